"""What a batch of R request slots carries from step to step, and what a decoding program is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.decoding.budget import Past, init_past
from dspark_jax.decoding.sampling import Mode, Sampling
from dspark_jax.decoding.schedule import BUDGETED, Schedule, slots_for
from dspark_jax.decoding.trace import Trace, TraceShape, init_trace
from dspark_jax.drafters import interface
from dspark_jax.drafters.interface import AnyConfig
from dspark_jax.models import transformer
from dspark_jax.models.cache import LayerCache
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
        trace: what is recorded of each round. switchable: rounds do without a draft where no request speculates or has
            room for one (budgeted schedules do so anyway).
    """

    target: TransformerConfig
    drafter: AnyConfig | None
    schedule: Schedule
    mode: Mode
    stop_ids: tuple[int, ...]
    cache_dtype: Any
    trace: TraceShape | None = None
    switchable: bool = False

    @property
    def slots(self) -> int:
        """S, rows that one request can have in a step: the anchor and gamma drafts."""
        return 1 + (self.drafter.block_size if self.drafter else 0)

    @property
    def budgeted(self) -> bool:
        """Whether rows are shared out by a budget, among drafts."""
        return self.drafter is not None and self.schedule in BUDGETED

    def slots_in(self, bucket: int, requests: int) -> int:
        """S of a step with `bucket` rows for `requests` slots: fewer in small buckets of a budgeted schedule."""
        if self.drafter is None or not self.budgeted:
            return self.slots
        return slots_for(requests, self.drafter.block_size, bucket)

    @property
    def capture(self) -> tuple[int, ...]:
        """Target layers whose outputs the drafter reads."""
        return self.drafter.target_layer_ids if self.drafter else ()


class Counters(NamedTuple):
    """Per-request statistics since the request came in, int32 `[R]` each.

    rounds: steps taken. drafted: tokens proposed, 0 for requests that decode plainly. verified: draft tokens that the
    target looked at. accepted: draft tokens that were committed.
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
        tokens: int32 `[R, T + S]`, generated tokens so far (the first from prefill). length: int32 `[R]`, how many.
        limit: int32 `[R]`, tokens to generate at most. active: bool `[R]`. stopped: bool `[R]`, ended by a stop token.
        threshold: float32 `[]`, of the `threshold` schedule.
        speculative: bool `[R]`, whether drafts of a request may be verified; else it decodes plainly.
        sampling: settings by request. counters: statistics by request. past: what budgets are forecast from.
        trace: records of the newest rounds, () where there are none.
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
    speculative: Array
    sampling: Sampling
    counters: Counters
    past: Past
    trace: Trace | tuple[()] = ()

    @property
    def capacity(self) -> int:
        """T, positions of the caches."""
        return self.target_cache[0].keys.shape[1]


def init_caches(program: Program, requests: int, capacity: int) -> tuple[tuple[LayerCache, ...], Any]:
    """Empty caches of the target and the drafter (an empty tuple without one), for R requests of `capacity` tokens."""
    target = transformer.init_target_cache(program.target, requests, capacity, program.cache_dtype)
    if program.drafter is None:
        return target, ()
    return target, interface.init_memory(program.drafter, requests, capacity, program.cache_dtype)


def init_state(program: Program, requests: int, capacity: int, threshold: float = 0.0) -> DecodeState:
    """R empty slots with caches of `capacity` tokens."""
    ints = lambda: jnp.zeros((requests,), jnp.int32)  # noqa: E731
    floats = lambda value: jnp.full((requests,), value, jnp.float32)  # noqa: E731
    target_cache, draft_cache = init_caches(program, requests, capacity)
    return DecodeState(
        target_cache=target_cache,
        draft_cache=draft_cache,
        anchor=ints(),
        start=ints(),
        tokens=jnp.zeros((requests, capacity + program.slots), jnp.int32),
        length=ints(),
        limit=ints(),
        active=jnp.zeros((requests,), bool),
        stopped=jnp.zeros((requests,), bool),
        threshold=jnp.float32(threshold),
        speculative=jnp.ones((requests,), bool),
        sampling=Sampling(floats(0), floats(1), ints(), floats(0), jnp.zeros((requests, 2), jnp.uint32)),
        counters=Counters(ints(), ints(), ints(), ints()),
        past=init_past(requests, program.slots - 1),
        trace=init_trace(program.trace, requests, program.slots),
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
