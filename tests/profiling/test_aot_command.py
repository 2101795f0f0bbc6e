"""`dspark aot` from end to end: on virtual CPU devices always, for a TPU topology where libtpu is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.cli import main

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
    drafter=DrafterSettings(block_size=2, num_layers=1, target_layer_ids=(0,), mask_token_id=255, markov_rank=8),
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
    assert names == ["train", *(f"decode, {n} rows" for n in (rows, 2 * rows, 3 * rows))]
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
    flops = [program["cost"]["flops"] for program in decode]
    assert flops == sorted(flops) and flops[0] < flops[-1]


def test_virtual_cpu_devices(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Both kinds of programs, the table on stdout and the same in JSON; without a mesh copies of everything do."""
    file = tmp_path / "report.json"
    assert main(words(folder, "--topology", "cpu:4", "--context", "32", "--json", str(file))) == 0
    values = json.loads(file.read_text())
    check_report(values, 4)
    assert all(program["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1} for program in values["programs"])
    assert values["programs"][0]["micro_batches"] == 2, "one sequence on each device at a time"
    printed = capsys.readouterr().out
    assert "4 CPU devices" in printed and "decode, 96 rows" in printed and "arguments, GiB" in printed


def test_a_mesh_that_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Refused with the sizes, exit code 1, and with a mesh that fits: what is cut four ways needs a quarter."""
    file = tmp_path / "report.json"
    given = words(folder, "--topology", "cpu:4", "--what", "train", "--mesh.data", "4", "--json", str(file))
    assert main([*given, "--no-suggest"]) == 0
    whole = json.loads(file.read_text())["programs"][0]
    limit = str((whole["memory"]["arguments"] - 1) / 2**30)

    assert main([*given, "--hbm", limit, "--no-suggest"]) == 1
    printed = capsys.readouterr().out
    assert "train: does not fit: its arguments alone need" in printed and "fits with" not in printed

    assert main([*given, "--hbm", str((whole["needed"] - 1) / 2**30)]) == 1
    printed = capsys.readouterr().out
    assert "train: does not fit: needs" in printed and "temporaries" in printed and "largest arrays:" in printed
    values = json.loads(file.read_text())
    assert values["fits"] is False and values["programs"][0]["mesh"]["data"] == 4
    found = values["suggestions"]["train"]
    assert found["mesh"]["fsdp"] > 1
    assert f"train: fits with --mesh.data {found['mesh']['data']} --mesh.fsdp {found['mesh']['fsdp']}" in printed


def test_nothing_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither compiled nor suggested where not even the arguments fit on any mesh."""
    assert main(words(folder, "--topology", "cpu:4", "--what", "decode", "--hbm", "0.00001")) == 1
    printed = capsys.readouterr().out
    assert "decode: does not fit: its arguments alone need" in printed
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
    """The compiler's memory, cycles and collectives for eight chips; in a process of its own, as libtpu stays loaded."""
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
