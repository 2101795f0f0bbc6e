"""Pictures and TensorBoard events of an evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from dspark_jax.evaluation.plots import colours, plot, write_board
from dspark_jax.evaluation.scores import score
from tests.evaluation.outcome_sets import benchmark, outcome, random_outcomes


def test_pictures_are_drawn_of_all_there_is(tmp_path: Path) -> None:
    benchmarks = [benchmark("a", "math", 3), benchmark("b", "chat", 1)]  # the second has no intervals
    outcomes = random_outcomes({"plain": 0, "x": 0.5, "y": 0.7}, benchmarks)
    scores = score(outcomes, benchmarks, ["plain", "x", "y"], baseline="plain")
    paths = plot(tmp_path, scores)
    assert [path.name for path in paths] == ["accepted.png", "position.png"]
    shown = colours(scores)
    assert len(set(shown.values())) == 3 and list(shown) == ["plain", "x", "y"]
    for path in paths:
        image = imread(path)
        assert min(image.shape[:2]) > 300
        for name in ("x", "y") if path.name == "position.png" else ("x", "y", "plain"):
            assert has_colour(image, shown[name])


def has_colour(image: np.ndarray, name: str) -> bool:
    """Whether a good many points have just this colour."""
    from matplotlib.colors import to_rgb

    return int((np.abs(image[..., :3] - np.asarray(to_rgb(name))) < 0.01).all(axis=-1).sum()) > 50


def test_plain_decoding_alone_has_no_picture_of_positions(tmp_path: Path) -> None:
    one = [benchmark("a", conversations=2)]
    scores = score(random_outcomes({"plain": 0}, one), one, ["plain"], baseline="plain")
    assert [path.name for path in plot(tmp_path, scores)] == ["accepted.png"]


def test_positions_that_were_not_reached_are_left_open(tmp_path: Path) -> None:
    one = [benchmark("a", conversations=2)]
    scores = score([outcome("d", "a", f"c{i}", [0, 1]) for i in (0, 1)], one, ["d"])
    assert len(plot(tmp_path, scores)) == 2


@pytest.mark.parametrize("times", [1, 2])
def test_events_are_those_of_the_last_report(tmp_path: Path, times: int) -> None:
    """A run for each system, with the names of its figures; written again, not added to."""
    one = [benchmark("a", conversations=2)]
    scores = score(random_outcomes({"plain": 0, "x": 0.5}, one), one, ["plain", "x"], baseline="plain")
    for _ in range(times):
        write_board(tmp_path, scores)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "x"]
    for run in tmp_path.iterdir():
        (events,) = run.iterdir()
        assert b"accepted_length/a" in events.read_bytes() and b"speedup/all" in events.read_bytes()
    assert b"acceptance_by_position/math" in next((tmp_path / "x").iterdir()).read_bytes()
    assert b"acceptance_by_position" not in next((tmp_path / "plain").iterdir()).read_bytes()
