"""The DSpark drafter at decoding time: one parallel pass, then a scan that samples the block left to right.

DFlash is the same drafter with `markov_kind` none and no confidence head. The embedding and the draft head are the
target's; `bind` brings them together once, so that a step never slices or gathers a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.drafters.backbone import block_states
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.heads import (
    confidence_logits,
    head_step,
    init_head_state,
    markov_bias,
    previous_embedding,
)
from dspark_jax.models.attention import dense_packing
from dspark_jax.models.cache import LayerCache
from dspark_jax.models.layers import embed_rows, linear, softcap

Array = jax.Array
Params = dict[str, Any]


class Proposal(NamedTuple):
    """A block of draft tokens for each request.

    Attributes:
        tokens: int32 `[R, K]`, ids of the target's vocabulary.
        token_probs: float32 `[R, K]`, p_d of each token (1 in greedy mode).
        probs: float32 `[K, Vd, R]`, the distributions they were drawn from (`[K, 0, R]` in greedy mode).
        confidence: float32 `[R, K]`, conditional survival probabilities (1 without a confidence head).
        cache: the drafter's memory after the pass (here its caches).
    """

    tokens: Array
    token_probs: Array
    probs: Array
    confidence: Array
    cache: Any


def bind(params: Params, embed: Array, head: Array) -> Params:
    """Completes a drafter that shares the target's `embed [V, D]` and `head [V, D]`.

    Adds `embed`, `head` (the rows of the draft vocabulary) and `ids` (int32 `[Vd]`, target ids of the draft ids; absent
    for a full vocabulary). What the checkpoint brought itself is kept.
    """
    bound = dict(params)
    bound.setdefault("embed", embed)
    if "d2t" in params:
        ids = jnp.arange(params["d2t"].shape[0], dtype=jnp.int32) + params["d2t"].astype(jnp.int32)
        bound["ids"] = ids
        bound.pop("d2t")
        if "head" not in bound:
            bound["head"] = jnp.take(head, ids, axis=0)
    bound.setdefault("head", head)
    return bound


def to_target_ids(params: Params, draft_ids: Array) -> Array:
    """Target ids of draft-vocabulary ids."""
    return jnp.take(params["ids"], draft_ids) if "ids" in params else draft_ids


def spread(params: Params, probs: Array, vocab_size: int) -> Array:
    """A draft distribution `[Vd, R]` over the target's vocabulary, `[V, R]`: zero outside the draft vocabulary."""
    if "ids" not in params:
        return probs
    return jnp.zeros((vocab_size, probs.shape[1]), probs.dtype).at[params["ids"]].set(probs, unique_indices=True)


def block_ids(anchor: Array, slots: int, mask_token_id: int) -> Array:
    """`[anchor, mask, ...]` for each request: int32 `[R, slots]`."""
    masks = jnp.full((anchor.shape[0], slots - 1), mask_token_id, jnp.int32)
    return jnp.concatenate([anchor[:, None], masks], axis=1)


def prediction_slots(hidden: Array, config: DrafterConfig) -> Array:
    """The states `[D, B * K]` of the slots that predict, out of those of all slots `[D, B * block_slots]`."""
    if config.anchor_predicts:
        return hidden
    return hidden.reshape(hidden.shape[0], -1, config.block_slots)[:, :, 1:].reshape(hidden.shape[0], -1)


def propose(
    params: Params,
    config: DrafterConfig,
    cache: tuple[LayerCache, ...],
    anchor: Array,
    start: Array,
    draw: Callable[[Array, Array], tuple[Array, Array, Array]],
) -> Proposal:
    """Drafts a block for each request.

    Args:
        params: bound parameters. cache: context caches; positions below `start` are read.
        anchor: int32 `[R]`, last committed token of each request. start: int32 `[R]`, its position.
        draw: `(logits [Vd, R], slot) -> (draft ids [R], their probabilities [R], distribution [Vd or 0, R])`.
    """
    requests, slots = anchor.shape[0], config.block_size
    ids = block_ids(anchor, config.block_slots, config.mask_token_id)
    x = embed_rows(params["embed"], ids.reshape(-1), config.traits.scales_embeddings)  # [D, R * block_slots]
    hidden, cache = block_states(params, config, cache, x, start, dense_packing(requests, config.block_slots))
    hidden = prediction_slots(hidden, config)  # [D, R * K]
    base = softcap(linear(params["head"], hidden), config.final_softcap).reshape(-1, requests, slots)  # U, [Vd, R, K]
    by_slot = (jnp.moveaxis(base, 2, 0), jnp.moveaxis(hidden.reshape(-1, requests, slots), 2, 0), jnp.arange(slots))

    def step(
        carry: tuple[Array, Array], inputs: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        state, previous = carry
        logits, state_k, slot = inputs
        if config.markov_kind != "none":
            state, vector = head_step(params, config, state, previous_embedding(params, previous), state_k)
            logits = logits + markov_bias(params, vector)
        drawn, prob, distribution = draw(logits, slot)
        token = to_target_ids(params, drawn)
        return (state, token), (token, prob, distribution)

    start_state = (init_head_state(config, requests), anchor)
    drawn: tuple[Array, Array, Array] = jax.lax.scan(step, start_state, by_slot)[1]
    tokens, token_probs, probs = drawn[0].T, drawn[1].T, drawn[2]  # [R, K], [R, K], [K, Vd, R]
    if config.confidence:
        previous_ids = jnp.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)
        logits = confidence_logits(params, config, hidden, previous_ids.reshape(-1)).reshape(requests, slots)
        confidence = calibrated(logits, config)
    else:
        confidence = jnp.ones((requests, slots))
    return Proposal(tokens, token_probs, probs, confidence, cache)


def calibrated(logits: Array, config: DrafterConfig) -> Array:
    """Conditional survival probabilities c_k = sigmoid(z_k / T_k + b_k) of confidence logits `[R, K]`.

    T is 1 and b is 0 where the drafter is not calibrated.
    """
    if config.confidence_temperatures:
        logits = logits / jnp.asarray(config.confidence_temperatures, jnp.float32)
    if config.confidence_biases:
        logits = logits + jnp.asarray(config.confidence_biases, jnp.float32)
    return jax.nn.sigmoid(logits)


def init_params(config: DrafterConfig, key: Array, dtype=jnp.float32) -> Params:
    """Random trainable parameters: everything but the embedding, the head and the vocabulary map, which are frozen.

    Projections are normal with standard deviation 0.02; W2 and the confidence head start at zero, so that the drafter
    starts from its base logits alone. The RNN head's output starts as W1[x_{k-1}], the vanilla head's vector: among
    normal weights the previous token would have a hundredth of h_k's part in it, and be learnt much later.
    """
    keys = iter(jax.random.split(key, 8 * config.num_layers + 8))
    d, f, groups, hd, r = (
        config.hidden_size,
        config.intermediate_size,
        config.num_kv_heads,
        config.head_dim,
        config.markov_rank,
    )

    def dense(*shape: int) -> Array:
        return (jax.random.normal(next(keys), shape) * 0.02).astype(dtype)

    def unit(size: int) -> Array:  # a norm weight that leaves the scale alone
        return jnp.full((size,), 1.0 - config.traits.norm_offset, dtype)

    def layer() -> Params:
        outer = ("attn_out_norm", "mlp_out_norm") if config.traits.sandwich_norms else ()
        norms = {name: unit(d) for name in ("input_norm", "post_norm", *outer)}
        if config.qk_norm:
            norms |= {name: unit(hd) for name in ("q_norm", "k_norm")}
        per_group = config.num_heads // groups
        weights = {
            "q": dense(groups, per_group, hd, d),
            "kv": dense(groups, 1 if config.shared_kv else 2, hd, d),
            "o": dense(d, groups, per_group, hd),
        }
        return norms | weights | {"gate_up": dense(2, f, d), "down": dense(d, f)}

    params: Params = {
        "fc": dense(d, len(config.target_layer_ids) * d),
        "hidden_norm": unit(d),
        "layers": tuple(layer() for _ in range(config.num_layers)),
        "norm": unit(d),
    }
    if r:
        params["markov"] = {"w1": dense(config.vocab_size, r), "w2": jnp.zeros((config.draft_vocab_size, r), dtype)}
        if config.markov_kind == "gated":
            params["markov"] |= {"gate_w": dense(r, d + r), "gate_b": jnp.zeros((r,), dtype)}
        if config.markov_kind == "rnn":
            output = jnp.eye(r, 2 * r + d, k=r, dtype=dtype)  # of [s_{k-1}; W1[x_{k-1}]; h_k]
            recurrent = jnp.concatenate([dense(2 * r, 2 * r + d), output])
            params["markov"] |= {"joint_w": recurrent, "joint_b": jnp.zeros((3 * r,), dtype)}
    if config.confidence:
        width = d + (r if config.confidence_with_markov else 0)
        params["confidence"] = {"w": jnp.zeros((width,), dtype), "b": jnp.zeros((), dtype)}
    return params
