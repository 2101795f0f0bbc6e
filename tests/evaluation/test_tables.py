"""The report's tables: the paper's form, the best in bold, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspark_jax.evaluation import tables
from dspark_jax.evaluation.scores import Estimate, Scores, score
from tests.evaluation.outcome_sets import benchmark, outcome, random_outcomes

BENCHMARKS = [benchmark("a", "math", 4), benchmark("b", "code", 4), benchmark("c", "chat", 4)]


@pytest.fixture(scope="module")
def scores() -> Scores:
    """Plain decoding and two drafters on a benchmark of each domain."""
    outcomes = random_outcomes({"plain": 0, "dflash": 0.5, "dspark": 0.7}, BENCHMARKS, rounds=60)
    return score(outcomes, BENCHMARKS, ["plain", "dflash", "dspark"], baseline="plain")


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, without its rule; every line has as many."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len({len(row) for row in rows}) == 1 and set("".join(rows[1])) <= set("-:")
    return [rows[0], *rows[2:]]


def test_the_first_table_is_the_papers(scores: Scores) -> None:
    rows = cells(tables.accepted_lengths(scores))
    assert rows[0] == ["drafter", "A", "B", "C", "math", "code", "chat", "all"]
    assert [row[0] for row in rows[1:]] == ["plain", "dflash", "dspark"]
    assert rows[1][1:] == ["1.00"] * 7
    for column, cell in zip(scores.benchmarks, rows[3][1:], strict=False):
        value = scores.by_benchmark["dspark"][column.name].accepted_length.value
        assert cell == f"**{value:.2f}**"
    assert rows[3][-1] == f"**{scores.by_domain['dspark']['all'].accepted_length.value:.2f}**"
    assert not any("*" in cell for row in rows[:3] for cell in row)


def test_one_domain_needs_no_columns_of_its_own() -> None:
    one = [benchmark("a", "math", 2)]
    found = score(random_outcomes({"d": 0.5}, one), one, ["d"])
    assert cells(tables.accepted_lengths(found))[0] == ["drafter", "A", "all"]
    assert "*" not in tables.accepted_lengths(found)  # nothing to be better than


def test_equal_figures_are_all_bold_and_missing_ones_never() -> None:
    assert tables.best_in_bold([["1.00", "2.00", "2.00"], ["-", "0.50", "-"], ["-", "-", "-"]]) == [
        ["1.00", "**2.00**", "**2.00**"], ["-", "**0.50**", "-"], ["-", "-", "-"],
    ]  # fmt: skip


def test_intervals_stand_behind_their_figures() -> None:
    assert tables.with_interval(Estimate(0.123, 0.1, 0.2), 1, 100) == "12.3 [10.0, 20.0]"
    assert tables.with_interval(Estimate(0.5, 0.25, 0.75), sign=True) == "+0.50 [+0.25, +0.75]"
    assert tables.with_interval(Estimate(1.0, 1.0, 1.0)) == tables.with_interval(Estimate(1.0)) == "1.00"
    assert tables.with_interval(Estimate(None)) == "-"


def test_the_second_table_has_intervals_and_differences(scores: Scores) -> None:
    rows = cells(tables.intervals(scores))
    assert len(rows) == 4 and rows[3][1].endswith("]") and "[" in rows[3][1]
    pairs = cells(tables.differences(scores))
    assert pairs[0] == ["difference", "math", "code", "chat", "all"] and pairs[1][0] == "dflash - dspark"
    assert pairs[1][-1].startswith("-") and len(pairs) == 2


def test_speed_has_a_row_for_each_domain_and_system(scores: Scores) -> None:
    rows = cells(tables.speed(scores))
    assert rows[0][:2] == ["domain", "drafter"] and len(rows) == 1 + 4 * 3
    last = dict(zip(rows[0], rows[-1], strict=True))
    assert (last["domain"], last["drafter"], last["speed-up"]) == ("all", "dspark", "2.00")
    found = scores.by_domain["dspark"]["all"]
    assert last["tokens/s"] == "4.0" and last["tokens"] == str(found.tokens)
    assert last["acceptance rate %"].startswith(f"{100 * found.acceptance_rate.value:.1f} [")  # type: ignore[operator]
    assert last["verified per round"] == "4.00"
    plain = dict(zip(rows[0], rows[1], strict=True))
    assert plain["acceptance rate %"] == "-" and plain["verified per round"] == "0.00"


def test_positions_have_a_column_each(scores: Scores) -> None:
    rows = cells(tables.positions(scores))
    assert rows[0] == ["domain", "drafter", "k = 1", "k = 2", "k = 3", "k = 4"]
    assert [row[1] for row in rows[1:]] == ["dflash", "dspark"] * 4  # plain decoding has none
    assert rows[-1][2].startswith(f"{100 * scores.by_domain['dspark']['all'].positions[0].value:.1f} [")  # type: ignore[operator]


def test_shorter_blocks_leave_cells_open() -> None:
    one = [benchmark("a")]
    outcomes = [outcome("short", "a", "c0", [1], block=1), outcome("long", "a", "c0", [2, 3], block=3)]
    rows = cells(tables.positions(score(outcomes, one, ["short", "long"])))
    assert rows[1] == ["math", "short", "100.0", "-", "-"] and rows[2] == ["math", "long", "100.0", "100.0", "50.0"]


def test_the_report_says_what_was_not_timed_and_what_was_left_out(scores: Scores) -> None:
    assert tables.untimed(scores) == tables.dropped(scores) == ""
    outcomes = random_outcomes({"plain": 0, "d": 0.5}, BENCHMARKS)
    found = score(outcomes, BENCHMARKS, ["plain", "d"], baseline="plain", clock="none")
    rows = cells(tables.speed(found))
    assert {row[rows[0].index(name)] for row in rows[1:] for name in ("tokens/s", "speed-up")} == {"-"}
    text = tables.report(replace(found, dropped=3), [])
    assert "some of the answers were not timed" in text and "room to answer in the context: 3" in text


def test_the_report_has_all_parts(scores: Scores) -> None:
    text = tables.report(scores, ["target X", "seed 0"])
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == ["# Evaluation", "## Accepted length", "## Intervals", "## Speed", "## Acceptance by position"]
    assert "- target X\n- seed 0\n" in text
    for part in (tables.accepted_lengths, tables.intervals, tables.differences, tables.speed, tables.positions):
        assert part(scores) in text


def test_plain_decoding_alone_has_no_positions() -> None:
    one = [benchmark("a", conversations=2)]
    found = score(random_outcomes({"plain": 0}, one), one, ["plain"], baseline="plain")
    text = tables.report(found, [])
    assert "by position" not in text and "Differences" not in text
