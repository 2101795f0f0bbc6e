"""Many rounds in one compiled program: each drafts or not, and verifies in the bucket that its schedule chooses."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.decoding.budget import (
    Costs,
    bucket_gains,
    budgeted_lengths,
    corrected,
    count_kept,
    forecast,
    make_round,
    pays_to_draft,
    remember,
)
from dspark_jax.decoding.control import once
from dspark_jax.decoding.state import DecodeState, Program
from dspark_jax.decoding.step import admitted_lengths, draft, positions_left, room_left, step, verify_and_commit
from dspark_jax.drafters import interface
from dspark_jax.drafters.interface import Proposal

Array = jax.Array
Params = dict[str, Any]


class Totals(NamedTuple):
    """What a call of `run_rounds` did, int32.

    Attributes:
        rounds: `[]`, rounds. drafted: `[]`, rounds with a draft. by_bucket: `[buckets]`, rounds by the bucket that they
            verified in. rows: `[]`, rows that were verified for a request; the others of a bucket are padding.
            requests: `[]`, active requests, summed over the rounds.
    """

    rounds: Array
    drafted: Array
    by_bucket: Array
    rows: Array
    requests: Array

    def after(self, drafted: Array | bool, bucket: Array | int, active: Array, lengths: Array) -> Totals:
        """One round more, of bool `active [R]` requests with `lengths [R]` verified drafts."""
        busy = jnp.sum(active)
        rows = busy + jnp.sum(jnp.where(active, lengths, 0))
        by_bucket = self.by_bucket.at[bucket].add(1)
        drafts = self.drafted + jnp.int32(drafted)
        return Totals(self.rounds + 1, drafts, by_bucket, self.rows + rows, self.requests + busy)


class _Carry(NamedTuple):
    """What goes from round to round. `proposal`: buffers for the newest one, its cache left out."""

    state: DecodeState
    proposal: Proposal
    totals: Totals


def verify_in_bucket(
    target_params: Params,
    draft_params: Params,
    state: DecodeState,
    proposal: Proposal,
    lengths: Array,
    index: Array,
    program: Program,
    buckets: tuple[int, ...],
    drafted: Array | None = None,
) -> DecodeState:
    """`verify_and_commit` in bucket number `index`; `proposal` without its cache, which the state has."""
    for number, size in enumerate(buckets):

        def verify(now: DecodeState, size: int = size) -> DecodeState:
            block = proposal._replace(cache=now.draft_cache)
            return verify_and_commit(
                target_params, draft_params, now, block, lengths, program=program, bucket=size, drafted=drafted
            )[0]

        state = once(index == number, verify, state)
    return state


def empty_proposal(draft_params: Params, state: DecodeState, program: Program) -> Proposal:
    """Zeros in the shape of a proposal, its cache left out: for rounds without a draft."""
    shapes = jax.eval_shape(lambda params, now: draft(params, now, program)._replace(cache=()), draft_params, state)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _free_round(
    target_params: Params, draft_params: Params, carry: _Carry, program: Program, buckets: tuple[int, ...]
) -> _Carry:
    """A round of a schedule without a budget."""
    if not (program.switchable and program.drafter):
        return _drafting_round(target_params, draft_params, carry, program, buckets)
    wanted = jnp.any(carry.state.active & (positions_left(carry.state, program) > 0))

    def plain(now: _Carry) -> _Carry:
        state, nothing = now.state, jnp.zeros_like(now.state.start)
        new, _ = verify_and_commit(
            target_params,
            draft_params,
            state,
            empty_proposal(draft_params, state, program)._replace(cache=state.draft_cache),
            nothing,
            program=program,
            bucket=buckets[0],
            drafted=jnp.bool_(False),
        )
        return now._replace(state=new, totals=now.totals.after(False, 0, state.active, nothing))

    carry = once(~wanted, plain, carry)
    return once(wanted, lambda c: _drafting_round(target_params, draft_params, c, program, buckets), carry)


def _drafting_round(
    target_params: Params, draft_params: Params, carry: _Carry, program: Program, buckets: tuple[int, ...]
) -> _Carry:
    """A round with a draft, in the smallest bucket that holds what it admits."""
    state, full, has_drafter = carry.state, len(buckets) - 1, program.drafter is not None
    if (program.schedule == "fixed" and not interface.may_abstain(program.drafter)) or not full:
        new, out = step(target_params, draft_params, state, program=program, bucket=buckets[-1])
        return carry._replace(state=new, totals=carry.totals.after(has_drafter, full, state.active, out.verified))
    proposal = draft(draft_params, state, program)
    lengths = admitted_lengths(proposal, state, program, buckets[-1])
    state = state._replace(draft_cache=proposal.cache)  # one owner of the cache
    index = jnp.sum(jnp.asarray(buckets) < jnp.sum(jnp.where(state.active, lengths + 1, 0)))
    block = proposal._replace(cache=())
    new = verify_in_bucket(target_params, draft_params, state, block, lengths, index, program, buckets)
    return carry._replace(state=new, totals=carry.totals.after(has_drafter, index, state.active, lengths))


def _budgeted_round(
    target_params: Params,
    draft_params: Params,
    carry: _Carry,
    costs: Costs,
    program: Program,
    buckets: tuple[int, ...],
) -> _Carry:
    """A round of `causal` or `async`: it drafts if that pays, and fills the bucket that its budget says."""
    state, past = carry.state, carry.state.past
    assert program.drafter is not None  # budgets are for drafts
    now = make_round(state.active, room_left(carry.proposal, state, program), buckets, program.drafter.block_size)
    gains = bucket_gains(now, forecast(past, program.schedule))
    drafts = pays_to_draft(now, gains, past, costs)

    def propose(inner: tuple[Any, Proposal]) -> tuple[Any, Proposal]:
        proposal = draft(draft_params, state._replace(draft_cache=inner[0]), program)
        return proposal.cache, proposal._replace(cache=())

    draft_cache, proposal = once(drafts, propose, (state.draft_cache, carry.proposal))
    state = state._replace(draft_cache=draft_cache)
    raw = jnp.cumprod(proposal.confidence, axis=1)
    survival = corrected(past, raw)
    lengths, index = budgeted_lengths(program.schedule, now, survival, gains, costs)
    lengths, index = jnp.where(drafts, lengths, 0), jnp.where(drafts, index, 0)
    new = verify_in_bucket(target_params, draft_params, state, proposal, lengths, index, program, buckets, drafts)
    accepted = new.counters.accepted - state.counters.accepted
    past = remember(count_kept(past, raw, lengths, accepted), survival, state.active, drafts)
    new = new._replace(past=past)
    return _Carry(new, proposal, carry.totals.after(drafts, index, state.active, lengths))


def run_rounds(
    target_params: Params,
    draft_params: Params,
    state: DecodeState,
    rounds: Array,
    until_free: Array,
    costs: Costs | None = None,
    *,
    program: Program,
    buckets: tuple[int, ...],
) -> tuple[DecodeState, Totals]:
    """Keeps the loop on the device: up to `rounds` rounds, each in the bucket that its schedule chooses.

    It ends early where the caches have no room for one more round of every active request.

    Args:
        rounds: int32 `[]`, most rounds to take.
        until_free: bool `[]`, stop as soon as a slot that was active has ended (so that the host can refill it).
        costs: the throughput curve, for schedules with a budget.
        buckets: ascending row counts; the last holds everything.
    """
    before = jnp.sum(state.active)
    last = state.capacity - program.slots  # where the last round that fits begins
    if program.budgeted and costs is None:
        raise ValueError(f"schedule {program.schedule!r}: needs costs (budget.make_costs)")

    def go_on(carry: _Carry) -> Array:
        now = carry.state
        busy = jnp.sum(now.active)
        fits = jnp.all(~now.active | (now.start <= last))
        return (carry.totals.rounds < rounds) & (busy > 0) & fits & ((busy == before) | ~until_free)

    def body(carry: _Carry) -> _Carry:
        if program.budgeted:
            assert costs is not None
            return _budgeted_round(target_params, draft_params, carry, costs, program, buckets)
        return _free_round(target_params, draft_params, carry, program, buckets)

    zero = jnp.int32(0)
    totals = Totals(zero, zero, jnp.zeros(len(buckets), jnp.int32), zero, zero)
    nothing = empty_proposal(draft_params, state, program) if program.budgeted else ()
    done = jax.lax.while_loop(go_on, body, _Carry(state, nothing, totals))  # type: ignore[arg-type]
    return done.state, done.totals
