"""How requests enter a batch: their prompts run through target and drafter, whole or in chunks, then they get slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.decoding.budget import forget
from dspark_jax.decoding.sampling import Sampling, choose_as_needed
from dspark_jax.decoding.state import Counters, DecodeState, Program, init_caches, is_stop, mask_padding
from dspark_jax.decoding.trace import Scores, Trace, score
from dspark_jax.drafters import interface
from dspark_jax.drafters.interface import Committed
from dspark_jax.models import transformer
from dspark_jax.models.attention import dense_packing
from dspark_jax.models.cache import LayerCache, insert

Array = jax.Array
Params = dict[str, Any]


class NewRequests(NamedTuple):
    """P requests to admit: right-padded prompts `ids [P, S]`, `lengths [P]`, `slots [P]` (R and above: nobody's),
    `limit [P]` and `sampling` of P entries; `speculative [P]` and `wants [P]` (scores), bool."""

    ids: Array
    lengths: Array
    slots: Array
    limit: Array
    sampling: Sampling
    speculative: Array | bool = True
    wants: Array | bool = False


class Prefilled(NamedTuple):
    """P prompts after prefill: caches of the padded length, the first sampled token `first [P]` (int32), and its scores
    where the program records them."""

    target_cache: tuple[LayerCache, ...]
    draft_cache: Any
    first: Array
    scores: Scores | tuple[()] = ()


class Chunk(NamedTuple):
    """A piece of P prompts, int32: right-padded `ids [P, S]`, `lengths [P]` of them, from position `start [P]` on, and
    `after [P]`, the token behind the piece (-1 where the prompt ends: then it is the one that is sampled)."""

    ids: Array
    lengths: Array
    start: Array
    after: Array


def prefill_chunk(
    target_params: Params,
    draft_params: Params,
    caches: tuple[tuple[LayerCache, ...], Any],
    chunk: Chunk,
    sampling: Sampling,
    *,
    program: Program,
) -> Prefilled:
    """Runs target and drafter over a piece of P prompts, behind what the caches of both hold already.

    The `first` token counts where the piece is the prompt's last; it is drawn as its request says, whatever
    `program.mode` is.
    """
    prompts, padded = chunk.ids.shape
    packing = dense_packing(prompts, padded)
    target_cache, memory = caches
    hidden, target_cache = transformer.extend(
        target_params, program.target, target_cache, chunk.ids.reshape(-1), chunk.start, packing, program.capture
    )
    last_slot = chunk.lengths - 1
    last = jnp.take(hidden.final, jnp.arange(prompts) * padded + last_slot, axis=1)  # [D, P]
    logits = mask_padding(transformer.logits(target_params, last, program.target.final_softcap), program.target)
    first = choose_as_needed(logits, sampling, chunk.start + chunk.lengths)  # [P]
    if program.drafter:
        after = jnp.where(chunk.after < 0, first, chunk.after)
        shifted = jnp.pad(chunk.ids[:, 1:], ((0, 0), (0, 1)))
        following = jnp.where(jnp.arange(padded) == last_slot[:, None], after[:, None], shifted)  # [P, S]
        seen = Committed(hidden, chunk.start, chunk.ids[:, 0], following, last_slot, packing)
        memory = interface.ingest(program.drafter, draft_params, memory, seen)
    top = program.trace.top if program.trace else None
    scores = () if top is None else score(logits, first, jnp.arange(prompts), top)
    return Prefilled(target_cache, memory, first, scores)


def prefill(target_params: Params, draft_params: Params, new: NewRequests, *, program: Program) -> Prefilled:
    """Runs target and drafter over P whole prompts, and samples each one's first token."""
    caches = init_caches(program, *new.ids.shape)
    zero = jnp.zeros_like(new.lengths)
    whole = Chunk(new.ids, new.lengths, zero, zero - 1)
    return prefill_chunk(target_params, draft_params, caches, whole, new.sampling, program=program)


def admit(state: DecodeState, new: NewRequests, ready: Prefilled, *, program: Program) -> DecodeState:
    """Puts P prefilled requests into their slots; of `new`, `ids` are not read.

    A slot keeps nothing of the request that had it before: its length restarts, and what lies beyond it is never read.
    """
    first = ready.first
    memory = state.draft_cache
    if program.drafter:
        memory = interface.insert(program.drafter, memory, ready.draft_cache, new.slots)
    stopped = is_stop(first, program.stop_ids)
    put = lambda old, value: old.at[new.slots].set(value, mode="drop")  # noqa: E731
    trace = state.trace
    if isinstance(trace, Trace):
        trace = trace._replace(wants=put(trace.wants, new.wants))
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
        speculative=put(state.speculative, new.speculative),
        sampling=Sampling(*(put(a, b) for a, b in zip(state.sampling, new.sampling, strict=True))),
        counters=Counters(*(put(c, 0) for c in state.counters)),
        past=forget(state.past, new.slots),
        trace=trace,
    )
