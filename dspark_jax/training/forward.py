"""The drafter's teacher-forced forward pass over many blocks at once (section 3, training).

A block anchored at position a sees context features strictly before a and its own slots, nothing else. Anchors A of N
sequences become N * A * K packed rows; the context part of the attention is bounded by the anchor, the block part is
local, and both share one softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.drafters.backbone import context_features, project_kv, run_block
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.heads import teacher_forced_vectors
from dspark_jax.models.layers import rope_tables
from dspark_jax.training.anchors import BlockTargets

Array = jax.Array
Params = dict[str, Any]
_MASKED = -1e30


class BlockStates(NamedTuple):
    """Per-slot states of all blocks, float32: `hidden [D, N * A * K]`, `vectors [r, N * A * K]` (r = 0: no head)."""

    hidden: Array
    vectors: Array


def block_forward(
    params: Params,
    embed: Array,
    config: DrafterConfig,
    features: Array,
    anchors: Array,
    keep: Array,
    targets: BlockTargets,
) -> BlockStates:
    """Runs the backbone and the sequential head's recurrence over all blocks.

    Args:
        params: trainable parameters in the compute dtype. embed: the target's embedding `[V, D]`.
        features: the target's captured layers `[N, T, m * D]`.
        anchors: int32 `[N, A]`. keep: bool `[N, A]`; dropped blocks see nothing, and their rows are meaningless.
        targets: previous tokens and labels of each slot.
    """
    sequences, length = features.shape[:2]
    blocks, slots = anchors.shape[1], config.block_size
    context = context_features(params, config, features.reshape(sequences * length, -1).T)  # [D, N * T]
    context_tables = rope_tables(config.rope, config.head_dim, jnp.tile(jnp.arange(length), sequences))
    first = jnp.where(keep, targets.prev_ids[..., 0], config.mask_token_id)
    masks = jnp.full((sequences, blocks, slots - 1), config.mask_token_id, first.dtype)
    ids = jnp.concatenate([first[..., None], masks], axis=2).reshape(-1)
    x = jnp.take(embed, ids, axis=0).T.astype(jnp.float32)  # [D, N * A * K]
    visible = (jnp.arange(length) < anchors[..., None]) & keep[..., None]  # [N, A, T]

    dtype = params["fc"].dtype

    def attend_with(layer: Params):
        def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            context_kv = project_kv(layer, config, context, context_tables)
            return block_attention(q, k, v, *context_kv, visible, keep, config.head_dim**-0.5, dtype), None

        return attend

    positions = (anchors[..., None] + jnp.arange(slots)).reshape(-1)
    hidden, _ = run_block(params, config, x, positions, [attend_with(layer) for layer in params["layers"]])
    if config.markov_kind == "none":
        return BlockStates(hidden, jnp.zeros((0, hidden.shape[1])))
    previous = targets.prev_ids.reshape(-1, slots)  # [N * A, K]
    vectors = teacher_forced_vectors(params, config, previous, hidden.reshape(-1, *previous.shape))
    return BlockStates(hidden, vectors.reshape(vectors.shape[0], -1))


def block_attention(
    q: Array,
    k: Array,
    v: Array,
    context_k: Array,
    context_v: Array,
    visible: Array,
    keep: Array,
    scale: float,
    dtype: DTypeLike,
) -> Array:
    """Attention of N x A blocks of K slots to their sequence's context and to themselves.

    Args:
        q: `[G, Q, hd, N * A * K]`. k, v: `[G, hd, N * A * K]`. context_k, context_v: `[G, hd, N * T]`.
        visible: bool `[N, A, T]`, context that each block sees. keep: bool `[N, A]`; dropped blocks get zeros.
        scale: multiplies the scores. dtype: of the products' operands; sums and softmax are float32.

    Returns:
        float32 `[G, Q, hd, N * A * K]`.
    """
    sequences, blocks, length = visible.shape

    def split(x: Array, *tail: int) -> Array:
        return x.astype(dtype).reshape(*x.shape[:-1], sequences, *tail)

    def product(spec: str, x: Array, y: Array) -> Array:
        return jnp.einsum(spec, x.astype(dtype), y, preferred_element_type=jnp.float32)

    q = split(q * scale, blocks, -1)  # [G, Q, hd, N, A, K]
    k, v = split(k, blocks, -1), split(v, blocks, -1)  # [G, hd, N, A, K]
    context_k, context_v = split(context_k, length), split(context_v, length)  # [G, hd, N, T]
    far = product("gqhnak,ghnt->ngqakt", q, context_k)  # scores of the context
    near = product("gqhnak,ghnas->ngqaks", q, k)  # scores of the block itself
    far = jnp.where(visible[:, None, None, :, None], far, _MASKED)
    peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(far, -1), jnp.max(near, -1)))[..., None]
    far, near = jnp.exp(far - peak), jnp.exp(near - peak)
    total = jnp.sum(far, -1) + jnp.sum(near, -1)  # [N, G, Q, A, K]
    out = product("ngqakt,ghnt->ngqahk", far, context_v) + product("ngqaks,ghnas->ngqahk", near, v)
    out = jnp.where(keep[:, None, None, :, None, None], out / total[..., None, :], 0.0)
    return jnp.transpose(out, (1, 2, 4, 0, 3, 5)).reshape(*q.shape[:3], -1)
