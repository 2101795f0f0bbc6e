"""`dspark calibrate` from prompts to temperatures in a drafter's folder, and everything it refuses in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibration import command, report
from dspark_jax.calibration.collect import Records, load_records, save_records
from dspark_jax.calibration.metrics import position_metrics
from dspark_jax.calibration.sts import scaled
from dspark_jax.checkpoints import deepspec, specforge
from dspark_jax.checkpoints.drafters import read_drafter
from dspark_jax.checkpoints.load import embedded_drafter_path
from tests.checkpoints.tiny_drafters import block
from tests.serving.conftest import copy_model, write_target

FLAGS = ["--dtype", "float32", "--max-tokens", "24", "--batch-size", "4"]
TEXTS = [f"{a} {b} {'x' * i}" for i, (a, b) in enumerate([("tulips", "red"), ("a b", "c"), ("the", "answer")] * 4)]


@pytest.fixture(scope="module")
def target(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden Qwen3 target with a tokenizer."""
    return write_target(golden, tmp_path_factory.mktemp("target"))


@pytest.fixture
def drafter(golden: Path, tmp_path: Path) -> Path:
    """A copy of that target's drafter, to be written to."""
    return copy_model(golden / "inference/dspark_qwen3_vanilla", tmp_path / "drafter")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of six prompts."""
    folder = tmp_path_factory.mktemp("prompts")
    for number, name in enumerate(("first", "second")):
        lines = [json.dumps({"prompt": text}) + "\n" for text in TEXTS[6 * number : 6 * number + 6]]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return [str(folder / "first.jsonl"), str(folder / "second.jsonl")]


@pytest.fixture(scope="module")
def records(golden: Path, target: Path, prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rounds of all prompts, from a run of the command itself."""
    file = tmp_path_factory.mktemp("records") / "rounds.npz"
    places = ["--target", str(target), "--drafter", str(golden / "inference/dspark_qwen3_vanilla")]
    assert command.main([*places, *FLAGS, "--prompts", *prompts, "--records-out", str(file)]) == 0
    return file


def test_prompts_become_rounds_of_both_parts(records: Path) -> None:
    """Odd lines to fit on, even ones held out, in the domains of their files."""
    found = load_records(records)
    assert found.domains == ("first", "second") and len(found.ids) == 12
    for name, held_out in zip(found.ids, found.held_out, strict=True):
        assert held_out == (int(name.rsplit(":", 1)[1]) % 2 == 0)
    assert (found.prompt_tokens[:-1] <= found.prompt_tokens[1:]).all()  # shortest first
    assert (found.tokens <= 24).all() and (found.verified <= found.block_size).all()
    assert found.about["max_tokens"] == 24 and found.about["temperature"] == 1.0


Few = Callable[..., Records]


@pytest.fixture
def few(golden: Path, target: Path, prompts: list[str], tmp_path: Path) -> Few:
    """Rounds of the first prompts of each file and part, with options; too few of them to fit, which comes later."""
    places = ["--target", str(target), "--drafter", str(golden / "inference/dspark_qwen3_vanilla")]

    def run(*flags: str) -> Records:
        file = tmp_path / "rounds.npz"
        file.unlink(missing_ok=True)
        given = [*places, *FLAGS, "--prompts", *prompts, "--records-out", str(file), "--limit", "1", *flags]
        command.main(given)
        return load_records(file)

    return run


OPTIONS: dict[str, tuple[list[str], Callable[[Records], Any], Any]] = {  # option: words, what is looked at, the value
    "fit_lines": (["--fit-lines", "even", "--test-lines", "none"], lambda r: {i[-1] for i in r.ids}, {"2"}),
    "test_lines": (["--test-lines", "none"], lambda r: r.held_out.any(), False),
    "limit": (["--limit", "2"], lambda r: len(r.ids), 8),
    "max_tokens": (["--max-tokens", "8"], lambda r: r.tokens.max() <= 8, True),
    "batch_size": (["--batch-size", "2"], lambda r: len(r.ids), 4),
    "seed": (["--seed", "1"], lambda r: r.about["seed"], 1),
    "temperature": (["--temperature", "0"], lambda r: r.about["temperature"], 0),
    "dtype": (["--dtype", "bfloat16"], lambda r: r.about["dtype"], "bfloat16"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_the_rounds(name: str, few: Few, monkeypatch) -> None:
    words, look, wanted = OPTIONS[name]
    sizes, collect = [], command.collect
    monkeypatch.setattr(command, "collect", lambda *a, **how: (sizes.append(how["batch_size"]), collect(*a, **how))[1])
    base, other = few(), few(*words)
    assert look(other) == wanted and (name == "batch_size" or look(base) != wanted)
    assert (sizes == [4, 2]) == (name == "batch_size")
    rows, others = (np.sort(found.confidence, axis=0) for found in (base, other))
    same = rows.shape == others.shape and np.allclose(rows, others, atol=1e-4)
    assert same == (name == "batch_size")


def test_long_prompts_are_left_out(few: Few) -> None:
    longest = int(few("--limit", "0").prompt_tokens.max())
    assert few("--limit", "0", "--max-prompt-tokens", str(longest - 1)).prompt_tokens.max() < longest


def test_bins_are_those_of_the_errors(golden: Path, records: Path, tmp_path: Path) -> None:
    flags = ["--drafter", str(golden / "inference/dspark_qwen3_vanilla"), "--records-in", str(records)]
    errors = []
    for bins in ("2", "10"):
        assert command.main([*flags, "--bins", bins, "--json", str(tmp_path / "out.json")]) == 0
        done = json.loads((tmp_path / "out.json").read_text())["splits"]["held_out"]["mean_ece"]["cumulative"]
        errors.append(done["before"])
    assert errors[0] < errors[1]  # halves of the interval hide what its tenths show


def test_a_run_from_records_to_a_drafter(drafter: Path, records: Path, tmp_path: Path, capsys) -> None:
    places = ["--json", str(tmp_path / "out.json"), "--plots", str(tmp_path / "plots"), "--write"]
    assert command.main(["--drafter", str(drafter), "--records-in", str(records), *places]) == 0
    done = json.loads((tmp_path / "out.json").read_text())
    config = read_drafter(drafter, jnp.float32)[0]
    assert list(config.confidence_temperatures) == done["temperatures"] and len(done["temperatures"]) == 7
    assert done["written"] == [str(drafter)] and done["fitted"][0]
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == ["fit.png", "held_out.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (tmp_path / "plots").iterdir())
    found = load_records(records).split(held_out=True)
    after = position_metrics(scaled(found.confidence, done["temperatures"]), found.accepted, found.verified)
    held = done["splits"]["held_out"]
    assert held["rounds"] == len(found.accepted) and held["requests"] == 6
    assert [m["ece"] for m in held["metrics"]["after"]["cumulative"]] == pytest.approx([m.ece for m in after])
    assert held["mean_ece"]["cumulative"]["after"] == pytest.approx(np.mean([m.ece for m in after]))
    assert done["biases"] == [] == list(config.confidence_biases) and list(held["metrics"]) == ["before", "after"]
    text = capsys.readouterr().out
    assert "held out: 6 requests" in text and "mean ECE over positions" in text and "\ntemperatures " in text
    assert "biases" not in text


def test_biases_are_fitted_beside_temperatures(drafter: Path, records: Path, tmp_path: Path, capsys) -> None:
    """Reported are both fits, written is the one with biases; a run without the flag takes them away again."""
    flags = ["--drafter", str(drafter), "--records-in", str(records), "--write", "--json", str(tmp_path / "out.json")]
    assert command.main([*flags, "--biases", "--plots", str(tmp_path / "plots")]) == 0
    done = json.loads((tmp_path / "out.json").read_text())
    config = read_drafter(drafter, jnp.float32)[0]
    assert list(config.confidence_temperatures) == done["temperatures"]
    assert list(config.confidence_biases) == done["biases"] and len(done["biases"]) == 7 and done["biases"][0] != 0
    found = load_records(records).split(held_out=True)
    held = done["splits"]["held_out"]["metrics"]
    for stage, values in (
        ("temperatures", (done["temperatures_alone"], ())),
        ("after", (done["temperatures"], done["biases"])),
    ):
        wanted = position_metrics(scaled(found.confidence, *values), found.accepted, found.verified)
        assert [m["brier"] for m in held[stage]["cumulative"]] == pytest.approx([m.brier for m in wanted])
    assert held["before"]["cumulative"][0]["auroc"] == pytest.approx(held["after"]["cumulative"][0]["auroc"])
    assert (tmp_path / "plots/held_out.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "cumulative, before > temperatures > after" in text and "\nbiases " in text
    assert command.main(flags) == 0
    done = json.loads((tmp_path / "out.json").read_text())
    assert len(done["earlier_biases"]) == 7 and done["biases"] == []
    assert read_drafter(drafter, jnp.float32)[0].confidence_biases == ()


def test_records_in_two_files_give_what_one_gives(golden: Path, records: Path, tmp_path: Path) -> None:
    whole = load_records(records)
    drafter = ["--drafter", str(golden / "inference/dspark_qwen3_vanilla")]
    results = []
    for name, parts in (("one", [whole]), ("two", [_requests(whole, 0, 5), _requests(whole, 5, 12)])):
        files = [str(tmp_path / f"{name}{i}.npz") for i in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            save_records(file, part)
        json_file = tmp_path / f"{name}.json"
        assert command.main([*drafter, "--records-in", *files, "--json", str(json_file)]) == 0
        results.append(json.loads(json_file.read_text()))
    assert results[0]["temperatures"] == results[1]["temperatures"]
    assert results[0]["splits"] == results[1]["splits"]


def _requests(records, first: int, last: int):
    """The requests `first` to `last` of records, with their rounds."""
    part = records.rows((records.request >= first) & (records.request < last))
    fields = {name: getattr(records, name)[first:last] for name in ("domain", "held_out", "prompt_tokens", "tokens")}
    return type(part)(
        **{**vars(part), **fields, "ids": records.ids[first:last], "request": (part.request - first).astype(np.int32)}
    )


def test_an_output_folder_gets_a_copy(drafter: Path, records: Path, tmp_path: Path) -> None:
    before = (drafter / "config.json").read_bytes()
    copy = tmp_path / "copy"
    assert command.main(["--drafter", str(drafter), "--records-in", str(records), "--output", str(copy)]) == 0
    assert (drafter / "config.json").read_bytes() == before
    assert (copy / "model.safetensors").read_bytes() == (drafter / "model.safetensors").read_bytes()
    assert len(read_drafter(copy, jnp.float32)[0].confidence_temperatures) == 7


def test_a_drafter_of_another_format_becomes_one_of_ours(records: Path, tmp_path: Path) -> None:
    """SpecForge's format has no field for temperatures: the copy is a DeepSpec folder, bit for bit the same weights."""
    config, params = block()
    specforge.write_drafter(tmp_path / "theirs", config, params, storage_dtype="float32")
    rng = np.random.default_rng(0)
    found = load_records(records)
    rows = len(found.accepted)
    changed = {**vars(found), "confidence": rng.random((rows, 3), np.float32), "accepted": rng.integers(0, 4, rows)}
    changed |= {"verified": np.full(rows, 3), "about": {"block_size": 3, "fingerprint": command.fingerprint(params)}}
    save_records(tmp_path / "rounds.npz", type(found)(**changed))
    flags = ["--drafter", str(tmp_path / "theirs"), "--records-in", str(tmp_path / "rounds.npz")]
    assert command.main([*flags, "--output", str(tmp_path / "ours")]) == 0
    again, read = deepspec.read_drafter(tmp_path / "ours", jnp.float32)
    assert len(again.confidence_temperatures) == 3 and again.target_layer_ids == config.target_layer_ids
    np.testing.assert_array_equal(read["fc"], params["fc"])


def test_nothing_is_written_without_being_asked(drafter: Path, records: Path) -> None:
    before = sorted((p.name, p.read_bytes()) for p in drafter.iterdir())
    assert command.main(["--drafter", str(drafter), "--records-in", str(records)]) == 0
    assert sorted((p.name, p.read_bytes()) for p in drafter.iterdir()) == before


def test_what_cannot_be_measured_is_null() -> None:
    metrics = {stage: _empty() for stage in ("before", "after")}
    found = report.as_json(report.SplitReport("x", 1, 0, float("nan"), metrics, {}))
    assert found["accepted"] is None and found["metrics"]["before"]["cumulative"][0]["auroc"] is None
    json.dumps(found, allow_nan=False)


def _empty() -> dict:
    return {r: position_metrics(np.zeros((0, 2)), np.zeros(0), np.zeros(0), r) for r in report.READINGS}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --prompts FILE.jsonl ..., or the rounds"),
        (["--records-in", "{records}", "--prompts", "{prompts}"], "give --prompts FILE.jsonl ..., or the rounds"),
        (["--records-in", "/no/such.npz"], "records /no/such.npz: no such file"),
        (["--records-in", "{prompts}"], "no whole file of `dspark calibrate --records-out`"),
        (["--prompts", "/no/such.jsonl", "--target", "{target}"], "/no/such.jsonl: not found"),
        (["--prompts", "{prompts}", "--target", "/no/such/model"], "/no/such/model"),
        (
            ["--prompts", "{prompts}", "--target", "{target}", "--max-prompt-tokens", "3"],
            "no prompt of at most 3 tokens",
        ),
        (["--prompts", "{prompts}", "--fit-lines", "even"], "test_lines 'even': share prompts with fit_lines 'even'"),
        (["--prompts", "{prompts}", "--fit-lines", "all"], "test_lines 'even': share prompts with fit_lines 'all'"),
        (["--prompts", "{prompts}", "--temperature", "-1"], "temperature -1.0: must be finite and at least 0"),
        (["--prompts", "{prompts}", "--batch-size", "0"], "batch_size 0: must be at least 1"),
        (["--prompts", "{prompts}", "--json", "/no/such/folder/a.json"], "the folder /no/such/folder does not exist"),
        (["--records-in", "{records}", "--records-in-drafter", "no-head"], "without a confidence head"),
        (["--records-in", "{records}", "--records-in-drafter", "other"], "made with another drafter"),
        (["--records-in", "{records}", "--output", "{drafter}"], "is the drafter itself, --write changes it"),
        (["--records-in", "{records}", "--output", "{full}"], "holds notes, which is no part of a drafter"),
        (["--records-in", "{few}"], "rounds to fit on: too few, must be at least 50"),
        (["--records-in", "{records}", "{records}"], "is in the records twice"),
    ],
)
def test_wrong_input_is_told_in_one_line(
    golden: Path, target: Path, drafter: Path, prompts: list[str], records: Path, tmp_path: Path, flags, message, capsys
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").touch()
    whole = load_records(records)
    save_records(tmp_path / "few.npz", whole.rows(np.arange(len(whole.accepted)) < 20))
    named = drafter
    if "--records-in-drafter" in flags:
        kind = {"no-head": "inference/dflash_qwen3", "other": "inference/dspark_qwen3_rnn"}
        named, flags = golden / kind[flags[-1]], flags[:-2]
    places = {"records": records, "prompts": prompts[0], "target": target, "drafter": drafter}
    places |= {"full": tmp_path / "full", "few": tmp_path / "few.npz"}
    before = (drafter / "config.json").read_bytes()
    assert command.main(["--drafter", str(named), *(flag.format(**places) for flag in flags)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dspark calibrate: error: ") and message in last
    assert (drafter / "config.json").read_bytes() == before


def test_the_package_is_never_written_to(records: Path, capsys) -> None:
    for named in ([], ["--drafter", embedded_drafter_path()]):
        before = (Path(embedded_drafter_path()) / "config.json").read_bytes()
        assert command.main(["--records-in", str(records), "--write", *named]) == 2
        assert "give --output FOLDER for a copy" in capsys.readouterr().err.splitlines()[-1]
        assert (Path(embedded_drafter_path()) / "config.json").read_bytes() == before


def test_write_refuses_a_format_without_the_field(records: Path, tmp_path: Path, capsys) -> None:
    config, params = block()
    specforge.write_drafter(tmp_path / "theirs", config, params)
    flags = ["--drafter", str(tmp_path / "theirs"), "--records-in", str(records), "--write"]
    assert command.main(flags) == 2
    assert "another project's format" in capsys.readouterr().err.splitlines()[-1]
