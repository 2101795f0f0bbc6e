"""What Eagle3 and MTP share: one decoder layer that turns (hidden state, next token) into the next hidden state.

Position i pairs a state of token i with the embedding of token i + 1 and predicts token i + 2. At committed positions
the state comes from the target; beyond them the layer reads its own output, one small step per draft token, and those
steps are one `lax.scan` inside the compiled step. Kinds differ in how the two inputs meet (`Model`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.drafters.config import DraftLayers
from dspark_jax.drafters.dspark import Proposal, to_target_ids
from dspark_jax.models.attention import Packing, cached_attention, dense_packing
from dspark_jax.models.cache import LayerCache, init_cache
from dspark_jax.models.cache import insert as insert_cache
from dspark_jax.models.config import RopeConfig
from dspark_jax.models.families import FAMILIES
from dspark_jax.models.layers import embed_rows, linear, rope_tables, softcap
from dspark_jax.models.transformer import Hidden, add_attention, add_mlp, project_qkv
from dspark_jax.sharding import constrain, gathered

Array = jax.Array
Params = dict[str, Any]
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]  # q, k, v -> mixed values, and what else is kept
Draw = Callable[[Array, Array], tuple[Array, Array, Array]]


@dataclass(frozen=True)
class RecurrentConfig(DraftLayers):
    """Sizes and switches of a one-layer drafter that feeds on its own hidden state.

    Attributes:
        block_size: gamma, draft tokens of one round.
        target_layer_ids: target layers whose raw outputs it reads, strictly increasing; empty: the final-normed state.
        vocab_size: V of the target. draft_vocab_size: rows of the draft head; equal to V when nothing is trimmed.
        shares_embeddings: the checkpoint brings no embedding and head of its own, the target's are used.
        num_target_layers: L of the target it was made for.
        max_positions: positions that the drafter was built for, in tokens.
        hidden_size .. rope, shared_kv .. final_softcap: as in `TransformerConfig`; the layer has the form of the
            target's full layers.
    """

    block_size: int
    target_layer_ids: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    shares_embeddings: bool
    num_target_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    max_positions: int
    family: str
    shared_kv: bool = False
    attention_scale: float | None = None
    final_softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family {self.family!r}: these drafters have layers of one of {sorted(FAMILIES)}")
        sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_positions")
        for name in ("block_size", *sizes):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be positive")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: RoPE rotates pairs, so it must be even")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads}: must be a multiple of num_kv_heads {self.num_kv_heads}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size}: must lie in 1..vocab_size ({self.vocab_size})")

    @property
    def num_layers(self) -> int:
        """There is one layer."""
        return 1

    @property
    def confidence(self) -> bool:
        """There is no confidence head."""
        return False


class Model(NamedTuple):
    """The parts in which kinds differ.

    Attributes:
        enter: `(params, config, hidden) -> [D, B]`, the state that the layer reads at committed positions.
        mix: `(params, config, embedded [D, B], state [D, B]) -> (residual [D, B], normed attention input [.., B])`.
        leave: `(params, config, x [D, B]) -> [D, B]`, the next state from the layer's output.
        read: `(params, config, state [D, B]) -> [D, B]`, what the head reads.
    """

    enter: Callable[[Params, Any, Hidden], Array]
    mix: Callable[[Params, Any, Array, Array], tuple[Array, Array]]
    leave: Callable[[Params, Any, Array], Array]
    read: Callable[[Params, Any, Array], Array]


class Memory(NamedTuple):
    """What is carried between rounds: the layer's cache, and its output float32 `[R, D]` at the last committed row."""

    cache: tuple[LayerCache, ...]
    state: Array


class Committed(NamedTuple):
    """What a prefill or a verification hands to a drafter.

    Attributes:
        hidden: the target's states of the B packed rows. start: int32 `[R]`, position of slot 0.
        first: int32 `[R]`, the token at `start`. following: int32 `[R, S]`, the token after each slot's, as far as it
            is committed. last: int32 `[R]`, the last committed slot.
        packing: where the rows belong.
    """

    hidden: Hidden
    start: Array
    first: Array
    following: Array
    last: Array
    packing: Packing


def advance(
    model: Model,
    params: Params,
    config: RecurrentConfig,
    ids: Array,
    state: Array,
    positions: Array,
    attend: Attend,
) -> tuple[Array, Any]:
    """The layer on rows that pair `state [D, B]` with the tokens `ids [B]`, at `positions [B]`.

    Returns:
        The next state, float32 `[D, B]`, and what `attend` kept.
    """
    params = gathered(params)
    layer, traits, eps = params["layers"][0], config.traits, config.rms_norm_eps
    embedded = embed_rows(params["embed"], ids, traits.scales_embeddings)  # [D, B]
    residual, x = model.mix(params, config, embedded, state)
    tables = rope_tables(config.rope, config.head_dim, positions)
    mixed, kept = attend(*project_qkv(layer, config, config.attention, x, tables))  # [G, Q, hd, B]
    x = constrain(add_attention(layer, traits, eps, residual, mixed), None, "batch")
    x = constrain(add_mlp(layer, traits, eps, x), None, "batch")
    return model.leave(params, config, x), kept


def init_memory(config: RecurrentConfig, requests: int, capacity: int, dtype: DTypeLike) -> Memory:
    """Empty memory of `requests` requests of up to `capacity` tokens."""
    cache = init_cache(1, requests, config.num_kv_heads, capacity, config.head_dim, dtype)
    return Memory(cache, jnp.zeros((requests, config.hidden_size), jnp.float32))


def insert(memory: Memory, other: Memory, slots: Array) -> Memory:
    """Puts the requests of `other` into `slots [P]` of `memory` (see `models.cache.insert`)."""
    state = memory.state.at[slots].set(other.state, mode="drop")
    return Memory(insert_cache(memory.cache, other.cache, slots), state)


def ingest(model: Model, params: Params, config: RecurrentConfig, memory: Memory, new: Committed) -> Memory:
    """Runs the layer on what the target has verified, and keeps the output of the last committed row."""
    packing = new.packing
    ids = new.following[packing.request, packing.offset]  # [B]
    positions = new.start[packing.request] + packing.offset
    attend = _cached(config, memory.cache, new.start, packing)
    entered = model.enter(params, config, new.hidden)  # [D, B]
    state, cache = advance(model, params, config, ids, entered, positions, attend)
    row = jnp.take_along_axis(packing.row, new.last[:, None], axis=1)[:, 0]  # [R]
    return Memory(cache, jnp.take(state, row, axis=1).T)


def propose(
    model: Model, params: Params, config: RecurrentConfig, memory: Memory, anchor: Array, start: Array, draw: Draw
) -> Proposal:
    """Drafts gamma tokens for each request: one from the kept state, then a scan of gamma - 1 steps of the layer.

    The steps write the cache from `start` on, where the next `ingest` overwrites it. Arguments as `dspark.propose`.
    """
    requests, slots = anchor.shape[0], config.block_size
    packing = dense_packing(requests, 1)

    def pick(state: Array, slot: Array) -> tuple[Array, Array, Array]:
        logits = softcap(linear(params["head"], model.read(params, config, state)), config.final_softcap)  # [Vd, R]
        drawn, prob, distribution = draw(logits, slot)
        return to_target_ids(params, drawn), prob, distribution

    def step(carry: tuple, slot: Array) -> tuple[tuple, tuple[Array, Array, Array]]:
        token, state, cache = carry
        at = start + slot - 1
        attend = _cached(config, cache, at, packing)
        state, cache = advance(model, params, config, token, state, at, attend)
        picked = pick(state, slot)
        return (picked[0], state, cache), picked

    state = memory.state.T  # [D, R]
    first = pick(state, jnp.int32(0))
    carry, rest = jax.lax.scan(step, (first[0], state, memory.cache), jnp.arange(1, slots))
    tokens, token_probs, probs = (jnp.concatenate([a[None], b]) for a, b in zip(first, rest, strict=True))  # [K, ...]
    ones = jnp.ones((requests, slots), jnp.float32)
    return Proposal(tokens.T, token_probs.T, probs, ones, Memory(carry[2], memory.state))


def _cached(config: RecurrentConfig, cache: tuple[LayerCache, ...], start: Array, packing: Packing) -> Attend:
    """Causal attention to the layer's cache, which takes in the rows first."""

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[LayerCache, ...]]:
        mixed, layer_cache = cached_attention(q, k, v, cache[0], start, packing, config.score_scale)
        return mixed, (layer_cache,)

    return attend


def init_layer(config: RecurrentConfig, keys: Any, width: int, dtype: DTypeLike) -> Params:
    """Random parameters of the layer, whose attention reads `width` inputs: normal with deviation 0.02, unit norms."""
    d, f, groups, hd = config.hidden_size, config.intermediate_size, config.num_kv_heads, config.head_dim
    per_group = config.num_heads // groups
    outer = ("attn_out_norm", "mlp_out_norm") if config.traits.sandwich_norms else ()
    norms = {name: unit_norm(config, d, dtype) for name in ("input_norm", "post_norm", *outer)}
    if config.qk_norm:
        norms |= {name: unit_norm(config, hd, dtype) for name in ("q_norm", "k_norm")}
    shapes = {
        "qkv": (groups, per_group + (1 if config.shared_kv else 2), hd, width),
        "o": (d, groups, per_group, hd),
        "gate_up": (2, f, d),
        "down": (d, f),
    }
    return norms | {name: dense(next(keys), shape, dtype) for name, shape in shapes.items()}


def unit_norm(config: RecurrentConfig, size: int, dtype: DTypeLike) -> Array:
    """A norm weight `[size]` that leaves the scale alone."""
    return jnp.full((size,), 1.0 - config.traits.norm_offset, dtype)


def dense(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """A random weight, normal with standard deviation 0.02."""
    return (jax.random.normal(key, shape) * 0.02).astype(dtype)
