"""How many drafted tokens the target verifies, and whose: the schedules `causal` and `async` (section 3, Algorithm 1).

A round that verifies B rows in all takes T(B) seconds (the throughput curve, 1 / SPS(B)) and commits about tau tokens:
one for each active request, and the survival a_{r,j} = c_{r,1} ... c_{r,j} of each admitted draft. The aim is the
greatest tau / T. T is a staircase whose steps are the compiled buckets, and a bucket is filled whole: its rows cost the
same. Tokens are taken in the order of their survival.

    causal  walks up the buckets on this round's confidences and stops where the next step does not pay. Whether a later
            bucket pays is forecast from the round before, so a flat stretch of the curve does not end the walk.
    async   takes the bucket that was best for the confidences of two rounds before (section 5.2, a global search), and
            ranks this round's tokens.

Both are non-anticipating: whether x_{r,j} is verified depends on past rounds, on other requests, and on c_{r,1..j},
which were there before x_{r,j} was drawn. A global search over this round's confidences is not (Appendix A).

Confidences are calibrated for one temperature and one kind of text (`dspark calibrate`). What was accepted in earlier
rounds corrects them for what is served now (`corrected`); the past is all that it reads.

Drafting is a cost too: a batch for which past confidences promise less than plain decoding does not draft. It looks
again after a while, the sooner the less it expects to lose by it (`PROBE`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.curve import RoundSeconds
from dspark_jax.decoding.schedule import Schedule, slots_for

Array = jax.Array
PROBE = 256  # times the share of speed that a draft is expected to lose: rounds without one, after which one drafts
FIRST_SURVIVAL = 0.7  # per token, before anything is known
WEIGHT = 0.05  # of a round in the running mean
SHRINK = 0.5  # of a forecast towards the running mean: 3 % faster than none in simulations of load 1, else no slower
FORGET = 0.99  # what a round leaves of the counts before it
TRUST = 20.0  # verified tokens after which counts weigh as much as the confidences' own word
DECIDE, PLAIN = -2, -1  # values of `Costs.force`


class Costs(NamedTuple):
    """The throughput curve of R slots on the device.

    Attributes:
        drafted: float32 `[buckets]`, seconds of a round with its draft. plain: float32 `[]`, of one without.
        force: int32 `[]`: `DECIDE`; `PLAIN`, never draft; or the number of the bucket that every round fills (the last
            two are for measuring).
    """

    drafted: Array
    plain: Array
    force: Array


def make_costs(seconds: RoundSeconds | None, buckets: int, force: int = DECIDE) -> Costs:
    """`Costs` of a curve; without one, all rounds cost the same, and whole blocks are verified."""
    drafted = np.ones(buckets) if seconds is None else seconds.drafted
    plain = 1.0 if seconds is None else seconds.plain
    return Costs(jnp.asarray(drafted, jnp.float32), jnp.float32(plain), jnp.int32(force))


class Past(NamedTuple):
    """What earlier rounds said, float32.

    Attributes:
        older, newer: `[R, K]`, survival of each request's tokens as of two rounds before and of one. mean: `[K]`, a
            running mean, which stands for requests that have drafted nothing yet.
        idle: int32 `[]`, rounds without a draft since the last with one. promised, kept: `[K]`, decaying sums over the
            verified tokens of each slot: their survival as the confidences have it, and how many were accepted.
    """

    older: Array
    newer: Array
    mean: Array
    idle: Array
    promised: Array
    kept: Array


def init_past(requests: int, block: int) -> Past:
    """Before anything is known: each token survives with `FIRST_SURVIVAL`, given the ones before."""
    mean = FIRST_SURVIVAL ** jnp.arange(1, block + 1, dtype=jnp.float32)
    older, newer = (jnp.tile(mean, (requests, 1)) for _ in range(2))  # two arrays: a state is donated leaf by leaf
    return Past(older, newer, mean, jnp.int32(0), *(jnp.zeros(block, jnp.float32) for _ in range(2)))


def forget(past: Past, slots: Array) -> Past:
    """Requests that come into `slots [P]` (R and above: nobody's) know nothing yet."""
    rows = jnp.broadcast_to(past.mean, (slots.shape[0], past.mean.shape[0]))
    put = lambda old: old.at[slots].set(rows, mode="drop")  # noqa: E731
    return past._replace(older=put(past.older), newer=put(past.newer))


def corrected(past: Past, survival: Array) -> Array:
    """Survival `[R, K]` by the confidences, times what their word was worth lately at each slot: `[R, K]`, at most 1.

    A slot that was verified rarely gets the factor of the slot before it.
    """
    factors = []
    factor = jnp.float32(1.0)
    for promised, kept in zip(past.promised, past.kept, strict=True):
        factor = (TRUST * factor + kept) / (TRUST + promised)
        factors.append(factor)
    if not factors:
        return survival
    return jax.lax.cummin(jnp.minimum(survival * jnp.stack(factors), 1.0), axis=1)


def count_kept(past: Past, raw: Array, lengths: Array, accepted: Array) -> Past:
    """The past with the outcome of a round: of `lengths [R]` verified drafts with survival `raw [R, K]`, `accepted`."""
    slot = jnp.arange(raw.shape[1])
    verified, good = slot < lengths[:, None], slot < jnp.minimum(lengths, accepted)[:, None]
    decay = jnp.where(jnp.any(verified), FORGET, 1.0)
    promised = decay * past.promised + jnp.sum(jnp.where(verified, raw, 0.0), axis=0)
    return past._replace(promised=promised, kept=decay * past.kept + jnp.sum(good, axis=0))


def remember(past: Past, survival: Array, active: Array, drafted: Array) -> Past:
    """The past after a round: bool `drafted`, whether its `survival [R, K]` of bool `active [R]` requests is there."""
    seen = drafted & active[:, None]
    count = jnp.sum(active)
    now = jnp.sum(jnp.where(active[:, None], survival, 0.0), axis=0) / jnp.maximum(count, 1)
    mean = jnp.where(drafted & (count > 0), past.mean + WEIGHT * (now - past.mean), past.mean)
    idle = jnp.where(drafted, 0, past.idle + 1).astype(jnp.int32)
    return past._replace(older=past.newer, newer=jnp.where(seen, survival, past.newer), mean=mean, idle=idle)


def forecast(past: Past, schedule: Schedule) -> Array:
    """Survival `[R, K]` to expect of a request's next tokens: halfway between its own last one and the running mean.

    `causal` knows the round before, `async` the one before that.
    """
    return (1 - SHRINK) * (past.newer if schedule == "causal" else past.older) + SHRINK * past.mean


class Round(NamedTuple):
    """The state of a round that budgets depend on: bool `active [R]`, int32 `room [R]` (most drafts that a request may
    have verified), and int32 `buckets [n]`, `caps [n]` (most drafts of a request in each bucket)."""

    active: Array
    room: Array
    buckets: Array
    caps: Array

    @property
    def busy(self) -> Array:
        """n, active requests."""
        return jnp.sum(self.active)


def make_round(active: Array, room: Array, buckets: Sequence[int], block: int) -> Round:
    """A `Round` for static bucket sizes; `active [R]`, `room [R]`."""
    caps = [slots_for(active.shape[0], block, size) - 1 for size in buckets]
    return Round(active, room, jnp.asarray(buckets, jnp.int32), jnp.asarray(caps, jnp.int32))


def fill(now: Round, survival: Array, admitted: Array, bucket: Array) -> Array:
    """Drafts to verify, int32 `[R]`, when bucket number `bucket` is filled in the order of survival `[R, K]`.

    What is `admitted [R]` stays so; equals go by request, then by slot.
    """
    slot = jnp.arange(survival.shape[1])
    allowed = now.active[:, None] & (slot < now.room[:, None]) & (slot < now.caps[bucket])
    score = jnp.where(slot < admitted[:, None], survival + 2.0, survival)
    order = jnp.argsort(-jnp.where(allowed, score, -1.0).reshape(-1), stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]), unique_indices=True)
    taken = allowed & (rank.reshape(survival.shape) < now.buckets[bucket] - now.busy)
    return jnp.sum(taken, axis=1).astype(jnp.int32)


def admitted_gain(survival: Array, lengths: Array) -> Array:
    """Expected accepted drafts, float32 `[]`, of the first `lengths [R]` of each request."""
    slot = jnp.arange(survival.shape[1])
    return jnp.sum(jnp.where(slot < lengths[:, None], survival, 0.0))


def bucket_gains(now: Round, survival: Array) -> Array:
    """Expected accepted drafts, float32 `[buckets]`, if each bucket were filled in the order of survival `[R, K]`."""
    none = jnp.zeros_like(now.room)
    numbers = jnp.arange(now.buckets.shape[0])
    return jax.vmap(lambda i: admitted_gain(survival, fill(now, survival, none, i)))(numbers)


def rates(now: Round, gains: Array, costs: Costs) -> Array:
    """Tokens per second, float32 `[buckets]`, for the gains of the filled buckets; buckets that are too small: 0."""
    return jnp.where(now.buckets >= now.busy, (now.busy + gains) / costs.drafted, 0.0)


def pays_to_draft(now: Round, gains: Array, past: Past, costs: Costs) -> Array:
    """Whether this round drafts, bool `[]`: some bucket's past `gains` beat plain decoding, or it is time to look.

    A look costs the share of a round that it is expected to lose, so looking once in `PROBE` times that many rounds
    costs about 1 / `PROBE` of all time, whatever the share is.
    """
    loss = 1.0 - jnp.max(rates(now, gains, costs)) * costs.plain / jnp.maximum(now.busy, 1)
    decided = (loss < 0) | (past.idle + 1 >= PROBE * loss)
    return jnp.where(costs.force == DECIDE, decided, costs.force >= 0)


def causal_lengths(now: Round, survival: Array, gains: Array, costs: Costs) -> Array:
    """Algorithm 1 on a staircase: int32 `[R]` drafts to verify.

    From a filled bucket the walk goes on to the one with the best forecast, where that is better than to stay; no token
    beyond the next one of each request has been looked at. In the forecast the next token in line is worth what it is,
    and those behind it what the round before had at their ranks, but never more. With buckets of all sizes, and a past
    that promises nothing, this is Algorithm 1 to the letter.

    Args:
        survival: `[R, K]`, of this round. gains: `[buckets]`, `bucket_gains` of the round before.
    """
    numbers = jnp.arange(now.buckets.shape[0])

    def look(lengths: Array, bucket: Array) -> tuple[Array, Array]:
        gain = admitted_gain(survival, lengths)
        next_up = jnp.take_along_axis(survival, jnp.minimum(lengths, survival.shape[1] - 1)[:, None], axis=1)[:, 0]
        next_up = jnp.max(jnp.where(now.active & (lengths < now.room) & (lengths < survival.shape[1]), next_up, 0.0))
        rows = jnp.maximum(now.buckets - now.buckets[bucket], 1)
        others = jnp.maximum((gains - gains[bucket]) / rows, 0.0)  # each
        forecast = rates(now, gain + next_up + (rows - 1) * jnp.minimum(others, next_up), costs)
        best = jnp.argmax(jnp.where(numbers > bucket, forecast, 0.0))
        goes_on = (best > bucket) & (forecast[best] > rates(now, gain, costs)[bucket])
        return best, goes_on

    def walk(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        lengths, bucket, _ = carry
        lengths = fill(now, survival, lengths, bucket)
        best, goes_on = look(lengths, bucket)
        return lengths, jnp.where(goes_on, best, bucket), goes_on

    first = jnp.argmax(now.buckets >= now.busy)
    start = (jnp.zeros_like(now.room), first, jnp.bool_(True))
    return jax.lax.while_loop(lambda carry: carry[2], walk, start)[0]


def budgeted_lengths(
    schedule: Schedule, now: Round, survival: Array, gains: Array, costs: Costs
) -> tuple[Array, Array]:
    """Drafts to verify, int32 `[R]`, and the number of the bucket, int32 `[]`, of a round that has drafted.

    Args:
        survival: `[R, K]`, of this round. gains: `[buckets]`, `bucket_gains` of the past that the schedule reads.
    """
    none = jnp.zeros_like(now.room)
    if schedule == "async":
        lengths = fill(now, survival, none, jnp.argmax(rates(now, gains, costs)))
    else:
        lengths = causal_lengths(now, survival, gains, costs)
    even = jnp.broadcast_to(0.5 ** jnp.arange(survival.shape[1], dtype=jnp.float32), survival.shape)
    forced = fill(now, even, none, jnp.maximum(costs.force, 0))
    lengths = jnp.where(costs.force == DECIDE, lengths, forced)
    fits = (now.buckets >= jnp.sum(lengths) + now.busy) & (now.caps >= jnp.max(lengths))
    smallest = jnp.argmax(fits)
    return lengths, jnp.where(costs.force == DECIDE, smallest, jnp.maximum(costs.force, 0)).astype(jnp.int32)
