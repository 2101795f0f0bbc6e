"""Recorded rounds as requests to serve: which round is replayed where, what it accepts, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_jax.calibration.sts import scaled
from dspark_jax.evaluation.replay import Calibration, make_replay
from tests.evaluation.tiny import records, replay

DRAWS = np.random.default_rng(0)


def test_the_round_is_the_nearest_recorded_one_at_or_before_the_position():
    """Rounds that begin with 1, 4 and 5 tokens there; the second request's come behind the first one's."""
    found = replay([[2, 0, 1], [0]], block=3)
    assert found.tokens.tolist() == [7, 2]
    assert found.rounds(np.zeros(6, int), np.arange(1, 7)).tolist() == [0, 0, 0, 1, 2, 2]
    assert found.rounds(np.array([1]), np.array([1])).tolist() == [3]


def test_whole_blocks_give_back_the_recorded_rounds():
    runs = [[2, 0, 1, 3], [1, 1]]
    found = replay(runs, block=3)
    for request, run in enumerate(runs):
        length, got = 1, []
        while length < found.tokens[request]:
            number = found.rounds(np.array([request]), np.array([length]))
            got.append(int(found.accept(number, np.array([3]), DRAWS)[0]))
            length += got[-1] + 1
        assert got == run and length == found.tokens[request]


def test_fewer_verified_tokens_accept_no_more_than_those():
    found = replay([[2, 0, 3]], block=3)
    for length in range(4):
        assert found.accept(np.arange(3), np.full(3, length), DRAWS).tolist() == [min(2, length), 0, length]


def test_beyond_what_was_verified_confidences_decide():
    """A round that verified and accepted one token: the second survives with its confidence, the first surely."""
    part = records([[1]], block=3, confidence=[0.1, 0.3, 1.0])
    part = replace(part, verified=np.array([1], np.int8))
    found = make_replay([part], Calibration())
    accepted = found.accept(np.zeros(4000, int), np.full(4000, 3), np.random.default_rng(1))
    assert set(accepted.tolist()) == {1, 3} and (accepted == 3).mean() == pytest.approx(0.3, abs=0.03)
    rejected = make_replay([replace(part, accepted=np.array([0], np.int8))], Calibration())
    assert (rejected.accept(np.zeros(50, int), np.full(50, 3), DRAWS) == 0).all()  # that was told


def test_confidences_are_calibrated_as_the_drafter_does_it():
    part = records([[1, 0]], block=2, confidence=[0.8, 0.3])
    found = make_replay([part], Calibration((2.0, 0.5)))
    assert found.confidence == pytest.approx(scaled(part.confidence, (2.0, 0.5)))
    assert found.survival[:, 1] == pytest.approx(found.confidence.prod(axis=1))
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
    assert found.rounds(np.array([0, 1, 1]), np.array([1, 1, 3])).tolist() == [0, 2, 3]


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
