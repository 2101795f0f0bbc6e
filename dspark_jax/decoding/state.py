"""What a batch of R request slots carries from step to step, and how requests enter it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.decoding.sampling import Mode, Sampling, choose
from dspark_jax.decoding.schedule import Schedule
from dspark_jax.drafters import interface
from dspark_jax.drafters.interface import AnyConfig, Committed
from dspark_jax.models import transformer
from dspark_jax.models.attention import dense_packing
from dspark_jax.models.cache import LayerCache, insert
from dspark_jax.models.config import TransformerConfig

Array = jax.Array
Params = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """The static part of a decoding program: what it is compiled for.

    Attributes:
        target: the target's config. drafter: the drafter's, or None for plain decoding.
        schedule: which prefix of a block is verified. mode: the sampling program (see `SamplingParams.mode`).
        stop_ids: tokens that end a request. cache_dtype: dtype of all caches (float32 is fastest on CPUs).
    """

    target: TransformerConfig
    drafter: AnyConfig | None
    schedule: Schedule
    mode: Mode
    stop_ids: tuple[int, ...]
    cache_dtype: Any

    @property
    def slots(self) -> int:
        """S, rows that one request can have in a step: the anchor and gamma drafts."""
        return 1 + (self.drafter.block_size if self.drafter else 0)

    @property
    def capture(self) -> tuple[int, ...]:
        """Target layers whose outputs the drafter reads."""
        return self.drafter.target_layer_ids if self.drafter else ()


class Counters(NamedTuple):
    """Per-request statistics since the request came in, int32 `[R]` each.

    rounds: steps taken. drafted: tokens proposed. verified: draft tokens that the target looked at. accepted: draft
    tokens that were committed.
    """

    rounds: Array
    drafted: Array
    verified: Array
    accepted: Array


class DecodeState(NamedTuple):
    """R request slots.

    Attributes:
        target_cache: caches of T positions; positions below `start` count. draft_cache: the drafter's memory.
        anchor: int32 `[R]`, last committed token, in no cache yet. start: int32 `[R]`, its position.
        tokens: int32 `[R, M]`, generated tokens so far (the first from prefill). length: int32 `[R]`, how many.
        limit: int32 `[R]`, tokens to generate at most. active: bool `[R]`. stopped: bool `[R]`, ended by a stop token.
        threshold: float32 `[]`, of the `threshold` schedule.
        sampling: settings by request. counters: statistics by request.
    """

    target_cache: tuple[LayerCache, ...]
    draft_cache: Any
    anchor: Array
    start: Array
    tokens: Array
    length: Array
    limit: Array
    active: Array
    stopped: Array
    threshold: Array
    sampling: Sampling
    counters: Counters


class NewRequests(NamedTuple):
    """P requests to admit: right-padded prompts `ids [P, S]`, `lengths [P]`, `slots [P]` (R and above: nobody's),
    `limit [P]` and `sampling` of P entries."""

    ids: Array
    lengths: Array
    slots: Array
    limit: Array
    sampling: Sampling


def init_caches(program: Program, requests: int, capacity: int) -> tuple[tuple[LayerCache, ...], Any]:
    """Empty caches of the target and the drafter (an empty tuple without one), for R requests of `capacity` tokens."""
    target = transformer.init_target_cache(program.target, requests, capacity, program.cache_dtype)
    if program.drafter is None:
        return target, ()
    return target, interface.init_memory(program.drafter, requests, capacity, program.cache_dtype)


def init_state(program: Program, requests: int, capacity: int, max_tokens: int, threshold: float = 0.0) -> DecodeState:
    """R empty slots with caches of `capacity` tokens and room for `max_tokens` generated ones."""
    ints = lambda: jnp.zeros((requests,), jnp.int32)  # noqa: E731
    floats = lambda value: jnp.full((requests,), value, jnp.float32)  # noqa: E731
    target_cache, draft_cache = init_caches(program, requests, capacity)
    return DecodeState(
        target_cache=target_cache,
        draft_cache=draft_cache,
        anchor=ints(),
        start=ints(),
        tokens=jnp.zeros((requests, max_tokens + program.slots), jnp.int32),
        length=ints(),
        limit=ints(),
        active=jnp.zeros((requests,), bool),
        stopped=jnp.zeros((requests,), bool),
        threshold=jnp.float32(threshold),
        sampling=Sampling(floats(0), floats(1), ints(), floats(0), jnp.zeros((requests, 2), jnp.uint32)),
        counters=Counters(ints(), ints(), ints(), ints()),
    )


def is_stop(tokens: Array, stop_ids: tuple[int, ...]) -> Array:
    """Whether each token is one of `stop_ids`."""
    found = jnp.zeros(tokens.shape, bool)
    for stop in stop_ids:
        found |= tokens == stop
    return found


def mask_padding(logits: Array, config: TransformerConfig) -> Array:
    """Makes the padding rows of the vocabulary impossible in `logits [V, B]`."""
    if config.num_tokens == config.vocab_size:
        return logits
    return jnp.where(jnp.arange(config.vocab_size)[:, None] < config.num_tokens, logits, -jnp.inf)


class Prefilled(NamedTuple):
    """P prompts after prefill: caches of the padded length, and the first sampled token `first [P]` (int32)."""

    target_cache: tuple[LayerCache, ...]
    draft_cache: Any
    first: Array


def prefill(target_params: Params, draft_params: Params, new: NewRequests, *, program: Program) -> Prefilled:
    """Runs target and drafter over P prompts, and samples each one's first token."""
    prompts, padded = new.ids.shape
    packing = dense_packing(prompts, padded)
    zero = jnp.zeros((prompts,), jnp.int32)
    cache = transformer.init_target_cache(program.target, prompts, padded, program.cache_dtype)
    hidden, cache = transformer.extend(
        target_params, program.target, cache, new.ids.reshape(-1), zero, packing, program.capture
    )
    last = jnp.take(hidden.final, jnp.arange(prompts) * padded + new.lengths - 1, axis=1)  # [D, P]
    logits = mask_padding(transformer.logits(target_params, last, program.target.final_softcap), program.target)
    first = choose(logits, new.sampling, new.lengths, program.mode)  # [P]
    context = ()
    if program.drafter:
        last_slot = new.lengths - 1
        shifted = jnp.pad(new.ids[:, 1:], ((0, 0), (0, 1)))
        following = jnp.where(jnp.arange(padded) == last_slot[:, None], first[:, None], shifted)  # [P, S]
        seen = Committed(hidden, zero, new.ids[:, 0], following, last_slot, packing)
        empty = interface.init_memory(program.drafter, prompts, padded, program.cache_dtype)
        context = interface.ingest(program.drafter, draft_params, empty, seen)
    return Prefilled(cache, context, first)


def admit(state: DecodeState, new: NewRequests, ready: Prefilled, *, program: Program) -> DecodeState:
    """Puts P prefilled requests into their slots.

    A slot keeps nothing of the request that had it before: its length restarts, and what lies beyond it is never read.
    """
    first = ready.first
    memory = state.draft_cache
    if program.drafter:
        memory = interface.insert(program.drafter, memory, ready.draft_cache, new.slots)
    stopped = is_stop(first, program.stop_ids)
    put = lambda old, value: old.at[new.slots].set(value, mode="drop")  # noqa: E731
    return DecodeState(
        target_cache=insert(state.target_cache, ready.target_cache, new.slots),
        draft_cache=memory,
        anchor=put(state.anchor, first),
        start=put(state.start, new.lengths),
        tokens=state.tokens.at[new.slots, 0].set(first, mode="drop"),
        length=put(state.length, 1),
        limit=put(state.limit, new.limit),
        active=put(state.active, ~stopped & (new.limit > 1)),
        stopped=put(state.stopped, stopped),
        threshold=state.threshold,
        sampling=Sampling(*(put(a, b) for a, b in zip(state.sampling, new.sampling, strict=True))),
        counters=Counters(*(put(c, 0) for c in state.counters)),
    )


@partial(jax.jit, static_argnames=("shape",))
def _resized(x: Array, shape: tuple[int, ...]) -> Array:
    kept = x[tuple(slice(size) for size in shape)]
    return jnp.pad(kept, [(0, size - old) for size, old in zip(shape, kept.shape, strict=True)])


def with_capacity(state: DecodeState, capacity: int, program: Program) -> DecodeState:
    """The state with caches of `capacity` positions: zeros are added, or the positions beyond are dropped.

    The old caches are given up array by array, so that both never lie in memory together.
    """

    def resize(old: Array, wanted: jax.ShapeDtypeStruct) -> Array:
        if old.shape == wanted.shape:
            return old
        new = _resized(old, wanted.shape)
        old.delete()
        return new

    shapes = jax.eval_shape(partial(init_caches, program, state.anchor.shape[0], capacity))
    target, draft = jax.tree.map(resize, (state.target_cache, state.draft_cache), shapes)
    return state._replace(target_cache=target, draft_cache=draft)
