"""The drafter's teacher-forced forward pass over many blocks at once (section 3, training).

A block anchored at position a sees context features strictly before a and its own slots, nothing else. Anchors A of N
sequences become N * A * K packed rows; the context part of the attention is bounded by the anchor, the block part is
local, and both share one softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.drafters.backbone import context_features, project_kv, run_block
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import prediction_slots
from dspark_jax.drafters.heads import teacher_forced_vectors
from dspark_jax.models.layers import embed_rows, linear_rows, rope_tables, row_major
from dspark_jax.models.platform import for_cpu
from dspark_jax.training.anchors import BlockTargets

Array = jax.Array
Params = dict[str, Any]
_MASKED = -1e30
_GROUP = 8  # blocks whose slots share a product


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
    blocks, slots = anchors.shape[1], config.block_slots
    context = context_features(params, config, features.reshape(sequences * length, -1), linear_rows)  # [D, N * T]
    context_tables = rope_tables(config.rope, config.head_dim, jnp.tile(jnp.arange(length), sequences))
    first = jnp.where(keep, targets.prev_ids[..., 0], config.mask_token_id)
    masks = jnp.full((sequences, blocks, slots - 1), config.mask_token_id, first.dtype)
    ids = jnp.concatenate([first[..., None], masks], axis=2).reshape(-1)
    x = embed_rows(embed, ids, config.traits.scales_embeddings)  # [D, N * A * slots]
    visible = (jnp.arange(length) < anchors[..., None]) & keep[..., None]  # [N, A, T]

    dtype = params["fc"].dtype

    def attend_with(layer: Params):
        def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            context_kv = project_kv(layer, config, context, context_tables)
            return block_attention(q, k, v, *context_kv, visible, keep, config.score_scale, dtype), None

        return attend

    positions = (anchors[..., None] + jnp.arange(slots)).reshape(-1)
    hidden, _ = run_block(params, config, x, positions, [attend_with(layer) for layer in params["layers"]])
    hidden = prediction_slots(hidden, config)  # [D, N * A * K]
    if config.markov_kind == "none":
        return BlockStates(hidden, jnp.zeros((0, hidden.shape[1])))
    previous = targets.prev_ids.reshape(-1, config.block_size)  # [N * A, K]
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
    slots = q.shape[-1] // (sequences * blocks)
    size = min(_GROUP, blocks)  # b blocks a group, P groups
    missing = -blocks % size

    def grouped(x: Array) -> Array:  # [..., N * A * K] -> [..., N, P, b * K]
        x = x.astype(dtype).reshape(*x.shape[:-1], sequences, blocks * slots)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing * slots)])
        return x.reshape(*x.shape[:-1], -1, size * slots)

    def by_sequence(x: Array) -> Array:  # [G, hd, N * T] -> [N, G, hd, T]
        return jnp.moveaxis(x.astype(dtype).reshape(*x.shape[:-1], sequences, length), -2, 0)

    queries = jnp.transpose(grouped(q * scale), (3, 0, 2, 4, 1, 5))  # [N, G, hd, P, Q, b * K]
    own_k = jnp.transpose(grouped(k), (2, 0, 3, 4, 1))  # [N, G, P, b * K, hd]
    own_v = jnp.transpose(grouped(v), (2, 0, 3, 1, 4))  # [N, G, P, hd, b * K]
    context = jnp.swapaxes(by_sequence(context_k), 2, 3), by_sequence(context_v)
    seen = jnp.repeat(jnp.pad(visible, ((0, 0), (0, missing), (0, 0))), slots, axis=1)  # [N, P * b * K, T]
    seen = jnp.swapaxes(seen, 1, 2).reshape(sequences, length, -1, 1, size * slots)
    seen = jnp.broadcast_to(seen, (*seen.shape[:3], q.shape[1], seen.shape[4]))  # [N, T, P, Q, b * K]
    queries_flat = queries.reshape(*queries.shape[:3], -1)
    out = _attention(queries_flat, own_k, own_v, *context, seen.reshape(sequences, length, -1), size)
    out = jnp.transpose(out.reshape(queries.shape), (1, 4, 2, 0, 3, 5))  # [G, Q, hd, N, P, b * K]
    out = out.reshape(*out.shape[:4], blocks + missing, slots)[:, :, :, :, :blocks]
    return jnp.where(keep[..., None], out, 0.0).reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(q: Array, k: Array, v: Array, context_k: Array, context_v: Array, seen: Array, size: int) -> Array:
    """Attention of groups of `size` blocks; on CPUs a sequence at a time, so that the scores stay in caches.

    The scores are `[keys, queries]`, and made again in the backward pass: so every product of both passes contracts the
    last axis of its left operand (see `row_major`). A block's own K keys are too few for matrix units; those of a group
    share a product, and each query is masked to its block.

    Args:
        q: `[N, G, hd, P * R]`, scaled, R = Q * b * K queries of a group. k: `[N, G, P, b * K, hd]`.
        v: `[N, G, P, hd, b * K]`. context_k: `[N, G, T, hd]`. context_v: `[N, G, hd, T]`. All of one dtype.
        seen: bool `[N, T, P * R]`, context that each query sees. size: b.

    Returns:
        float32 `[N, G, hd, P * R]`.
    """
    return _attention_forward(q, k, v, context_k, context_v, seen, size)[0]


def _each_sequence(attend: Callable, parts: tuple) -> tuple:
    """`attend` on the parts of each sequence: one after the other on CPUs, together where sequences are spread out."""
    return jax.lax.map(attend, parts) if for_cpu() else jax.vmap(attend)(parts)


def _attention_forward(*args: Any) -> tuple[Array, tuple]:
    *inputs, size = args

    def attend(parts: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, context_k, context_v, seen = parts
        groups = k.shape[1]
        far, near = _scores(q, k, context_k, seen, size)
        peak = jnp.maximum(jnp.max(far, -2), jnp.max(near, -2).reshape(q.shape[0], -1))[:, None]  # [G, 1, P * R]
        far, near = jnp.exp(far - peak).astype(q.dtype), jnp.exp(near - _split(peak, groups)).astype(q.dtype)
        out = _product(_with_ones(context_v), far, -2) + _join(_product(_with_ones(v), near, -2))  # [G, hd + 1, P * R]
        return out[:, :-1] / out[:, -1:], peak + jnp.log(out[:, -1:])

    out, normalizer = _each_sequence(attend, tuple(inputs))
    return out, (tuple(inputs), out, normalizer)


def _attention_backward(size: int, saved: tuple, cotangent: Array) -> tuple:
    def attend(parts: tuple) -> tuple[Array, ...]:
        (q, k, v, context_k, context_v, seen), out, normalizer, cotangent = parts
        groups, dtype = k.shape[1], q.dtype
        far, near = _scores(q, k, context_k, seen, size)
        far = jnp.exp(far - normalizer).astype(dtype)
        near = jnp.exp(near - _split(normalizer, groups)).astype(dtype)
        mean = jnp.sum(out * cotangent, axis=1, keepdims=True)  # of the weights' cotangents, [G, 1, P * R]
        cotangent = row_major(cotangent.astype(dtype))
        own_q, own_cotangent = _split(q, groups), _split(cotangent, groups)  # [G, P, hd, R]
        dfar = (far * (_product(_transposed(context_v), cotangent, -2) - mean)).astype(dtype)
        dnear = (near * (_product(_transposed(v), own_cotangent, -2) - _split(mean, groups))).astype(dtype)
        dq = _product(_transposed(context_k), dfar, -2) + _join(_product(_transposed(k), dnear, -2))
        dk, dcontext_k = _product(own_q, dnear, -1), _product(q, dfar, -1)
        dv, dcontext_v = _product(own_cotangent, near, -1), _product(cotangent, far, -1)
        grads = dq, _transposed(dk), dv, _transposed(dcontext_k), dcontext_v
        return tuple(x.astype(dtype) for x in grads)

    return (*_each_sequence(attend, (*saved, cotangent)), None)


_attention.defvjp(_attention_forward, _attention_backward)


def _scores(q: Array, k: Array, context_k: Array, seen: Array, size: int) -> tuple[Array, Array]:
    """Masked scores of one sequence: context, float32 `[G, T, P * R]`, and the groups' own slots `[G, P, b * K, R]`."""
    far = jnp.where(seen, _product(context_k, q, -2), _MASKED)
    near = _product(k, _split(q, k.shape[1]), -2)
    block = jnp.arange(k.shape[2]) // (k.shape[2] // size)  # of each slot
    same = jnp.tile(block[:, None] == block, (1, near.shape[-1] // block.size))  # [b * K, R]
    return far, jnp.where(same, near, _MASKED)


def _product(a: Array, b: Array, axis: int) -> Array:
    """Batched `a [..., m, k]` with axis `axis` of `b`, operands of one dtype, float32 out."""
    batch = tuple(range(a.ndim - 2))
    contracted = ((a.ndim - 1,), (b.ndim + axis,))
    return jax.lax.dot_general(row_major(a), b, (contracted, (batch, batch)), preferred_element_type=jnp.float32)


def _split(x: Array, groups: int) -> Array:
    """`[G, D, P * R]` -> `[G, P, D, R]`."""
    return row_major(jnp.swapaxes(x.reshape(*x.shape[:2], groups, -1), 1, 2))


def _join(x: Array) -> Array:
    """`[G, P, D, R]` -> `[G, D, P * R]`."""
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


def _transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _with_ones(values: Array) -> Array:
    """`[..., hd, S]` with a row of ones, whose product with the weights is their sum: `[..., hd + 1, S]`."""
    return jnp.concatenate([values, jnp.ones_like(values[..., :1, :])], axis=-2)
