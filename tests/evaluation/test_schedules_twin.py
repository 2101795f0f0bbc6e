"""The numpy schedules decide as the compiled ones do, on random rounds in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding import budget
from dspark_jax.decoding.curve import RoundSeconds
from dspark_jax.decoding.schedule import buckets_for
from dspark_jax.evaluation import schedules

BLOCK = 4
LENGTHS = {"causal": schedules.causal_lengths, "async": schedules.async_lengths}


def random_round(slots: int, seed: int):
    """Active slots, room, survival now and before, and a jagged curve."""
    draws = np.random.default_rng((slots, seed))
    active = draws.random(slots) < 0.8
    active[draws.integers(slots)] = True
    room = draws.integers(0, BLOCK + 3, slots)
    ease = draws.uniform(0.3, 0.95, (2, slots, 1))
    now, before = np.cumprod(draws.uniform(0.6, 1.0, (2, slots, BLOCK)) * ease, axis=2).astype(np.float32)
    sizes = buckets_for(slots, BLOCK, fine=True)
    drafted = 1.2 + np.cumsum(draws.choice([0.01, 0.3], len(sizes))) * draws.uniform(0.2, 2)
    return active, room, now, before, RoundSeconds(sizes, drafted, float(draws.uniform(0.6, 1.3)))


@pytest.fixture(scope="module")
def compiled():
    """The engine's choice: gains, whether drafting pays, lengths and bucket."""

    def choose(schedule, active, room, now, before, idle, sizes, costs):
        state = budget.make_round(active, room, sizes, BLOCK)
        gains = budget.bucket_gains(state, before)
        past = budget.init_past(active.shape[0], BLOCK)._replace(idle=idle)
        pays = budget.pays_to_draft(state, gains, past, costs)
        return gains, pays, *budget.budgeted_lengths(schedule, state, now, gains, costs)

    return jax.jit(choose, static_argnames=("schedule", "sizes"))


@pytest.mark.parametrize("schedule", ["causal", "async"])
@pytest.mark.parametrize("slots", [1, 5, 16])
def test_budgets_of_random_rounds_are_the_same(schedule, slots, compiled):
    seen = set()
    for seed in range(40):
        active, room, now, before, seconds = random_round(slots, seed)
        costs = budget.make_costs(seconds, len(seconds.buckets))
        args = (jnp.asarray(active), jnp.asarray(room, jnp.int32), jnp.asarray(now), jnp.asarray(before))
        idle = 3 * seed % 25
        gains, pays, lengths, bucket = compiled(schedule, *args, jnp.int32(idle), sizes=seconds.buckets, costs=costs)
        buckets = schedules.make_buckets(slots, BLOCK, seconds)
        count = int(active.sum())
        mine = schedules.bucket_gains(schedules.rank(before[active], room[active]), count, buckets)
        assert mine == pytest.approx(np.asarray(gains), abs=1e-5)
        assert schedules.drafting_pays(mine, count, buckets, idle) == bool(pays)
        chosen = LENGTHS[schedule](now[active], room[active], mine, buckets)
        assert chosen.tolist() == np.asarray(lengths)[active].tolist() and not np.asarray(lengths)[~active].any()
        assert schedules.smallest_bucket(chosen, buckets) == int(bucket)
        seen.add((bool(pays), int(bucket)))
    assert len(seen) > 3  # the rounds are of many kinds


def test_the_past_is_kept_alike():
    """Drafted and other rounds, some slots idle, new requests in between."""
    draws = np.random.default_rng(0)
    theirs, mine = budget.init_past(3, BLOCK), schedules.Past(3, BLOCK)
    remember, count_kept, corrected = map(jax.jit, (budget.remember, budget.count_kept, budget.corrected))
    for turn in range(40):
        drafted, active = bool(draws.random() < 0.5), draws.random(3) < 0.7
        survival = np.cumprod(draws.random((3, BLOCK)), axis=1).astype(np.float32)
        if active.any():  # the loop runs no round of nobody
            lengths = draws.integers(0, BLOCK + 1, 3) * active * drafted
            accepted = draws.integers(0, BLOCK + 1, 3)
            theirs = count_kept(theirs, jnp.asarray(survival), jnp.asarray(lengths), jnp.asarray(accepted))
            mine.count_kept(survival[active], lengths[active], accepted[active])
            assert mine.corrected(survival) == pytest.approx(np.asarray(corrected(theirs, survival)), abs=1e-5)
            theirs = remember(theirs, jnp.asarray(survival), jnp.asarray(active), jnp.bool_(drafted))
            mine.remember(np.flatnonzero(active), survival[active] if drafted else None)
        if turn % 7 == 0:
            theirs = budget.forget(theirs, jnp.asarray([turn % 3]))
            mine.forget(turn % 3)
        for name in ("older", "newer", "mean"):
            assert getattr(mine, name) == pytest.approx(np.asarray(getattr(theirs, name)), abs=1e-5)
        assert mine.idle == int(theirs.idle)
