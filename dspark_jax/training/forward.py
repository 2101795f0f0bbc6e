"""The drafter's teacher-forced forward pass over many blocks at once (section 3, training).

A block anchored at position a sees context features of its document strictly before a and its own slots, nothing else.
Anchors A of N sequences become N * A * K packed rows, sequence-major.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.drafters.backbone import block_layer, context_features, project_kv
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import prediction_slots
from dspark_jax.drafters.heads import teacher_forced_vectors
from dspark_jax.models.layers import embed_rows, linear_rows, rms_norm, rope_tables
from dspark_jax.training.anchors import BlockTargets, document_positions, document_starts
from dspark_jax.training.block_attention import block_attention

Array = jax.Array
Params = dict[str, Any]


class BlockStates(NamedTuple):
    """Per-slot states of all blocks, float32: `hidden [D, N * A * K]`, `vectors [r, N * A * K]` (r = 0: no head)."""

    hidden: Array
    vectors: Array


class Places(NamedTuple):
    """Where context and blocks stand, int32: `context [N, T]` and `blocks [N, A]`, positions in their documents, and
    `first [N, A]`, the index in its row at which a block's document starts."""

    context: Array
    blocks: Array
    first: Array


def places(anchors: Array, length: int, segments: Array | None) -> Places:
    """Positions of `length` = T tokens a row and of the blocks at `anchors [N, A]`.

    `segments`: int `[N, T]`, the document of each token; None: a row is one document.
    """
    if segments is None:
        context = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (anchors.shape[0], length))
        return Places(context, anchors, jnp.zeros_like(anchors))
    context, starts = document_positions(segments), document_starts(segments)
    return Places(context, *(jnp.take_along_axis(x, anchors, axis=1) for x in (context, starts)))


def block_forward(
    params: Params,
    embed: Array,
    config: DrafterConfig,
    features: Array,
    anchors: Array,
    keep: Array,
    targets: BlockTargets,
    segments: Array | None = None,
    *,
    remat: bool = False,
) -> BlockStates:
    """Runs the backbone and the sequential head's recurrence over all blocks.

    Args:
        params: trainable parameters in the compute dtype. embed: the target's embedding `[V, D]`.
        features: the target's captured layers `[N, T, m * D]`.
        anchors: int32 `[N, A]`. keep: bool `[N, A]`; dropped blocks see nothing, and their rows are meaningless.
        targets: previous tokens and labels of each slot.
        segments: int32 `[N, T]`, the document of each token; blocks see their own alone, and positions count from its
            start. None: a row is one document.
        remat: the backward pass computes each layer anew, and nothing but its input is kept.
    """
    sequences, length = features.shape[:2]
    context = context_features(params, config, features.reshape(sequences * length, -1), linear_rows)  # [D, N * T]
    place = places(anchors, length, segments)
    slots = (place.blocks[..., None] + jnp.arange(config.block_slots)).reshape(-1)  # [N * A * slots]
    tables, context_tables = (rope_tables(config.rope, config.head_dim, x.reshape(-1)) for x in (slots, place.context))

    def run(layer: Params, x: Array, context: Array) -> Array:
        def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            kv = project_kv(layer, config, context, context_tables)
            where = place.first, anchors, keep
            return block_attention(q, k, v, *kv, *where, config.score_scale, params["fc"].dtype), None

        return block_layer(layer, config, x, tables, attend)[0]

    if remat:
        run = jax.checkpoint(run)
    x = embed_rows(embed, _block_ids(config, keep, targets), config.traits.scales_embeddings)  # [D, N * A * slots]
    for layer in params["layers"]:
        x = run(layer, x, context)
    hidden = rms_norm(x, params["norm"], config.rms_norm_eps, config.traits.norm_offset)
    hidden = prediction_slots(hidden, config)  # [D, N * A * K]
    if config.markov_kind == "none":
        return BlockStates(hidden, jnp.zeros((0, hidden.shape[1])))
    previous = targets.prev_ids.reshape(-1, config.block_size)  # [N * A, K]
    vectors = teacher_forced_vectors(params, config, previous, hidden.reshape(-1, *previous.shape))
    return BlockStates(hidden, vectors.reshape(vectors.shape[0], -1))


def _block_ids(config: DrafterConfig, keep: Array, targets: BlockTargets) -> Array:
    """What the slots read, `[N * A * slots]`: the anchor's token, then masks; dropped blocks masks alone."""
    first = jnp.where(keep, targets.prev_ids[..., 0], config.mask_token_id)
    masks = jnp.full((*keep.shape, config.block_slots - 1), config.mask_token_id, first.dtype)
    return jnp.concatenate([first[..., None], masks], axis=2).reshape(-1)
