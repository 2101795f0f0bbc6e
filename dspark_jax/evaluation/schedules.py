"""How many draft tokens are verified, and whose, on the host: the numpy twin of `decoding.budget`.

Shapes: n active requests (idle slots are left out), K draft tokens a block, b buckets. The survival a_{r,j} =
c_{r,1} ... c_{r,j} of a draft token is the chance that it is committed. Everything but `Past` is a pure function.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dspark_jax.decoding.budget import FIRST_SURVIVAL, FORGET, PROBE, SHRINK, TRUST, WEIGHT
from dspark_jax.decoding.curve import RoundSeconds
from dspark_jax.decoding.schedule import slots_for


class Buckets(NamedTuple):
    """Buckets of R slots and what they cost.

    Attributes:
        rows: int64 `[b]`, ascending from R. caps: int64 `[b]`, most draft tokens of one request in each.
        drafted: `[b]`, seconds of a round with its draft. plain: seconds of a round without one.
    """

    rows: np.ndarray
    caps: np.ndarray
    drafted: np.ndarray
    plain: float


def make_buckets(slots: int, block: int, seconds: RoundSeconds) -> Buckets:
    """`Buckets` of R `slots` and blocks of K = `block` tokens."""
    caps = [slots_for(slots, block, size) - 1 for size in seconds.buckets]
    return Buckets(np.asarray(seconds.buckets), np.asarray(caps), seconds.drafted, seconds.plain)


class Ranking(NamedTuple):
    """The m draft tokens that may be verified, best first: of equals, by request, then by slot.

    Attributes:
        survival: `[m]`, descending. request: int64 `[m]`, 0..n-1. slot: int64 `[m]`, 0..K-1.
    """

    survival: np.ndarray
    request: np.ndarray
    slot: np.ndarray


def rank(survival: np.ndarray, room: np.ndarray) -> Ranking:
    """The tokens of `survival [n, K]` within `room [n]`, the most draft tokens that each request may have verified."""
    block = survival.shape[1]
    place = np.flatnonzero(np.arange(block) < room[:, None])
    values = survival.ravel()[place]
    order = np.argsort(-values, kind="stable")
    place = place[order]
    return Ranking(values[order], place // block, place % block)


def bucket_gains(ranking: Ranking, active: int, buckets: Buckets) -> np.ndarray:
    """Expected accepted draft tokens, `[b]`, if each bucket were filled in the order of the ranking."""
    allowed = ranking.slot < buckets.caps[:, None]  # [b, m]
    taken = allowed & (np.cumsum(allowed, axis=1) <= (buckets.rows - active)[:, None])
    return taken @ ranking.survival


def fill(ranking: Ranking, admitted: np.ndarray, number: int, buckets: Buckets) -> np.ndarray:
    """Draft tokens to verify, int64 `[n]`, when bucket `number` is filled; the `admitted [n]` first ones stay."""
    spare = int(buckets.rows[number]) - len(admitted) - int(admitted.sum())
    allowed = (ranking.slot < buckets.caps[number]) & (ranking.slot >= admitted[ranking.request])
    return admitted + np.bincount(ranking.request[allowed][:spare], minlength=len(admitted))


def rates(gains: np.ndarray | float, active: int, buckets: Buckets) -> np.ndarray:
    """Committed tokens per second, `[b]`, for the gains of filled buckets."""
    return (active + gains) / buckets.drafted


def drafting_pays(gains: np.ndarray, active: int, buckets: Buckets, idle: int) -> bool:
    """Whether a round drafts: some bucket's past `gains [b]` promise more tokens a second than a round without a draft,
    or it is time to look, after `idle` rounds without one."""
    loss = 1.0 - float(rates(gains, active, buckets).max()) * buckets.plain / active
    return loss < 0 or idle + 1 >= PROBE * loss


def causal_lengths(survival: np.ndarray, room: np.ndarray, past_gains: np.ndarray, buckets: Buckets) -> np.ndarray:
    """Algorithm 1 on a staircase: draft tokens to verify, int64 `[n]`.

    From a filled bucket the walk goes on to the later one with the best forecast, where that is better than to stay. In
    the forecast the next token in line is worth what it is, and those behind it what the round before had in these
    rows on average, never more than the next.

    Args:
        survival: `[n, K]`, of this round. room: int64 `[n]`. past_gains: `[b]`, of the round before.
    """
    active, block = survival.shape
    ranking = rank(survival, room)
    here, lengths = 0, np.zeros(active, np.int64)
    while True:
        lengths = fill(ranking, lengths, here, buckets)
        if here + 1 == len(buckets.rows):
            return lengths
        waiting = np.arange(block) == lengths[:, None]  # the next token of each request
        next_up = float(survival[waiting & (lengths < room)[:, None]].max(initial=0.0))
        gain = float(survival[np.arange(block) < lengths[:, None]].sum())
        rows = np.maximum(buckets.rows - buckets.rows[here], 1)
        others = np.maximum((past_gains - past_gains[here]) / rows, 0.0)  # each
        forecast = rates(gain + next_up + (rows - 1) * np.minimum(others, next_up), active, buckets)
        best = here + 1 + int(np.argmax(forecast[here + 1 :]))
        if not forecast[best] > rates(gain, active, buckets)[here]:
            return lengths
        here = best


def async_lengths(survival: np.ndarray, room: np.ndarray, past_gains: np.ndarray, buckets: Buckets) -> np.ndarray:
    """Section 5.2: fills the bucket that was best for the survival of two rounds before; arguments as above."""
    active = len(room)
    best = int(np.argmax(rates(past_gains, active, buckets)))
    return fill(rank(survival, room), np.zeros(active, np.int64), best, buckets)


def smallest_bucket(lengths: np.ndarray, buckets: Buckets) -> int:
    """The number of the first bucket that holds `lengths [n]` draft tokens and their anchors."""
    fits = (buckets.rows >= lengths.sum() + len(lengths)) & (buckets.caps >= lengths.max(initial=0))
    return int(np.argmax(fits))


class Past:
    """What earlier rounds said of S slots.

    Attributes:
        older, newer: `[S, K]`, survival of each slot's tokens as of two rounds before and of one. mean: `[K]`, a
            running mean, which stands for requests that have drafted nothing yet. idle: rounds without a draft since
            the last with one. promised, kept: `[K]`, decaying sums over the verified tokens of each slot: their
            survival as the confidences have it, and how many were accepted.
    """

    def __init__(self, slots: int, block: int) -> None:
        self.mean = FIRST_SURVIVAL ** np.arange(1, block + 1)
        self.older = np.tile(self.mean, (slots, 1))
        self.newer = self.older.copy()
        self.idle = 0
        self.promised, self.kept = np.zeros(block), np.zeros(block)

    def corrected(self, survival: np.ndarray) -> np.ndarray:
        """Survival `[n, K]` by the confidences, times what their word was worth lately; at most 1."""
        factor, factors = 1.0, []
        for promised, kept in zip(self.promised, self.kept, strict=True):
            factor = (TRUST * factor + kept) / (TRUST + promised)
            factors.append(factor)
        return np.minimum.accumulate(np.minimum(survival * np.asarray(factors), 1.0), axis=1)

    def count_kept(self, raw: np.ndarray, lengths: np.ndarray, accepted: np.ndarray) -> None:
        """Of `lengths [n]` verified drafts with survival `raw [n, K]` by the confidences, `accepted [n]` were kept."""
        slot = np.arange(raw.shape[1])
        verified, good = slot < lengths[:, None], slot < np.minimum(lengths, accepted)[:, None]
        decay = FORGET if verified.any() else 1.0
        self.promised = decay * self.promised + np.where(verified, raw, 0.0).sum(axis=0)
        self.kept = decay * self.kept + good.sum(axis=0)

    def forecast(self, slots: np.ndarray, schedule: str) -> np.ndarray:
        """Survival `[n, K]` to expect of the next tokens of `slots [n]`."""
        own = self.newer if schedule == "causal" else self.older
        return (1 - SHRINK) * own[slots] + SHRINK * self.mean

    def forget(self, slot: int) -> None:
        """A new request comes into `slot`."""
        self.older[slot] = self.newer[slot] = self.mean

    def remember(self, slots: np.ndarray, survival: np.ndarray | None) -> None:
        """A round of the active `slots [n]` with `survival [n, K]`, or without a draft (None)."""
        self.older[:] = self.newer
        if survival is None:
            self.idle += 1
            return
        self.idle = 0
        self.newer[slots] = survival
        self.mean = self.mean + WEIGHT * (survival.mean(axis=0) - self.mean)
