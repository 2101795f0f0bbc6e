"""Forced decoding: the rounds that a drafter would have had along texts that the target has written already.

Speculative decoding emits the token x at a slot from two sources: as an accepted draft, with probability
min(p_d(x), p_t(x)), or as the correction, with p_t(x) less that. So given that x came out, it was an accepted draft
with probability min(1, p_d(x) / p_t(x)), and a walk along a text drawn from p_t (plain decoding's) that flips this coin
at each slot has the very joint distribution of texts and rounds that decoding with the drafter has. At temperature 0
the coin is whether the draft is x, and the rounds are those of real decoding.

The target reads a text once, in one pass, whatever the number of drafters (`Reader`) and rounds; a round costs the
draft alone. With `whole`, what decoding would have drafted behind the first rejection is drawn too: the rejected draft
from max(p_d - p_t, 0), normalised, and those behind it from p_d. Only their confidences need it: a threshold may let
them be verified. Letters: R texts side by side, T padded tokens of one, M rounds at most, K draft tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.batching import capacity_for, padded_length
from dspark_jax.decoding.requests import Request, mode_of
from dspark_jax.decoding.sampling import (
    DRAW_ACCEPT,
    DRAW_DRAFT,
    Mode,
    Sampling,
    best_token,
    categorical,
    distribution,
    raw_key,
    sampling_of,
    uniforms,
)
from dspark_jax.decoding.schedule import BUDGETED, Schedule, check_confidence, verify_lengths
from dspark_jax.decoding.verify import accept_probability, leading_run
from dspark_jax.drafters import interface
from dspark_jax.drafters.interface import Committed, bind
from dspark_jax.evaluation.reading import Read, Reader, Text, target_logits
from dspark_jax.models.attention import dense_packing
from dspark_jax.models.config import TransformerConfig
from dspark_jax.models.transformer import Hidden, head_weight

Array = jax.Array
Params = dict[str, Any]
_ROOM = 512  # padded tokens of a text in a whole group


@dataclass(frozen=True)
class ForcedRounds:
    """The rounds of one text, the fields as `Outcome`'s; `confidence` is () without a head, or without `whole`."""

    id: str
    accepted: tuple[int, ...]
    verified: tuple[int, ...]
    reached: tuple[int, ...]
    confidence: tuple[tuple[float, ...], ...]


class _Plan(NamedTuple):
    """What a program is compiled for."""

    target: TransformerConfig
    drafter: Any
    schedule: Schedule
    mode: Mode
    whole: bool
    rounds: int
    dtype: Any


class _Texts(NamedTuple):
    """R texts on the device: `ids [R, T]`, tokens of `prompt [R]` and of both together, `end [R]`; `room [R]`, the
    position of the last draft that the limit allows; `sampling`, and the schedule's `threshold []`."""

    ids: Any
    prompt: Any
    end: Any
    room: Any
    sampling: Sampling
    threshold: Any


class _Rounds(NamedTuple):
    """Rounds of R texts: `accepted`, `verified [R, M]`, `confidence [R, M, K]`."""

    accepted: Array
    verified: Array
    confidence: Array


def forced_rounds(
    target: Any,
    drafter: Any,
    texts: Sequence[Text],
    *,
    schedule: Schedule = "fixed",
    threshold: float = 0.5,
    whole: bool | None = None,
    batch_size: int = 16,
    reader: Reader | None = None,
) -> Iterator[ForcedRounds]:
    """The rounds of every text, in no particular order.

    Args:
        target, drafter: as `Generator`'s. schedule: `fixed` or `threshold`.
        whole: draw the drafts behind a rejection too; by default where the schedule asks for confidences. Needs the
            target's head at each rejection. batch_size: R at most; long texts come in smaller groups.
        reader: keeps what the target says of these texts, for other drafters; nothing is kept without.

    Raises:
        ValueError: a drafter that does not belong to the target, a schedule with a budget (it needs the batch's other
            requests), or one that wants confidences of a drafter without.
    """
    config = drafter.config
    config.check_target(target.config)
    if schedule in BUDGETED:
        raise ValueError(f"schedule {schedule}: shares rows among requests, forced decoding has fixed and threshold")
    check_confidence(config, schedule)
    whole = schedule != "fixed" if whole is None else whole
    params = target.params
    reader = reader or Reader(config.target_layer_ids, keep_bytes=0)
    bound = bind(drafter.params, params["embed"], head_weight(params))
    bound["draft_ids"] = _inverse(bound, target.config.vocab_size)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else params["embed"].dtype
    for text in texts:
        if len(text.token_ids) <= 1:  # the prefill brought all
            yield ForcedRounds(text.id, (), (), (), ())
    for group, rows in groups_of([text for text in texts if len(text.token_ids) > 1], batch_size):
        mode = mode_of(Request(text.id, text.prompt_ids, text.sampling) for text in group)
        answer = max(len(text.token_ids) for text in group)
        plan = _Plan(target.config, config, schedule, mode, whole, padded_length(answer), dtype)
        on_device = _on_device(group, plan, rows, threshold)
        read = reader.read(target, group, on_device.ids.shape, mode, config.target_layer_ids)
        made = jax.device_get(_run(params, bound, on_device, read, plan=plan))
        for row, text in enumerate(group):
            yield _of_text(text, jax.tree.map(lambda x, row=row: x[row], made), whole and config.confidence)


def groups_of(texts: Sequence[Text], batch_size: int) -> Iterator[tuple[list[Text], int]]:
    """Texts of like lengths side by side, with the number of rows that a program has for them, `batch_size` or less.

    Rows are halved until a group has no more than `batch_size * _ROOM` padded tokens: what the target keeps of its
    pass grows with them, scores of attention with their length on top.
    """
    todo = sorted(texts, key=lambda text: len(text.ids))
    begin = 0
    while begin < len(todo):
        rows = batch_size
        while rows > 1 and rows * capacity_for(len(todo[begin : begin + rows][-1].ids)) > batch_size * _ROOM:
            rows = (rows + 1) // 2
        yield todo[begin : begin + rows], rows
        begin += rows


def _inverse(bound: Params, vocab_size: int) -> Array:
    """Draft ids of the target's ids, int32 `[V]`; -1 for tokens that cannot be drafted."""
    if "ids" not in bound:
        return jnp.arange(vocab_size, dtype=jnp.int32)
    ids = bound["ids"]
    return jnp.full(vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))


def _on_device(group: Sequence[Text], plan: _Plan, size: int, threshold: float) -> _Texts:
    """The arrays of a group, filled up with texts that are at their end; a few lengths only, so that few programs are
    compiled."""
    at_its_end = replace(group[0], token_ids=group[0].token_ids[:1])
    full = [*group, *[at_its_end] * (size - len(group))]
    ends = [len(text.ids) for text in full]
    ids = np.zeros((size, capacity_for(max(ends) + plan.drafter.block_size + 1)), np.int32)
    for row, text, end in zip(ids, full, ends, strict=True):
        row[:end] = text.ids
    context = plan.target.max_positions
    rooms = [min(len(t.prompt_ids) + t.sampling.max_tokens, context) - 2 for t in full]
    keys = (raw_key(text.stream, own=False) for text in full)
    sampling = sampling_of([text.sampling for text in full], keys)
    prompts = np.asarray([len(text.prompt_ids) for text in full], np.int32)
    return _Texts(
        ids, prompts, np.asarray(ends, np.int32), np.asarray(rooms, np.int32), sampling, np.float32(threshold)
    )


def _of_text(text: Text, made: _Rounds, confident: bool) -> ForcedRounds:
    """The rounds of one text out of host arrays `[M]` and `[M, K]`."""
    left = len(text.token_ids) - 1
    accepted: list[int] = []
    verified: list[int] = []
    reached: list[int] = []
    while left > 0:
        number = len(accepted)
        took, looked = int(made.accepted[number]), int(made.verified[number])
        stop = text.stopped and took == left  # the stop token was an accepted draft
        accepted.append(took)
        verified.append(looked)
        reached.append(took if stop else looked)
        left -= took + 1
    rows = made.confidence[: len(accepted)].tolist() if confident else []
    return ForcedRounds(text.id, tuple(accepted), tuple(verified), tuple(reached), tuple(map(tuple, rows)))


# --- on the device ---


@partial(jax.jit, static_argnames=("plan",))
def _run(params: Params, bound: Params, texts: _Texts, read: Read, *, plan: _Plan) -> _Rounds:
    """All rounds of R texts."""
    requests, length = texts.ids.shape
    columns = lambda x: x.reshape(requests * length, -1).T  # noqa: E731
    hidden = Hidden(columns(read.final), columns(read.features))
    memory = interface.init_memory(plan.drafter, requests, length, plan.dtype)
    following = jnp.pad(texts.ids[:, 1:], ((0, 0), (0, 1)))
    whole = Committed(
        hidden,
        jnp.zeros_like(texts.prompt),
        texts.ids[:, 0],
        following,
        texts.prompt - 1,
        dense_packing(requests, length),
    )
    # rows behind the prompt come in too: nothing reads a cache at or behind a round's start, and rounds overwrite it
    memory = interface.ingest(plan.drafter, bound, memory, whole)
    block = plan.drafter.block_size
    empty = jnp.zeros((requests, plan.rounds), jnp.int32)
    out = _Rounds(empty, empty, jnp.zeros((requests, plan.rounds, block), jnp.float32))

    def going(carry: tuple[Any, Array, Array, _Rounds]) -> Array:
        return jnp.any(carry[1] < texts.end - 1)

    def step(carry: tuple[Any, Array, Array, _Rounds]) -> tuple[Any, Array, Array, _Rounds]:
        memory, start, number, out = carry
        memory, did = _round(params, bound, texts, read, memory, start, plan)
        active = start < texts.end - 1
        put = lambda old, new: old.at[:, number].set(new)  # noqa: E731
        return memory, start + jnp.where(active, did.accepted + 1, 0), number + 1, jax.tree.map(put, out, did)

    return jax.lax.while_loop(going, step, (memory, texts.prompt, jnp.int32(0), out))[3]


def _round(
    params: Params, bound: Params, texts: _Texts, read: Read, memory: Any, start: Array, plan: _Plan
) -> tuple[Any, _Rounds]:
    """One round of R texts from position `start [R]` on: the memory behind it, and what was accepted, `[R]`."""
    requests, block = start.shape[0], plan.drafter.block_size
    slots = jnp.arange(block + 1)
    at = start[:, None] + slots  # [R, S]
    near = lambda x: jnp.take_along_axis(x, at.reshape(at.shape + (1,) * (x.ndim - 2)), axis=1)  # noqa: E731
    tokens = jnp.take_along_axis(texts.ids, start[:, None] + jnp.arange(block + 2), axis=1)  # [R, S + 1]
    anchor, labels, following = tokens[:, 0], tokens[:, 1:-1], tokens[:, 1:]  # [R], [R, K], [R, S]
    seen = near(read.final), near(read.features)  # [R, S, D], [R, S, m D]
    labelled = _Labels(labels, bound["draft_ids"][labels])
    propose = partial(interface.propose, plan.drafter, bound, memory, anchor, start)
    proposal = propose(_forced(texts, labelled, plan))
    drafted = jnp.where(proposal.tokens == labels, proposal.token_probs, 0.0)
    taken = _coins(texts, start, drafted, near(read.probs)[:, :block])
    left = texts.end - 1 - start  # tokens of the text that are still to come
    run = leading_run(taken, jnp.minimum(left, block))
    if plan.whole and plan.mode != "greedy":  # greedy proposals are whole
        state = jnp.take_along_axis(seen[0], run[:, None, None], axis=1)[:, 0].T  # [D, R]
        logits = target_logits(params, state, plan.target)
        refused = distribution(logits, texts.sampling, plan.mode)  # p_t there, [V, R]
        proposal = propose(_whole(texts, labelled, start, run, left, refused, bound, plan))
    last = min(plan.target.max_positions, plan.drafter.max_positions) - 1
    room = jnp.minimum(texts.room, last) - start
    if interface.may_abstain(plan.drafter):
        room = jnp.minimum(room, interface.proposed(plan.drafter, proposal))
    lengths = verify_lengths(plan.schedule, proposal.confidence, texts.threshold, room)
    accepted = jnp.minimum(run, lengths)
    columns = lambda x: x.reshape(requests * (block + 1), -1).T  # noqa: E731
    hidden = Hidden(columns(seen[0]), columns(seen[1]))
    new = Committed(hidden, start, anchor, following, accepted, dense_packing(requests, block + 1))
    memory = interface.ingest(plan.drafter, bound, proposal.cache, new)
    return memory, _Rounds(accepted, lengths, proposal.confidence)


def _coins(texts: _Texts, start: Array, drafted: Array, probs: Array) -> Array:
    """Whether each slot's token was an accepted draft, bool `[R, K]`, given p_d and p_t of it, `[R, K]`."""
    draws = [_uniform(texts, start, slot, DRAW_ACCEPT) for slot in range(drafted.shape[1])]
    return jnp.stack(draws, axis=1) < accept_probability(drafted, probs)


def _uniform(texts: _Texts, start: Array, slot: Array | int, purpose: Array | int) -> Array:
    return uniforms(texts.sampling.key, start + 1 + slot, purpose)


class _Labels(NamedTuple):
    """The text's tokens in a block, int32 `[R, K]`: `target` ids, and `draft` ids (-1: cannot be drafted)."""

    target: Array
    draft: Array


def _forced(texts: _Texts, labels: _Labels, plan: _Plan) -> interface.Draw:
    """What `propose` draws by: the text's tokens, with p_d of them (0 for those that cannot be drafted).

    Greedy proposals are the drafter's own: they are the text's as long as they are accepted.
    """
    requests = labels.draft.shape[0]
    nothing = jnp.zeros((0, requests))

    def greedy(logits: Array, slot: Array) -> tuple[Array, Array, Array]:
        return best_token(logits), jnp.ones(requests), nothing

    def forced(logits: Array, slot: Array) -> tuple[Array, Array, Array]:
        wanted = labels.draft[:, slot]
        ids = jnp.maximum(wanted, 0)
        drafted = distribution(logits, texts.sampling, plan.mode)  # [Vd, R]
        return ids, jnp.take_along_axis(drafted, ids[None], axis=0)[0] * (wanted >= 0), nothing

    return greedy if plan.mode == "greedy" else forced


def _whole(
    texts: _Texts,
    labels: _Labels,
    start: Array,
    run: Array,
    left: Array,
    refused: Array,
    bound: Params,
    plan: _Plan,
) -> interface.Draw:
    """What `propose` draws by where `run [R]` tokens are accepted: those, the refused draft, and the drafter's own.

    Args:
        left: tokens of the text that are still to come, `[R]`; where all of them are accepted, no draft is refused.
        refused: p_t at the refused draft's slot, `[V, R]`.
    """
    refused = refused[bound["ids"]] if "ids" in bound else refused  # [Vd, R]

    def draw(logits: Array, slot: Array) -> tuple[Array, Array, Array]:
        drafted = distribution(logits, texts.sampling, plan.mode)
        uniform = _uniform(texts, start, slot, DRAW_DRAFT + slot)
        refuses = (slot == run) & (run < left)
        own = categorical(jnp.where(refuses, jnp.maximum(drafted - refused, 0.0), drafted), uniform)
        ids = jnp.where(slot < run, jnp.maximum(labels.draft[:, slot], 0), own)
        return ids, jnp.ones_like(uniform), jnp.zeros((0, run.shape[0]))

    return draw
