"""The compiled training step: loss terms, empty sequences, online hidden states, meshes, micro-batches, packed rows."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.checkpoints.load import Target, load_target
from dspark_jax.data.pipeline import HostBatch
from dspark_jax.data.quantized import quantize
from dspark_jax.models.transformer import forward
from dspark_jax.sharding import MeshShape, make_mesh
from dspark_jax.training.fill import local_rows
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.optimizer import make_optimizer
from dspark_jax.training.settings import DrafterSettings, drafter_config
from dspark_jax.training.step import (
    TrainState,
    TrainStep,
    addressable_rows,
    init_state,
    make_eval_step,
    make_frozen,
    make_step,
    place_batch,
    place_frozen,
)
from tests.training.tiny_run import SHAPE, TARGETS

FULL = LossConfig(ce=0.1, tv=0.9, confidence=0.5)
LOSSES = {"dspark": FULL, "eagle3": LossConfig(ce=1.0, tv=0.0, confidence=0.0), "mtp": LossConfig(1.0, 0.5, 0.0)}
SHAPES = {
    "dspark": replace(SHAPE, draft_vocab_size=0),
    "reduced": SHAPE,
    "eagle3": DrafterSettings(kind="eagle3", block_size=3, target_layer_ids=(0, 2), draft_vocab_size=64),
    "mtp": DrafterSettings(kind="mtp", block_size=1),
}
MESHES = [((2, 2, 2), 1), ((1, 1, 1), 2), ((1, 2, 2), 4)]  # and micro-batches
D2T = np.arange(0, 192, 3, dtype=np.int32) - np.arange(64, dtype=np.int32)
ROWS, LENGTH = 8, 32


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TARGETS / "llama_tied")


def host_batch(seed: int = 0) -> HostBatch:
    """Eight rows of random tokens without states, the last one empty, others with prompts and padding."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 290, (ROWS, LENGTH), dtype=np.int32)
    mask = np.ones((ROWS, LENGTH), np.uint8)
    for row in range(ROWS):
        mask[row, : rng.integers(2, 7)] = 0
        mask[row, LENGTH - rng.integers(0, 9) :] = 0
    mask[-1] = 0
    return HostBatch(ids, mask, np.arange(ROWS, dtype=np.uint32)[:, None])


def with_states(batch: HostBatch, target: Target, shape: DrafterSettings) -> HostBatch:
    """The batch with the target's hidden states, as a cache would give them (the normaliser left to the step)."""
    config = drafter_config(shape, target.config)
    hidden = forward(target.params, target.config, jnp.asarray(batch.input_ids), config.target_layer_ids)
    features, final = (np.asarray(x.T).reshape(*batch.input_ids.shape, -1) for x in (hidden.features, hidden.final))
    return batch._replace(features=features, final=final)


def keep_gradients() -> optax.GradientTransformation:
    """An optimiser that changes nothing and keeps the gradients as its state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


@functools.cache
def compiled(
    kind: str,
    loss: LossConfig,
    mesh: tuple[int, int, int],
    micro: int,
    online: bool,
    ema: float,
    grads: bool,
    dtype: str = "float32",
) -> TrainStep:
    """A step for the tiny target; made once for each set of arguments, as compiling is what takes time here."""
    config = load_target(TARGETS / "llama_tied").config
    devices = jax.devices()[: mesh[0] * mesh[1] * mesh[2]]
    return make_step(
        drafter_config(SHAPES[kind], config),
        loss,
        keep_gradients() if grads else make_optimizer(1e-2),
        make_mesh(MeshShape(*mesh), devices),
        num_anchors=6,
        seed=0,
        ema=ema,
        compute_dtype=jnp.dtype(dtype),
        target=config if online else None,
        micro_batches=micro,
    )


def run_step(
    target: Target,
    batch: HostBatch,
    kind: str = "reduced",
    loss: LossConfig | None = None,
    mesh: tuple[int, int, int] = (1, 1, 1),
    micro: int = 1,
    ema: float = 0.0,
    grads: bool = False,
    dtype: str = "float32",
    markov: float = 0.0,
) -> tuple[TrainState, TrainState, dict[str, float]]:
    """One update from a fresh state: the state before and after, and the mean metrics. `markov`: what the head's W2,
    which begins with zeros, has in their place."""
    online = batch.features is None
    loss = loss or LOSSES.get(kind, FULL)
    step = compiled(kind, loss, mesh, micro, online, ema, grads, dtype)
    config = drafter_config(SHAPES[kind], target.config)
    frozen = make_frozen(target.params, D2T if config.trims_vocabulary else None, online)
    optimizer = keep_gradients() if grads else make_optimizer(1e-2)
    start = init_state(config, optimizer, 0, ema > 0, step.mesh)
    if markov:
        head = start.params["markov"]
        filled = head | {"w2": markov * jax.random.normal(jax.random.key(3), head["w2"].shape)}
        start = start._replace(params=start.params | {"markov": filled})
    before = jax.device_get(start)
    arguments = place_frozen(frozen, step.mesh), place_batch(batch, step.mesh, micro), jnp.int32(0)
    after, metrics = step(start, *arguments)
    pairs = jax.device_get(metrics)
    return before, jax.device_get(after), {name: float(a / max(b, 1e-9)) for name, (a, b) in pairs.items()}


def close(found: Any, want: Any, relative: float = 1e-5) -> None:
    """Every leaf within `relative` of its norm."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(want), strict=True):
        scale = max(float(np.linalg.norm(b)), 1e-6)
        assert float(np.linalg.norm(np.asarray(a) - np.asarray(b))) <= relative * scale, jax.tree_util.keystr(path)


@pytest.mark.parametrize("kind", SHAPES)
def test_loss_and_gradients_do_not_depend_on_mesh_and_micro_batches(target: Target, kind: str) -> None:
    batch = host_batch()
    _, one, found = run_step(target, batch, kind, grads=True)
    assert found["total"] > 0 and found["grad_norm"] > 0
    for mesh, micro in MESHES if kind == "dspark" else [((2, 2, 2), 2)]:
        _, many, again = run_step(target, batch, kind, mesh=mesh, micro=micro, grads=True)
        assert again == pytest.approx(found, rel=1e-5, abs=1e-6), (mesh, micro)
        close(many.opt_state, one.opt_state)


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_in_bfloat16_are_those_of_float32(target: Target, kind: str) -> None:
    """Every parameter: none may lose its gradient on the way through products and lookups in bfloat16."""
    batch, markov = host_batch(), 0.1 if kind in ("dspark", "reduced") else 0.0
    _, one, _ = run_step(target, batch, kind, grads=True, markov=markov)
    _, two, _ = run_step(target, batch, kind, grads=True, markov=markov, dtype="bfloat16")
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(one.opt_state), jax.tree.leaves(two.opt_state), strict=True
    ):
        a, b = np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)
        norms = np.linalg.norm(a), np.linalg.norm(b)
        name = jax.tree_util.keystr(path)
        assert norms[0] > 0 and norms[1] == pytest.approx(norms[0], rel=0.1), name
        assert a @ b > 0.98 * norms[0] * norms[1], name


def test_quantised_states_are_read(target: Target) -> None:
    plain = with_states(host_batch(), target, SHAPE)
    _, _, want = run_step(target, plain)
    bits = {name: quantize(getattr(plain, name), "int8", 16) for name in ("features", "final")}
    _, _, found = run_step(target, plain._replace(**bits), mesh=(2, 2, 2))
    assert found["total"] == pytest.approx(want["total"], rel=2e-2) and found["total"] != want["total"]


@pytest.mark.parametrize("kind", SHAPES)
def test_online_states_give_the_loss_of_cached_ones(target: Target, kind: str) -> None:
    batch = host_batch()
    _, one, found = run_step(target, with_states(batch, target, SHAPES[kind]), kind, grads=True)
    _, two, again = run_step(target, batch, kind, grads=True)
    assert found == pytest.approx(again, rel=1e-5, abs=1e-6)
    close(two.opt_state, one.opt_state)


@pytest.mark.parametrize("kind", SHAPES)
def test_packed_documents_count_as_rows_of_their_own(target: Target, kind: str) -> None:
    """Loss terms and gradients of two documents in one row are those of two rows (each short enough that all of its
    anchors are drawn)."""
    rng = np.random.default_rng(1)
    half = LENGTH // 2
    ids, mask = rng.integers(0, 290, (2, half), dtype=np.int32), np.zeros((2, half), np.uint8)
    mask[0, 9:14], mask[1, 3:6] = 1, 1
    pad = np.zeros((2, half))
    apart = HostBatch(
        np.concatenate([ids, pad], 1).astype(np.int32),
        np.concatenate([mask, pad], 1).astype(np.uint8),
        np.arange(2, dtype=np.uint32)[:, None],
    )
    segments = np.concatenate([np.repeat(np.int32([1, 2]), half)[None], np.zeros((1, LENGTH), np.int32)])
    together = HostBatch(
        np.concatenate([ids.reshape(1, -1), np.zeros((1, LENGTH))]).astype(np.int32),
        np.concatenate([mask.reshape(1, -1), np.zeros((1, LENGTH))]).astype(np.uint8),
        np.uint32([[0, 1], [7, 7]]),
        segments=segments,
    )
    _, one, found = run_step(target, apart, kind, grads=True)
    _, two, again = run_step(target, together, kind, grads=True)
    assert again["total"] == pytest.approx(found["total"], rel=1e-5) and found["total"] > 0
    close(two.opt_state, one.opt_state)


def test_each_weight_at_zero_removes_its_term(target: Target) -> None:
    names = {"ce": "ce_loss", "tv": "l1_loss", "confidence": "confidence_loss"}
    batch = with_states(host_batch(), target, SHAPE)
    _, _, before = run_step(target, batch)
    terms = {name: getattr(FULL, name) * before[metric] for name, metric in names.items()}
    assert all(value > 0 for value in terms.values())
    assert before["total"] == pytest.approx(sum(terms.values()), rel=1e-4)
    for name in names:
        start, after, found = run_step(target, batch, loss=replace(FULL, **{name: 0.0}))
        assert found["total"] == pytest.approx(sum(terms.values()) - terms[name], rel=1e-4)
        moved = np.any(after.params["confidence"]["w"] != start.params["confidence"]["w"])
        assert moved == (name != "confidence")


@pytest.mark.parametrize("kind", ["reduced", "eagle3", "mtp"])
def test_sequences_without_supervised_tokens(target: Target, kind: str) -> None:
    batch = host_batch()
    _, _, found = run_step(target, batch, kind)
    mask = batch.loss_mask.copy()
    mask[0] = 0
    _, after, some = run_step(target, batch._replace(loss_mask=mask), kind)
    assert np.isfinite(some["total"]) and some["total"] != found["total"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    before, after, none = run_step(target, batch._replace(loss_mask=mask * 0), kind)
    assert none["total"] == 0 and none["grad_norm"] == 0
    for one, two in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(one, two)


def test_average_follows_the_weights(target: Target) -> None:
    before, after, _ = run_step(target, host_batch(), ema=0.9)
    want = jax.tree.map(lambda old, new: 0.1 * old + 0.9 * new, before.ema, after.params)  # early decay: 1 / 10
    for a, b in zip(jax.tree.leaves(after.ema), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert after.best is after.ema and int(after.step) == 1
    plain = after._replace(ema=None)
    assert plain.best is plain.params


@pytest.mark.parametrize(("mesh", "micro"), [((1, 1, 1), 1), ((2, 2, 2), 2)])
def test_states_of_a_batch_can_be_kept(target: Target, mesh: tuple[int, int, int], micro: int) -> None:
    batch = host_batch()
    want = with_states(batch, target, SHAPE)
    config = drafter_config(SHAPE, target.config)
    grid = make_mesh(MeshShape(*mesh), jax.devices()[: mesh[0] * mesh[1] * mesh[2]])
    options: dict[str, Any] = dict(num_anchors=6, seed=0, ema=0.0, compute_dtype=jnp.float32, micro_batches=micro)
    optimizer = make_optimizer(1e-2)
    step = make_step(config, FULL, optimizer, grid, target=target.config, keep_states=True, **options)
    frozen = place_frozen(make_frozen(target.params, D2T, True), grid)
    start = init_state(config, optimizer, 0, False, grid)
    kept = step(start, frozen, place_batch(batch, grid, micro), jnp.int32(0))[2]
    rows = dict(local_rows(kept))
    assert sorted(rows) == list(range(ROWS))
    logits = want.final @ np.asarray(target.params["embed"]).T
    sums = np.log(np.exp(logits).sum(-1))
    for row, (features, final, normalizer) in rows.items():
        np.testing.assert_allclose(features, want.features[row], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(final, want.final[row], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(normalizer, sums[row], rtol=1e-4)
    with pytest.raises(ValueError, match="keep_states"):
        make_step(config, FULL, optimizer, grid, keep_states=True, **options)


@pytest.mark.parametrize("kind", ["reduced", "eagle3", "mtp"])
def test_evaluation_gives_the_losses_of_a_step(target: Target, kind: str) -> None:
    batch = host_batch()
    _, _, want = run_step(target, batch, kind)
    config = drafter_config(SHAPES[kind], target.config)
    grid = make_mesh(MeshShape(1, 2, 1), jax.devices()[:2])
    options: dict[str, Any] = dict(num_anchors=6, seed=0, compute_dtype=jnp.float32, target=target.config)
    evaluate = make_eval_step(config, LOSSES.get(kind, FULL), grid, **options)
    state = init_state(config, make_optimizer(1e-2), 0, False, grid)
    frozen = place_frozen(make_frozen(target.params, D2T if config.trims_vocabulary else None, True), grid)
    pairs = jax.device_get(evaluate(state.params, frozen, place_batch(batch, grid)))
    found = {name: float(a / max(b, 1e-9)) for name, (a, b) in pairs.items()}
    want.pop("grad_norm")
    assert found == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_weights_can_be_gathered_anew_in_each_pass(target: Target) -> None:
    """The same update; the program holds a layer's weights back until its turn comes."""
    batch, config = host_batch(), drafter_config(SHAPE, target.config)
    grid = make_mesh(MeshShape(1, 2, 1), jax.devices()[:2])
    options: dict[str, Any] = dict(num_anchors=6, seed=0, ema=0.0, compute_dtype=jnp.float32, micro_batches=2)
    optimizer = keep_gradients()
    frozen = place_frozen(make_frozen(target.params, D2T, True), grid)
    grads, barriers = [], []
    for regather in (False, True):
        step = make_step(config, FULL, optimizer, grid, target=target.config, regather=regather, **options)
        arguments = frozen, place_batch(batch, grid, 2), jnp.int32(0)
        start = init_state(config, optimizer, 0, False, grid)
        barriers.append(step.lower(start, *arguments).as_text().count("optimization_barrier"))
        grads.append(jax.device_get(step(start, *arguments)[0].opt_state))
    assert barriers[1] - barriers[0] == target.config.num_layers
    close(grads[1], grads[0])


def test_rows_of_a_process_cover_the_batch() -> None:
    grid = make_mesh(MeshShape(2, 2, 2))
    assert addressable_rows(grid, 8, 2) == list(range(8))
    some = jax.sharding.Mesh(grid.devices[:1], grid.axis_names)
    assert addressable_rows(some, 4) == [0, 1, 2, 3]
