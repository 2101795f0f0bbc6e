"""`dspark data cache`: estimates without weights, caches of a config, shares, refusals in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax import cli
from dspark_jax.checkpoints.load import load_target
from dspark_jax.data import cache_command, hidden_cache
from dspark_jax.data.hidden_cache import HiddenCache, cache_key
from dspark_jax.data.records import RecordSamples
from tests.training.tiny_run import TARGETS, write_records

ROOT = Path(__file__).resolve().parents[2]
QWEN = ["--config", str(ROOT / "configs/dspark_qwen3_4b.py"), "--estimate"]
CONFIG = """
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    records=("{records}",), target="{target}", cache="{cache}", max_length=24, compute_dtype="float32", eval_samples=2,
    drafter=DrafterSettings(num_layers=1, block_size=4, target_layer_ids=(0, 2), mask_token_id=299, markov_rank=8),
)
"""


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints."""
    assert cli.main(["data", "cache", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of bad input."""
    assert cli.main(["data", "cache", *words]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dspark data cache: error: ")
    return last


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A training config with records of 12 samples."""
    records = write_records(tmp_path / "records.jsonl", 12)
    text = CONFIG.format(records=records, target=TARGETS / "llama_tied", cache=tmp_path / "cache")
    file = tmp_path / "config.py"
    file.write_text(text)
    return file


def opened(folder: Path, kind: str) -> HiddenCache:
    target = load_target(TARGETS / "llama_tied")
    return HiddenCache(folder, cache_key(target.path, target.config, target.params, (0, 2), kind))


def test_qwen3_4b_is_estimated_without_weights_and_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    counts = ["--samples", "1300000", "--mean-length", "1024.5"]
    out = run(capsys, *QWEN, *counts, "--kind", "int8", "--cache", str(tmp_path), "--json", str(report))
    figures = json.loads(report.read_text())
    size = 6 * 2560 + 6 * (2560 // 128) * 2 + 4 + 1 + 4 + 4
    assert figures["bytes_per_token"] == size < 16_000
    assert figures["bytes_per_token_of_kinds"] == {
        "bfloat16": 6 * 2560 * 2 + 13,
        "float32": 6 * 2560 * 4 + 13,
        "int8": size,
        "fp8": size,
    }
    assert figures["layers"] == [1, 9, 17, 25, 33] and figures["hidden_size"] == 2560 and figures["kind"] == "int8"
    assert figures["samples"] == 1_300_000 and figures["tokens"] == 1_331_850_000
    assert 1 <= figures["total_bytes"] / (figures["tokens"] * size) < 1.001
    free = shutil.disk_usage(tmp_path).free
    assert abs(figures["free_bytes"] - free) < 1e9 and figures["fits"] == (figures["total_bytes"] < free)
    for text in ("Qwen/Qwen3-4B", "15,613 in int8", "1,331,850,000", "20.8 TB", f"in {tmp_path}", "bfloat16 30,733"):
        assert text in out


@pytest.mark.parametrize(
    ("target", "hidden", "samples"),
    [
        (["--target", str(TARGETS / "gemma4" / "config.json")], 64, 0),
        (["--target", str(TARGETS / "llama_tied")], 48, 5),
        (["--target", "no/such-model", "--hidden-size", "4096"], 4096, 0),
        (["--hidden-size", "96"], 96, 7),
    ],
)
def test_sizes_come_from_a_config_json_a_folder_or_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: list[str], hidden: int, samples: int
) -> None:
    counts = ["--tokens", "100000", *(["--samples", str(samples)] if samples else [])]
    words = [*target, "--layers", "-1", "0", "2", *counts, "--kind", "bfloat16", "--json", str(tmp_path / "out.json")]
    run(capsys, "--estimate", *words)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["hidden_size"] == hidden and figures["layers"] == [-1, 0, 2]
    assert figures["bytes_per_token"] == 4 * hidden * 2 + 13 and figures["tokens"] == 100_000
    assert figures["samples"] == (samples or -(-100_000 // 512))  # of max_length tokens each, if nothing is said


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_config_is_cached_as_it_was_estimated(
    tmp_path: Path, config: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", str(config), "--json", str(tmp_path / "out.json")]
    words += [] if kind == "float32" else ["--kind", kind]  # auto: the dtype of the products
    run(capsys, *words, "--estimate")
    wanted = json.loads((tmp_path / "out.json").read_text())
    assert not (tmp_path / "cache").exists() and wanted["kind"] == kind
    run(capsys, *words)
    assert (
        json.loads((tmp_path / "out.json").read_text()).items()
        >= {name: wanted[name] for name in ("samples", "tokens", "bytes_per_token", "total_bytes", "layers")}.items()
    )
    found = sum(file.stat().st_size for file in (tmp_path / "cache").iterdir())
    assert found <= wanted["total_bytes"]
    cache = opened(tmp_path / "cache", kind)
    samples = RecordSamples(tmp_path / "records.jsonl", 24)
    assert sorted(cache.ids) == sorted(sample.id for sample in samples)
    for sample in samples:
        np.testing.assert_array_equal(cache.read(cache.number(sample.id)).input_ids, sample.input_ids)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()}
    run(capsys, *words)  # nothing to do
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()} == before
    if kind == "int8":
        assert "dtype is int8 in the cache, fp8 in this run" in refused(capsys, *words, "--kind", "fp8")


def test_options_come_before_the_config(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_records(tmp_path / "other.jsonl", 5, seed=1)

    def figures(*words: str) -> tuple[int, int]:
        run(capsys, "--config", str(config), "--estimate", "--json", str(tmp_path / "out.json"), *words)
        found = json.loads((tmp_path / "out.json").read_text())
        return found["samples"], found["tokens"]

    whole = figures()
    assert whole[0] == 12 and figures("--records", str(other))[0] == 5
    assert whole[1] > 12 * 20
    assert figures("--max-length", "20", "--min-loss-tokens", "1") == (12, 12 * 20)  # each has 20 at least
    assert figures("--min-loss-tokens", "19")[0] < 12


def test_batch_tokens_are_those_of_a_pass(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, batches = [], hidden_cache._batches

    def count(*args: Any) -> Any:
        found = list(batches(*args))
        passes.append(len(found))
        return iter(found)

    monkeypatch.setattr(hidden_cache, "_batches", count)
    for number, words in enumerate(([], ["--batch-tokens", "24"])):
        run(capsys, "--config", str(config), "--cache", str(tmp_path / f"cache{number}"), *words)
    assert passes == [1, 2]  # of eight samples, one for each device


def test_shards_share_the_samples(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--config",
        str(config),
        "--max-length",
        "20",
        "--min-loss-tokens",
        "1",
        "--cache",
        str(tmp_path / "other"),
    ]
    counts = []
    for shard in ("1/3", "0/3", "2/3"):
        run(capsys, *words, "--shard", shard)
        counts.append(len(opened(tmp_path / "other", "float32")))
    assert counts == [4, 8, 12]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "records: names no file"),
        (["--records", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--estimate"], "an estimate can do with --tokens"),
        (["--estimate", "--target", "no/such-model"], "a config.json or --hidden-size will do"),
        (["--estimate", "--records", "{records}", "--tokens", "5"], "not for both"),
        (["--estimate", "--samples", "5"], "--mean-length"),
        (["--estimate", "--mean-length", "5"], "--samples"),
        (["--estimate", "--tokens", "-5"], "tokens -5"),
        (["--tokens", "5"], "tokens 5: is for an estimate, add --estimate"),
        (["--kind", "int4"], "kind 'int4': must be one of auto, bfloat16, float32, int8, fp8"),
        (["--records", "{records}", "--shard", "3/3"], "shard '3/3': must be I/N"),
        (["--records", "{records}", "--layers", "2", "1"], "layers [2, 1]: must increase and lie in -1..4"),
        (["--records", "{records}", "--layers", "1", "9"], "layers [1, 9]: must increase and lie in -1..4"),
        (["--records", "{records}", "--layers"], "layers: name the captured layers"),
        (["--records", "{records}", "--target", "{target}/config.json"], "config.json: holds no weights"),
        (["--records", "{records}", "--max-length", "1"], "max_length 1"),
        (["--records", "{records}", "--min-loss-tokens", "99"], "no sample has min_loss_tokens 99"),
        (["--records", "{records}", "--batch-tokens", "0"], "batch_tokens 0: must be at least 1"),
        (["--config", "/no/config.py"], "config /no/config.py: no such file"),
        (["--records", "{records}", "--json", "/no/folder/out.json"], "json /no/folder/out.json"),
    ],
)
def test_wrong_input_is_told_in_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records = write_records(tmp_path / "records.jsonl", 3)
    target = TARGETS / "llama_tied"
    words = [word.format(records=records, target=target) for word in words]
    for name, values in (("--layers", ["0", "2"]), ("--target", [str(target)]), ("--cache", [str(tmp_path / "cache")])):
        words += [] if name in words or "--config" in words else [name, *values]
    assert message in refused(capsys, *words)
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_told_in_one_line(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=999))
    assert "need about" in refused(capsys, "--config", str(config))
    out = run(capsys, "--config", str(config), "--estimate")
    assert "does not fit" in out


def test_data_still_regenerates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cache_command, "main", lambda words: seen.append(words) or 7)
    assert cli.main(["data", "cache", "--estimate"]) == 7 and seen == [["--estimate"]]
    assert cli.main(["data", "--output", "/tmp/none.jsonl", "--target", "/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err and len(seen) == 1
