"""The speculative step: draft, schedule, pack, verify, commit, each a pure function; jitted once per bucket.

`bucket` is static: the rows that the target computes in this step, over all requests together. With no drafter a step
is plain decoding by the same code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.decoding.budget import fill, make_round
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
from dspark_jax.decoding.trace import Rounds, Trace, record
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
        position = state.start + 1 + slot
        draws = uniforms(state.sampling.key, position, DRAW_DRAFT + slot)
        if program.budgeted:
            draws = jnp.where(state.sampling.pinned, uniforms(state.sampling.key, position, DRAW_TARGET), draws)
        token = categorical(probs, draws)
        return token, jnp.take_along_axis(probs, token[None], axis=0)[0], probs

    return interface.propose(program.drafter, draft_params, state.draft_cache, state.anchor, state.start, draw)


def positions_left(state: DecodeState, program: Program) -> Array:
    """Draft tokens for which token limit and position limits have room, int32 `[R]`; none for plain requests."""
    if program.drafter is None:
        return jnp.zeros_like(state.start)
    last_position = min(program.target.max_positions, program.drafter.max_positions) - 1
    room = jnp.minimum(state.limit - state.length - 1, last_position - state.start)
    return jnp.where(state.speculative, room, 0)


def room_left(proposal: Proposal, state: DecodeState, program: Program) -> Array:
    """Draft tokens that may be verified at most, int32 `[R]`: within `positions_left`, and those that there are."""
    room = positions_left(state, program)
    if program.drafter is None or not interface.may_abstain(program.drafter):
        return room
    return jnp.minimum(room, interface.proposed(program.drafter, proposal))


def admitted_lengths(proposal: Proposal, state: DecodeState, program: Program, bucket: int) -> Array:
    """Draft tokens to verify in `bucket` rows, int32 `[R]`: the schedule's choice where the bucket is given.

    With a budgeted schedule those of the greatest survival that fill it; else a prefix of each block, later requests'
    cut where they do not fit.
    """
    room = room_left(proposal, state, program)
    if program.drafter is None or not program.budgeted:
        lengths = verify_lengths(program.schedule, proposal.confidence, state.threshold, room)
        return cap_to_bucket(lengths, state.active, bucket)
    now = make_round(state.active, room, (bucket,), program.drafter.block_size)
    survival = jnp.cumprod(proposal.confidence, axis=1)
    return fill(now, survival, jnp.zeros_like(room), jnp.int32(0))


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
    verdict = Verdict(accepted, categorical(target_next, draw))
    if block and program.budgeted:
        pinned = judge_pinned(target, proposal, lengths, packing, state)
        verdict = Verdict(*(jnp.where(state.sampling.pinned, a, b) for a, b in zip(pinned, verdict, strict=True)))
    return verdict


def judge_pinned(target: Array, proposal: Proposal, lengths: Array, packing: Packing, state: DecodeState) -> Verdict:
    """The rule for requests with a seed of their own, where verify lengths depend on the other requests.

    The token at a position is the one that plain decoding draws there, from `target [V, B]` and (seed, position); a
    draft is accepted if it is that token. Drafts are drawn with the same uniforms, so they often are, less often
    though than by `accepted_length`: no rule whose tokens do not depend on the drafts accepts as many.
    """
    positions = state.start[packing.request] + 1 + packing.offset
    draws = uniforms(state.sampling.key[packing.request], positions, DRAW_TARGET)
    own = unpack(categorical(target, draws), packing.row)  # [R, S]
    return verify_greedy(own, proposal.tokens, lengths)


def commit(
    state: DecodeState, proposal: Proposal, lengths: Array, verdict: Verdict, program: Program, drafted: Array
) -> tuple[DecodeState, Array, Array]:
    """Moves lengths past the committed tokens, applies stop tokens and limits, writes the output.

    `drafted`: int32 `[R]`, tokens that each request drafted, for the counters.

    A stop token inside the accepted run ends the request there; a stop token before the length limit wins.

    Returns:
        The state (its caches as they were), committed tokens `[R, S]`, and how many of them count `[R]`.
    """
    width = proposal.tokens.shape[1] + 1
    slots = jnp.arange(width)
    padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    run = jnp.where(slots == verdict.accepted[:, None], verdict.next_token[:, None], padded)  # [R, S]
    natural = verdict.accepted + 1
    stop = is_stop(run, program.stop_ids) & (slots < natural[:, None])
    first_stop = jnp.where(jnp.any(stop, axis=1), jnp.argmax(stop, axis=1), width)
    count = jnp.minimum(jnp.minimum(natural, first_stop + 1), state.limit - state.length)
    count = jnp.where(state.active, count, 0)
    stopped = state.active & (first_stop < count)
    length = state.length + count
    write = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    kept = jnp.take_along_axis(run, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    counters = Counters(
        state.counters.rounds + state.active,
        state.counters.drafted + jnp.where(state.active, drafted, 0),
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
    drafted: Array | None = None,
) -> tuple[DecodeState, StepOutput]:
    """The second half of a step, compiled once per bucket: target pass over the packed rows, acceptance, commit.

    Args:
        lengths: int32 `[R]`, at most `program.slots_in(bucket, R) - 1` each, and in all what the bucket holds.
        drafted: bool `[]`, whether `proposal` is of this round; None: it is. Counts and records of requests that decode
            plainly know nothing of it.
    """
    slots = program.slots_in(bucket, state.anchor.shape[0])
    whole, proposal = proposal, leading_slots(proposal, slots - 1)
    offered = state.speculative if drafted is None else state.speculative & drafted  # [R]
    tokens = jnp.where(offered, interface.proposed(program.drafter, whole), 0)
    packing = pack_rows(lengths, state.active, slots, bucket)
    block = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)  # [R, S]
    ids = block[packing.request, packing.offset]  # [B]
    hidden, target_cache = transformer.extend(
        target_params, program.target, state.target_cache, ids, state.start, packing, program.capture
    )
    logits = transformer.logits(target_params, hidden.final, program.target.final_softcap)
    logits = mask_padding(logits, program.target)  # [V, B]
    verdict = judge(logits, proposal, lengths, packing, state, program, draft_params)
    new, run, kept = commit(state, proposal, lengths, verdict, program, tokens)
    if isinstance(state.trace, Trace):
        did = Rounds(kept, verdict.accepted, lengths, tokens, whole.tokens, whole.confidence)
        number = state.counters.rounds
        new = new._replace(trace=record(state.trace, number, state.active, did, logits, run, packing.row))
    draft_cache = proposal.cache
    if program.drafter:
        seen = Committed(hidden, state.start, state.anchor, run, verdict.accepted, packing)
        draft_cache = interface.ingest(program.drafter, draft_params, draft_cache, seen)
    new = new._replace(target_cache=target_cache, draft_cache=draft_cache)
    run = jnp.pad(run, ((0, 0), (0, program.slots - slots)))
    return new, StepOutput(run, kept, verdict.accepted, lengths, whole.confidence, whole.tokens)


def leading_slots(proposal: Proposal, block: int) -> Proposal:
    """The first `block` draft tokens of each request."""
    if block == proposal.tokens.shape[1]:
        return proposal
    tokens, token_probs, confidence = (
        x[:, :block] for x in (proposal.tokens, proposal.token_probs, proposal.confidence)
    )
    return Proposal(tokens, token_probs, proposal.probs[:block], confidence, proposal.cache)


def step(
    target_params: Params, draft_params: Params, state: DecodeState, *, program: Program, bucket: int
) -> tuple[DecodeState, StepOutput]:
    """One round over all slots.

    Args:
        target_params: the target's pytree. draft_params: the drafter's (`interface.bind`), {} without one.
        program, bucket: static. See `admitted_lengths`.
    """
    proposal = draft(draft_params, state, program)
    lengths = admitted_lengths(proposal, state, program, bucket)
    return verify_and_commit(target_params, draft_params, state, proposal, lengths, program=program, bucket=bucket)
