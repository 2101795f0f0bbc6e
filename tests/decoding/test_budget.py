"""Budgets: Algorithm 1 by brute force, staircases, the search of two rounds before, and what may not be looked at."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.budget import (
    PLAIN,
    PROBE,
    Costs,
    Past,
    Round,
    bucket_gains,
    budgeted_lengths,
    fill,
    forget,
    init_past,
    make_costs,
    make_round,
    pays_to_draft,
    remember,
)
from dspark_jax.decoding.curve import RoundSeconds
from dspark_jax.decoding.schedule import buckets_for, slots_for

R, K = 4, 3
NONE = jnp.zeros(R, jnp.int32)
lengths_of = jax.jit(budgeted_lengths, static_argnames=("schedule",))
gains_of = jax.jit(bucket_gains)
fill_up = jax.jit(fill)


def round_of(active=(True,) * R, room=(K,) * R, buckets=tuple(range(R, R * (K + 1) + 1)), caps=None) -> Round:
    caps = caps or (K,) * len(buckets)
    return Round(*(jnp.asarray(x) for x in (active, room, buckets, caps)))


def costs_of(drafted, plain=1e9) -> Costs:
    return make_costs(RoundSeconds((), np.asarray(drafted, float), plain), len(drafted))


def survival_of(confidence) -> np.ndarray:
    return np.cumprod(np.asarray(confidence, np.float32), axis=1)


def algorithm_1(survival: np.ndarray, seconds) -> np.ndarray:
    """The paper's loop: one token at a time in the order of survival, until one does not raise tau / T."""
    order = np.argsort(-survival.reshape(-1), kind="stable")
    lengths, tau = np.zeros(len(survival), int), float(len(survival))
    for count, token in enumerate(order, 1):
        more = tau + survival.reshape(-1)[token]
        if not more / seconds[count] > tau / seconds[count - 1]:
            break
        tau = more
        lengths[token // survival.shape[1]] += 1
    return lengths


confidences = st.lists(st.floats(0.02, 1), min_size=R * K, max_size=R * K).map(lambda x: np.reshape(x, (R, K)))
increments = st.lists(st.floats(0.01, 1), min_size=R * K, max_size=R * K)


@settings(deadline=None)
@given(confidences, increments)
def test_causal_is_algorithm_1_where_the_past_promises_nothing(confidence: np.ndarray, more: list[float]) -> None:
    seconds = np.cumsum([3.0, *more])
    now, survival = round_of(), survival_of(confidence)
    lengths, bucket = lengths_of("causal", now, jnp.asarray(survival), jnp.zeros(R * K + 1), costs_of(seconds))
    np.testing.assert_array_equal(lengths, algorithm_1(survival, np.float32(seconds)))
    assert now.buckets[bucket] == R + lengths.sum()


@pytest.mark.parametrize("schedule", ["causal", "async"])
@settings(deadline=None)
@given(confidences, confidences, st.lists(st.floats(1, 3), min_size=4, max_size=4), st.integers(0, R - 1), st.data())
def test_nothing_is_anticipated(schedule: str, confidence, past, steps, request: int, data) -> None:
    """Whether the first j drafts of a request are verified does not depend on what follows draft j."""
    now = make_round(jnp.ones(R, bool), jnp.full(R, K), (4, 6, 8, 16), K)
    gains = gains_of(now, jnp.asarray(survival_of(past)))
    costs = costs_of(np.cumprod([1.0, *steps[1:]]))
    j = data.draw(st.integers(1, K - 1))
    other = np.array(confidence)
    other[request, j:] = data.draw(st.lists(st.floats(0, 1), min_size=K - j, max_size=K - j))
    both = [lengths_of(schedule, now, jnp.asarray(survival_of(c)), gains, costs)[0] for c in (confidence, other)]
    first, second = (np.minimum(lengths[request], j) for lengths in both)
    assert first == second


@settings(deadline=None)
@given(confidences, st.lists(st.integers(0, 2), min_size=R, max_size=R), st.integers(R, 2 * R + 3), st.integers(1, K))
def test_fill(confidence: np.ndarray, admitted: list[int], size: int, cap: int) -> None:
    """The bucket is full or nothing is left; what was admitted stays; nobody passes a token of greater survival."""
    admitted = list(np.minimum(admitted, cap))
    room = [K, 2, K, 1]
    admitted = np.minimum(admitted, room)
    if R + admitted.sum() > size:
        return
    now = round_of(room=room, buckets=(size,), caps=(cap,))
    survival = survival_of(confidence)
    lengths = np.asarray(fill_up(now, jnp.asarray(survival), jnp.asarray(admitted), jnp.int32(0)))
    most = np.minimum(room, cap)
    assert (lengths >= admitted).all() and (lengths <= most).all()
    assert lengths.sum() == min(size - R, most.sum())
    taken = [survival[r, j] for r in range(R) for j in range(admitted[r], lengths[r])]
    left = [survival[r, lengths[r]] for r in range(R) if lengths[r] < most[r]]
    assert not taken or not left or min(taken) >= max(left)


def test_slots_that_are_empty_or_full_get_nothing() -> None:
    now = round_of(active=(True, False, True, True), room=(K, K, 0, -2))
    lengths = fill_up(now, jnp.full((R, K), 0.5), NONE, jnp.int32(len(now.buckets) - 1))
    np.testing.assert_array_equal(lengths, [K, 0, 0, 0])


def test_causal_crosses_a_step_that_pays_and_stops_at_one_that_does_not() -> None:
    """A staircase: the first token of a bucket alone never pays for it, the whole bucket does."""
    now = round_of(buckets=(4, 8, 16), caps=(K, K, K))
    survival = jnp.asarray(survival_of(np.full((R, K), 0.9)))
    gains = gains_of(now, survival)
    for seconds, expected in (((1, 1.5, 4), 4), ((1, 2.5, 4), 0), ((1, 2.5, 2.6), 12), ((1, 1.5, 1.7), 12)):
        lengths, bucket = lengths_of("causal", now, survival, gains, costs_of(seconds))
        assert lengths.sum() == expected, seconds
        assert now.buckets[bucket] == 4 + expected
    # this round's confidences are worse than the past's: the forecast is no more than they allow
    low = jnp.asarray(survival_of(np.full((R, K), 0.3)))
    assert lengths_of("causal", now, low, gains, costs_of((1, 1.5, 4)))[0].sum() == 0


def test_async_takes_the_budget_of_the_past_and_ranks_by_the_present() -> None:
    now = round_of(buckets=(4, 6, 16), caps=(K, K, K))
    past = jnp.asarray(survival_of([[0.9, 0.9, 0.9], [0.1] * 3, [0.1] * 3, [0.1] * 3]))
    costs = costs_of((1, 1.2, 9))
    confidence = [[0.1] * 3, [0.8, 0.9, 0.1], [0.7, 0.1, 0.1], [0.2] * 3]
    lengths, bucket = lengths_of("async", now, jnp.asarray(survival_of(confidence)), gains_of(now, past), costs)
    np.testing.assert_array_equal(lengths, [0, 2, 0, 0])
    assert bucket == 1
    nothing = lengths_of("async", now, jnp.asarray(survival_of(confidence)), jnp.zeros(3), costs)
    assert nothing[0].sum() == 0 and nothing[1] == 0


def test_drafting_is_skipped_where_it_does_not_pay_and_looked_at_again() -> None:
    now = round_of(buckets=(4, 8, 16), caps=(0, 1, 3))
    past, costs = init_past(R, K), costs_of((1.5, 2, 4), plain=1.0)
    low = jnp.asarray(survival_of(np.full((R, K), 0.2)))
    high = jnp.full((R, K), 1.0)
    assert not pays_to_draft(now, gains_of(now, low), past, costs)
    assert not pays_to_draft(now, gains_of(now, high), past, costs_of((1.5, 2, 4), plain=0.9))
    assert pays_to_draft(now, gains_of(now, high), past, costs_of((1.5, 1.9, 4), plain=1.0))
    assert pays_to_draft(now, gains_of(now, low), past._replace(idle=jnp.int32(PROBE - 1)), costs)
    for force, drafts in ((PLAIN, False), (0, True), (2, True)):
        assert pays_to_draft(now, gains_of(now, low), past, costs._replace(force=jnp.int32(force))) == drafts


def test_forced_rounds_fill_their_bucket_evenly() -> None:
    now = round_of(buckets=(4, 6, 16), caps=(0, 2, 3))
    for force, expected in ((0, [0, 0, 0, 0]), (1, [1, 1, 0, 0]), (2, [3, 3, 3, 3])):
        costs = costs_of((1, 1, 1))._replace(force=jnp.int32(force))
        lengths, bucket = lengths_of("causal", now, jnp.zeros((R, K)), jnp.zeros(3), costs)
        np.testing.assert_array_equal(lengths, expected)
        assert bucket == force


def test_without_a_curve_whole_blocks_are_verified() -> None:
    now, past = make_round(jnp.ones(R, bool), jnp.full(R, K), (4, 8, 16), K), init_past(R, K)
    costs = make_costs(None, 3)
    gains = gains_of(now, past.newer)
    assert pays_to_draft(now, gains, past, costs)
    for schedule in ("causal", "async"):
        lengths, bucket = lengths_of(schedule, now, jnp.full((R, K), 0.01), gains, costs)
        np.testing.assert_array_equal(lengths, [K] * R)
        assert bucket == 2


def test_past_moves_on() -> None:
    past = init_past(R, K)
    active = jnp.asarray([True, True, False, True])
    survival = jnp.asarray(survival_of(np.full((R, K), 0.5)))
    one = remember(past, survival, active, jnp.bool_(True))
    np.testing.assert_array_equal(one.older, past.newer)
    np.testing.assert_allclose(one.newer[0], [0.5, 0.25, 0.125])
    np.testing.assert_array_equal(one.newer[2], past.newer[2])
    np.testing.assert_allclose(one.mean, past.mean + 0.05 * (survival[0] - past.mean), rtol=1e-6)
    two = remember(one, jnp.zeros((R, K)), active, jnp.bool_(False))  # no draft: nothing new
    np.testing.assert_array_equal(two.older, one.newer)
    np.testing.assert_array_equal(two.newer, one.newer)
    assert (one.idle, two.idle) == (0, 1)
    fresh = forget(two, jnp.asarray([1, R]))
    np.testing.assert_array_equal(fresh.older[1], two.mean)
    np.testing.assert_array_equal(fresh.newer[0], two.newer[0])
    nobody = remember(past, survival, jnp.zeros(R, bool), jnp.bool_(True))
    assert isinstance(nobody, Past) and np.isfinite(nobody.mean).all()
    np.testing.assert_array_equal(nobody.mean, past.mean)


@pytest.mark.parametrize("requests", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("block", [1, 3, 7, 15])
def test_buckets(requests: int, block: int) -> None:
    for fine in (False, True):
        sizes = buckets_for(requests, block, fine)
        assert sizes[0] == requests and sizes[-1] == requests * (block + 1)
        assert list(sizes) == sorted(set(sizes))
    slots = [slots_for(requests, block, size) for size in sizes]
    assert slots[0] == 1 and slots[-1] == block + 1 and slots == sorted(slots)
    assert all(requests * s >= size for s, size in zip(slots, sizes, strict=True))
