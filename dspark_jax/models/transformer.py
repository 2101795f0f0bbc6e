"""One decoder-only transformer for every family: pure functions over a pytree of parameters.

Parameters (weights `[out, in]`, Q = H / G query heads per KV head):
    {"embed": [V, D], "layers": ({...},) * L, "final_norm": [D], "head": [V, D] unless tied}
    layer: {"input_norm": [D], "qkv": [G, Q+2, hd, D], "q_norm", "k_norm": [hd] where the family has them,
            "o": [D, G, Q, hd], "post_norm": [D], "gate_up": [2, F, D], "down": [D, F]}
Layers are separate arrays: in decoding they are read faster than slices of one stacked array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.models.attention import Packing, cached_attention, causal_attention
from dspark_jax.models.cache import LayerCache, init_cache
from dspark_jax.models.config import TransformerConfig
from dspark_jax.models.layers import gated_mlp, head_norm, linear, rms_norm, rope_tables, rotate, take_rows
from dspark_jax.models.platform import for_cpu

Array = jax.Array
Params = dict[str, Any]
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]  # q, k, v -> mixed values, and what else the layer keeps


class Hidden(NamedTuple):
    """What a forward pass leaves behind, all float32.

    Attributes:
        final: `[D, B]`, after the final norm: what the head reads.
        features: `[m * D, B]`, raw outputs of the captured layers, concatenated in order (empty without any).
    """

    final: Array
    features: Array


def embed(params: Params, ids: Array) -> Array:
    """Embeddings of `ids [B]` as float32 `[D, B]`."""
    return take_rows(params["embed"], ids)


def head_weight(params: Params) -> Array:
    """The LM head `[V, D]`: its own matrix, or the embedding where they are tied."""
    return params["head"] if "head" in params else params["embed"]


def logits(params: Params, final: Array) -> Array:
    """LM head on final-normed states `[D, B]` -> float32 `[V, B]`."""
    return linear(head_weight(params), final)


def project_qkv(
    layer: Params, config: TransformerConfig, x: Array, tables: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Queries `[G, Q, hd, B]`, keys and values `[G, hd, B]` of normed `x [D, B]`, norms and RoPE applied; float32."""
    qkv = linear(layer["qkv"], x)  # [G, Q+2, hd, B]
    q, k, v = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    if config.qk_norm:
        q = head_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = head_norm(k, layer["k_norm"], config.rms_norm_eps)
    return rotate(q, tables), rotate(k, tables), v


def decoder_layer(
    layer: Params,
    config: TransformerConfig,
    x: Array,
    tables: tuple[Array, Array],
    attend: Attend,
) -> tuple[Array, Any]:
    """One pre-norm layer on the residual stream `x [D, B]`; also returns what `attend` returned beside its output."""
    q, k, v = project_qkv(layer, config, rms_norm(x, layer["input_norm"], config.rms_norm_eps), tables)
    mixed, extra = attend(q, k, v)  # [G, Q, hd, B]
    x = x + linear(layer["o"], mixed, num_inputs=3)
    return x + gated_mlp(layer["gate_up"], layer["down"], rms_norm(x, layer["post_norm"], config.rms_norm_eps)), extra


def _run_layers(
    params: Params,
    config: TransformerConfig,
    ids: Array,
    positions: Array,
    attends: Sequence[Attend],
    capture: tuple[int, ...],
) -> tuple[Hidden, list[Any]]:
    """All layers on rows `ids [B]` at `positions [B]`, layer i attending by `attends[i]`; also their extra outputs."""
    x = embed(params, ids)  # [D, B]
    tables = rope_tables(config.rope, config.head_dim, positions)
    captured = {-1: x}
    extras = []
    for i, (layer, attend) in enumerate(zip(params["layers"], attends, strict=True)):
        x, extra = decoder_layer(layer, config, x, tables, attend)
        extras.append(extra)
        if i in capture:
            captured[i] = x
    features = jnp.concatenate([captured[i] for i in capture]) if capture else jnp.zeros((0, x.shape[1]))
    return Hidden(rms_norm(x, params["final_norm"], config.rms_norm_eps), features), extras


def extend(
    params: Params,
    config: TransformerConfig,
    cache: tuple[LayerCache, ...],
    ids: Array,
    start: Array,
    packing: Packing,
    capture: tuple[int, ...] = (),
) -> tuple[Hidden, tuple[LayerCache, ...]]:
    """Runs packed rows against the caches of their requests: decoding, verification and prefill in chunks alike.

    Args:
        cache: one entry a layer; positions below `start` of each request are read, the chunk's are written.
        ids: int32 `[B]`, token of each row. start: int32 `[R]`, position of each request's slot 0.
        packing: which request and slot each row is. capture: layer ids whose outputs are wanted (-1: the embedding).

    Returns:
        `Hidden` with B rows, and the new cache.
    """
    rows = ids.shape[0]
    if rows == 1 and params["embed"].dtype == jnp.bfloat16 and for_cpu():
        # The same row twice: one row alone is compiled to other rounding than more of them, and plain decoding shall
        # give, bit for bit, what verification gives; bf16 products of one row are slow on CPUs anyway.
        ids = jnp.repeat(ids, 2)
        packing = Packing(jnp.repeat(packing.request, 2), jnp.repeat(packing.offset, 2), packing.row)
    positions = start[packing.request] + packing.offset
    scale = config.head_dim**-0.5
    attends = [
        lambda q, k, v, layer_cache=c: cached_attention(q, k, v, layer_cache, start, packing, scale) for c in cache
    ]
    hidden, caches = _run_layers(params, config, ids, positions, attends, capture)
    return Hidden(hidden.final[:, :rows], hidden.features[:, :rows]), tuple(caches)


def forward(params: Params, config: TransformerConfig, ids: Array, capture: tuple[int, ...] = ()) -> Hidden:
    """Whole sequences `ids [N, T]` causally, without a cache: `Hidden` with B = N * T rows (sequence-major)."""
    sequences, length = ids.shape
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), sequences)
    scale = config.head_dim**-0.5
    attend = lambda q, k, v: (causal_attention(q, k, v, sequences, scale), None)  # noqa: E731
    return _run_layers(params, config, ids.reshape(-1), positions, [attend] * config.num_layers, capture)[0]


def init_target_cache(
    config: TransformerConfig, requests: int, capacity: int, dtype: DTypeLike
) -> tuple[LayerCache, ...]:
    """Empty caches of all layers for `requests` requests of up to `capacity` tokens."""
    return init_cache(config.num_layers, requests, config.num_kv_heads, capacity, config.head_dim, dtype)


def init_params(config: TransformerConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters (normal, fan-in scaled), for tests and shape evaluation."""
    keys = iter(jax.random.split(key, 4 * config.num_layers + 2))
    d, f, groups, hd = config.hidden_size, config.intermediate_size, config.num_kv_heads, config.head_dim

    def dense(shape: tuple[int, ...], fan_in: int) -> Array:
        return (jax.random.normal(next(keys), shape) * fan_in**-0.5).astype(dtype)

    def layer() -> Params:
        norms = {name: jnp.ones((d,), dtype) for name in ("input_norm", "post_norm")}
        if config.qk_norm:
            norms |= {name: jnp.ones((hd,), dtype) for name in ("q_norm", "k_norm")}
        per_group = config.queries_per_group
        return norms | {
            "qkv": dense((groups, per_group + 2, hd, d), d),
            "o": dense((d, groups, per_group, hd), config.num_heads * hd),
            "gate_up": dense((2, f, d), d),
            "down": dense((d, f), f),
        }

    params = {
        "embed": dense((config.vocab_size, d), d),
        "layers": tuple(layer() for _ in range(config.num_layers)),
        "final_norm": jnp.ones((d,), dtype),
    }
    if not config.tie_embeddings:
        params["head"] = dense((config.vocab_size, d), d)
    return params
