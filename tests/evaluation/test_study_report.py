"""Reports of studies: what stands where, signs of differences, gains, pictures, and that the clock stays apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_jax.evaluation.plots import panels
from dspark_jax.evaluation.scores import Estimate, Scores, score
from dspark_jax.evaluation.studies import STUDIES
from dspark_jax.evaluation.study_plots import draw
from dspark_jax.evaluation.study_report import (
    TIMINGS,
    Headline,
    Report,
    difference,
    differences,
    gain,
    per_cent,
    text,
    write,
)
from tests.evaluation.outcome_sets import benchmark, outcome, random_outcomes

STUDY = STUDIES["head"]


@pytest.fixture(scope="module")
def scores() -> Scores:
    benchmarks = [benchmark("a", "math", 5), benchmark("b", "chat", 5)]
    outcomes = random_outcomes({"plain": 0, "none": 0.4, "vanilla": 0.6}, benchmarks)
    return score(outcomes, benchmarks, ["plain", "none", "vanilla"], baseline="plain")


def test_a_difference_is_the_same_both_ways_but_for_its_sign(scores: Scores) -> None:
    there, back = difference(scores, "none", "vanilla"), difference(scores, "vanilla", "none")
    for domain, (value, low, high) in there.items():
        assert back[domain] == pytest.approx((-value, -high, -low)) and back[domain].value > 0
    assert str(difference(score([outcome("a", "x", "c0", [1]), outcome("b", "x", "c0", [1])], [benchmark("x")],
                                ["a", "b"]), "b", "a")["all"].value) == "0.0"  # fmt: skip


def test_pairs_that_are_not_there_are_passed_over(scores: Scores) -> None:
    table = differences(scores, (("vanilla", "none"), ("gated", "vanilla")))
    assert table.count("\n") == 2 and "vanilla - none" in table
    assert differences(scores, (("gated", "vanilla"),)) == ""


def test_gains_are_ratios_of_means(scores: Scores) -> None:
    lengths = {name: scores.by_domain[name]["all"].accepted_length.value for name in ("none", "vanilla")}
    assert gain(scores, "vanilla", "none", "all") == pytest.approx(lengths["vanilla"] / lengths["none"] - 1)
    assert gain(scores, "vanilla", "plain", "math") == pytest.approx(
        scores.by_domain["vanilla"]["math"].accepted_length.value - 1
    )
    assert per_cent(0.1234) == "12.3 %" and per_cent(None) == "-"


def full(clocked: bool = False) -> Report:
    report = Report(clocked=clocked)
    report.headlines = [Headline("gain", "16.3 %", "12.0 %")]
    report.sections, report.timings = ["| measured |"], ["| 3.2 ms |"]
    report.values, report.timing_values = {"scores": 1}, {"ms": 3.2}
    report.left_out = {"gated": "no room"}
    return report


def test_the_paper_comes_beside_what_was_measured_and_the_clock_at_the_end(tmp_path: Path) -> None:
    report = full()
    report.pictures = [tmp_path / "out" / "T1" / "accepted.png"]
    markdown = write(tmp_path / "out", STUDY, report, ["config x"], {"seed": 3})
    assert (tmp_path / "out" / "report.md").read_text() == markdown
    order = [STUDY.title, STUDY.question, "- config x", STUDY.paper, "| gain", "| measured |", "![accepted]", "no room"]
    places = [markdown.index(part) for part in (*order, TIMINGS, "| 3.2 ms |")]
    assert places == sorted(places) and "(T1/accepted.png)" in markdown
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["study"] == "head" and found["seed"] == 3 and found["scores"] == 1 and found["timings"] == {"ms": 3.2}
    assert found["headlines"][0]["here"] == "12.0 %" and found["left_out"] == {"gated": "no room"}


def test_headlines_of_the_clock_stand_with_it(tmp_path: Path) -> None:
    steady, clocked = (text(STUDY, full(clocked), [], tmp_path).split(TIMINGS) for clocked in (False, True))
    assert "12.0 %" in steady[0] and "12.0 %" in clocked[1] and "12.0 %" not in clocked[0]
    assert full(True).as_json()["timings"]["headlines"] and "headlines" not in full(True).as_json()


def test_a_report_without_timings_has_no_such_section(tmp_path: Path) -> None:
    assert TIMINGS not in text(STUDY, Report(sections=["| x |"]), [], tmp_path)


@pytest.mark.parametrize("logarithmic", [False, True])
def test_pictures_are_drawn_with_and_without_intervals(tmp_path: Path, logarithmic: bool) -> None:
    points = [(4.0, Estimate(2.0, 1.5, 2.5)), (1.0, Estimate(1.0)), (2.0, Estimate(None))]
    curves = {"math": {"one": points, "other": points[:1]}, "all": {"one": []}}
    places = [(1.0, "1"), (4.0, "full")]
    file = draw(
        tmp_path / "x.png", curves, "t", "x", "y", places=places, logarithmic=logarithmic, share=not logarithmic
    )
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_single_domain_needs_one_panel(scores: Scores) -> None:
    assert [column.name for column in panels(scores)] == ["math", "chat", "all"]
    one = score([outcome("a", "x", "c0", [1])], [benchmark("x")], ["a"])
    assert [column.name for column in panels(one)] == ["all"]
