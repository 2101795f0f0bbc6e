"""Eagle3 and MTP through the whole trainer: the loss falls, what was exported decodes, wrong settings are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.drafters import read_drafter
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.prepare import prepare
from dspark_jax.training.settings import DrafterSettings, TrainSettings
from dspark_jax.training.trainer import train
from tests.training.tiny_run import tiny_settings

EAGLE: dict[str, Any] = {
    "drafter": DrafterSettings(kind="eagle3", block_size=3, target_layer_ids=(0, 2), draft_vocab_size=64),
    "loss": LossConfig(ce=1.0, tv=0.0, confidence=0.0, decay=4.0),
}
MTP: dict[str, Any] = {
    "drafter": DrafterSettings(kind="mtp", block_size=2),
    "loss": LossConfig(ce=0.5, tv=0.5, confidence=0.0),
}


def settings(folder: Path, fields: dict[str, Any], **more: Any) -> TrainSettings:
    return tiny_settings(folder, ema=0.0, checkpoint_every=0, **fields, **more)


@pytest.mark.parametrize(("fields", "states"), [(EAGLE, "cache"), (MTP, "cache"), (MTP, "online")])
def test_a_run_trains_exports_and_decodes(tmp_path: Path, fields: dict[str, Any], states: str) -> None:
    run = settings(tmp_path, fields, states=states)
    state = train(run)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    totals = [line["total"] for line in lines if "total" in line]
    assert len(totals) == 7 and np.isfinite(totals).all() and totals[-1] < totals[0]
    assert any("accepted_length" in line for line in lines)
    config, params = read_drafter(tmp_path / "out" / "drafter", jnp.bfloat16)
    assert config == prepare(run).config
    np.testing.assert_array_equal(params["norm"], state.best["norm"].astype(jnp.bfloat16))
    assert any("held_out_total" in line for line in lines)
    raw = json.loads((tmp_path / "out" / "drafter" / "config.json").read_text())
    assert ("step_loss_decay" in raw) == (fields is EAGLE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (EAGLE | {"loss": LossConfig()}, "loss.confidence 1.0: this drafter has no confidence head"),
        (MTP | {"drafter": DrafterSettings(kind="mtp", target_layer_ids=(1,))}, "MTP reads the target's final state"),
        (MTP | {"drafter": DrafterSettings(kind="medusa")}, "drafter.kind 'medusa': must be one of"),
    ],
)
def test_settings_that_do_not_fit_the_kind_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(settings(tmp_path, fields))


def test_one_cache_serves_drafters_that_read_fewer_layers(tmp_path: Path) -> None:
    short: dict[str, Any] = {"steps": 2, "eval_samples": 0}
    train(settings(tmp_path, EAGLE, output="wide", **short))
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    shared = train(settings(tmp_path, MTP, output="shared", **short))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == stamps
    own = train(settings(tmp_path, MTP, output="own", cache=str(tmp_path / "own"), **short))
    np.testing.assert_array_equal(shared.best["norm"], own.best["norm"])
