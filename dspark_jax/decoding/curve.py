"""The hardware's throughput curve as the scheduler reads it: seconds of a round by rows verified (section 3, SPS(B)).

One point for each number of slots R and cache capacity T that was measured; between two capacities costs are linear in
T. `profiling` measures curves and keeps them in files; nothing here runs on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class RoundSeconds(NamedTuple):
    """Seconds of one round of R slots.

    Attributes:
        buckets: rows that the target can verify, ascending. drafted: float64 `[len(buckets)]`, of a whole round, the
            draft included, in each bucket. plain: of a round without a draft, R rows.
    """

    buckets: tuple[int, ...]
    drafted: np.ndarray
    plain: float

    @property
    def draft(self) -> float:
        """Seconds that drafting adds: the same rows with and without it."""
        return max(float(self.drafted[0]) - self.plain, 0.0)


@dataclass(frozen=True)
class Point:
    """What was measured for R slots with caches of T tokens.

    Attributes:
        slots: R. context: T, tokens. buckets: row counts, ascending, from R to R * (gamma + 1).
        drafted: seconds of a whole round in each bucket. plain: seconds of a round of R rows without a draft.
    """

    slots: int
    context: int
    buckets: tuple[int, ...]
    drafted: tuple[float, ...]
    plain: float

    def __post_init__(self) -> None:
        where = f"point of {self.slots} slots and {self.context} tokens"
        if self.slots < 1 or self.context < 1:
            raise ValueError(f"{where}: both must be at least 1")
        rising = all(a < b for a, b in pairwise(self.buckets))
        if not self.buckets or not rising or self.buckets[0] != self.slots:
            raise ValueError(f"{where}: buckets {list(self.buckets)}: must rise from {self.slots}")
        if len(self.drafted) != len(self.buckets):
            raise ValueError(f"{where}: {len(self.drafted)} times for {len(self.buckets)} buckets")
        if not all(0 < s < float("inf") for s in (*self.drafted, self.plain)):
            raise ValueError(f"{where}: seconds must be positive, finite numbers")


@dataclass(frozen=True)
class Prefill:
    """Seconds to take in one prompt of `tokens` tokens (padded), the target's and the drafter's part."""

    tokens: int
    seconds: float

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 < self.seconds < float("inf"):
            raise ValueError(f"prefill of {self.tokens} tokens in {self.seconds} s: both must be positive")


@dataclass(frozen=True)
class Curve:
    """A throughput curve: `points` of several (R, T), and `prefills` by prompt length.

    Raises:
        ValueError: no point, or two of the same R and T.
    """

    points: tuple[Point, ...]
    prefills: tuple[Prefill, ...] = ()

    def __post_init__(self) -> None:
        places = [(p.slots, p.context) for p in self.points]
        if not places or len(set(places)) < len(places):
            raise ValueError(f"curve with points {places}: must have at least one, each once")

    @property
    def slot_sizes(self) -> tuple[int, ...]:
        """Slot counts R that were measured, ascending."""
        return tuple(sorted({p.slots for p in self.points}))

    def costs(self, slots: int, context: int, buckets: Sequence[int] | None = None) -> RoundSeconds:
        """Seconds of a round of `slots` slots with caches of `context` tokens.

        Linear in the context between measured capacities, and beyond them along the nearest two; linear in the rows for
        `buckets` that are not among the measured ones.

        Raises:
            ValueError: this number of slots was not measured, or was with other buckets at another capacity.
        """
        points = sorted((p for p in self.points if p.slots == slots), key=lambda p: p.context)
        if not points:
            raise ValueError(f"slots {slots}: not in the curve, which has {self.slot_sizes}; profile them too")
        sizes = points[0].buckets
        if any(p.buckets != sizes for p in points):
            raise ValueError(f"slots {slots}: measured with other buckets at another capacity; profile them again")
        table = np.asarray([(*p.drafted, p.plain) for p in points])  # [points, buckets + 1]
        seconds = _between(np.asarray([p.context for p in points]), table, context)
        wanted = tuple(buckets or sizes)
        drafted = np.interp(wanted, sizes, seconds[:-1])
        return RoundSeconds(wanted, drafted, float(seconds[-1]))

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to take in a prompt padded to `tokens`: linear between measured lengths, in proportion beyond."""
        if not self.prefills:
            return 0.0
        known = sorted(self.prefills, key=lambda p: p.tokens)
        lengths, seconds = [p.tokens for p in known], [p.seconds for p in known]
        if tokens > lengths[-1]:
            return seconds[-1] * tokens / lengths[-1]
        return float(np.interp(tokens, lengths, seconds))


def _between(contexts: np.ndarray, table: np.ndarray, context: int) -> np.ndarray:
    """The row of `table [points, n]` at `context`; never below a tenth of the nearest measured one."""
    if len(contexts) == 1:
        return table[0]
    right = int(np.clip(np.searchsorted(contexts, context), 1, len(contexts) - 1))
    low, high = contexts[right - 1], contexts[right]
    share = (context - low) / (high - low)
    nearest = table[right if share > 0.5 else right - 1]
    return np.maximum(table[right - 1] + share * (table[right] - table[right - 1]), 0.1 * nearest)
