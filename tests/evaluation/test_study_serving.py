"""Rounds as records, calibration and load of studies, on outcomes whose true probabilities are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspark_jax.evaluation import study_serving
from dspark_jax.evaluation.answering import Protocol, System
from dspark_jax.evaluation.benchmarks import Benchmark
from dspark_jax.evaluation.outcomes import Outcome, outcome_id
from dspark_jax.evaluation.replay import Calibration, make_replay
from dspark_jax.evaluation.studies import STUDIES
from dspark_jax.evaluation.study_analyses import Workbench
from dspark_jax.evaluation.study_report import TIMINGS, text
from dspark_jax.evaluation.tally import Result
from dspark_jax.profiling.measure import Timing
from tests.evaluation.outcome_sets import benchmark
from tests.evaluation.tiny import curve

BLOCK, RATE = 4, 0.7


def walked(name: str, conversation: str, tokens: int, draws: np.random.Generator, block: int = BLOCK) -> Outcome:
    """An answer that ended with a stop token, along which every draft was accepted with RATE; the head says 0.9."""
    left, accepted, verified, reached = tokens - 1, list[int](), list[int](), list[int]()
    while left > 0:
        run = int(np.cumprod(draws.random(block) < RATE).sum())
        took = min(run, left)
        accepted.append(took)
        verified.append(block)
        reached.append(took if run >= left else block)  # the stop token was an accepted draft
        left -= took + 1
    rows = ((0.9,) * block,) * len(accepted)
    parts = outcome_id("d", name, conversation, 0), "d", name, conversation, 0, 5, tuple(range(tokens)), "stop"
    return Outcome(*parts, tuple(accepted), tuple(verified), tuple(reached), rows)


def answers(one: Benchmark, seed: int, block: int = BLOCK) -> list[Outcome]:
    draws = np.random.default_rng(seed)
    return [walked(one.name, c.id, int(draws.integers(2, 12)), draws, block) for c in one.conversations]


def test_records_tell_where_rounds_began_and_how_far_the_text_went() -> None:
    one = replace(walked("a", "c0", 9, np.random.default_rng(0)), accepted=(2, 0, 3), verified=(4, 4, 4))
    one = replace(one, reached=(4, 4, 3), confidence=((0.5,) * 4,) * 3)
    other = replace(one, conversation="c1", prompt_tokens=7, accepted=(4, 3), verified=(4, 4), reached=(4, 3))
    other = replace(other, confidence=((0.25,) * 4,) * 2)
    made = study_serving.as_records({False: [one], True: [other]}, {"a": "math"}, 20)
    assert made.position.tolist() == [5, 8, 9, 7, 12] and made.round.tolist() == [0, 1, 2, 0, 1]
    assert made.verified.tolist() == [4, 4, 4, 4, 3]  # 8, 5, 4; 8 and 3 tokens were left
    assert made.accepted.tolist() == [2, 0, 3, 4, 3] and made.request.tolist() == [0, 0, 0, 1, 1]
    assert made.held_out.tolist() == [False, True] and made.tokens.tolist() == [9, 9] and made.domains == ("math",)
    assert made.confidence[:, 0].tolist() == [0.5] * 3 + [0.25] * 2
    part = study_serving.kept_requests(made)
    assert part.ids == ("a/c1/0/1",) and part.request.tolist() == [0, 0] and part.position.tolist() == [7, 12]
    assert make_replay([part], Calibration()).requests == 1


def test_the_end_of_a_text_bends_no_rate() -> None:
    """Short answers: most rounds see the end; what was reached would count successes less often than failures."""
    one = benchmark("a", conversations=5000)
    made = study_serving.as_records({True: answers(one, 1)}, {"a": "math"}, 20)
    for k in range(1, BLOCK + 1):
        told = made.accepted[made.verified >= k] >= k
        assert told.mean() == pytest.approx(RATE**k, abs=3.5 * np.sqrt(RATE**k * (1 - RATE**k) / len(told)))


# --- studies on outcomes that are given ---


class _Lab:
    """Answers with what it is given; `mtp` drafts one token."""

    def __init__(self, output: Path, lacking: str = "") -> None:
        self.output, self.lacking = output, lacking

    def lacks(self, variant: Any) -> str:
        return "too large" if variant.name == self.lacking else ""

    def trained(self, changes: Any) -> Any:
        return SimpleNamespace(name="d")

    def system(self, variant: Any, threshold: float | None = None) -> System:
        assert (threshold == 0) == (variant.name == "dspark") or threshold is None
        drafter: Any = SimpleNamespace(config=SimpleNamespace(block_size=1 if variant.name == "mtp" else BLOCK))
        return System(variant.name, drafter)

    def answered(self, system: System, benchmarks: Any, protocol: Protocol) -> list[Outcome]:
        assert protocol.temperature == 1 and system.drafter is not None
        block = system.drafter.config.block_size
        return [one for number, b in enumerate(benchmarks) for one in answers(b, number + b.name.count("x"), block)]


def bench(tmp_path: Path, conversations: int = 150, lacking: str = "") -> Workbench:
    asked = [benchmark("a", "math", conversations), benchmark("b", "chat", conversations)]
    others = [benchmark("ax", "math", conversations), benchmark("bx", "chat", conversations)]
    protocols = [Protocol(temperature, max_tokens=12) for temperature in (1.0, 0.0)]
    lab: Any = _Lab(tmp_path, lacking)
    return Workbench(lab, asked, others, protocols, 0, (1, 2, 4), Timing())


def test_confidences_that_are_too_high_are_calibrated(tmp_path: Path) -> None:
    """The head says 0.9 where 0.7 is true: 20 % at the first position before, next to nothing after."""
    study = STUDIES["calibration"]
    report = study_serving.calibration(study, bench(tmp_path), tmp_path)
    errors = {headline.figure: headline.here for headline in report.headlines}
    before, after = (float(errors[name].split()[0]) for name in errors if name.startswith("calibration error"))
    assert before > 15 and after < 5
    found = report.values["held_out"]["metrics"]
    assert found["before"]["cumulative"][0]["ece"] == pytest.approx(0.2, abs=0.03)
    assert found["temperatures"]["cumulative"][0]["ece"] < 0.05
    fits = report.values["fits"]
    assert len(fits["temperatures"]["temperatures"]) == BLOCK and len(fits["after"]["biases"]) == BLOCK
    assert report.pictures[0].read_bytes().startswith(b"\x89PNG") and not report.clocked
    assert "fitted on" in text(study, report, [], tmp_path)


def test_answers_without_rounds_cannot_be_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(one: Benchmark, seed: int, block: int = BLOCK) -> list[Outcome]:
        return [walked(one.name, c.id, 1, np.random.default_rng(0), block) for c in one.conversations]

    monkeypatch.setitem(globals(), "answers", short)
    with pytest.raises(
        ValueError, match="answers without rounds: nothing to calibrate or to serve; give a larger --max-tok"
    ):
        study_serving.calibration(STUDIES["calibration"], bench(tmp_path, 2), tmp_path)


def test_schedules_are_simulated_against_the_single_token_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose rows cost nothing the schedules verify whole blocks and beat MTP-1; all of it is clocked."""

    def given(_: Workbench, variant: Any, longest: int) -> Any:
        return curve((1, 2, 4), 1 if variant.name == "mtp" else BLOCK, draft=0.05)

    monkeypatch.setattr(study_serving, "_curve", given)
    report = study_serving.load(STUDIES["load"], bench(tmp_path, 30), tmp_path / "load")
    results = report.timing_values["results"]
    assert {one["system"] for one in results} == {"plain", "fixed", "threshold", "causal", "async", "mtp1"}
    assert [one["load"] for one in results if one["system"] == "causal"] == [1, 2, 4]
    speed = {one["system"]: one["tokens_per_second"] for one in results if one["load"] == 4}
    assert speed["causal"] > speed["mtp1"] > speed["plain"]
    budgets = [one["budget"] for one in results if one["system"] == "causal"]
    assert min(budgets) > 3
    single = next(one for one in results if one["system"] == "mtp1" and one["load"] == 1)
    assert 1.3 < single["accepted_length"] < 1 + RATE + 0.1
    assert report.clocked and all(path.exists() for path in report.pictures)
    markdown = text(STUDIES["load"], report, [], tmp_path / "load")
    assert "causal" in markdown.split(TIMINGS)[1] and "tokens/s" not in markdown.split(TIMINGS)[0].split("##")[0]


def test_a_target_without_the_single_token_drafter_is_served_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_serving, "_curve", lambda *_: curve((1, 2, 4), BLOCK, draft=0.05))
    report = study_serving.load(STUDIES["load"], bench(tmp_path, 30, "mtp"), tmp_path / "load")
    assert report.left_out == {"mtp": "too large"}
    assert {one["system"] for one in report.timing_values["results"]} == {
        "plain",
        "fixed",
        "threshold",
        "causal",
        "async",
    }
    assert [headline.figure for headline in report.headlines] == ["verify budget (causal)"]
    with pytest.raises(ValueError, match="study load: serves dspark, which this target lacks: too large"):
        study_serving.load(STUDIES["load"], bench(tmp_path, 30, "dspark"), tmp_path / "load")


def test_budgets_are_told_from_the_smallest_load_to_the_largest() -> None:
    """They may rise with the load."""
    results = [replace(result("causal", n, 1.0, 1.0), budget=rows) for n, rows in ((1, 2.5), (2, 5.0), (4, 4.0))]
    assert study_serving._budget(results).here == "2.5 to 4.0 rows, alone to the largest load"
    assert study_serving._budget([replace(results[0], budget=None), *results[1:]]).here == "-"


def result(system: str, load: float, user: float, throughput: float) -> Result:
    values: dict[str, Any] = dict.fromkeys(Result.__dataclass_fields__)
    return Result(**(values | {"system": system, "load": load, "budget": 3.0, "tokens_per_second": throughput,
                               "tokens_per_second_per_user": user}))  # fmt: skip


def test_frontiers_are_compared_at_the_same_load_speed_and_throughput() -> None:
    """Twice the throughput at every speed per user."""
    theirs = [result("mtp1", n, 100 / n, 100.0 * n**0.5) for n in (1, 2, 4)]
    ours = [result(name, n, 100 / n, 200.0 * n**0.5) for name in ("causal", "async") for n in (1, 2, 4)]
    headlines, rows = study_serving.matched([*theirs, *ours])
    assert rows[1][:5] == ["causal", "1", "100.0 %", "0.0 %", "100.0 %"] and len(rows) == 1 + 6
    assert headlines[0].here == "+100 %"
    # at twice MTP's throughput users wait: 100 in all is outside of ours (200 and more), 200 is our first point
    assert [row[5] for row in rows[1:4]] == ["-", "-", "300.0 %"]
