"""What a simulated engine did while it was measured, and the figures that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Phase = Literal["prefill", "draft", "verify", "host", "resize", "idle"]
PHASES: tuple[Phase, ...] = ("prefill", "draft", "verify", "host", "resize", "idle")
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Result:
    """Figures of one system under one load; rates are of all replicas together.

    Attributes:
        system, kind, load, replicas: what was simulated; see `loads.Load`. requests: answers measured, of one replica.
        seconds: of the measurement. tokens_per_second, requests_per_second: handed out in it.
        tokens_per_second_per_user: median over the answers of their tokens after the first by the time these took.
        concurrency: active requests in a round, of one replica, mean over rounds.
        accepted_length: committed tokens per request and round, bonus token included.
        budget: rows verified per request and round, anchor included. drafted: share of rounds with a draft.
        padding: share of the buckets' rows that were of no request. shares: of the time, by phase.
        time_to_first_token, inter_token: percentiles, seconds; the tokens of a round share the time since the last one.
            None where there was nothing to measure.
    """

    system: str
    kind: str
    load: float
    replicas: int
    requests: int
    seconds: float
    rounds: int
    tokens_per_second: float
    requests_per_second: float
    tokens_per_second_per_user: float | None
    concurrency: float | None
    accepted_length: float | None
    budget: float | None
    drafted: float | None
    padding: float | None
    shares: dict[str, float]
    time_to_first_token: dict[str, float] | None
    inter_token: dict[str, float] | None


@dataclass
class Tally:
    """Sums over the measured part: whatever is added while `measuring` is off does not count."""

    measuring: bool = False
    began: float = 0.0
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    active: int = 0
    committed: int = 0
    rows: int = 0
    bucket_rows: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token, of answers
    speeds: list[float] = field(default_factory=list)  # tokens per second, of answers
    answers: int = 0
    gaps: list[np.ndarray] = field(default_factory=list)  # seconds between tokens, and how many tokens each stands for
    gap_counts: list[np.ndarray] = field(default_factory=list)

    def start(self, second: float) -> None:
        """Measures from now on."""
        self.measuring, self.began = True, second

    def spend(self, phase: Phase, seconds: float) -> None:
        """Time of a phase."""
        if self.measuring:
            self.seconds[phase] += seconds

    def prefilled(self) -> None:
        """A prompt was taken in: its first token is there."""
        self.tokens += self.measuring

    def round(self, counts: np.ndarray, gaps: np.ndarray, rows: int, bucket: int, drafted: bool) -> None:
        """A round that committed `counts [n]` tokens of n requests, `gaps [n]` seconds after their last ones."""
        if not self.measuring:
            return
        self.rounds += 1
        self.drafted += drafted
        self.active += len(counts)
        self.committed += int(counts.sum())
        self.rows += rows
        self.bucket_rows += bucket
        self.gaps.append(gaps / counts)
        self.gap_counts.append(counts)

    def answer(self, tokens: int, came: float, first: float, last: float) -> None:
        """An answer of `tokens` tokens is whole; `came`, `first`, `last`: seconds of its request and of its tokens."""
        if not self.measuring:
            return
        self.answers += 1
        self.first.append(first - came)
        if last > first:
            self.speeds.append((tokens - 1) / (last - first))

    def result(self, second: float, replicas: int, **what: Any) -> Result:
        """The figures, when it ends at `second`; `what`: fields that name the system and its load."""
        seconds = second - self.began
        spent = max(sum(self.seconds.values()), 1e-300)
        gaps = np.repeat(np.concatenate(self.gaps), np.concatenate(self.gap_counts)) if self.gaps else np.zeros(0)
        return Result(
            **what,
            replicas=replicas,
            requests=self.answers,
            seconds=seconds,
            rounds=self.rounds,
            tokens_per_second=replicas * _ratio(self.tokens + self.committed, seconds, 0.0),
            requests_per_second=replicas * _ratio(self.answers, seconds, 0.0),
            tokens_per_second_per_user=float(np.median(self.speeds)) if self.speeds else None,
            concurrency=_ratio(self.active, self.rounds),
            accepted_length=_ratio(self.committed, self.active),
            budget=_ratio(self.rows, self.active),
            drafted=_ratio(self.drafted, self.rounds),
            padding=_ratio(self.bucket_rows - self.rows, self.bucket_rows),
            shares={phase: value / spent for phase, value in self.seconds.items()},
            time_to_first_token=_percentiles(np.asarray(self.first)),
            inter_token=_percentiles(gaps),
        )


def _ratio(one: float, other: float, without: Any = None) -> Any:
    return one / other if other > 0 else without


def _percentiles(values: np.ndarray) -> dict[str, float] | None:
    if not len(values):
        return None
    return {f"p{q}": float(v) for q, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
