"""Every field of a training run changes what is prepared, the step, or what the run leaves on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from dspark_jax.models.config import TransformerConfig
from dspark_jax.sharding import MeshShape
from dspark_jax.training import prepare, trainer
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.prepare import Run
from dspark_jax.training.settings import DrafterSettings, drafter_config
from dspark_jax.training.step import place_batch
from tests.drafters.one_round import differ
from tests.training.test_trainer import steps_of
from tests.training.tiny_run import SHAPE, TARGETS, metrics_of, tiny_settings, write_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records that all runs share, and fewer ones."""
    path = tmp_path_factory.mktemp("settings")
    write_records(path / "few.jsonl", 5, seed=1)
    return path


def prepared(folder: Path, **fields: Any) -> Run:
    """A run without a cache, unless `fields` say otherwise; `{folder}` in them is the folder."""
    values = {"states": "online"} | fields
    for name, value in values.items():
        if isinstance(value, str):
            values[name] = value.format(folder=folder)
    if "records" in values:
        values["records"] = tuple(file.format(folder=folder) for file in values["records"])
    return prepare.prepare(tiny_settings(folder, **values))


def batch_of(run: Run) -> Any:
    return run.feed.pipeline.batch(0)


def cached(run: Run) -> int:
    """States in the run's cache, without one -1."""
    cache = run.feed.pipeline._cache
    return -1 if cache is None else len(cache)


def least_supervised(run: Run) -> bool:
    return min(int(sample.loss_mask.sum()) for sample in run.feed.pipeline.samples) >= 22


Look = Callable[[Run], Any]
CACHE: dict[str, Any] = {"states": "cache", "cache": "{folder}/other"}
CHANGES: dict[str, tuple[dict[str, Any], Look, Any]] = {  # field: settings, what is looked at, what it must be
    "records": ({"records": ("{folder}/few.jsonl",)}, lambda run: len(run.feed.pipeline.samples), 3),
    "target": ({"target": str(TARGETS / "qwen3_untied")}, lambda run: run.target.config.family, "qwen3"),
    "output": ({"output": "{folder}/made"}, lambda run: (run.output.name, (run.output).exists()), ("made", True)),
    "states": ({"states": "fill", "cache": "{folder}/filled"}, cached, 2),  # those held out
    "cache": (CACHE, lambda run: (cached(run), run.feed.pipeline._cache.folder.name), (14, "other")),
    "cache_kind": (
        {"states": "cache", "cache": "{folder}/bytes", "cache_kind": "int8"},
        lambda run: str(batch_of(run).features.values.dtype),
        "int8",
    ),
    "drafter": ({"drafter": replace(SHAPE, num_layers=2)}, lambda run: len(run.like.params["layers"]), 2),
    "epochs": ({"steps": 0, "epochs": 2}, lambda run: run.total, 6),
    "steps": ({"steps": 5}, lambda run: run.total, 5),
    "batch_size": ({"batch_size": 6}, lambda run: batch_of(run).input_ids.shape, (6, 32)),
    "pack": ({"pack": True}, lambda run: batch_of(run).segments is None, False),
    "buckets": ({"buckets": (24,)}, lambda run: run.feed.pipeline.widths, (24, 32)),
    "max_length": ({"max_length": 24}, lambda run: batch_of(run).input_ids.shape, (4, 24)),
    "min_loss_tokens": ({"min_loss_tokens": 22}, least_supervised, True),
    "compute_dtype": ({"compute_dtype": "bfloat16"}, lambda run: str(run.target.params["embed"].dtype), "bfloat16"),
    "eval_samples": ({"eval_samples": 3}, lambda run: len(run.held_out), 3),
    "devices": ({"devices": 2}, lambda run: run.mesh.size, 2),
    "mesh": ({"devices": 2, "mesh": MeshShape(fsdp=2)}, lambda run: run.mesh.shape["fsdp"], 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changes_what_is_prepared(name: str, folder: Path) -> None:
    changes, look, wanted = CHANGES[name]
    base = {field: value for field, value in changes.items() if field != name}
    assert look(prepared(folder, **changes)) == wanted
    if name not in ("cache", "cache_kind"):  # without them it is the folder of the other tests
        assert look(prepared(folder, **base)) != wanted


def test_a_seed_decides_weights_and_order(folder: Path) -> None:
    one, same, other = (prepared(folder, seed=seed) for seed in (0, 0, 1))
    weights = [run.fresh().params["fc"] for run in (one, same, other)]
    orders = [run.feed.pipeline.indices(0).tolist() for run in (one, same, other)]
    assert (weights[0] == weights[1]).all() and not (weights[0] == weights[2]).any()
    assert orders[0] == orders[1] != orders[2]


# --- the step ---


def program(folder: Path, **fields: Any) -> str:
    """The run's step as the compiler gets it: all that an update computes, with its constants."""
    run = prepared(folder, **fields)
    batch = place_batch(batch_of(run), run.mesh, run.feed._micro_batches)
    return str(run.feed._step.lower(run.like, run.feed.frozen, batch, jnp.int32(0)).as_text())


CUT: dict[str, Any] = {"devices": 2, "mesh": MeshShape(fsdp=2), "micro_batches": 2}
STEPS: dict[str, dict[str, Any]] = {
    "loss": {"loss": LossConfig(tv=0.5)}, "micro_batches": {"micro_batches": 2}, "num_anchors": {"num_anchors": 3},
    "lr": {"lr": 2e-2}, "warmup": {"warmup": 0.5}, "weight_decay": {"weight_decay": 0.1},
    "max_grad_norm": {"max_grad_norm": 2.0}, "ema": {"ema": 0.25}, "compute_dtype": {"compute_dtype": "bfloat16"},
    "seed": {"seed": 1}, "remat": {"remat": True}, "regather": CUT | {"regather": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(folder: Path) -> str:
    """The step of the settings as they are."""
    return program(folder)


@pytest.mark.parametrize("name", STEPS)
def test_a_field_changes_the_step(name: str, folder: Path, plain: str) -> None:
    base = {field: value for field, value in STEPS[name].items() if field != name}
    assert program(folder, **STEPS[name]) != (program(folder, **base) if base else plain)


def test_the_same_settings_give_the_same_step(folder: Path, plain: str) -> None:
    assert program(folder, steps=7) == plain


# --- the run ---


def rows_of_losses(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a log's lines those that tell of updates."""
    return [row for row in rows if "ce_loss" in row]


def test_fields_say_when_a_run_writes(folder: Path) -> None:
    fields = {"checkpoint_every": 2, "keep_checkpoints": 4, "log_every": 3, "eval_every": 4, "eval_tokens": 5}
    fields["json"] = folder / "writes.json"
    trainer.train(tiny_settings(folder, "writes", **fields))
    rows = metrics_of(folder, "writes")
    assert [row["step"] for row in rows_of_losses(rows)] == [3, 6, 7]
    evaluated = [row for row in rows if "accepted_length" in row]
    assert [row["step"] for row in evaluated] == [4, 7]
    assert {row["eval_tokens"] for row in evaluated} == {2 * 4}  # two prompts; the first token is of the prompt's pass
    assert steps_of(folder, "writes") == [2, 4, 6, 7]
    told = json.loads((folder / "writes.json").read_text())
    assert told["updates"] == {"total": 7, "first": 0, "last": 7, "finished": True}
    assert told["metrics"].items() >= rows[-1].items() - {"step": 7}.items() and told["best"]["step"] in (4, 7)
    assert (Path(told["drafter"]) / "config.json").is_file() and told["settings"]["log_every"] == 3
    assert told["tokens"] == sum(n * row["tokens"] for n, row in zip((3, 3, 1), rows_of_losses(rows), strict=True))
    assert told["seconds"] > 0


# --- the drafter ---


OTHER: dict[str, Any] = {
    "kind": "eagle3", "block_size": 3, "num_layers": 2, "target_layer_ids": (0, 1), "mask_token_id": 5,
    "draft_vocab_size": 32, "markov_rank": 4, "markov_kind": "gated", "confidence": False,
    "confidence_with_markov": False, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 12,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> TransformerConfig:
    return prepare.read_target_config(TARGETS / "llama_tied")


@pytest.mark.parametrize("name", [field.name for field in fields(DrafterSettings)])
def test_every_field_of_the_shape_changes_the_drafter(name: str, target: TransformerConfig) -> None:
    """It has other weights, or drafts otherwise with the same ones."""
    base = replace(SHAPE, num_heads=2) if name == "num_kv_heads" else SHAPE
    assert differ(drafter_config(base, target), drafter_config(replace(base, **{name: OTHER[name]}), target))
