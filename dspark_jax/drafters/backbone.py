"""The parallel block backbone with injected context features (section 3; DFlash's KV injection).

Context features H_ctx = RMSNorm(W_c [H(l1); ...; H(lm)]) enter every layer as keys and values only; queries come from
the block alone. The slots of a block see each other in both directions and all context before the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.models.attention import Packing, cached_attention, write_rows
from dspark_jax.models.cache import LayerCache, init_cache
from dspark_jax.models.layers import head_norm, linear, rms_norm, rope_tables, rotate
from dspark_jax.models.transformer import add_attention, add_mlp, normed_values
from dspark_jax.sharding import constrain, gathered

Array = jax.Array
Params = dict[str, Any]


def context_features(
    params: Params, config: DrafterConfig, features: Array, product: Callable[[Array, Array], Array] = linear
) -> Array:
    """H_ctx, float32 `[D, B]`, from the target's captured layers `features`.

    Args:
        features: `[m * D, B]`, or `[B, m * D]` with `linear_rows` as the `product`.
    """
    mixed = constrain(product(gathered({"fc": params["fc"]})["fc"], features), None, "batch")
    return rms_norm(mixed, params["hidden_norm"], config.rms_norm_eps, config.traits.norm_offset)


def project_kv(layer: Params, config: DrafterConfig, x: Array, tables: tuple[Array, Array]) -> tuple[Array, Array]:
    """Keys (normed, rotated) and values `[G, hd, B]` of `x [D, B]`: context features or the normed block stream."""
    kv = linear(gathered({"kv": layer["kv"]})["kv"], x)  # [G, 2, hd, B]; [G, 1, hd, B] where keys and values are shared
    kv = constrain(kv, "heads", None, None, "batch")
    k, v = kv[:, 0], kv[:, -1]
    if config.qk_norm:
        k = head_norm(k, layer["k_norm"], config.rms_norm_eps, config.traits.norm_offset)
    return rotate(k, tables), normed_values(v, config.traits, config.rms_norm_eps, layer["kv"].dtype)


def block_layer(
    layer: Params,
    config: DrafterConfig,
    x: Array,
    tables: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], tuple[Array, Any]],
) -> tuple[Array, Any]:
    """One layer on the block stream `x [D, B]`; `attend(q, k, v)` adds the context's keys and values to the block's."""
    eps, traits, layer = config.rms_norm_eps, config.traits, gathered(layer)
    normed = rms_norm(x, layer["input_norm"], eps, traits.norm_offset)
    q = constrain(linear(layer["q"], normed), "heads", None, None, "batch")  # [G, Q, hd, B]
    if config.qk_norm:
        q = head_norm(q, layer["q_norm"], eps, traits.norm_offset)
    k, v = project_kv(layer, config, normed, tables)
    mixed, extra = attend(rotate(q, tables), k, v)
    x = constrain(add_attention(layer, traits, eps, x, mixed), None, "batch")
    return constrain(add_mlp(layer, traits, eps, x), None, "batch"), extra


def run_block(
    params: Params, config: DrafterConfig, x: Array, positions: Array, attends: Sequence[Callable]
) -> tuple[Array, list]:
    """All layers on block embeddings `x [D, B]` at `positions [B]`: normed hidden states `[D, B]`, and the extras."""
    tables = rope_tables(config.rope, config.head_dim, positions)
    extras = []
    for layer, attend in zip(params["layers"], attends, strict=True):
        x, extra = block_layer(layer, config, x, tables, attend)
        extras.append(extra)
    return rms_norm(x, params["norm"], config.rms_norm_eps, config.traits.norm_offset), extras


def init_draft_cache(config: DrafterConfig, requests: int, capacity: int, dtype) -> tuple[LayerCache, ...]:
    """Empty context caches for `requests` requests of up to `capacity` tokens."""
    return init_cache(config.num_layers, requests, config.num_kv_heads, capacity, config.head_dim, dtype)


def ingest(
    params: Params,
    config: DrafterConfig,
    cache: tuple[LayerCache, ...],
    features: Array,
    start: Array,
    packing: Packing,
) -> tuple[LayerCache, ...]:
    """Takes the target's features `[m * D, B]` of packed rows into the context cache, from `start [R]` on."""
    context = context_features(params, config, features)
    tables = rope_tables(config.rope, config.head_dim, start[packing.request] + packing.offset)
    return tuple(
        write_rows(layer_cache, *project_kv(layer, config, context, tables), start, packing)
        for layer, layer_cache in zip(params["layers"], cache, strict=True)
    )


def block_states(
    params: Params,
    config: DrafterConfig,
    cache: tuple[LayerCache, ...],
    x: Array,
    start: Array,
    packing: Packing,
) -> tuple[Array, tuple[LayerCache, ...]]:
    """Hidden states of the blocks at decoding time.

    The block's own keys and values are put into the cache behind the context, at positions that the next commit
    overwrites; so the context is never copied.

    Args:
        x: block embeddings `[D, R * K]`. start: int32 `[R]`, anchor positions. packing: the dense one of R x K.

    Returns:
        Normed hidden states `[D, R * K]` and the cache (its context part is unchanged).
    """
    scale = config.score_scale
    attends = [
        lambda q, k, v, layer_cache=c: cached_attention(q, k, v, layer_cache, start, packing, scale, causal=False)
        for c in cache
    ]
    positions = start[packing.request] + packing.offset
    hidden, caches = run_block(params, config, x, positions, attends)
    return hidden, tuple(caches)
