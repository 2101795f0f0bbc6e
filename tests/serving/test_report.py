"""Totals, intervals and comparisons of output lines."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dspark_jax.config import write_json
from dspark_jax.serving import report
from dspark_jax.serving.settings import ServeSettings


def line(name, tokens, rounds, seconds=1.0):
    """An output line with `tokens` distinct ids."""
    return {
        "id": name, "finish_reason": "length", "token_ids": list(range(tokens)), "prompt_tokens": 3,
        "completion_tokens": tokens, "rounds": rounds, "drafted": 7 * rounds, "verified": 7 * rounds,
        "accepted": tokens - 1 - rounds, "accepted_length": 0.0, "seconds": seconds,
    }  # fmt: skip


def test_totals_pool_rounds_over_prompts():
    total = report.totals([line("a", 11, 5), line("b", 31, 5), line("c", 1, 0)], 2.0)
    assert total["accepted_length"] == 4.0
    assert (total["prompts"], total["completion_tokens"], total["tokens_per_second"]) == (3, 43, 21.5)
    low, high = total["accepted_length_ci95"]
    assert 2.0 <= low <= 4.0 <= high <= 6.0 and low < high


def test_an_interval_needs_two_prompts_and_is_repeatable():
    assert report.accepted_length_interval([line("a", 11, 5)]) is None
    same = [line(str(i), 11, 5) for i in range(4)]
    assert report.accepted_length_interval(same) == [2.0, 2.0]
    mixed = [line("a", 11, 5), line("b", 31, 5)]
    assert report.accepted_length_interval(mixed) == report.accepted_length_interval(mixed)


def test_a_ledger_has_the_numbers_of_its_lines():
    """Without texts and tokens, as a sequence; and totals of it are those of the lines."""
    records = [line("a", 11, 5), line("b", 31, 5), line("c", 1, 0)]
    ledger = report.Ledger()
    for record in records:
        ledger.append(record)
    slim = [{name: value for name, value in record.items() if name != "token_ids"} for record in records]
    assert list(ledger) == slim and ledger[1:] == slim[1:] and ledger[-1] == slim[-1]
    assert report.totals(ledger, 2.0) == report.totals(records, 2.0)
    summary = report.make_report(ServeSettings(prompt="a"), "float32", ledger, 1.0)
    assert [prompt["id"] for prompt in summary["prompts"]] == ["a", "b", "c"]


def test_intervals_of_very_many_prompts_resample_groups(monkeypatch):
    rng = np.random.default_rng(0)
    records = [line(str(i), int(n), 5) for i, n in enumerate(rng.integers(6, 30, 400))]
    single = report.accepted_length_interval(records)
    monkeypatch.setattr(report, "_RESAMPLED", 100)
    grouped = report.accepted_length_interval(records)
    assert single is not None and grouped is not None and grouped != single
    assert np.allclose(single, grouped, atol=0.04)


def test_nothing_done_gives_zeros():
    total = report.totals([], 0.0)
    assert (total["tokens_per_second"], total["accepted_length"], total["accepted_length_ci95"]) == (0.0, 0.0, None)


def test_comparison_by_id_whatever_the_order():
    mine = [line("a", 10, 5, 1.0), line("b", 20, 5, 1.0)]
    plain = [line("b", 20, 19, 3.0), line("a", 10, 9, 2.0)]
    plain[1]["token_ids"] = [5] * 10
    found = report.compare(mine, 2.0, plain, 5.0, {"a", "b"})
    assert found["speedup"] == 2.5
    assert [prompt["speedup"] for prompt in found["prompts"]] == [2.0, 3.0]
    assert (found["equal_texts"], found["different"]) == (False, ["a"])
    assert report.compare(mine, 2.0, plain, 5.0, {"b"})["equal_texts"] is True
    assert report.compare(mine, 2.0, plain, 5.0, set())["equal_texts"] is None


@pytest.mark.parametrize(("greedy", "words"), [({"a"}, "texts equal"), (set(), "sampled, not compared")])
def test_report_is_json_and_one_line(greedy, words, tmp_path):
    records = [line("a", 10, 5)]
    found = report.compare(records, 1.0, [line("a", 10, 9)], 2.0, greedy)
    summary = report.make_report(ServeSettings(prompt="é"), "float32", records, 1.0, comparison=found)
    text = report.statistics_line(summary)
    assert "\n" not in text and "speed-up 2.00" in text and words in text
    write_json(tmp_path / "r.json", summary)
    back = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert back["settings"]["dtype"] == "float32" and back["settings"]["prompt"] == "é"
    assert back["totals"]["completion_tokens"] == 10 and back["prompts"][0]["id"] == "a"
