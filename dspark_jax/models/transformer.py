"""One decoder-only transformer for every family: pure functions over a pytree of parameters.

Parameters (weights `[out, in]`, Q = H / G query heads per KV head):
    {"embed": [V, D], "layers": ({...},) * L, "final_norm": [D], "head": [V, D] unless tied}
    layer: {"input_norm": [D], "qkv": [G, Q+2, hd, D], "q_norm", "k_norm": [hd] where the family has them,
            "o": [D, G, Q, hd], "post_norm": [D], "gate_up": [2, F, D], "down": [D, F]}
Layers with `shared_kv` have "qkv": [G, Q+1, hd, D], where the last is key and value. "post_norm" is the norm before the
MLP. Families with sandwich norms add "attn_out_norm", "mlp_out_norm": [D], and Gemma4 "scalar": [] (1 where absent).
Layers are separate arrays: in decoding they are read faster than slices of one stacked array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.models.attention import Packing, cached_attention, causal_attention
from dspark_jax.models.cache import LayerCache, init_layer_caches
from dspark_jax.models.config import AttentionConfig, TransformerConfig
from dspark_jax.models.families import Family
from dspark_jax.models.layers import (
    embed_rows,
    gated_mlp,
    head_norm,
    linear,
    rms_norm,
    rope_tables,
    rotate,
    softcap,
)
from dspark_jax.models.platform import for_cpu
from dspark_jax.sharding import active, constrain, gathered

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


def embed(params: Params, config: TransformerConfig, ids: Array) -> Array:
    """Embeddings of `ids [B]` as float32 `[D, B]`, scaled where the family does so."""
    table = gathered({"embed": params["embed"]})["embed"]
    return constrain(embed_rows(table, ids, config.traits.scales_embeddings), None, "batch")


def head_weight(params: Params) -> Array:
    """The LM head `[V, D]`: its own matrix, or the embedding where they are tied."""
    return params["head"] if "head" in params else params["embed"]


def logits(params: Params, final: Array, cap: float = 0.0) -> Array:
    """LM head on final-normed states `[D, B]` -> float32 `[V, B]`; `cap`: the config's `final_softcap`."""
    return softcap(linear(head_weight(params), final), cap)


class LayerSizes(Protocol):
    """What a layer asks of a config, a target's or a drafter's; see `TransformerConfig`."""

    @property
    def num_heads(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def traits(self) -> Family: ...


def project_qkv(
    layer: Params, config: LayerSizes, kind: AttentionConfig, x: Array, tables: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Queries `[G, Q, hd, B]`, keys and values `[G, hd, B]` of normed `x`, norms and RoPE applied; float32."""
    qkv = linear(layer["qkv"], x)  # [G, Q+2, hd, B], Q+1 where keys and values are shared
    queries = config.num_heads // kind.num_kv_heads
    q, k, v = qkv[:, :queries], qkv[:, queries], qkv[:, -1]
    eps, offset = config.rms_norm_eps, config.traits.norm_offset
    if config.qk_norm:
        q = head_norm(q, layer["q_norm"], eps, offset)
        k = head_norm(k, layer["k_norm"], eps, offset)
    return rotate(q, tables), rotate(k, tables), normed_values(v, config.traits, eps, layer["qkv"].dtype)


def normed_values(v: Array, traits: Family, eps: float, dtype: DTypeLike) -> Array:
    """Value heads `[G, hd, B]`, normed (without a weight) where the family does so; `dtype`: the parameters'."""
    return head_norm(v, jnp.ones(v.shape[-2], dtype), eps) if traits.value_norm else v


def add_attention(layer: Params, traits: Family, eps: float, x: Array, mixed: Array) -> Array:
    """The residual stream `x [D, B]` after attention that gave `mixed [G, Q, hd, B]`."""
    out = linear(layer["o"], mixed, num_inputs=3)
    return x + (rms_norm(out, layer["attn_out_norm"], eps, traits.norm_offset) if traits.sandwich_norms else out)


def add_mlp(layer: Params, traits: Family, eps: float, x: Array) -> Array:
    """The residual stream `x [D, B]` after the layer's MLP and, in Gemma4, its scalar (which is never trained)."""
    normed = rms_norm(x, layer["post_norm"], eps, traits.norm_offset)
    out = gated_mlp(layer["gate_up"], layer["down"], normed, traits.activation)
    x = x + (rms_norm(out, layer["mlp_out_norm"], eps, traits.norm_offset) if traits.sandwich_norms else out)
    return x * jax.lax.stop_gradient(layer["scalar"]).astype(jnp.float32) if "scalar" in layer else x


def decoder_layer(
    layer: Params,
    config: TransformerConfig,
    kind: AttentionConfig,
    x: Array,
    tables: tuple[Array, Array],
    attend: Attend,
) -> tuple[Array, Any]:
    """One pre-norm layer on the residual stream `x [D, B]`; also returns what `attend` returned beside its output."""
    eps, layer = config.rms_norm_eps, gathered(layer)
    normed = rms_norm(x, layer["input_norm"], eps, config.traits.norm_offset)
    q, k, v = project_qkv(layer, config, kind, normed, tables)
    q = constrain(q, "heads", None, None, "batch")
    mixed, extra = attend(q, *(constrain(part, "heads", None, "batch") for part in (k, v)))  # [G, Q, hd, B]
    x = constrain(add_attention(layer, config.traits, eps, x, mixed), None, "batch")
    return constrain(add_mlp(layer, config.traits, eps, x), None, "batch"), extra


def _run_layers(
    params: Params,
    config: TransformerConfig,
    ids: Array,
    positions: Array,
    attends: Sequence[Attend],
    capture: tuple[int, ...],
    regather: bool = False,
) -> tuple[Hidden, list[Any]]:
    """All layers on rows `ids [B]` at `positions [B]`, layer i attending by `attends[i]`; also their extra outputs."""
    x = embed(params, config, ids)  # [D, B]
    kinds = [config.attention(i) for i in range(config.num_layers)]
    tables = {kind: rope_tables(kind.rope, kind.head_dim, positions) for kind in dict.fromkeys(kinds)}
    captured = {-1: x}
    extras = []
    for i, (layer, kind, attend) in enumerate(zip(params["layers"], kinds, attends, strict=True)):
        if regather and active():
            layer, x = jax.lax.optimization_barrier((layer, x))
        x, extra = decoder_layer(layer, config, kind, x, tables[kind], attend)
        extras.append(extra)
        if i in capture:
            captured[i] = x
    features = jnp.concatenate([captured[i] for i in capture]) if capture else jnp.zeros((0, x.shape[1]))
    final = rms_norm(x, params["final_norm"], config.rms_norm_eps, config.traits.norm_offset)
    return Hidden(final, features), extras


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
    attends = [
        partial(cached_attention, cache=c, start=start, packing=packing, **_score_options(config, i))
        for i, c in enumerate(cache)
    ]
    hidden, caches = _run_layers(params, config, ids, positions, attends, capture)
    return Hidden(hidden.final[:, :rows], hidden.features[:, :rows]), tuple(caches)


def forward(
    params: Params,
    config: TransformerConfig,
    ids: Array,
    capture: tuple[int, ...] = (),
    segments: Array | None = None,
    positions: Array | None = None,
    regather: bool = False,
) -> Hidden:
    """Whole sequences causally, without a cache: `Hidden` with B = N * T rows (sequence-major).

    Args:
        ids: int32 `[N, T]`. capture: layer ids whose outputs are wanted (-1: the embedding).
        segments: int32 `[N, T]`, the document of each token, which sees that document alone; None: a row is one.
        positions: int32 `[N, T]`, place of each token in its document; None: in its row.
        regather: on a mesh, bring each layer's weights together when its turn comes. Without, a compiler that runs this
            in a loop does it once, ahead of the loop, and holds them all.
    """
    sequences, length = ids.shape
    dtype = None if for_cpu() else params["embed"].dtype  # CPUs keep the float32 that their caches have in decoding
    if positions is None:
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), sequences)

    def attend_in(layer: int) -> Attend:
        options = _score_options(config, layer)
        return lambda q, k, v: (causal_attention(q, k, v, sequences, segments=segments, dtype=dtype, **options), None)

    attends = [attend_in(i) for i in range(config.num_layers)]
    return _run_layers(params, config, ids.reshape(-1), positions.reshape(-1), attends, capture, regather)[0]


def _score_options(config: TransformerConfig, layer: int) -> dict[str, Any]:
    window = config.attention(layer).window
    return {"scale": config.score_scale(layer), "window": window, "cap": config.attention_softcap}


def init_target_cache(
    config: TransformerConfig, requests: int, capacity: int, dtype: DTypeLike
) -> tuple[LayerCache, ...]:
    """Empty caches of all layers for `requests` requests of up to `capacity` tokens."""
    kinds = [config.attention(i) for i in range(config.num_layers)]
    return init_layer_caches([(kind.num_kv_heads, kind.head_dim) for kind in kinds], requests, capacity, dtype)


def init_params(config: TransformerConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters (normal, fan-in scaled), for tests and shape evaluation."""
    keys = iter(jax.random.split(key, 4 * config.num_layers + 2))
    d, f, traits = config.hidden_size, config.intermediate_size, config.traits

    def dense(shape: tuple[int, ...], fan_in: int) -> Array:
        return (jax.random.normal(next(keys), shape) * fan_in**-0.5).astype(dtype)

    def unit(size: int) -> Array:  # a norm weight that leaves the scale alone
        return jnp.full((size,), 1.0 - traits.norm_offset, dtype)

    def layer(kind: AttentionConfig) -> Params:
        groups, hd = kind.num_kv_heads, kind.head_dim
        outer = ("attn_out_norm", "mlp_out_norm") if traits.sandwich_norms else ()
        norms = {name: unit(d) for name in ("input_norm", "post_norm", *outer)}
        if config.qk_norm:
            norms |= {name: unit(hd) for name in ("q_norm", "k_norm")}
        if traits.layer_scalar:
            norms["scalar"] = jnp.ones((), dtype)
        per_group = config.num_heads // groups
        return norms | {
            "qkv": dense((groups, per_group + (1 if kind.shared_kv else 2), hd, d), d),
            "o": dense((d, groups, per_group, hd), config.num_heads * hd),
            "gate_up": dense((2, f, d), d),
            "down": dense((d, f), f),
        }

    params = {
        "embed": dense((config.vocab_size, d), d),
        "layers": tuple(layer(config.attention(i)) for i in range(config.num_layers)),
        "final_norm": unit(d),
    }
    if not config.tie_embeddings:
        params["head"] = dense((config.vocab_size, d), d)
    return params
