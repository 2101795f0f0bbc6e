"""The speculative step: draft, schedule, pack, verify, commit, each a pure function; jitted once per bucket.

`bucket` is static: the rows that the target computes in this step, over all requests together. With no drafter a step
is plain decoding by the same code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.decoding.sampling import (
    DRAW_ACCEPT,
    DRAW_DRAFT,
    DRAW_TARGET,
    best_token,
    categorical,
    distribution,
    uniforms,
)
from dspark_jax.decoding.schedule import cap_to_bucket, pack_rows, verify_lengths
from dspark_jax.decoding.state import Counters, DecodeState, Program, is_stop, mask_padding
from dspark_jax.decoding.verify import Verdict, accepted_length, next_distribution, verify_greedy
from dspark_jax.drafters import interface
from dspark_jax.drafters.interface import Committed, Proposal
from dspark_jax.models import transformer
from dspark_jax.models.attention import Packing, unpack

Array = jax.Array
Params = dict[str, Any]


class StepOutput(NamedTuple):
    """What one step did: `committed` int32 `[R, S]` (the first `kept [R]` of each row count), `accepted [R]` draft
    tokens before stops and limits, `verified [R]`, `confidence [R, K]`, `drafts [R, K]`."""

    committed: Array
    kept: Array
    accepted: Array
    verified: Array
    confidence: Array
    drafts: Array


def draft(draft_params: Params, state: DecodeState, program: Program) -> Proposal:
    """Proposes a block for each request (section 3); without a drafter, blocks of no tokens."""
    requests = state.anchor.shape[0]
    if program.drafter is None:
        empty = jnp.zeros((requests, 0))
        return Proposal(empty.astype(jnp.int32), empty, jnp.zeros((0, 0, requests)), empty, ())

    def draw(logits: Array, slot: Array) -> tuple[Array, Array, Array]:
        if program.mode == "greedy":
            best = best_token(logits)
            return best, jnp.ones((requests,)), jnp.zeros((0, requests))
        probs = distribution(logits, state.sampling, program.mode)  # [Vd, R]
        token = categorical(probs, uniforms(state.sampling.key, state.start + 1 + slot, DRAW_DRAFT))
        return token, jnp.take_along_axis(probs, token[None], axis=0)[0], probs

    return interface.propose(program.drafter, draft_params, state.draft_cache, state.anchor, state.start, draw)


def admitted_lengths(proposal: Proposal, state: DecodeState, program: Program) -> Array:
    """Draft tokens to verify, int32 `[R]`: the schedule's choice, within the token limit and the position limits."""
    if program.drafter is None:
        return jnp.zeros_like(state.start)
    last_position = min(program.target.max_positions, program.drafter.max_positions) - 1
    room = jnp.minimum(state.limit - state.length - 1, last_position - state.start)
    if interface.may_abstain(program.drafter):
        room = jnp.minimum(room, interface.proposed(program.drafter, proposal))
    return verify_lengths(program.schedule, proposal.confidence, state.threshold, room)


def judge(
    logits: Array,
    proposal: Proposal,
    lengths: Array,
    packing: Packing,
    state: DecodeState,
    program: Program,
    bound: Params,
) -> Verdict:
    """Applies the acceptance rule to the target's `logits [V, B]` of packed rows."""
    if program.mode == "greedy":
        best = unpack(best_token(logits), packing.row)  # [R, S]
        return verify_greedy(best, proposal.tokens, lengths)
    target = distribution(logits, state.sampling.rows(packing.request), program.mode)  # [V, B]
    requests, block = proposal.tokens.shape
    slot_row = packing.row[:, :block]  # [R, K]
    token_probs = target[proposal.tokens, slot_row]  # [R, K]
    positions = state.start[:, None] + 1 + jnp.arange(block)
    keys = jnp.repeat(state.sampling.key, block, axis=0)
    draws = uniforms(keys, positions.reshape(-1), DRAW_ACCEPT).reshape(requests, block)
    accepted = accepted_length(token_probs, proposal.token_probs, draws, lengths)
    here = jnp.take_along_axis(packing.row, accepted[:, None], axis=1)[:, 0]
    target_next = jnp.take(target, here, axis=1)  # [V, R]
    if block:
        slot = jnp.minimum(accepted, block - 1)
        assert program.drafter is not None  # blocks of no tokens come without one
        draft_next = interface.draft_distribution(program.drafter, bound, proposal, slot, target.shape[0])  # [V, R]
        target_next = next_distribution(target_next, draft_next, accepted < lengths)
    draw = uniforms(state.sampling.key, state.start + 1 + accepted, DRAW_TARGET)
    return Verdict(accepted, categorical(target_next, draw))


def commit(
    state: DecodeState, proposal: Proposal, lengths: Array, verdict: Verdict, program: Program
) -> tuple[DecodeState, Array, Array]:
    """Moves lengths past the committed tokens, applies stop tokens and limits, writes the output.

    A stop token inside the accepted run ends the request there; a stop token before the length limit wins.

    Returns:
        The state (its caches as they were), committed tokens `[R, S]`, and how many of them count `[R]`.
    """
    slots = jnp.arange(program.slots)
    padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    run = jnp.where(slots == verdict.accepted[:, None], verdict.next_token[:, None], padded)  # [R, S]
    natural = verdict.accepted + 1
    stop = is_stop(run, program.stop_ids) & (slots < natural[:, None])
    first_stop = jnp.where(jnp.any(stop, axis=1), jnp.argmax(stop, axis=1), program.slots)
    count = jnp.minimum(jnp.minimum(natural, first_stop + 1), state.limit - state.length)
    count = jnp.where(state.active, count, 0)
    stopped = state.active & (first_stop < count)
    length = state.length + count
    write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    kept = jnp.take_along_axis(run, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    counters = Counters(
        state.counters.rounds + state.active,
        state.counters.drafted + jnp.where(state.active, interface.proposed(program.drafter, proposal), 0),
        state.counters.verified + jnp.where(state.active, lengths, 0),
        state.counters.accepted + jnp.minimum(count, verdict.accepted) * state.active,
    )
    new = state._replace(
        anchor=jnp.where(state.active, kept, state.anchor),
        start=state.start + count,
        tokens=write(state.tokens, run, state.length),
        length=length,
        active=state.active & ~stopped & (length < state.limit),
        stopped=state.stopped | stopped,
        counters=counters,
    )
    return new, run, count


def verify_and_commit(
    target_params: Params,
    draft_params: Params,
    state: DecodeState,
    proposal: Proposal,
    lengths: Array,
    *,
    program: Program,
    bucket: int,
) -> tuple[DecodeState, StepOutput]:
    """The second half of a step, compiled once per bucket: target pass over the packed rows, acceptance, commit."""
    packing = pack_rows(lengths, state.active, program.slots, bucket)
    block = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)  # [R, S]
    ids = block[packing.request, packing.offset]  # [B]
    hidden, target_cache = transformer.extend(
        target_params, program.target, state.target_cache, ids, state.start, packing, program.capture
    )
    logits = transformer.logits(target_params, hidden.final, program.target.final_softcap)
    logits = mask_padding(logits, program.target)  # [V, B]
    verdict = judge(logits, proposal, lengths, packing, state, program, draft_params)
    new, run, count = commit(state, proposal, lengths, verdict, program)
    draft_cache = proposal.cache
    if program.drafter:
        seen = Committed(hidden, state.start, state.anchor, run, verdict.accepted, packing)
        draft_cache = interface.ingest(program.drafter, draft_params, draft_cache, seen)
    new = new._replace(target_cache=target_cache, draft_cache=draft_cache)
    return new, StepOutput(run, count, verdict.accepted, lengths, proposal.confidence, proposal.tokens)


def step(
    target_params: Params, draft_params: Params, state: DecodeState, *, program: Program, bucket: int
) -> tuple[DecodeState, StepOutput]:
    """One round over all slots.

    Args:
        target_params: the target's pytree. draft_params: the drafter's (`interface.bind`), {} without one.
        program, bucket: static. Verify lengths are cut where they would not fit into the bucket.
    """
    proposal = draft(draft_params, state, program)
    lengths = cap_to_bucket(admitted_lengths(proposal, state, program), state.active, bucket)
    return verify_and_commit(target_params, draft_params, state, proposal, lengths, program=program, bucket=bucket)


def verify_in_bucket(
    target_params: Params,
    draft_params: Params,
    state: DecodeState,
    proposal: Proposal,
    lengths: Array,
    program: Program,
    buckets: tuple[int, ...],
) -> DecodeState:
    """`verify_and_commit` in the smallest bucket that holds the admitted rows.

    A loop for each bucket, of which one runs, once: `lax.switch` would copy all caches, into and out of its branches.
    """
    rows = jnp.sum(jnp.where(state.active, lengths + 1, 0))
    index = jnp.sum(jnp.asarray(buckets) < rows)
    state, proposal = state._replace(draft_cache=proposal.cache), proposal._replace(cache=())  # one owner of the cache
    carry = (index, state)
    for number, size in enumerate(buckets):

        def chosen(carry: tuple[Array, DecodeState], number: int = number) -> Array:
            return carry[0] == number

        def once(carry: tuple[Array, DecodeState], size: int = size) -> tuple[Array, DecodeState]:
            now = carry[1]
            block = proposal._replace(cache=now.draft_cache)
            new, _ = verify_and_commit(target_params, draft_params, now, block, lengths, program=program, bucket=size)
            return jnp.full_like(index, -1), new

        carry = jax.lax.while_loop(chosen, once, carry)
    return carry[1]


def run_rounds(
    target_params: Params,
    draft_params: Params,
    state: DecodeState,
    rounds: Array,
    until_free: Array,
    *,
    program: Program,
    buckets: tuple[int, ...],
) -> DecodeState:
    """Keeps the loop on the device: up to `rounds` steps, each in the smallest bucket that holds what is admitted.

    It ends early where the caches have no room for one more step of every active request.

    Args:
        rounds: int32 `[]`, most steps to take.
        until_free: bool `[]`, stop as soon as a slot that was active has ended (so that the host can refill it).
        buckets: ascending row counts; the last holds everything.
    """
    before = jnp.sum(state.active)
    last = state.target_cache[0].keys.shape[1] - program.slots  # where the last step that fits begins

    def go_on(carry: tuple[Array, DecodeState]) -> Array:
        taken, now = carry
        busy = jnp.sum(now.active)
        fits = jnp.all(~now.active | (now.start <= last))
        return (taken < rounds) & (busy > 0) & fits & ((busy == before) | ~until_free)

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        taken, now = carry
        whole = program.schedule == "fixed" and not interface.may_abstain(program.drafter)
        if whole or len(buckets) == 1:
            return taken + 1, step(target_params, draft_params, now, program=program, bucket=buckets[-1])[0]
        proposal = draft(draft_params, now, program)
        lengths = cap_to_bucket(admitted_lengths(proposal, now, program), now.active, buckets[-1])
        return taken + 1, verify_in_bucket(target_params, draft_params, now, proposal, lengths, program, buckets)

    return jax.lax.while_loop(go_on, body, (jnp.int32(0), state))[1]
