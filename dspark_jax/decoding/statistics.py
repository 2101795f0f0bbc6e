"""What a batch has done since it began: counts, time by phase, and the ratios that people look at."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dspark_jax.decoding.requests import Completion
    from dspark_jax.decoding.rounds import Totals

_REMEMBERED = 1000  # times to the first token that percentiles are taken of


@dataclass
class Statistics:
    """Counts since the start; seconds are wall time.

    Attributes:
        submitted, completed, cancelled: requests. prompt_tokens: taken in. tokens: generated; first_tokens: of those,
            from prefills.
        rounds: decoding rounds of the batch; drafted_rounds: those with a draft. request_rounds: rounds summed over the
            requests that were active. by_bucket: rounds by rows of the bucket.
        rows, padded_rows: rows that the target verified for requests, and the rest of its buckets.
        prefill_seconds, rounds_seconds: the device's time. draft_seconds: of the latter, spent on drafting by the
            throughput curve (0 without one). host_seconds: the device waited for the host while requests were there.
        resizes: changes of the number of slots or of the caches' capacity.
    """

    submitted: int = 0
    completed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    first_tokens: int = 0
    rounds: int = 0
    drafted_rounds: int = 0
    request_rounds: int = 0
    by_bucket: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    padded_rows: int = 0
    prefill_seconds: float = 0.0
    rounds_seconds: float = 0.0
    draft_seconds: float = 0.0
    host_seconds: float = 0.0
    resizes: int = 0
    _first: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def first_token(self, seconds: float) -> None:
        """A request got its first token, so long after it came."""
        self.tokens += 1
        self.first_tokens += 1
        self._first.append(seconds)

    def ended(self, completion: Completion) -> None:
        """A request has ended."""
        if completion.finish_reason == "cancelled":
            self.cancelled += 1
        else:
            self.completed += 1

    def spend(self, what: str, seconds: float) -> None:
        """The device took `seconds` for `what`, "prefill" or "rounds"."""
        if what == "prefill":
            self.prefill_seconds += seconds
        else:
            self.rounds_seconds += seconds

    def add_rounds(self, totals: Totals, buckets: Sequence[int], tokens: int, draft_seconds: float) -> None:
        """Rounds that brought `tokens`; `draft_seconds`: what a draft takes."""
        counts = np.asarray(totals.by_bucket)
        self.tokens += tokens
        self.rounds += int(totals.rounds)
        self.drafted_rounds += int(totals.drafted)
        self.request_rounds += int(totals.requests)
        self.by_bucket.update({size: int(n) for size, n in zip(buckets, counts, strict=True) if n})
        self.rows += int(totals.rows)
        self.padded_rows += int(counts @ np.asarray(buckets)) - int(totals.rows)
        self.draft_seconds += int(totals.drafted) * draft_seconds

    @property
    def busy_seconds(self) -> float:
        """Time in which requests were there."""
        return self.prefill_seconds + self.rounds_seconds + self.host_seconds

    def as_json(self) -> dict[str, Any]:
        """Counts and ratios: tokens a second, accepted length (tokens of a request and round), verify budget (rows of a
        request and round, the anchor included), padding (share of verified rows), and shares of the time."""
        rows, busy = self.rows + self.padded_rows, self.busy_seconds
        in_rounds = self.tokens - self.first_tokens
        names = ("submitted", "completed", "cancelled", "prompt_tokens", "tokens", "rounds", "drafted_rounds")
        shares = {"prefill": self.prefill_seconds, "draft": self.draft_seconds, "host": self.host_seconds}
        shares["verify"] = self.rounds_seconds - self.draft_seconds
        return {
            **{name: getattr(self, name) for name in names},
            "resizes": self.resizes,
            "seconds": round(busy, 6),
            "tokens_per_second": round(self.tokens / busy, 3) if busy else 0.0,
            "accepted_length": round(in_rounds / self.request_rounds, 4) if self.request_rounds else 0.0,
            "budget": round(self.rows / self.request_rounds, 4) if self.request_rounds else 0.0,
            "padding": round(self.padded_rows / rows, 4) if rows else 0.0,
            "time_shares": {name: round(value / busy, 4) if busy else 0.0 for name, value in shares.items()},
            "first_token_seconds": _percentiles(self._first),
            "rounds_by_bucket": {str(size): n for size, n in sorted(self.by_bucket.items())},
        }


def _percentiles(values: Sequence[float] | deque[float]) -> dict[str, float]:
    if not values:
        return {}
    array = np.asarray(values)
    return {f"p{p}": round(float(np.percentile(array, p)), 6) for p in (50, 95, 99)}
