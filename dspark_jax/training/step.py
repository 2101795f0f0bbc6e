"""One training step as one compiled program: anchors, hidden states, losses, gradients, clipping, AdamW, the average.

The state goes in and comes out; its buffers are donated. Where everything lies on the mesh is said by `sharding`; the
same program runs on one device and on a pod. A batch may be split into M micro-batches that run one after the other:
denominators are those of the whole batch, and gradients add up in float32, so the split does not change the update.
Anchors depend on (seed, epoch, sample) alone. Letters: M micro-batches, N sequences of them all, T tokens, A anchors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dspark_jax import sharding
from dspark_jax.data.pipeline import HostBatch
from dspark_jax.data.quantized import Quantized, dequantize
from dspark_jax.drafters.interface import init_params
from dspark_jax.models import transformer
from dspark_jax.models.config import TransformerConfig
from dspark_jax.training.anchors import document_positions
from dspark_jax.training.losses import Batch, LossConfig, target_normalizer
from dspark_jax.training.objectives import TrainableConfig, check_loss, drafter_loss, draw, loss_counts
from dspark_jax.training.optimizer import average_weights, global_norm

Params = dict[str, Any]
Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count)
DeviceBatch = Any  # a `HostBatch` whose fields are jax arrays [M, N / M, ...]


class TrainState(NamedTuple):
    """All that training changes.

    Attributes:
        params: float32 master weights of the drafter's trainable part. opt_state: the optimiser's moments.
        ema: float32 average of the weights, or None. step: int32 [], updates made.
    """

    params: Params
    opt_state: optax.OptState
    ema: Params | None
    step: jax.Array

    @property
    def best(self) -> Params:
        """The weights to use: the average where there is one."""
        return self.params if self.ema is None else self.ema


class States(NamedTuple):
    """The target's hidden states of a batch, as a cache takes them.

    Attributes:
        features: [M, N / M, T, m * D]. final: [M, N / M, T, D], normed. normalizer: float32 [M, N / M, T].
    """

    features: jax.Array
    final: jax.Array
    normalizer: jax.Array


class TrainStep:
    """A compiled step on a mesh."""

    def __init__(self, function: Callable, mesh: Mesh, **options: Any) -> None:
        """`function` is jitted with `options`, and traced with `mesh` in context."""
        self.mesh = mesh
        self._jitted = jax.jit(function, **options)

    def __call__(self, *args: Any) -> Any:
        """Runs the step; see what made it for arguments and result."""
        with jax.set_mesh(self.mesh):
            return self._jitted(*args)

    def lower(self, *args: Any) -> Any:
        """The lowered program for concrete or abstract arguments; `.compile()` it."""
        with jax.set_mesh(self.mesh):
            return self._jitted.lower(*args)


def _fresh(
    config: TrainableConfig, optimizer: optax.GradientTransformation, seed: int, ema: bool
) -> Callable[[Params | None], TrainState]:
    def make(params: Params | None) -> TrainState:
        if params is None:
            params = init_params(config, jax.random.key(seed, impl="threefry2x32"), jnp.float32)
        average = jax.tree.map(jnp.copy, params) if ema else None
        return TrainState(params, optimizer.init(params), average, jnp.zeros((), jnp.int32))

    return make


def abstract_state(
    config: TrainableConfig, optimizer: optax.GradientTransformation, ema: bool, mesh: Mesh
) -> TrainState:
    """The state's shapes, dtypes and shardings."""
    shapes = jax.eval_shape(_fresh(config, optimizer, 0, ema), None)
    return sharding.abstract(shapes, sharding.shardings(shapes, mesh))


def init_state(
    config: TrainableConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    ema: bool,
    mesh: Mesh,
    params: Params | None = None,
) -> TrainState:
    """A fresh state on the mesh: `params` or random weights of `seed`, zero moments, an average (if wanted) that starts
    there. No device ever holds more than its part, and the weights do not depend on the mesh.
    """
    make = _fresh(config, optimizer, seed, ema)
    places = sharding.shardings(jax.eval_shape(make, None), mesh)
    if params is not None:
        params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
        params = sharding.put(params, places.params)
    return jax.jit(make, out_shardings=places)(params)


def make_frozen(target: Params, d2t: Any | None, online: bool) -> Params:
    """What a step reads and never changes: the target, whole where it runs in the step, else its embedding and head.

    Args:
        target: the target's parameters. d2t: int32 [Vd] offsets of a reduced vocabulary, or None.
    """
    parts = target if online else {name: target[name] for name in ("embed", "head") if name in target}
    return {"target": parts} | ({} if d2t is None else {"d2t": jnp.asarray(d2t, jnp.int32)})


def place_frozen(frozen: Params, mesh: Mesh) -> Params:
    """`make_frozen`'s result on the mesh, cut by the table of `sharding`."""
    return sharding.put(frozen, sharding.shardings(frozen, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where a device batch [M, N / M, ...] lies: the sequences of each micro-batch split over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(None, sharding.RULES["batch"]))


def place_batch(batch: HostBatch, mesh: Mesh, micro_batches: int = 1) -> DeviceBatch:
    """A batch of N sequences on the devices: row r becomes sequence r % (N / M) of micro-batch r // (N / M).

    In runs of several processes each gives the rows of its own devices (`addressable_rows`); others are not looked at.
    """
    where = batch_sharding(mesh)
    size = len(batch.input_ids) // micro_batches
    split = jax.tree.map(lambda x: np.asarray(x).reshape(micro_batches, size, *x.shape[1:]), batch)
    return sharding.put(split, jax.tree.map(lambda x: where, split))


def addressable_rows(mesh: Mesh, batch_size: int, micro_batches: int = 1) -> list[int]:
    """Rows of a batch that this process's devices need, ascending."""
    per_pass = batch_size // micro_batches
    pieces = batch_sharding(mesh).addressable_devices_indices_map((micro_batches, per_pass)).values()
    inner = sorted({j for piece in pieces for j in range(*piece[1].indices(per_pass))})  # type: ignore[index]
    return [number * per_pass + j for number in range(micro_batches) for j in inner]


def make_step(
    config: TrainableConfig,
    loss: LossConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    num_anchors: int,
    seed: int,
    ema: float,
    compute_dtype: DTypeLike,
    target: TransformerConfig | None = None,
    micro_batches: int = 1,
    keep_states: bool = False,
    remat: bool = False,
    regather: bool = False,
) -> TrainStep:
    """Compile-once training step.

    Args:
        config: the drafter's. loss: weights of the terms. optimizer: from `make_optimizer`. mesh: from `make_mesh`.
        num_anchors: A. seed: of the anchors. ema: decay of the average, 0 for none. compute_dtype: of the products.
        target: the target's config where its hidden states are computed in the step; then the batch has no features.
        micro_batches: M. keep_states: also return the hidden states, to put them into a cache (needs `target`).
        remat: keep less of the drafter's forward pass, and compute it again in the backward pass.
        regather: bring the target's weights together anew in each micro-batch, a layer at a time, in place of once for
            all of them: less memory, more communication.

    Returns:
        `step(state, frozen, batch, epoch) -> (state, metrics)`, or `(state, metrics, States)`. The old state is
        consumed. `frozen` is from `place_frozen`, `batch` from `place_batch`, `epoch` int32 []. Metrics are pairs (sum,
        count), to be added up over steps and divided; `grad_norm` is among them.

    Raises:
        ValueError: a weight of a loss term that this kind of drafter does not have; states to keep without a target.
    """
    check_loss(config, loss)
    if keep_states and target is None:
        raise ValueError("keep_states: only states that are computed in the step can be kept, give the target's config")

    def step(state: TrainState, frozen: Params, batch: DeviceBatch, epoch: jax.Array) -> tuple[Any, ...]:
        shared = shared_parts(frozen, compute_dtype)
        drawn, counts = _drawn(config, loss, shared, batch, seed, epoch, num_anchors)

        def one(batch: DeviceBatch, drawn: tuple[jax.Array, ...]) -> tuple[Any, ...]:
            inputs = jax.lax.stop_gradient(_inputs(config, target, frozen, batch, compute_dtype, regather))

            def objective(params: Params) -> tuple[jax.Array, Metrics]:
                return drafter_loss(params, shared, config, loss, inputs, drawn, compute_dtype, counts, remat)

            (total, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
            kept = _kept(shared, config, inputs) if keep_states else None
            return sharding.stored(grads), {"total": (total, jnp.float32(1)), **metrics}, kept

        grads, metrics, kept = _over_passes(one, batch, drawn)
        metrics["total"] = (metrics["total"][0], jnp.float32(1))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = average_weights(state.ema, params, step=state.step, decay=ema) if ema else None
        metrics |= {"grad_norm": (global_norm(grads), jnp.float32(1))}
        new = TrainState(params, opt_state, average, state.step + 1)
        return (new, metrics, kept) if keep_states else (new, metrics)

    places = jax.tree.map(lambda x: x.sharding, abstract_state(config, optimizer, ema > 0, mesh))
    outputs: tuple[Any, ...] = (places, sharding.replicated(mesh))
    if keep_states:
        outputs += (batch_sharding(mesh),)
    return TrainStep(step, mesh, donate_argnums=0, out_shardings=outputs)


def make_eval_step(
    config: TrainableConfig,
    loss: LossConfig,
    mesh: Mesh,
    *,
    num_anchors: int,
    seed: int,
    compute_dtype: DTypeLike,
    target: TransformerConfig | None = None,
) -> TrainStep:
    """The losses of a batch without an update: `evaluate(params, frozen, batch) -> metrics`, pairs (sum, count).

    Arguments as `make_step`; anchors are those of epoch 0.
    """
    check_loss(config, loss)

    def evaluate(params: Params, frozen: Params, batch: DeviceBatch) -> Metrics:
        shared = shared_parts(frozen, compute_dtype)
        drawn, counts = _drawn(config, loss, shared, batch, seed, jnp.int32(0), num_anchors)

        def one(batch: DeviceBatch, drawn: tuple[jax.Array, ...]) -> tuple[Any, ...]:
            inputs = _inputs(config, target, frozen, batch, compute_dtype)
            total, metrics = drafter_loss(params, shared, config, loss, inputs, drawn, compute_dtype, counts)
            return (), {"total": (total, jnp.float32(1)), **metrics}, None

        metrics = _over_passes(one, batch, drawn)[1]
        return metrics | {"total": (metrics["total"][0], jnp.float32(1))}

    return TrainStep(evaluate, mesh, out_shardings=sharding.replicated(mesh))


def shared_parts(frozen: Params, dtype: DTypeLike) -> Params:
    """What the losses read of `frozen`: `embed` and `head` (brought together along `fsdp`, in `dtype`), and `d2t`."""
    target = frozen["target"]
    parts = {"embed": target["embed"], "head": transformer.head_weight(target)}
    parts = sharding.gathered(jax.tree.map(lambda x: x.astype(dtype), parts))
    if "head" not in target:
        parts["head"] = parts["embed"]
    return parts | ({"d2t": frozen["d2t"]} if "d2t" in frozen else {})


def _drawn(
    config: TrainableConfig,
    loss: LossConfig,
    shared: Params,
    batch: DeviceBatch,
    seed: int,
    epoch: jax.Array,
    num_anchors: int,
) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """Anchors of all micro-batches `[M, N / M, A]`, and the denominators of the whole batch."""

    def one(batch: DeviceBatch) -> tuple[Any, ...]:
        drawn = draw(config, seed, epoch, batch.sample_ids, batch.loss_mask, num_anchors, batch.segments)
        arguments = batch.input_ids, batch.loss_mask, drawn, batch.segments
        return drawn, loss_counts(shared, config, loss, *arguments)

    drawn, counts = jax.vmap(one)(batch._replace(features=None, final=None, normalizer=None))
    return drawn, jax.tree.map(lambda x: jnp.sum(x, axis=0), counts)


def _inputs(
    config: TrainableConfig,
    target: TransformerConfig | None,
    frozen: Params,
    batch: DeviceBatch,
    dtype: DTypeLike,
    regather: bool = False,
) -> Batch:
    """One micro-batch with its hidden states: those that came with it, or the target's forward pass."""
    ids, segments = batch.input_ids, batch.segments
    if target is None:
        features, final = (
            dequantize(part, dtype) if isinstance(part, Quantized) else part for part in (batch.features, batch.final)
        )
        return Batch(ids, batch.loss_mask, features, final, batch.normalizer, segments)
    params = jax.tree.map(lambda x: x.astype(dtype), frozen["target"])
    positions = None if segments is None else document_positions(segments)
    hidden = transformer.forward(params, target, ids, config.target_layer_ids, segments, positions, regather)

    def rows(x: jax.Array) -> jax.Array:  # [W, N * T] -> [N, T, W]
        return sharding.constrain(x.astype(dtype).T.reshape(*ids.shape, -1), "batch", None, None)

    return Batch(ids, batch.loss_mask, rows(hidden.features), rows(hidden.final), None, segments)


def _kept(shared: Params, config: TrainableConfig, inputs: Batch) -> States:
    """The hidden states of a micro-batch with their normaliser."""
    final = inputs.final
    flat = final.reshape(-1, final.shape[-1]).T
    normalizer = target_normalizer(shared["head"], flat, config.final_softcap, final.shape[0])
    return States(inputs.features, final, normalizer.reshape(final.shape[:2]))


def _over_passes(one: Callable, batch: DeviceBatch, drawn: tuple[jax.Array, ...]) -> tuple[Any, Metrics, Any]:
    """`one` on each micro-batch: sums of its first two results (in float32), and the third ones stacked."""
    first = jax.tree.map(lambda x: x[0], (batch, drawn))
    if batch.input_ids.shape[0] == 1:
        sums, metrics, kept = one(*first)
        return sums, metrics, jax.tree.map(lambda x: x[None], kept)
    shapes = jax.eval_shape(one, *first)[:2]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    zeros = sharding.stored(zeros[0]), zeros[1]

    def body(carry: tuple[Any, Metrics], part: tuple[Any, ...]) -> tuple[Any, Any]:
        *new, kept = one(*part)
        return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), carry, tuple(new)), kept

    (sums, metrics), kept = jax.lax.scan(body, zeros, (batch, drawn))
    return sums, metrics, kept
