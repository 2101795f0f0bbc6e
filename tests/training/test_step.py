"""The compiled training step: loss terms, empty sequences, online hidden states, several devices."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.load import Target, load_target
from dspark_jax.data.hidden_cache import build_cache, cache_key
from dspark_jax.data.pipeline import HostBatch, Pipeline
from dspark_jax.data.records import samples_from_records
from dspark_jax.models.transformer import head_weight
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.optimizer import make_optimizer
from dspark_jax.training.settings import drafter_config
from dspark_jax.training.step import Step, TrainState, data_mesh, init_state, make_step, replicate, split
from tests.training.tiny_run import SHAPE, TARGETS, write_records

D2T = np.arange(0, 192, 3, dtype=np.int32) - np.arange(64, dtype=np.int32)

FULL = LossConfig(ce=0.1, tv=0.9, confidence=0.5)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TARGETS / "llama_tied")


@pytest.fixture(scope="module")
def batches(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[HostBatch, HostBatch]:
    """The same batch with hidden states from a cache, and without."""
    folder = tmp_path_factory.mktemp("step")
    samples = samples_from_records(write_records(folder / "records.jsonl", 8), 32)
    key = cache_key(target.path, target.config, target.params, SHAPE.target_layer_ids, jnp.float32)
    cache = build_cache(folder / "cache", key, target.config, target.params, samples)
    options: dict[str, Any] = dict(batch_size=4, max_length=32, seed=0)
    return Pipeline(samples, cache=cache, **options).batch(0), Pipeline(samples, **options).batch(0)


@functools.cache
def compiled_step(loss: LossConfig, devices: int, online: bool, ema: float) -> Step:
    """A step for the tiny target; made once for each set of arguments, as compiling is what takes time here."""
    target = load_target(TARGETS / "llama_tied").config
    return make_step(
        drafter_config(SHAPE, target),
        loss,
        make_optimizer(1e-2),
        data_mesh(4, devices),
        num_anchors=6,
        seed=0,
        ema=ema,
        compute_dtype=jnp.float32,
        target=target if online else None,
    )


def run_step(
    target: Target, batch: HostBatch, loss: LossConfig = FULL, devices: int = 1, online: bool = False, ema: float = 0.0
) -> tuple[TrainState, TrainState, dict[str, float]]:
    """One update from a fresh state: the state before and after, and the mean metrics."""
    mesh = data_mesh(len(batch.input_ids), devices)
    assert mesh.size == devices
    frozen = {"embed": target.params["embed"], "head": head_weight(target.params), "d2t": jnp.asarray(D2T)}
    if online:
        frozen["target"] = target.params
    before = init_state(drafter_config(SHAPE, target.config), make_optimizer(1e-2), 0, ema > 0)
    state = replicate(jax.tree.map(jnp.copy, before), mesh)
    step = compiled_step(loss, devices, online, ema)
    after, metrics = step(state, replicate(frozen, mesh), split(batch, mesh), jnp.int32(0))
    pairs = jax.device_get(metrics)
    return before, jax.device_get(after), {name: float(a / max(b, 1e-9)) for name, (a, b) in pairs.items()}


def test_each_weight_at_zero_removes_its_term(target: Target, batches: tuple[HostBatch, HostBatch]) -> None:
    names = {"ce": "ce_loss", "tv": "l1_loss", "confidence": "confidence_loss"}
    _, _, before = run_step(target, batches[0])
    terms = {name: getattr(FULL, name) * before[metric] for name, metric in names.items()}
    assert all(value > 0 for value in terms.values())
    assert before["total"] == pytest.approx(sum(terms.values()), rel=1e-4)
    for name in names:
        start, after, found = run_step(target, batches[0], replace(FULL, **{name: 0.0}))
        assert found["total"] == pytest.approx(sum(terms.values()) - terms[name], rel=1e-4)
        moved = np.any(after.params["confidence"]["w"] != np.asarray(start.params["confidence"]["w"]))
        assert moved == (name != "confidence")


def test_sequences_without_supervised_tokens(target: Target, batches: tuple[HostBatch, HostBatch]) -> None:
    batch = batches[0]
    _, _, found = run_step(target, batch)
    mask = batch.loss_mask.copy()
    mask[0] = 0
    _, after, some = run_step(target, batch._replace(loss_mask=mask))
    assert np.isfinite(some["total"]) and 0 < some["sampled_anchors"] < found["sampled_anchors"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    before, after, none = run_step(target, batch._replace(loss_mask=mask * 0))
    assert none["total"] == 0 and none["grad_norm"] == 0 and none["sampled_anchors"] == 0
    for one, two in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(one, two)


def test_online_states_give_the_loss_of_cached_ones(target: Target, batches: tuple[HostBatch, HostBatch]) -> None:
    cached, online = batches
    _, one, found = run_step(target, cached)
    _, two, again = run_step(target, online, online=True)
    assert found == pytest.approx(again, rel=1e-4, abs=1e-6)
    for a, b in zip(jax.tree.leaves(one.opt_state), jax.tree.leaves(two.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-6)


def test_loss_and_gradients_do_not_depend_on_the_number_of_devices(
    target: Target, batches: tuple[HostBatch, HostBatch]
) -> None:
    _, one, found = run_step(target, batches[0])
    _, many, again = run_step(target, batches[0], devices=4)
    assert found == pytest.approx(again, rel=1e-4, abs=1e-6)
    for a, b in zip(jax.tree.leaves(one.opt_state), jax.tree.leaves(many.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-6)


def test_average_follows_the_weights(target: Target, batches: tuple[HostBatch, HostBatch]) -> None:
    before, after, _ = run_step(target, batches[0], ema=0.9)
    want = jax.tree.map(lambda old, new: 0.1 * old + 0.9 * new, before.ema, after.params)  # early decay: 1 / 10
    for a, b in zip(jax.tree.leaves(after.ema), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert after.best is after.ema and int(after.step) == 1
    plain = after._replace(ema=None)
    assert plain.best is plain.params


def test_devices_divide_the_batch() -> None:
    count = len(jax.devices())
    assert data_mesh(2 * count).size == count
    assert data_mesh(3).size in (1, 3)
    assert data_mesh(2 * count, 1).size == 1
