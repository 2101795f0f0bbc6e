"""`dspark aot` from end to end: on virtual CPU devices always, for a TPU topology where libtpu is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax  # sets TPU_LIBRARY_PATH where libtpu is installed
import pytest

from dspark_jax.cli import main
from dspark_jax.profiling import aot_plan
from dspark_jax.profiling.aot_report import Memory, ProgramReport, Times
from dspark_jax.sharding import MeshShape, make_mesh

TARGET = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
CONFIG = """
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    target="nobody/tiny",
    states="online",
    drafter=DrafterSettings(block_size=1, num_layers=1, target_layer_ids=(0,), mask_token_id=255, markov_rank=8),
    batch_size=8,
    num_anchors=4,
    max_length=32,
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny training config, and its target's config.json."""
    path = tmp_path_factory.mktemp("aot")
    (path / "config.json").write_text(json.dumps(TARGET))
    (path / "tiny.py").write_text(CONFIG)
    (path / "known.py").write_text(CONFIG.replace("nobody/tiny", str(path)))
    return path


def words(folder: Path, *more: str) -> list[str]:
    return ["aot", "--config", f"{folder}/tiny.py", "--target-config", f"{folder}/config.json", *more]


def check_report(values: dict[str, Any], devices: int) -> None:
    """What holds of every report that fits: the programs, and numbers that go together."""
    names = [program["name"] for program in values["programs"]]
    rows = 8 * devices
    assert names == ["train", f"decode, {rows} rows", f"decode, {2 * rows} rows"]
    assert values["fits"] is True and values["topology"]["devices"] == devices
    for program in values["programs"]:
        memory = program["memory"]
        parts = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"] + memory["code"]
        assert program["needed"] == memory["total"] == parts
        assert memory["aliased"] > 0, "the state is not donated"
        assert program["cost"]["flops"] > 0 and program["cost"]["nbytes"] > 0 and program["times"]["compile"] > 0
        assert program["largest"]
    train, decode = values["programs"][0], values["programs"][1:]
    assert train["cost"]["collectives"], "devices that train together must exchange gradients"
    assert decode[0]["cost"]["flops"] < decode[1]["cost"]["flops"]


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    """The report on four virtual CPU devices; without a mesh, copies of everything do. Its text is under `printed`."""
    file, printed = folder / "report.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(words(folder, "--topology", "cpu:4", "--context", "32", "--json", str(file))) == 0
    return json.loads(file.read_text()) | {"printed": printed.getvalue()}


def test_virtual_cpu_devices(whole: dict[str, Any]) -> None:
    """Both kinds of programs, the table on stdout and the same in JSON."""
    check_report(whole, 4)
    assert all(program["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1} for program in whole["programs"])
    assert whole["programs"][0]["micro_batches"] == 2, "one sequence on each device at a time"
    for part in ("4 CPU devices", "decode, 64 rows", "arguments, GiB"):
        assert part in whole["printed"]


# --- options that change what is compiled ---


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would have been compiled, in place of doing it: the train and the decode job, and reports by name."""
    seen: dict[str, Any] = {"reports": {}}

    def keep(kind: Any) -> Any:
        def make(*args: Any) -> Any:
            seen[kind.__name__] = kind(*args)
            return seen[kind.__name__]

        return make

    def report(name: str, lower: Any, topology: Any, mesh: Any, micro_batches: int = 1, hbm: Any = None) -> Any:
        made = ProgramReport(name, mesh, micro_batches, hbm, 1, Times(0, 0), Memory(1, 1, 0, 1, 1, 1))
        seen["reports"][name] = made
        return made

    for kind in (aot_plan.TrainJob, aot_plan.DecodeJob):
        monkeypatch.setattr(aot_plan, kind.__name__, keep(kind))
    monkeypatch.setattr(aot_plan, "compile_program", report)
    return seen


OPTIONS: dict[str, tuple[list[str], Any, Any]] = {  # option: words, what is looked at, and what it must be
    "fsdp": (["--mesh.fsdp", "2"], lambda j: j["reports"]["train"].mesh["fsdp"], 2),
    "tensor": (["--mesh.tensor", "2"], lambda j: j["reports"]["decode, 32 rows"].mesh["tensor"], 2),
    "micro_batches": (["--micro-batches", "1"], lambda j: j["reports"]["train"].micro_batches, 1),
    "what": (["--what", "train"], lambda j: list(j["reports"]), ["train"]),
    "batch_size": (["--batch-size", "16"], lambda j: batch_of(j).shape[:2], (1, 16)),
    "max_length": (["--max-length", "64"], lambda j: batch_of(j).shape[2], 64),
    "num_anchors": (["--num-anchors", "2"], lambda j: j["TrainJob"].settings.num_anchors, 2),
    "remat": (["--remat"], lambda j: "train, remat" in j["reports"], True),
    "regather": (["--regather"], lambda j: j["TrainJob"].settings.regather, True),
    "requests": (["--requests", "16"], lambda j: j["DecodeJob"].buckets, (16, 32)),
    "context": (["--context", "64"], lambda j: j["DecodeJob"].context, 64),
    "sampling": (["--sampling", "filtered"], lambda j: j["DecodeJob"].mode, "filtered"),
}


def batch_of(jobs: dict[str, Any]) -> Any:
    """The tokens that the train step would get on one device, in one pass."""
    return jobs["TrainJob"].arguments(make_mesh(MeshShape(), jax.devices()[:1]), 1)[2].input_ids


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_what_is_compiled(name: str, folder: Path, jobs: dict[str, Any]) -> None:
    given, look, wanted = OPTIONS[name]
    on = words(folder, "--topology", "cpu:4")
    assert main(on) == 0 and look(jobs) != wanted
    jobs["reports"].clear()
    assert main([*on, *given]) == 0 and look(jobs) == wanted


# --- what does not fit ---


def test_a_mesh_that_does_not_fit(
    folder: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Refused with the sizes, exit code 1, and with a mesh that fits: weights cut in two."""
    file, needed = tmp_path / "report.json", whole["programs"][-1]["needed"]
    limit = str((needed - 1) / 2**30)
    given = ("--what", "decode", "--context", "32", "--mesh.data", "4", "--hbm", limit, "--json", str(file))
    assert main(words(folder, "--topology", "cpu:4", *given)) == 1
    printed, values = capsys.readouterr().out, json.loads(file.read_text())
    assert "decode, 64 rows: does not fit: needs" in printed and "temporaries" in printed
    assert "largest arrays:" in printed
    assert "decode: fits with --mesh.data 2 --mesh.fsdp 1 --mesh.tensor 2" in printed
    assert values["fits"] is False and [one["needed"] for one in values["programs"]] == [needed]
    assert values["suggestions"]["decode"]["mesh"] == {"data": 2, "fsdp": 1, "tensor": 2}


def test_arguments_that_do_not_fit(folder: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Then the compiler is not asked; nor for a suggestion, where none is wanted."""
    limit = str((whole["programs"][0]["memory"]["arguments"] - 100) / 2**30)
    given = ("--what", "train", "--mesh.data", "4", "--hbm", limit, "--no-suggest")
    assert main(words(folder, "--topology", "cpu:4", *given)) == 1
    printed = capsys.readouterr().out
    assert "train: does not fit: needs" in printed and "not compiled" in printed and "fits with" not in printed


def test_nothing_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither compiled nor suggested where not even the arguments fit on any mesh."""
    assert main(words(folder, "--topology", "cpu:4", "--what", "decode", "--hbm", "0.00001")) == 1
    printed = capsys.readouterr().out
    assert "decode: does not fit: needs" in printed and "not compiled" in printed
    assert "no mesh of these 4 was found that fits" in printed


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--topology", "v9z:2x4"], "topology 'v9z:2x4': unknown"),
        (["--topology", "cpu:4", "--config", "nowhere.py"], "config nowhere.py: no such file"),
        (["--topology", "cpu:4", "--target-config", "nowhere.json"], "target-config nowhere.json: no such file"),
        (["--topology", "cpu:4", "--target-config", "{folder}/tiny.py"], "target-config"),
        (["--topology", "cpu:4", "--mesh.fsdp", "3"], "mesh data (the rest) x fsdp 3"),
        (["--topology", "cpu:4", "--mesh.tensor", "4"], "mesh.tensor 4: does not divide the target's num_kv_heads 2"),
        (["--topology", "cpu:4", "--mesh.data", "0"], "mesh.data 0: must be at least 1"),
        (["--topology", "cpu:4", "--micro-batches", "3"], "micro_batches 3"),
        (["--topology", "cpu:4", "--mesh.data", "4", "--micro-batches", "4"], "batch_size 8"),
        (["--topology", "cpu:4", "--what", "decode", "--requests", "6", "--mesh.data", "4"], "requests 6"),
        (["--topology", "cpu:4", "--hbm", "-1"], "hbm -1"),
        (["--topology", "cpu:4", "--json", "/nowhere/at/all.json"], "json /nowhere/at/all.json"),
    ],
)
def test_bad_input_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], changed: list[str], said: str
) -> None:
    assert main(words(folder, *(word.format(folder=folder) for word in changed))) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("dspark aot: error: ") and said in error and "\n" not in error


def test_a_target_that_is_not_known(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hub id is never asked for: it is a known one, or its config must be given; a folder with one will do."""
    assert main(["aot", "--config", f"{folder}/tiny.py", "--topology", "cpu:4"]) == 2
    error = capsys.readouterr().err
    assert "target 'nobody/tiny'" in error and "--target-config" in error and "Qwen/Qwen3-4B" in error
    argv = ["aot", "--config", f"{folder}/known.py", "--topology", "cpu:4", "--what", "train", "--mesh.data", "3"]
    assert main(argv) == 2
    assert "mesh data 3" in capsys.readouterr().err


def test_without_libtpu(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "libtpu" else find(name, *rest)
    )
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert main(words(folder, "--topology", "v5e:2x4")) == 2
    assert "pip install libtpu" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["aot", "--help"])
    assert stopped.value.code == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in ("--mesh.fsdp", "--micro-batches", "in GiB", "bytes, FLOPs and seconds", "v5p:4x4x8", "--no-suggest"):
        assert part in printed


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpu_topology(folder: Path, tmp_path: Path) -> None:
    """The compiler's memory, cycles and collectives for eight chips; in a process of its own: libtpu stays loaded."""
    file = tmp_path / "report.json"
    mesh = ("--mesh.fsdp", "4", "--mesh.tensor", "2")
    argv = words(folder, "--topology", "v5e:2x4", *mesh, "--context", "32", "--json", str(file))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    done = subprocess.run([sys.executable, "-m", "dspark_jax.cli", *argv], env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values = json.loads(file.read_text())
    check_report(values, 8)
    for program in values["programs"]:
        assert program["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2}
        assert program["hbm"] == values["chip"]["hbm"] == int(15.75 * 2**30)
        assert program["cost"]["cycles"] > 0 and program["cost"]["collectives"]
        assert 0 < program["times"]["roofline"] and 0 < program["times"]["compiler"] < 1
