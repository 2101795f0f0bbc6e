"""Timings of studies: turns, ratios, what is kept, and real rounds of tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from dspark_jax.checkpoints.load import load_target
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.evaluation.study_timing import draft_rounds, head_rounds, in_turns, kept, median, ratio, untrained
from dspark_jax.profiling.measure import Models, Rounds, Timing
from dspark_jax.training.settings import drafter_config
from tests.training.tiny_run import SHAPE

QUICK = Timing(repeats=3, seconds=0.002)


@pytest.fixture(scope="module")
def target(golden: Path) -> SimpleNamespace:
    return load_target(golden / "targets/qwen3_untied")


def test_cases_take_turns_forwards_and_backwards() -> None:
    order: list[str] = []

    def case(name: str):
        def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    samples = in_turns({name: case(name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    assert samples == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert median(samples["b"]) == 5


def test_ratios_are_taken_within_turns() -> None:
    samples = {"one": [2.0, 40.0, 3.3], "other": [1.0, 20.0, 3.0]}
    middle, low, high = ratio(samples, "one", "other")
    assert middle == 2 and low == pytest.approx(1.55) and high == 2


def test_samples_are_measured_once_for_a_key(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure() -> dict[str, list[float]]:
        calls.append(1)
        return {"a": [float(len(calls))]}

    file = tmp_path / "timings" / "x.json"
    assert kept(file, {"slots": 1}, measure) == kept(file, {"slots": 1}, measure) == {"a": [1.0]}
    assert kept(file, {"slots": 2}, measure) == {"a": [2.0]} and len(calls) == 2
    assert json.loads(file.read_text())["of"] == {"slots": 2} and not list(tmp_path.rglob("*.part"))


def test_an_untrained_drafter_drafts_tokens_of_the_target(target: SimpleNamespace) -> None:
    config = drafter_config(SHAPE, target.config)
    assert isinstance(config, DrafterConfig) and config.trims_vocabulary
    made = untrained(config, jnp.float32)
    assert made.params["d2t"].shape == (64,) and not made.params["d2t"].any()
    made.config.check_target(target.config)


def test_rounds_are_timed_by_head_and_with_and_without_a_draft(
    target: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks are verified in one bucket of all rows, drafts alone with a row a slot; only those are compiled."""
    ran: list[tuple[tuple[int, ...], int, tuple[int, ...], int]] = []
    run = Rounds.run

    def spy(self: Rounds, force: int, rounds: int, calls: int = 1):
        taken = run(self, force, rounds, calls)
        ran.append((self.buckets, taken.drafted, taken.by_bucket, taken.rounds))
        return taken

    monkeypatch.setattr(Rounds, "run", spy)
    heads = {name: untrained(drafter_config(SHAPE, target.config), jnp.float32) for name in ("vanilla",)}
    found = head_rounds(target, heads, 2, 64, QUICK)
    assert set(found) == {"vanilla"} and len(found["vanilla"]) == 3 and min(found["vanilla"]) > 0
    assert all(buckets == (2 * 5,) for buckets, *_ in ran)
    assert any(drafted == rounds for _, drafted, _, rounds in ran)
    ran.clear()
    found = draft_rounds(target, heads, 2, 64, QUICK)
    assert set(found) == {"vanilla", "vanilla plain"}
    assert all(buckets == (2,) for buckets, *_ in ran)
    assert {drafted > 0 for _, drafted, *_ in ran} == {True, False}
    assert Models(target, heads["vanilla"], stop_ids=()).block == 4
