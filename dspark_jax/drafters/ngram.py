"""Prompt lookup: drafts what followed the last tokens the last time they occurred (n-gram drafting, no weights).

Each request's history lies on the device. The longest match of the last n tokens counts (n from `longest` down to
`shortest`), the most recent one among equals; a continuation that runs into the present goes round. Where nothing
matches the request drafts nothing and its round is plain decoding. The proposal is a function of committed tokens, so
its distribution is one-hot and the acceptance rule stays lossless: a token is accepted with probability p_t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.drafters.dspark import Proposal
from dspark_jax.drafters.recurrent import Committed, Draw
from dspark_jax.models.config import TransformerConfig

Array = jax.Array
Params = dict[str, Any]


@dataclass(frozen=True)
class NgramConfig:
    """Settings of prompt lookup.

    Attributes:
        block_size: draft tokens of a round at most. longest, shortest: lengths of the match, in tokens.
    """

    block_size: int = 7
    longest: int = 3
    shortest: int = 2

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size {self.block_size}: must be at least 1 draft token")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"shortest match {self.shortest}, longest {self.longest}: 1 <= shortest <= longest must hold"
            )

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """It reads no target layer."""
        return ()

    @property
    def confidence(self) -> bool:
        """No confidence head: matches are verified whole, and requests without one verify nothing."""
        return False

    @property
    def max_positions(self) -> int:
        """No limit of its own."""
        return 2**31 - 1

    def check_target(self, target: TransformerConfig) -> None:
        """Every target will do."""


def init_memory(config: NgramConfig, requests: int, capacity: int, dtype: Any) -> Array:
    """Empty histories, int32 `[R, T + 1]`: the committed tokens by position, the anchor included."""
    return jnp.zeros((requests, capacity + 1), jnp.int32)


def insert(memory: Array, other: Array, slots: Array) -> Array:
    """Puts the histories of `other [P, ..]` into `slots [P]` of `memory`; a slot of R or more drops that request."""
    return memory.at[slots, : other.shape[1]].set(other, mode="drop")


def ingest(params: Params, config: NgramConfig, memory: Array, new: Committed) -> Array:
    """Writes the committed tokens from `start` on; those behind the last committed one are overwritten later."""
    tokens = jnp.concatenate([new.first[:, None], new.following], axis=1)  # [R, S + 1]
    return jax.vmap(lambda row, run, at: jax.lax.dynamic_update_slice(row, run, (at,)))(memory, tokens, new.start)


def propose(params: Params, config: NgramConfig, memory: Array, anchor: Array, start: Array, draw: Draw) -> Proposal:
    """Looks the last tokens up in each request's history; `confidence` is 1 where something was found, else 0.

    Greedy or not, the tokens are the same, and `probs` stays empty (`[K, 0, R]`): see `distribution`.
    """
    requests, slots = anchor.shape[0], config.block_size
    at, found = last_match(memory, start, config.longest, config.shortest)
    period = jnp.maximum(start - at, 1)[:, None]
    tokens = jnp.take_along_axis(memory, at[:, None] + 1 + jnp.arange(slots) % period, axis=1)  # [R, K]
    confidence = jnp.broadcast_to(found[:, None], (requests, slots)).astype(jnp.float32)
    return Proposal(tokens, jnp.ones((requests, slots)), jnp.zeros((slots, 0, requests)), confidence, memory)


def last_match(history: Array, start: Array, longest: int, shortest: int) -> tuple[Array, Array]:
    """Where the tokens up to `start [R]` occurred before, in `history [R, T]`.

    Returns:
        int32 `[R]`, the earlier position of the token at `start` (0 without a match), and bool `[R]`, whether at least
        `shortest` tokens matched.
    """
    width = history.shape[1]
    position = jnp.arange(width)
    run = jnp.zeros(history.shape, jnp.int32)  # tokens that match, going back, at most `longest`
    alive = position < start[:, None]
    for back in range(longest):
        wanted = jnp.take_along_axis(history, jnp.maximum(start - back, 0)[:, None], axis=1)  # [R, 1]
        alive &= (jnp.roll(history, back, axis=1) == wanted) & (position >= back)
        run += alive
    best = jnp.argmax(jnp.where(run >= shortest, run * width + position, -1), axis=1).astype(jnp.int32)
    found = jnp.take_along_axis(run, best[:, None], axis=1)[:, 0] >= shortest
    return jnp.where(found, best, 0), found


def distribution(tokens: Array, vocab_size: int) -> Array:
    """The one-hot distributions of `tokens [R]`, float32 `[V, R]`."""
    return (jnp.arange(vocab_size)[:, None] == tokens).astype(jnp.float32)
