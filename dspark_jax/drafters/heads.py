"""The sequential head and the confidence head (section 3).

Sequential stage: p_k(v) = softmax(U_k + B_k), U_k the backbone's base logits and B_k a bias that depends on the tokens
drawn before slot k: vanilla W2 W1[x_{k-1}], gated W2 (g * W1[x_{k-1}]), RNN W2 tanh(output), or none (DFlash).
W1 spans the target's vocabulary, W2 the draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.models.layers import linear, take_rows
from dspark_jax.sharding import gathered

Array = jax.Array
Params = dict[str, Any]


def previous_embedding(params: Params, ids: Array) -> Array:
    """W1 of the previous tokens `ids [B]`: float32 `[r, B]`."""
    return take_rows(gathered({"w1": params["markov"]["w1"]})["w1"], ids)


def init_head_state(config: DrafterConfig, blocks: int) -> Array:
    """The recurrent state s_0 = 0 of `blocks` blocks, `[r, B]` (`[0, B]` for heads without one)."""
    return jnp.zeros((config.markov_rank if config.markov_kind == "rnn" else 0, blocks), jnp.float32)


def head_step(
    params: Params, config: DrafterConfig, state: Array, previous: Array, hidden: Array
) -> tuple[Array, Array]:
    """One step of the sequential head.

    Args:
        state: `[r, B]` for the RNN head, else empty. previous: W1[x_{k-1}], `[r, B]`. hidden: h_k, `[D, B]`.

    Returns:
        The next state, and the vector `[r, B]` that W2 turns into the bias.
    """
    markov = params["markov"]
    if config.markov_kind == "vanilla":
        return state, previous
    if config.markov_kind == "gated":
        gate = linear(markov["gate_w"], jnp.concatenate([hidden, previous])) + _column(markov["gate_b"])
        return state, jax.nn.sigmoid(gate) * previous
    joint = linear(markov["joint_w"], jnp.concatenate([state, previous, hidden])) + _column(markov["joint_b"])
    gate, candidate, output = jnp.split(joint, 3)
    gate = jax.nn.sigmoid(gate)
    return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(output)


def markov_bias(params: Params, vector: Array) -> Array:
    """B_k = W2 `vector [r, B]`: float32 `[Vd, B]`."""
    return linear(params["markov"]["w2"], vector)


def teacher_forced_vectors(params: Params, config: DrafterConfig, previous_ids: Array, hidden: Array) -> Array:
    """The head's vectors of whole blocks whose previous tokens are known (training).

    Args:
        previous_ids: int32 `[B, K]`. hidden: `[D, B, K]`.

    Returns:
        float32 `[r, B, K]`.
    """
    blocks, slots = previous_ids.shape
    previous = previous_embedding(params, previous_ids.reshape(-1))  # [r, B * K]
    if config.markov_kind != "rnn":
        vector = head_step(params, config, jnp.zeros((0, blocks)), previous, hidden.reshape(hidden.shape[0], -1))[1]
        return vector.reshape(-1, blocks, slots)

    def step(state: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        return head_step(params, config, state, *inputs)

    slots_first = (jnp.moveaxis(previous.reshape(-1, blocks, slots), 2, 0), jnp.moveaxis(hidden, 2, 0))
    return jnp.moveaxis(jax.lax.scan(step, init_head_state(config, blocks), slots_first)[1], 0, 2)


def confidence_logits(params: Params, config: DrafterConfig, hidden: Array, previous_ids: Array) -> Array:
    """w . [h_k ; W1[x_{k-1}]] + b, float32 `[B]`, for `hidden [D, B]` and `previous_ids [B]`.

    Its sigmoid is the probability that slot k is accepted, given that the slots before it were.
    """
    head = params["confidence"]
    inputs = hidden
    if config.confidence_with_markov:
        inputs = jnp.concatenate([hidden, previous_embedding(params, previous_ids)])
    weight = head["w"].astype(jnp.float32)
    return jnp.sum(weight[:, None] * inputs, axis=0) + head["b"].astype(jnp.float32)


def _column(bias: Array) -> Array:
    return bias.astype(jnp.float32)[:, None]
