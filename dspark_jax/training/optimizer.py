"""The optimiser: AdamW on float32 master weights, clipped by global norm, with linear warm-up and a cosine decay.

The numbers are those of the paper's training section: peak 6e-4, warm-up 4 %, weight decay 0, clip 1.0. Frozen
parameters are not in the pytree at all, so nothing here knows about freezing. An exponential moving average of the
weights is offered beside it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = Any  # a pytree of arrays


def learning_rate(step: int | jax.Array, *, peak: float, total: int, warmup_ratio: float) -> jax.Array:
    """Learning rate in force during an update, in closed form.

    With W = int(warmup_ratio * total): peak * (step + 1) / W while step < W, then
    0.5 * peak * (1 + cos(pi * (step - W) / (total - W))). So updates W - 1 and W both have the peak, the last update
    (total - 1) is just above 0, and from `total` on the rate is 0.

    Args:
        step: 0-based number of the update; an int or an integer array of any shape.
        peak: highest rate, > 0. total: number of updates, >= 1. warmup_ratio: share of warm-up, in [0, 1].

    Returns:
        float32 array of step's shape.

    Raises:
        ValueError: peak, total or warmup_ratio out of range.
    """
    if not peak > 0:
        raise ValueError(f"peak {peak}: the peak learning rate must be positive")
    if total < 1:
        raise ValueError(f"total {total}: must be at least 1 update")
    if not 0 <= warmup_ratio <= 1:
        raise ValueError(f"warmup_ratio {warmup_ratio}: must lie in [0, 1]")
    warmup = int(warmup_ratio * total)
    step = jnp.asarray(step)
    rising = (step + 1).astype(jnp.float32) / max(warmup, 1)
    left = jnp.maximum(total - step, 0).astype(jnp.float32) / max(total - warmup, 1)  # share of the decay still to come
    falling = jnp.sin(0.5 * jnp.pi * left) ** 2  # = 0.5 * (1 + cos(pi * (1 - left))), without cancellation near the end
    return jnp.float32(peak) * jnp.where(step < warmup, rising, falling)


def cosine_schedule(*, peak: float, total: int, warmup_ratio: float) -> optax.Schedule:
    """`learning_rate` as an optax schedule (update number -> rate). Arguments and errors as there."""
    learning_rate(0, peak=peak, total=total, warmup_ratio=warmup_ratio)  # refuse bad values now, not under a trace

    def schedule(step: jax.Array) -> jax.Array:
        return learning_rate(step, peak=peak, total=total, warmup_ratio=warmup_ratio)

    return schedule


def global_norm(grads: Params) -> jax.Array:
    """Euclidean norm over all leaves of a pytree, float32 []; leaves are widened to float32 before they are squared."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(grads)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares))) if squares else jnp.float32(0)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale gradients by min(1, max_norm / (norm + 1e-6)); the leaves come out in float32.

    The small constant makes the factor that of torch's clipping, which optax's own does not have.

    Raises:
        ValueError: max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm}: must be positive (None switches clipping off)")

    def update(grads: Params, state: optax.OptState, params: Params = None) -> tuple[Params, optax.OptState]:
        factor = jnp.minimum(1.0, max_norm / (global_norm(grads) + 1e-6))
        return jax.tree.map(lambda grad: grad.astype(jnp.float32) * factor, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_optimizer(
    schedule: optax.ScalarOrSchedule,
    *,
    max_norm: float | None = 1.0,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Clipping, then AdamW with decoupled weight decay, on float32 master weights.

    `update(grads, state, masters)` gives float32 steps to add with `optax.apply_updates`. Gradients may have any float
    dtype; the moments are float32. The weights of the forward pass are the masters cast to the compute dtype.

    Args:
        schedule: learning rate, a float or a function of the update number (`cosine_schedule`).
        max_norm: gradients longer than this are scaled down to it; None does not clip.
        weight_decay: pulls each master towards 0 by rate * weight_decay of itself in each update, >= 0.
        b1, b2: decay of the first and second moment. eps: added to the root of the second moment.

    Raises:
        ValueError: max_norm or weight_decay out of range; at `init`, a leaf that is not float32.
    """
    if weight_decay < 0:
        raise ValueError(f"weight_decay {weight_decay}: must not be negative")
    clip = optax.identity() if max_norm is None else clip_by_global_norm(max_norm)
    inner = optax.chain(clip, optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay))

    def init(masters: Params) -> optax.OptState:
        for path, leaf in jax.tree_util.tree_leaves_with_path(masters):
            if leaf.dtype != jnp.float32:
                name = jax.tree_util.keystr(path)
                raise ValueError(f"parameter {name} has dtype {leaf.dtype}: master weights must be float32")
        return inner.init(masters)

    def update(grads: Params, state: optax.OptState, params: Params = None) -> tuple[Params, optax.OptState]:
        return inner.update(jax.tree.map(lambda grad: grad.astype(jnp.float32), grads), state, params)

    return optax.GradientTransformation(init, update)


def average_weights(average: Params, masters: Params, *, step: int | jax.Array, decay: float) -> Params:
    """One step of an exponential moving average of the weights, in float32.

    average <- d * average + (1 - d) * masters, with d = min(decay, (1 + step) / (10 + step)): early on the average
    follows the weights quickly, so that the random start is soon forgotten.

    Args:
        average, masters: pytrees alike. step: 0-based number of the update just made. decay: in [0, 1).

    Raises:
        ValueError: decay out of range.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay {decay}: must lie in [0, 1)")
    step = jnp.asarray(step, jnp.float32)
    keep = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: keep * old + (1.0 - keep) * new.astype(jnp.float32), average, masters)
