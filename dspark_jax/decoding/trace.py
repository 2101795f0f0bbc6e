"""What each round did for each request: drafts, confidences, verdicts and log-probabilities, for callers who ask.

The device keeps the newest N rounds of every slot, in round order modulo N; the host reads them after each call, which
takes no more than N. Without a `TraceShape` a program carries and computes nothing of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.control import once

Array = jax.Array
Origin = Literal["draft", "corrected", "bonus", "plain"]


class TraceShape(NamedTuple):
    """What a program records: `rounds` N that it remembers, and L `top` log-probabilities at most of a position (None:
    no scores, which a program that could compute them pays for even where nobody wants them)."""

    rounds: int
    top: int | None


class Scores(NamedTuple):
    """Natural log-probabilities by the target at temperature 1, before any filter: of the tokens `token [...]`, and of
    the L most likely ones, `top [..., L]` with ids `top_ids [..., L]` (int32)."""

    token: Array
    top: Array
    top_ids: Array


class Rounds(NamedTuple):
    """Rounds of R requests: one of each, `[R]`, `[R, K]`, or the newest N, `[R, N]`, `[R, N, K]`.

    Attributes:
        kept, accepted, verified: int32, tokens committed, drafts accepted before stops and limits, and drafts that the
            target looked at. drafted: int32, tokens proposed (0: the round had no draft, or none for this request).
        drafts: int32, the block of K. confidence: float32, of its slots.
    """

    kept: Array
    accepted: Array
    verified: Array
    drafted: Array
    drafts: Array
    confidence: Array


class Trace(NamedTuple):
    """The newest N `rounds` of R slots, `scores` of the S rows of each, `[R, N, S]` and `[R, N, S, L]` (() without
    any), and whose are computed, bool `wants [R]`."""

    rounds: Rounds
    scores: Scores | tuple[()]
    wants: Array


def no_scores(shape: tuple[int, ...], top: int) -> Scores:
    """Zeros for tokens of this shape."""
    wide = (*shape, top)
    return Scores(jnp.zeros(shape), jnp.zeros(wide), jnp.zeros(wide, jnp.int32))


def init_trace(shape: TraceShape | None, requests: int, slots: int) -> Trace | tuple[()]:
    """Empty records of R requests with S = `slots` rows each; () where nothing is recorded."""
    if shape is None:
        return ()
    rounds = (requests, shape.rounds)
    ints = lambda *more: jnp.zeros((*rounds, *more), jnp.int32)  # noqa: E731
    block = slots - 1
    scores = () if shape.top is None else no_scores((*rounds, slots), shape.top)
    confidence, wants = jnp.zeros((*rounds, block)), jnp.zeros(requests, bool)
    return Trace(Rounds(ints(), ints(), ints(), ints(), ints(block), confidence), scores, wants)


def score(logits: Array, tokens: Array, column: Array, top: int) -> Scores:
    """Scores of `tokens [...]` from `logits [V, B]`, the one of each token in `column [...]`."""
    totals = jax.nn.logsumexp(logits, axis=0)  # [B]
    chosen = logits[tokens, column] - totals[column]
    if not top:
        return no_scores(tokens.shape, 0)._replace(token=chosen)
    values, ids = jax.lax.top_k(logits.T, top)  # [B, L]
    return Scores(chosen, (values - totals[:, None])[column], ids[column].astype(jnp.int32))


def record(trace: Trace, number: Array, active: Array, new: Rounds, logits: Array, run: Array, row: Array) -> Trace:
    """Writes a round into the place of its `number [R]`.

    Args:
        active: bool `[R]`, requests that the round was for. logits: `[V, B]` of its packed rows.
        run: int32 `[R, S']`, tokens of its slots. row: int32 `[R, S']`, their rows.
    """
    requests, rounds = trace.rounds.kept.shape
    at = (jnp.arange(requests), number % rounds)

    def put(old: Array, value: Array) -> Array:
        wider = old.shape[2] - value.shape[1] if value.ndim > 1 else 0
        value = jnp.pad(value, [(0, 0), (0, wider), *[(0, 0)] * (value.ndim - 2)][: value.ndim])
        return old.at[at].set(value.astype(old.dtype))

    def rate(scores: Scores) -> Scores:
        rated = score(logits, run, row, scores.top.shape[-1])
        return jax.tree.map(put, scores, rated)

    scores = once(jnp.any(active & trace.wants), rate, trace.scores) if trace.scores else ()
    return Trace(jax.tree.map(put, trace.rounds, new), scores, trace.wants)


# --- the host ---


@dataclass(frozen=True)
class RoundTrace:
    """What a round, or the prefill, brought one request.

    Attributes:
        tokens: committed ones. drafts: the proposed block, () where nothing was drafted. confidence: of its slots, ()
            for drafters without a confidence head. verified: drafts that the target looked at. accepted: committed
            drafts.
        logprobs: natural log-probability of each token by the target at temperature 1, before any filter; () where the
            request did not ask. top: the most likely (id, log-probability) at each token.
    """

    tokens: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    verified: int = 0
    accepted: int = 0
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()

    def origin(self, index: int) -> Origin:
        """Where committed token number `index` comes from: an accepted draft; the target, in place of a rejected draft
        ("corrected"), behind a block accepted whole ("bonus"), or without any verified draft ("plain")."""
        if index < self.accepted:
            return "draft"
        if not self.verified:
            return "plain"
        return "corrected" if self.accepted < self.verified else "bonus"


def _ranked(
    scores: Scores, count: int, top: int
) -> tuple[tuple[float, ...], tuple[tuple[tuple[int, float], ...], ...]]:
    """Log-probabilities of the first `count` tokens, and their `top` most likely ones."""
    ids, values = scores.top_ids[:count, :top].tolist(), scores.top[:count, :top].tolist()
    most = tuple(tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
    return tuple(scores.token[:count].tolist()), most


def first_trace(scores: Scores | tuple[()], index: int, token: int, logprobs: int | None) -> RoundTrace:
    """The prefill's trace of prompt number `index`, whose first token is `token`."""
    if logprobs is None or not isinstance(scores, Scores):
        return RoundTrace((token,))
    one = jax.tree.map(lambda x: np.asarray(x)[index : index + 1], scores)
    return RoundTrace((token,), (), (), 0, 0, *_ranked(one, 1, logprobs))


def round_traces(
    trace: Trace, slot: int, before: int, after: int, tokens: list[int], logprobs: int | None, confident: bool
) -> tuple[RoundTrace, ...]:
    """Rounds number `before` to `after` of a slot, from host arrays.

    Args:
        tokens: committed in these rounds. logprobs: how many top ones the request asks for; None: no scores.
        confident: whether the drafter has a confidence head.
    """
    made, at = [], 0
    for number in range(before, after):
        place = (slot, number % trace.rounds.kept.shape[1])
        did = jax.tree.map(lambda x, at=place: x[at], trace.rounds)
        kept, verified, drafted = int(did.kept), int(did.verified), int(did.drafted)
        mine = tuple(tokens[at : at + kept])
        at += kept
        drafts = tuple(did.drafts[:drafted].tolist())
        confidence = tuple(did.confidence[:drafted].tolist()) if confident else ()
        scores: Any = ((), ())
        if logprobs is not None:
            scores = _ranked(jax.tree.map(lambda x, at=place: x[at], trace.scores), kept, logprobs)
        made.append(RoundTrace(mine, drafts, confidence, verified, min(int(did.accepted), kept), *scores))
    return tuple(made)
