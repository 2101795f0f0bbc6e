"""The schedules on cases that can be followed by hand: rows, walks over a staircase, the past."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.decoding.curve import RoundSeconds
from dspark_jax.evaluation.schedules import (
    PROBE,
    Past,
    async_lengths,
    bucket_gains,
    causal_lengths,
    drafting_pays,
    fill,
    make_buckets,
    rank,
    smallest_bucket,
)

SURVIVAL = np.array([[0.9, 0.8, 0.7, 0.6]])
ROOM = np.array([4])


def one_slot(*drafted: float, plain: float = 1.0):
    """Buckets of 1 to 5 rows for one slot and blocks of four, with these seconds."""
    return make_buckets(1, 4, RoundSeconds((1, 2, 3, 4, 5), np.asarray(drafted), plain))


def gains_of(survival, buckets, room=ROOM):
    return bucket_gains(rank(np.asarray(survival), room), len(room), buckets)


def test_tokens_are_ranked_by_survival_and_equals_by_request():
    ranking = rank(np.array([[0.5, 0.4], [0.9, 0.5], [0.8, 0.1]]), np.array([2, 2, 1]))
    assert ranking.survival.tolist() == [0.9, 0.8, 0.5, 0.5, 0.4]
    assert ranking.request.tolist() == [1, 2, 0, 1, 0] and ranking.slot.tolist() == [0, 0, 0, 1, 1]


def test_a_bucket_is_filled_within_its_rows_caps_and_the_room():
    buckets = make_buckets(2, 3, RoundSeconds((2, 3, 4, 8), np.ones(4), 1.0))
    assert buckets.caps.tolist() == [0, 1, 2, 3]
    ranking = rank(np.array([[0.9, 0.8, 0.7], [0.5, 0.4, 0.3]]), np.array([3, 1]))
    none = np.zeros(2, np.int64)
    filled = [fill(ranking, none, i, buckets).tolist() for i in range(4)]
    assert filled == [[0, 0], [1, 0], [2, 0], [3, 1]]
    assert bucket_gains(ranking, 2, buckets) == pytest.approx([0, 0.9, 1.7, 2.9])
    assert fill(ranking, np.array([0, 1]), 2, buckets).tolist() == [1, 1]  # what is admitted stays
    assert bucket_gains(ranking, 1, buckets)[0] == 0  # an idle slot's row is not for drafts where the cap is 0


def test_causal_stops_before_an_edge_that_does_not_pay():
    """2.7 tokens in 1 s beat a forecast of 3.4 or 4.05 tokens in 1.6 s."""
    buckets = one_slot(1, 1, 1, 1.6, 1.6)
    assert causal_lengths(SURVIVAL, ROOM, gains_of(SURVIVAL, buckets), buckets).tolist() == [2]


def test_causal_crosses_an_edge_that_the_past_promises_to_pay():
    """At 1.4 s the first bucket behind the edge does not pay (3.4 tokens), the second does (4.05)."""
    buckets = one_slot(1, 1, 1, 1.4, 1.4)
    assert causal_lengths(SURVIVAL, ROOM, gains_of(SURVIVAL, buckets), buckets).tolist() == [4]
    low = gains_of([[0.9, 0.8, 0.3, 0.1]], buckets)  # the round before promised less: 3.6
    assert causal_lengths(SURVIVAL, ROOM, low, buckets).tolist() == [2]


def test_causal_reads_no_further_than_the_next_token():
    """What lies behind the next token in line changes nothing: the past stands in for it, bounded by that token."""
    buckets = one_slot(1, 1, 1, 1.4, 1.4)
    past = gains_of([[0.9, 0.8, 0.3, 0.1]], buckets)
    for beyond in (0.0, 0.3, 0.7):
        other = np.array([[0.9, 0.8, 0.7, beyond]])
        assert causal_lengths(other, ROOM, past, buckets).tolist() == [2]
    buckets = one_slot(1, 1, 1, 1.46, 1.46)
    past = gains_of([[0.9, 0.9, 0.55, 0.55]], buckets)
    assert causal_lengths(np.array([[0.9, 0.8, 0.7, 0.1]]), ROOM, past, buckets).tolist() == [4]  # 3.95 tokens
    assert causal_lengths(np.array([[0.9, 0.8, 0.2, 0.1]]), ROOM, past, buckets).tolist() == [2]  # 3.1


def test_async_takes_the_bucket_of_the_past_and_the_tokens_of_now():
    buckets = make_buckets(2, 2, RoundSeconds((2, 4, 6), np.array([1.0, 1.2, 2.0]), 1.0))
    past = gains_of([[0.9, 0.8], [0.2, 0.1]], buckets, np.array([2, 2]))
    now = np.array([[0.3, 0.1], [0.6, 0.5]])
    assert async_lengths(now, np.array([2, 2]), past, buckets).tolist() == [0, 2]
    assert async_lengths(now, np.array([2, 1]), past, buckets).tolist() == [1, 1]


def test_drafting_pays_where_more_is_promised():
    gains = np.array([0.0, 0.5])
    make = lambda drafted: make_buckets(1, 1, RoundSeconds((1, 2), np.array([drafted, drafted]), 1.0))  # noqa: E731
    assert not drafting_pays(gains, 1, make(1.6), idle=0)
    assert drafting_pays(gains, 1, make(1.49), idle=0)


def test_the_smallest_bucket_holds_rows_and_each_request():
    buckets = make_buckets(2, 3, RoundSeconds((2, 3, 4, 8), np.ones(4), 1.0))
    assert [smallest_bucket(np.array(x), buckets) for x in ([0, 0], [1, 0], [2, 0], [1, 1], [3, 0])] == [0, 1, 2, 2, 3]
    assert smallest_bucket(np.array([1]), buckets) == 1  # two rows, but no request has a draft in the first bucket


def test_the_past_is_of_one_and_two_rounds_before():
    past = Past(2, 2)
    assert past.newer.tolist() == past.older.tolist() == [pytest.approx([0.7, 0.49])] * 2
    past.remember(np.array([1]), np.array([[0.9, 0.9]]))
    assert past.newer[1].tolist() == [0.9, 0.9] and past.older[1] == pytest.approx([0.7, 0.49])
    assert past.newer[0] == pytest.approx([0.7, 0.49])  # was not active
    assert past.mean == pytest.approx([0.71, 0.49 + 0.05 * 0.41])
    past.remember(np.array([1]), None)  # a round without a draft: both are the newer one
    assert past.older[1].tolist() == past.newer[1].tolist() == [0.9, 0.9] and past.mean[0] == pytest.approx(0.71)
    past.forget(1)
    assert past.newer[1] == pytest.approx(past.mean) and past.older[1] == pytest.approx(past.mean)


def test_a_look_is_due_after_rounds_in_proportion_to_what_it_loses():
    buckets = make_buckets(1, 1, RoundSeconds((1, 2), np.array([2.0, 2.0]), 1.0))
    for gain, waits in ((1.0, 0), (0.5, PROBE // 4), (0.0, PROBE // 2)):  # of 2 tokens in 2 seconds
        due = [drafting_pays(np.array([0.0, gain]), 1, buckets, idle) for idle in range(PROBE)]
        assert due == [False] * max(waits - 1, 0) + [True] * (PROBE - max(waits - 1, 0))


def test_outcomes_correct_the_confidences():
    past, raw = Past(1, 2), np.array([[0.5, 0.25]])
    assert past.corrected(raw).tolist() == raw.tolist()
    for _ in range(500):
        past.count_kept(raw, np.array([1]), np.array([1]))
    assert past.corrected(raw)[0] == pytest.approx([6 / 7, 3 / 7], rel=0.02)  # 20 parts the word (0.5), 50 the outcomes
    past.count_kept(raw, np.array([0]), np.array([0]))
    assert past.corrected(raw)[0] == pytest.approx([6 / 7, 3 / 7], rel=0.02)
