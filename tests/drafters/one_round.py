"""One round of any drafter with layers, with random weights and a random target: what its config makes of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.drafters import interface
from dspark_jax.drafters.interface import AnyConfig, Committed
from dspark_jax.models.attention import dense_packing
from dspark_jax.models.transformer import Hidden

PROMPT, CAPACITY = 5, 32


def keep_logits(logits: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A greedy draw that hands out the logits in place of the distribution."""
    return jnp.argmax(logits, axis=0).astype(jnp.int32), jnp.ones(logits.shape[1]), logits


def random_params(config: AnyConfig) -> dict[str, Any]:
    """Weights of the config's shapes, with the target's embedding and head, and a map of a reduced vocabulary."""
    shapes = jax.eval_shape(lambda key: interface.init_params(config, key), jax.random.key(0))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype), shapes)
    if config.draft_vocab_size < config.vocab_size:
        params["d2t"] = jnp.zeros(config.draft_vocab_size, jnp.int32)
    tables = (rng.normal(size=(config.vocab_size, config.hidden_size)) for _ in range(2))
    return interface.bind(params, *(jnp.asarray(table, jnp.float32) for table in tables))


def drafted(config: AnyConfig) -> list[np.ndarray]:
    """Draft tokens `[1, K]`, their logits `[K, Vd, 1]` and confidences `[1, K]` behind a prompt of five tokens.

    The target's states of a layer depend on its number alone.
    """
    layers = (-2, *config.target_layer_ids)  # -2: the final state
    states = [np.random.default_rng(layer + 2).normal(size=(config.hidden_size, PROMPT)) for layer in layers]
    final, *features = (jnp.asarray(state, jnp.float32) for state in states)
    hidden = Hidden(final, jnp.concatenate(features) if features else jnp.zeros((0, PROMPT)))
    number = lambda value: jnp.asarray([value], jnp.int32)  # noqa: E731
    following = jnp.asarray([[3, 1, 4, 1, 5]], jnp.int32)
    new = Committed(hidden, number(0), number(2), following, number(PROMPT - 1), dense_packing(1, PROMPT))

    def run(params: dict[str, Any]) -> tuple[jax.Array, ...]:
        memory = interface.init_memory(config, 1, CAPACITY, jnp.float32)
        memory = interface.ingest(config, params, memory, new)
        proposal = interface.propose(config, params, memory, number(5), number(PROMPT), keep_logits)
        return proposal.tokens, proposal.probs, proposal.confidence

    return [np.asarray(array) for array in jax.jit(run)(random_params(config))]


def differ(one: AnyConfig, other: AnyConfig) -> bool:
    """Whether two configs draft otherwise: other shapes, or other numbers."""
    pairs = list(zip(drafted(one), drafted(other), strict=True))
    return any(a.shape != b.shape or not np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)
