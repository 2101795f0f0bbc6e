"""What each kind of study shows, on outcomes and timings that are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspark_jax.evaluation import study_analyses as analyses
from dspark_jax.evaluation.answering import PLAIN, Protocol, System
from dspark_jax.evaluation.outcomes import Outcome
from dspark_jax.evaluation.studies import STUDIES, Study, Variant
from dspark_jax.evaluation.study_analyses import Workbench
from dspark_jax.evaluation.study_kinds import KINDS
from dspark_jax.evaluation.study_report import TIMINGS, Report, text
from dspark_jax.profiling.measure import Timing
from tests.evaluation.outcome_sets import benchmark, random_outcomes

ASKED = [benchmark("a", "math", 6), benchmark("b", "chat", 6)]
RATES = {"plain": 0.0, "ngram": 0.2, "mtp": 0.5, "eagle3": 0.55, "dflash": 0.5, "dspark": 0.7}


class _Lab:
    """Drafters that accept with the rate of RATES or 0.6; a vocabulary of 40 tokens that drafters know in part."""

    def __init__(self, output: Path, lacking: str = "") -> None:
        self.output, self.lacking, self.dtype = output, lacking, "float32"
        self.target: Any = "target"
        self.order: list[str] = []

    def lacks(self, variant: Variant) -> str:
        return f"{variant.name}: too large" if variant.name in self.lacking.split(",") else ""

    @property
    def clocked(self) -> Any:
        return self

    def trained(self, changes: Any) -> Any:
        self.order.append(changes.get("drafter.kind", "dspark"))
        held_out = {"held_out_tau_probabilistic": 2.5}
        size = changes.get("cache_kind", "")
        facts = {"updates": 7, "seconds_per_update": 0.25, "held_out": held_out, "states": size}
        facts |= {"bytes_per_token": len(size), "bytes": 1000 * len(size)}
        return SimpleNamespace(name="d-1", config="a shape", facts=facts)

    def system(self, variant: Variant, threshold: float | None = None) -> System:
        if variant.name == "plain":
            return System(PLAIN, None)
        params = {"fc": np.zeros((3, 4))}
        size = variant.changes.get("drafter.draft_vocab_size")
        if size:
            params["d2t"] = np.zeros(size // 1024, np.int32)  # the first 2, 8, 16 tokens
        drafter: Any = SimpleNamespace(params=params, config=SimpleNamespace(vocab_size=40))
        if threshold is None:
            return System(variant.name, drafter)
        return System(variant.name, drafter, "threshold", threshold)

    def answered(self, system: System, benchmarks: Any, protocol: Protocol) -> list[Outcome]:
        rate = RATES.get(system.name, 0.6) * (1 if protocol.temperature else 0.9)
        made = random_outcomes({system.name: rate}, benchmarks)
        if system.schedule != "threshold":
            return made
        cut = 4 - int(4 * system.threshold)  # the higher the threshold, the fewer are verified
        return [
            replace(
                one,
                accepted=tuple(min(x, cut) for x in one.accepted),
                verified=(cut,) * one.rounds,
                reached=(cut,) * one.rounds,
            )
            for one in made
        ]


def bench(tmp_path: Path, lacking: str = "", method: Any = "forced") -> Workbench:
    lab: Any = _Lab(tmp_path, lacking)
    protocols = [Protocol(temperature, method=method) for temperature in (1.0, 0.0)]
    return Workbench(lab, ASKED, [], protocols, 0, (1, 4), Timing())


def made(name: str, tmp_path: Path, **how: Any) -> tuple[Report, str]:
    study = STUDIES[name]
    report = KINDS[study.kind](study, bench(tmp_path, **how), tmp_path / name)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in report.pictures) and report.pictures
    return report, text(study, report, [], tmp_path / name)


def test_drafters_are_compared_with_their_gains(tmp_path: Path) -> None:
    report, markdown = made("main", tmp_path)
    gains = report.values["gains"]["T1"]
    lengths = {
        name: row["all"]["accepted_length"]["value"] for name, row in report.values["scores"]["T1"]["by_domain"].items()
    }
    assert (
        gains["dflash"]["all"] == pytest.approx(lengths["dspark"] / lengths["dflash"] - 1)
        and gains["ngram"]["all"] > 0.5
    )
    here = {headline.figure: headline.here for headline in report.headlines}
    assert here["gain of DSpark over dflash, all benchmarks"] == f"{100 * gains['dflash']['all']:.1f} %"
    assert lengths["plain"] == 1 and "| plain" in markdown and "dspark - eagle3" in markdown
    assert set(report.values["drafters"]) == {"mtp", "eagle3", "dflash", "dspark"} and "seconds" not in str(
        report.values
    )
    assert report.values["drafters"]["mtp"]["parameters"] == 12 and " 2.50 |" in markdown
    assert TIMINGS not in markdown and [path.parent.name for path in report.pictures] == ["T1", "T1", "T0", "T0"]


def test_gains_are_told_over_the_drafters_that_are_there(tmp_path: Path) -> None:
    report, markdown = made("main", tmp_path, lacking="eagle3")
    assert set(report.values["gains"]["T1"]) == {"dflash", "mtp", "ngram"} and "- eagle3: eagle3: too large" in markdown
    assert [headline.figure for headline in report.headlines] == ["gain of DSpark over dflash, all benchmarks"]
    report, markdown = made("main", tmp_path, lacking="dspark")
    assert "gains" not in report.values and not report.headlines and "Gains" not in markdown


def test_hidden_states_of_most_layers_are_made_first(tmp_path: Path) -> None:
    lab = bench(tmp_path)
    analyses.systems_of(lab, STUDIES["main"].variants)
    order = lab.lab.order  # type: ignore[attr-defined]
    assert order[:4] == ["eagle3", "dspark", "dspark", "mtp"]


def test_decoding_shows_its_speed_among_the_timings(tmp_path: Path) -> None:
    report, markdown = made("main", tmp_path, method="decode")
    before, after = markdown.split(TIMINGS)
    assert "speed-up" in after and "speed-up" not in before
    assert report.timing_values["T1"]["dspark"]["all"]["speedup"]["value"] == pytest.approx(2.0, abs=0.1)


def test_only_decoding_has_a_speed(tmp_path: Path) -> None:
    for method in ("forced", "decode"):
        asked = bench(tmp_path, method=method)
        scores = asked.scores({PLAIN: System(PLAIN, None)}, asked.top, PLAIN)
        assert (scores.by_domain[PLAIN]["all"].tokens_per_second is None) == (method == "forced")


def test_variants_stand_along_their_axis(tmp_path: Path) -> None:
    report, markdown = made("depth", tmp_path)
    assert [path.name for path in report.pictures] == ["accepted-T1.png", "accepted-T0.png"]
    assert report.headlines[0].paper == "above 0" and "dspark, 2 layers - dflash, 5 layers" in markdown
    assert markdown.count("| dspark, 3 layers |") == 2 * 2 + 1  # two tables at each temperature, and the drafters


def test_what_a_target_does_not_have_is_left_out_and_said(tmp_path: Path) -> None:
    report, markdown = made("head", tmp_path, lacking="gated,none")
    assert report.left_out == {"gated": "gated: too large", "none": "none: too large"}
    assert "- gated: gated: too large" in markdown and "| gated" not in markdown and "rnn - vanilla" in markdown
    with pytest.raises(ValueError, match="study head: vanilla: too large"):
        made("head", tmp_path, lacking="vanilla,gated,rnn,none")


def test_positions_are_shown_at_each_temperature(tmp_path: Path) -> None:
    report, markdown = made("positions", tmp_path)
    assert [path.name for path in report.pictures] == ["position.png"] * 2
    row = report.values["scores"]["T1"]["by_domain"]["dspark"]["all"]["positions"]
    assert len(row) == 4 and row[0]["value"] == pytest.approx(0.7, abs=0.1)
    assert "k = 4" in markdown and "| chat   | dflash" in markdown


def test_a_higher_threshold_verifies_less_and_accepts_more_of_it(tmp_path: Path) -> None:
    report, markdown = made("threshold", tmp_path)
    rows = report.values["scores"]["by_domain"]
    assert list(rows) == [f"{at:g}" for at in analyses.THRESHOLDS] and analyses.THRESHOLDS[0] == 0
    rates = [row["chat"]["acceptance_rate"]["value"] for row in rows.values()]
    assert rates[0] < rates[-1] and rows["0.9"]["chat"]["verified"]["value"] == 1
    here = {headline.figure.split(", ")[1]: headline for headline in report.headlines}
    assert set(here) == {"math", "chat"} and here["chat"].paper == "45.7 to 95.7 %"
    assert here["chat"].here == f"{100 * rates[0]:.1f} % to {100 * rates[-1]:.1f} %"
    assert "Temperature 1" in markdown


def test_coverage_and_drafting_are_told_by_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(self: Workbench, name: str, key: Any, measure: Any) -> Any:
        assert name == "drafts-vocab-1" and key["slots"] == 1
        return {n + more: [at + 0.010] * 3 for i, n in enumerate(("2048", "8192", "16384", "full"))
                for more, at in (("", 0.001 * (i + 1)), (" plain", 0.0))}  # fmt: skip

    monkeypatch.setattr(Workbench, "timed", timed)
    report, markdown = made("vocab", tmp_path)
    coverage = {name: shares[0] for name, shares in report.values["coverage"].items()}
    assert coverage["2048"] < coverage["8192"] < coverage["16384"] < coverage["full"] == 1
    answers = random_outcomes({"plain": 0}, ASKED)
    tokens = np.concatenate([one.token_ids for one in answers])
    assert coverage["2048"] == pytest.approx(np.mean(tokens < 2))
    assert report.timing_values["draft_seconds"] == pytest.approx(
        {"2048": 1e-3, "8192": 2e-3, "16384": 3e-3, "full": 4e-3}
    )
    assert "4.00" in markdown.split(TIMINGS)[1] and "40.0 %" in markdown.split(TIMINGS)[1]


def test_what_hidden_states_cost_is_told(tmp_path: Path) -> None:
    report, markdown = made("cache", tmp_path)
    before, after = markdown.split(TIMINGS)
    assert "| bfloat16 | " in before and "0.250" in after and "0.250" not in before
    assert report.timing_values["seconds_per_update"] == {"bfloat16": 0.25, "int8": 0.25, "online": 0.25}


def test_rounds_with_heads_are_set_against_those_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(self: Workbench, name: str, key: Any, measure: Any) -> Any:
        slots = key["slots"]
        assert name == f"heads-{slots}" and set(key["shapes"]) == {"vanilla", "gated", "rnn", "none"}
        shares = {"vanilla": 1.01, "gated": 1.02, "rnn": 1.03, "none": 1.0}
        return {head: [slots * share * x for x in (1.0, 2.0, 3.0)] for head, share in shares.items()}

    monkeypatch.setattr(Workbench, "timed", timed)
    monkeypatch.setattr(_Lab, "shape", lambda self, changes: dict(changes), raising=False)
    monkeypatch.setattr(Workbench, "context", 512)
    report, markdown = made("latency", tmp_path)
    assert [headline.here for headline in report.headlines] == ["1.00 % (4)", "2.00 % (4)", "3.00 % (4)"]
    assert report.timing_values["4"]["none"] == 8 and "1.00 %" not in markdown.split(TIMINGS)[0]


def test_timings_are_kept_for_the_machine_and_the_settings(tmp_path: Path, golden: Path) -> None:
    from dspark_jax.training.prepare import read_target_config

    lab: Any = _Lab(tmp_path)
    lab.target_config = read_target_config(golden / "targets/qwen3_untied")
    one = Workbench(lab, ASKED, [], [Protocol()], 0, (1,), Timing(repeats=2))
    calls: list[int] = []

    def measure() -> dict[str, list[float]]:
        calls.append(1)
        return {"x": [1.0 * len(calls)]}

    assert one.timed("a", {"n": 1}, measure) == one.timed("a", {"n": 1}, measure) == {"x": [1.0]}
    assert replace(one, timing=Timing(repeats=3)).timed("a", {"n": 1}, measure) == {"x": [2.0]}
    assert one.context == 512 and (tmp_path / "timings" / "a.json").exists()


def test_every_measure_of_a_study_is_known() -> None:
    study: Study
    for study in STUDIES.values():
        assert set(study.measures) <= set(analyses._MEASURES)
