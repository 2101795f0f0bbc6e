"""Recorded rounds as requests to serve: which round is replayed where, what it accepts, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_jax.calibration.sts import scaled
from dspark_jax.evaluation.replay import Calibration, Moment, make_replay
from tests.evaluation.tiny import mixed, records, replay

DRAWS = np.random.default_rng(0)


def at(rounds, offset=0) -> Moment:
    rounds = np.asarray(rounds)
    return Moment(rounds, np.full(len(rounds), offset))


def test_the_round_is_the_nearest_recorded_one_at_or_before_the_position():
    """Rounds that begin with 1, 4 and 5 tokens there; the second request's come behind the first one's."""
    found = replay([[2, 0, 1], [0]], block=3)
    assert found.tokens.tolist() == [7, 2]
    now = found.moment(np.zeros(6, int), np.arange(1, 7))
    assert now.rounds.tolist() == [0, 0, 0, 1, 2, 2] and now.offsets.tolist() == [0, 1, 2, 0, 0, 1]
    assert found.moment(np.array([1]), np.array([1])).rounds.tolist() == [3]


def accepted_in(found, request, verify):
    """Accepted tokens of each round of a request when `verify` tokens are verified."""
    length, got = 1, []
    while length < found.tokens[request]:
        now = found.moment(np.array([request]), np.array([length]))
        got.append(int(found.accept(now, np.array([verify]), DRAWS)[0]))
        length += got[-1] + 1
    return got


def test_whole_blocks_give_back_the_recorded_rounds():
    runs = [[2, 0, 1, 3], [1, 1]]
    found = replay(runs, block=3)
    assert [accepted_in(found, request, 3) for request in range(2)] == runs


def test_cut_blocks_come_to_the_recorded_rejections():
    """Runs of 4, 1, 0 and 5 by twos: two and a bonus token, one more, and so on to the rejection behind a run."""
    found = replay([[4, 1, 0, 5, 0]], block=6)
    assert accepted_in(found, 0, 2) == [2, 1, 1, 0, 2, 2, 0]
    assert accepted_in(found, 0, 1) == [1, 1, 0, 1, 0, 1, 1, 1, 0]
    assert accepted_in(found, 0, 0) == [0] * 15


@pytest.mark.parametrize("verify", [1, 2])
def test_cut_blocks_accept_as_often_as_the_drafter_is_right(verify):
    """Where each token is right with 0.6, whatever came before, the rate is that of whole blocks."""
    found = mixed(300, 6, longest=20)
    rounds = [accepted for request in range(300) for accepted in accepted_in(found, request, verify)]
    assert np.mean(rounds) == pytest.approx(np.minimum(found.accepted, verify).mean(), rel=0.02)


def test_beyond_what_was_verified_confidences_decide():
    """A round that verified and accepted one token: the second survives with its confidence, the first surely."""
    part = records([[1]], block=3, confidence=[0.1, 0.3, 1.0])
    part = replace(part, verified=np.array([1], np.int8))
    found = make_replay([part], Calibration())
    accepted = found.accept(at([0] * 4000), np.full(4000, 3), np.random.default_rng(1))
    assert set(accepted.tolist()) == {1, 3} and (accepted == 3).mean() == pytest.approx(0.3, abs=0.03)
    rejected = make_replay([replace(part, accepted=np.array([0], np.int8))], Calibration())
    assert (rejected.accept(at([0] * 50), np.full(50, 3), DRAWS) == 0).all()  # that was told


def test_behind_a_block_its_last_confidence_stands_for_more():
    """Two tokens into a block of three that was accepted whole: one token is told, those behind it have 0.25."""
    found = replay([[3]], block=3, confidence=[0.9, 0.5, 0.25])
    assert found.confidences(at([0], 1))[0] == pytest.approx([0.5, 0.25, 0.25])
    now = at([0] * 4000, 2)
    accepted = found.accept(now, np.full(4000, 2), np.random.default_rng(1))
    assert set(accepted.tolist()) == {1, 2} and (accepted == 2).mean() == pytest.approx(0.25, abs=0.03)


def test_confidences_are_calibrated_as_the_drafter_does_it():
    part = records([[1, 0]], block=2, confidence=[0.8, 0.3])
    found = make_replay([part], Calibration((2.0, 0.5)))
    assert found.confidence == pytest.approx(scaled(part.confidence, (2.0, 0.5)))
    biased = make_replay([part], Calibration((1.0, 1.0), (0.0, np.log(7.0)))).confidence[0]
    assert biased == pytest.approx([0.8, 3 / 4])  # odds 3/7 times 7


def test_answers_are_cut_and_servers_expect_the_limit():
    part = records([[0, 0, 0], [0]], max_tokens=30)
    found = make_replay([part, records([[0]], max_tokens=9, name="s")], Calibration())
    assert found.tokens.tolist() == [4, 2, 2] and found.limit.tolist() == [30, 30, 9]
    cut = make_replay([part], Calibration(), max_tokens=3)
    assert cut.tokens.tolist() == [3, 2] and cut.limit.tolist() == [3, 3]


def test_a_second_file_has_its_own_rounds():
    found = make_replay([records([[0, 1]]), records([[1, 0]], name="s")], Calibration())
    now = found.moment(np.array([0, 1, 1]), np.array([1, 1, 3]))
    assert now.rounds.tolist() == [0, 2, 3] and now.offsets.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("parts", "calibration", "message"),
    [
        ([], Calibration(), "no records"),
        ([records([[], []])], Calibration(), "records without rounds"),
        ([records([[0]]), records([[0]], block=2)], Calibration(), "blocks of 1 and 2 tokens"),
        ([records([[0]], block=2)], Calibration((1.0,)), "1 temperatures: records of blocks of 2"),
        ([records([[0]], block=2)], Calibration((1.0, 1.0), (0.0,)), "1 biases: records of blocks of 2"),
        ([records([[0]])], Calibration((0.0,)), "must be positive"),
        ([records([[0]])], Calibration((1.0,), (float("nan"),)), "must be finite"),
    ],
)
def test_what_cannot_be_replayed_is_refused(parts, calibration, message):
    with pytest.raises(ValueError, match=message):
        make_replay(parts, calibration)


def test_a_request_whose_rounds_are_missing_is_refused():
    part = records([[0, 0], [0]])
    with pytest.raises(ValueError, match="'r0': its first round is at position 11, must be at 10"):
        make_replay([part.rows(np.array([False, True, True]))], Calibration())
    with pytest.raises(ValueError, match="'r1': it has no round"):
        make_replay([part.rows(part.request == 0)], Calibration())
