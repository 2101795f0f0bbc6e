"""One training step as one compiled program: anchors, losses, gradients, clipping, AdamW and the weights' average.

The state goes in and comes out; its buffers are donated. Over several devices the sequences of a batch are split along
the mesh axis `data` and everything else is copied, so the compiler adds up the gradients. Anchors depend on (seed,
epoch, sample) alone, so neither the split nor a restart changes them. Letters: N sequences, T tokens, A anchors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dspark_jax.data.pipeline import HostBatch
from dspark_jax.drafters.interface import init_params
from dspark_jax.models import transformer
from dspark_jax.models.config import TransformerConfig
from dspark_jax.training.losses import Batch, LossConfig
from dspark_jax.training.objectives import TrainableConfig, check_loss, drafter_loss, draw
from dspark_jax.training.optimizer import average_weights, global_norm

Params = dict[str, Any]
Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count)
DeviceBatch = Any  # a `HostBatch` whose fields are jax arrays
Step = Callable[["TrainState", Params, DeviceBatch, jax.Array], tuple["TrainState", Metrics]]


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


def init_state(
    config: TrainableConfig, optimizer: optax.GradientTransformation, seed: int, ema: bool, params: Params | None = None
) -> TrainState:
    """A fresh state: `params` or random weights of `seed`, zero moments, an average (if wanted) that starts there."""
    params = params or init_params(config, jax.random.key(seed, impl="threefry2x32"), jnp.float32)
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(params, optimizer.init(params), average, jnp.zeros((), jnp.int32))


def data_mesh(batch_size: int, limit: int = 0) -> Mesh:
    """A mesh with the axis `data` over as many devices (at most `limit`, if not 0) as divide the batch evenly."""
    devices = jax.devices()
    count = math.gcd(batch_size, min(len(devices), limit or len(devices)))
    return Mesh(np.asarray(devices[:count]), ("data",))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """A full copy of a pytree on each device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def split(batch: HostBatch, mesh: Mesh) -> DeviceBatch:
    """A batch on the devices, its sequences split along `data`."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


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
) -> Step:
    """Compile-once training step.

    Args:
        config: the drafter's. loss: weights of the terms. optimizer: from `make_optimizer`. mesh: from `data_mesh`.
        num_anchors: A. seed: of the anchors. ema: decay of the average, 0 for none. compute_dtype: of the products.
        target: the target's config where its hidden states are computed in the step; then `frozen["target"]` holds its
            parameters and the batch has no features.

    Returns:
        `step(state, frozen, batch, epoch) -> (state, metrics)`. The old state is consumed. `frozen` is as `block_loss`
        takes it. Metrics are pairs (sum, count), to be added up over steps and divided; `grad_norm` is among them.

    Raises:
        ValueError: a weight of a loss term that this kind of drafter does not have.
    """
    check_loss(config, loss)

    def loss_inputs(frozen: Params, batch: DeviceBatch) -> Batch:
        ids = batch.input_ids
        if target is None:
            return Batch(ids, batch.loss_mask, batch.features, batch.final, batch.normalizer)
        hidden = transformer.forward(frozen["target"], target, ids, config.target_layer_ids)
        features, final = (
            part.astype(compute_dtype).T.reshape(*ids.shape, -1) for part in (hidden.features, hidden.final)
        )  # [N, T, m*D], [N, T, D]
        return Batch(ids, batch.loss_mask, features, final)

    def step(state: TrainState, frozen: Params, batch: DeviceBatch, epoch: jax.Array) -> tuple[TrainState, Metrics]:
        drawn = draw(config, seed, epoch, batch.sample_ids, batch.loss_mask, num_anchors)
        inputs = jax.lax.stop_gradient(loss_inputs(frozen, batch))
        shared = {name: part for name, part in frozen.items() if name != "target"}

        def objective(params: Params) -> tuple[jax.Array, Metrics]:
            return drafter_loss(params, shared, config, loss, inputs, drawn, compute_dtype)

        (total, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = average_weights(state.ema, params, step=state.step, decay=ema) if ema else None
        one = jnp.ones((), jnp.float32)
        metrics = {"total": (total, one), **metrics, "grad_norm": (global_norm(grads), one)}
        return TrainState(params, opt_state, average, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=NamedSharding(mesh, PartitionSpec()))
