"""Plans of an epoch: every sample once, whole, where it fits; as few rows as a plain best fit needs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.data import packing
from dspark_jax.data.packing import EpochPlan, pack, plan_buckets, plan_packed, plan_rows, shuffled

some_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=60).map(lambda x: np.asarray(x, np.int32))


def best_fit_decreasing(lengths: np.ndarray, width: int, documents: int) -> list[int]:
    """Row of each sample, by a plain loop."""
    rows: list[list[int]] = []  # [room, samples]
    result = [0] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [r for r, (room, count) in enumerate(rows) if room >= lengths[number] and count < documents]
        best = min(fitting, key=lambda r: (rows[r][0], r), default=len(rows))
        if best == len(rows):
            rows.append([width, 0])
        rows[best][0] -= int(lengths[number])
        rows[best][1] += 1
        result[number] = best
    return result


def check_plan(plan: EpochPlan, lengths: np.ndarray, documents: int) -> None:
    """Rows that fit their batch; every sample at most once, and all of them but those of fewer than N rows."""
    used = plan.used()
    assert len(set(used.tolist())) == len(used)
    out = sorted(set(range(len(lengths))) - set(plan.samples.tolist()))  # bucketing leaves them out before it sorts
    seen = []
    for step in range(plan.steps):
        rows = plan.rows(step)
        assert len(rows) == plan.batch_size
        for row in rows:
            assert len(row) <= documents and lengths[row].sum() <= plan.widths[step]
            seen += row.tolist()
    assert seen == used.tolist()
    assert sorted(plan.samples.tolist() + out) == list(range(len(lengths)))
    rows_left = len(out) + max(0, len(plan.bounds) - 1 - plan.steps * plan.batch_size)
    assert rows_left < plan.batch_size
    slots = int(plan.widths.sum()) * plan.batch_size
    assert plan.padding(lengths) == pytest.approx(1 - lengths[seen].sum() / slots)


@settings(max_examples=50)
@given(some_lengths, st.integers(1, 5), st.integers(0, 2**40), st.integers(0, 3))
def test_plans_hold_every_sample_once(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> None:
    plans = {
        1: [
            plan_rows(lengths, batch_size, 40, seed, epoch),
            plan_buckets(lengths, batch_size, (8, 16, 40), seed, epoch),
        ],
        3: [plan_packed(lengths, batch_size, 40, 3, seed, epoch)],
        9: [plan_packed(lengths, batch_size, 55, 9, seed, epoch)],
    }
    for documents, group in plans.items():
        for plan in group:
            check_plan(plan, lengths, documents)


@given(some_lengths, st.integers(1, 8))
def test_rows_are_those_of_a_plain_best_fit(lengths: np.ndarray, documents: int) -> None:
    np.testing.assert_array_equal(pack(lengths, 40, documents), best_fit_decreasing(lengths, 40, documents))


def test_windows_are_packed_one_by_one() -> None:
    lengths = np.random.default_rng(0).integers(0, 40, 70_000).astype(np.int32)
    window = 4096  # the largest there is: a row of 8000 tokens takes hundreds of these samples
    rows = pack(lengths, 8000, 500)
    first = 0
    for start in range(0, len(lengths), window):  # 18 windows
        part = np.asarray(best_fit_decreasing(lengths[start : start + window], 8000, 500)) + first
        np.testing.assert_array_equal(rows[start : start + window], part)
        first = int(part.max()) + 1
    short = np.tile(lengths[:300] + 1000, 70)
    rows = pack(short, 1040, 8)
    window = int(256 * 1040 / short.mean())  # 81 windows: more than are packed at once
    np.testing.assert_array_equal(rows[:window], best_fit_decreasing(short[:window], 1040, 8))
    assert sorted(rows) == list(range(len(short)))  # no two fit into one row


def test_many_lengths_take_little_time_and_leave_little_room() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.6, 0.8, 100_000), 20, 4096).astype(np.int32)
    documents = packing.documents_of_a_row(lengths, 4096)
    began = time.process_time()
    plan = plan_packed(lengths, 64, 4096, documents, 0, 0)
    assert time.process_time() - began < 5  # about 0.2 s; a plain loop takes minutes
    assert plan.padding(lengths) < 0.01
    assert plan_rows(lengths, 64, 4096, 0, 0).padding(lengths) > 0.7


def test_buckets_bring_like_lengths_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 101, 6400).astype(np.int32)
    plan = plan_buckets(lengths, 8, (25, 50, 75, 100), 0, 0)
    assert plan.steps == 800 and set(plan.widths) == {25, 50, 75, 100}
    for step, width in enumerate(plan.widths):
        longest = max(int(lengths[row].max()) for row in plan.rows(step))
        assert width == next(w for w in (25, 50, 75, 100) if w >= longest)
    assert plan.padding(lengths) < 0.25 < 0.49 < plan_rows(lengths, 8, 100, 0, 0).padding(lengths)
    assert np.abs(np.diff(plan.widths)).astype(bool).mean() > 0.5  # in mixed order


def test_who_is_left_out_does_not_depend_on_length() -> None:
    lengths = np.arange(1, 12, dtype=np.int32)
    for make in (
        lambda epoch: plan_buckets(lengths, 4, (6, 11), 0, epoch),
        lambda epoch: plan_packed(lengths, 4, 11, 8, 0, epoch),
    ):
        counts = np.zeros(11, int)
        for epoch in range(100):
            counts[make(epoch).used()] += 1
        assert counts.min() > 40 and counts.max() < 100


def test_order_depends_on_seed_epoch_and_stream() -> None:
    orders = [tuple(shuffled(50, *key)) for key in [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0, 1), (2**63, 0)]]
    assert len(set(orders)) == len(orders) and all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] == tuple(shuffled(50, 0, 0))
    assert shuffled(8, 3, 5).tolist() == [
        6,
        4,
        3,
        2,
        0,
        7,
        5,
        1,
    ]  # a resumed run finds its order, whatever the version of NumPy
