"""`dspark ablate`: what every option changes, what is refused in one line, and a study from files to a report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from dspark_jax import cli
from dspark_jax.evaluation import ablate_command as command
from dspark_jax.evaluation import studies, study_kinds
from dspark_jax.evaluation.ablate_command import AblateSettings
from dspark_jax.evaluation.study_report import TIMINGS, Report
from dspark_jax.training import trainer
from tests.evaluation.tiny_study import PAIR, TURNS, base_settings, words, write_config, write_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("study"))


# --- options ---


def view(study: Any, bench: Any, folder: Path) -> Report:
    """In place of an analysis: what it would have worked with."""
    asked, others = (
        [f"{one.name} {one.domain} {[c.id for c in one.conversations]}" for one in benchmarks]
        for benchmarks in (bench.benchmarks, bench.fit_benchmarks)
    )
    values = {
        "base": repr(bench.lab.base),
        "variants": [one.name for one in study.variants],
        "asked": asked,
        "others": others,
        "slots": list(bench.slots),
    }
    values |= {"protocols": [asdict(one) for one in bench.protocols], "timing": asdict(bench.timing)}
    return Report(values=values | {"seed": bench.seed, "place": str(folder)}, sections=["seen"])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in study_kinds.KINDS:
        monkeypatch.setitem(study_kinds.KINDS, kind, view)


def run(folder: Path, **options: Any) -> dict[str, Any]:
    """What studies would have worked with, by study."""
    plain = {"config": folder / "config.py", "prompts": (str(folder / "prompts"),), "output": folder / "seen"}
    settings = AblateSettings(**(plain | {"study": ("main", "calibration")} | options))
    return command.ablate(settings)["studies"]


OPTIONS: dict[str, Any] = {
    "study": ("main", "load"), "variants": ("none*",), "lines": "odd", "limit": 1, "domains": ("gsm8k=code",),
    "max_prompt_tokens": 30, "temperatures": (0.5,), "max_tokens": 5, "batch_size": 3, "seed": 7, "steps": 3,
    "method": "decode", "slots": (1, 3), "repeats": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(AblateSettings)])
def test_every_option_changes_something(name: str, folder: Path, tmp_path: Path, seen: None, capsys: Any) -> None:
    other: dict[str, Any] = {name: OPTIONS.get(name)}
    if name == "config":
        other = {name: write_config(tmp_path / "other.py", base_settings(folder, lr=0.5))}
    elif name == "prompts":
        other = {name: (str(folder / "prompts" / "gsm8k.jsonl"),)}
    elif name == "output":
        other = {name: tmp_path / "elsewhere"}
    elif name == "json":
        other = {name: str(tmp_path / "all.json")}
        given = words(folder, "--study", "main", "--json", other[name])
        assert command.main(given) == 0 and "main" in json.loads(Path(other[name]).read_text())["studies"]
        return
    plain = {"study": ("block",)} if name == "variants" else {}
    assert run(folder, **plain, **other) != run(folder, **plain)
    if name == "output":
        assert (tmp_path / "elsewhere" / "main" / "report.md").exists()


def test_a_run_says_how_it_was_made(folder: Path, seen: None, capsys: Any) -> None:
    given = words(folder, "--study", "main", "--limit", "1", "--max-prompt-tokens", "40", "--seed", "7", "--steps", "3")
    assert command.main(given) == 0
    said = capsys.readouterr().out
    for part in (
        "3 updates of 4 sequences, 12 samples, seed 7",
        "of at most 40 tokens, even lines: GSM8K 1, MT-Bench 1",
    ):
        assert part in said
    for part in ("temperatures 0, 1", "at most 9 tokens", "method forced", "batches of 4"):
        assert part in said
    for part in ("target target", "answers in float32", "training in float32"):
        assert part in said


def test_confidences_are_calibrated_on_the_other_lines_where_a_study_needs_them(folder: Path, seen: None) -> None:
    found = run(folder)["calibration"]
    assert found["asked"][0] == "gsm8k math ['2', '4']" and found["others"][0] == "gsm8k math ['1', '3']"
    assert run(folder, study=("main", "depth"))["main"]["others"] == []


# --- refusals ---


def refused(given: list[str], capsys: Any, message: str) -> None:
    assert command.main(given) == 2
    *logged, last = capsys.readouterr().err.splitlines()
    assert last.startswith("dspark ablate: error: ") and message in last, last
    assert not any("Traceback" in line for line in logged)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--study", "head", "--variants", "rnn2"],
            "variants rnn2: match none of study head, which has vanilla; gated",
        ),
        (["--study", "mian"], "study 'mian': unknown, must be of main, depth"),
        (["--config", "nowhere.py"], "config nowhere.py: no such file"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--prompts", "gsm9k"], "unknown benchmark"),
        (["--limit", "-1"], "limit -1: must be at least 0"),
        (["--max-prompt-tokens", "-1"], "max_prompt_tokens -1: must be at least 0"),
        (["--max-prompt-tokens", "1"], "holds no prompts"),
        (["--batch-size", "0"], "batch_size 0: must be at least 1"),
        (["--steps", "-5"], "steps -5: must be at least 0"),
        (["--repeats", "0"], "repeats 0: must be at least 1"),
        (["--max-tokens", "0"], "max_tokens 0"),
        (["--seed", "-1"], "seed -1"),
        (["--temperatures", "-1"], "temperature -1"),
        (["--temperatures", "1", "1"], "temperatures [1.0, 1.0]: must be at least one, each once"),
        (["--slots", "4", "1"], "slots [4, 1]: must be numbers of at least 1, ascending"),
        (["--slots", "0"], "slots [0]"),
        (["--domains", "gsm9k=math"], "gsm9k"),
        (["--lines", "all", "--study", "calibration"], "lines 'all': study calibration calibrates on the lines that"),
        (["--json", "nowhere/out.json"], "json nowhere/out.json"),
    ],
)
def test_bad_options_are_refused_in_one_line(folder: Path, more: list[str], message: str, capsys: Any) -> None:
    refused(words(folder, "--study", "main", *more), capsys, message)


def test_prompts_must_be_named(folder: Path, capsys: Any) -> None:
    refused(["--config", str(folder / "config.py"), "--study", "main"], capsys, "give --prompts")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("config = 3", "must define `config = TrainSettings(...)`, found int"),
        ("config = (", "SyntaxError"),
        ("import nothing_like_this", "ModuleNotFoundError"),
        ("from dspark_jax.training.settings import TrainSettings\nconfig = TrainSettings(lr=0)", "lr 0"),
        ("from dspark_jax.training.settings import TrainSettings\nconfig = TrainSettings(kind=1)", "TypeError"),
    ],
)
def test_a_wrong_config_is_told_in_one_line(
    folder: Path, tmp_path: Path, source: str, message: str, capsys: Any
) -> None:
    (tmp_path / "wrong.py").write_text(source + "\n")
    refused(words(folder, "--study", "main", "--config", str(tmp_path / "wrong.py")), capsys, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"records": ("gone.jsonl",)}, "gone.jsonl"),
        ({"target": "gone"}, "gone"),
        ({"initial": "gone"}, "initial 'gone'"),
        ({"max_length": 8}, "none is left to train on"),
    ],
)
def test_a_config_without_its_files_is_told_in_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str, capsys: Any
) -> None:
    file = write_config(tmp_path / "other.py", base_settings(folder, **changes))
    refused(words(folder, "--study", "main", "--config", str(file)), capsys, message)


def test_an_output_that_is_a_file_is_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    refused(words(folder, "--study", "main", "--output", str(tmp_path / "file")), capsys, "is a file, must be a folder")


def test_it_is_a_command_of_the_console_script(capsys: Any) -> None:
    assert cli.COMMANDS["ablate"][0] == command.__name__
    with pytest.raises(SystemExit) as ended:
        cli.main(["ablate", "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "--temperatures" in said and "in tokens" in said


# --- a study ---


@pytest.fixture(scope="module")
def done(folder: Path) -> Iterator[tuple[Path, str]]:
    """The folder of a study of two drafters, and its report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(studies.STUDIES, "pair", PAIR)
        assert command.main(words(folder, "--study", "pair")) == 0
        yield folder, (folder / "out" / "pair" / "report.md").read_text()


def test_a_study_trains_answers_and_reports(done: tuple[Path, str]) -> None:
    folder, report = done
    drafters = sorted(path.name for path in (folder / "out" / "drafters").iterdir())
    assert len(drafters) == 2 and all(f"| {name} |" in report for name in drafters)
    places = sorted(path.parent.name for path in (folder / "out" / "outcomes").rglob("outcomes.jsonl"))
    assert places == sorted([*drafters, "plain"] * 2)
    for part in ("### Temperature 0", "### Temperature 1", "none - vanilla", "(T1/accepted.png)", "GSM8K", "MT-Bench"):
        assert part in report
    assert TIMINGS not in report
    values = json.loads((folder / "out" / "pair" / "report.json").read_text())
    assert values["settings"]["max_tokens"] == 9 and set(values["scores"]) == {"T0", "T1"}
    assert set(values["drafters"]) == {"vanilla", "none"} and values["drafters"]["none"]["updates"] == 4
    row = values["scores"]["T1"]["by_domain"]["none"]["all"]
    assert row["answers"] == sum(len(turns) for said in TURNS.values() for turns in said[1::2])


def test_made_again_it_is_the_same_report(done: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, report = done

    def never(*arguments: Any, **more: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(trainer, "train", never)
    monkeypatch.setattr("dspark_jax.evaluation.study_run.Answerer", never)
    assert command.main(words(folder, "--study", "pair")) == 0
    assert (folder / "out" / "pair" / "report.md").read_text() == report


def test_decoding_gives_the_rounds_that_were_found_along_the_answers_and_their_speed(
    done: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0; the drafters are those that are there."""
    folder, _ = done
    forced = json.loads((folder / "out" / "pair" / "report.json").read_text())["scores"]["T0"]["by_domain"]
    monkeypatch.setattr(trainer, "train", None)
    assert command.main(words(folder, "--study", "pair", "--method", "decode", "--temperatures", "0")) == 0
    report = (folder / "out" / "pair" / "report.md").read_text()
    assert "tokens/s" in report.split(TIMINGS)[1] and "tokens/s" not in report.split(TIMINGS)[0]
    decoded = json.loads((folder / "out" / "pair" / "report.json").read_text())
    assert decoded["timings"]["T0"]["none"]["all"]["tokens_per_second"] > 0
    assert decoded["scores"]["T0"]["by_domain"] == forced


def test_drafters_that_were_put_in_their_place_are_refused(
    done: tuple[Path, str], golden: Path, tmp_path: Path, capsys: Any
) -> None:
    """One of another target, and outcomes of the drafter before."""
    import shutil

    from tests.serving.conftest import copy_model

    folder, _ = done
    output = tmp_path / "out"
    shutil.copytree(folder / "out", output)
    for place in (output / "drafters").iterdir():
        shutil.rmtree(place / "drafter")
        copy_model(golden / "inference/dspark_gemma4_vanilla", place / "drafter")
    given = words(folder, "--study", "pair", "--output", str(output))
    refused(given, capsys, "drafter and target do not belong together")
    for place in (output / "drafters").iterdir():
        shutil.rmtree(place / "drafter")
        copy_model(golden / "inference/dspark_qwen3_vanilla", place / "drafter")
    refused(given, capsys, "its outcomes were made otherwise: system.drafter was")
