"""Losses of Eagle3 and MTP: every position of a sequence drafts, over the steps of a training-time test (facts 37-43).

In step s, position i pairs its state with token i + s + 1 and predicts token i + s + 2; the state of step 0 comes from
the target, later ones are the drafter's own from the step before. Keys of step 0 are seen causally, those of later
steps by their own position alone, so a query sees what it would see in decoding after s draft tokens.

Eagle3's loss is the soft cross entropy -sum_v p_t log p_d, summed over supervised positions and divided by all N * T
positions, step s weighted by exp(-s / decay) (decay 4.48 is the reference's 0.8^s). MTP has one step and the terms of
`LossConfig` but confidence, over supervised positions, CE to the data token. In packed rows nothing reaches from one
document into another. Letters: N sequences, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.drafters import eagle3, mtp
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.drafters.recurrent import Model, advance
from dspark_jax.models.layers import linear, linear_rows, softcap
from dspark_jax.models.transformer import Hidden
from dspark_jax.sharding import constrain
from dspark_jax.training.anchors import document_positions
from dspark_jax.training.chunks import join_rows, split_rows
from dspark_jax.training.forward import BlockStates
from dspark_jax.training.losses import (
    Batch,
    Counts,
    LossConfig,
    Metrics,
    all_slot_terms,
    batch_normalizer,
    cast,
    draft_head,
    draft_ids,
    lk_metrics,
    of_whole_logits,
    slot_weights,
    vocabulary_lookup,
)

Array = jax.Array
Params = dict[str, Any]
_MASKED = -1e30


class StepTerms(NamedTuple):
    """Per-row values of a step: soft cross entropy, acceptance probability sum_v min(p_t, p_d), equal argmaxes."""

    ce: Array
    accept: Array
    correct: Array


def check_loss(config: Eagle3Config | MTPConfig, loss: LossConfig) -> None:
    """Refuses weights of terms that a kind does not have.

    Raises:
        ValueError: Eagle3 with a TV or an LK term, or a confidence term (neither kind has a confidence head).
    """
    if loss.confidence > 0:
        raise ValueError(f"loss.confidence {loss.confidence}: this drafter has no confidence head, must be 0")
    for name in ("tv", "lk", "lk_hybrid"):
        if isinstance(config, Eagle3Config) and getattr(loss, name) > 0:
            value = getattr(loss, name)
            raise ValueError(f"loss.{name} {value}: Eagle3 trains on the soft cross entropy alone, must be 0")


def shift(x: Array, by: int) -> Array:
    """Moves `x [N, T, ..]` left by `by` columns, zeros come in."""
    return jnp.pad(x[:, by:], ((0, 0), (0, min(by, x.shape[1])), *((0, 0),) * (x.ndim - 2)))


def reaches(segments: Array | None, by: int, like: Array) -> Array:
    """Bool `[N, T]`: whether the token `by` columns further on belongs to the same document; `like [N, T]`: any."""
    inside = jnp.arange(like.shape[1]) + by < like.shape[1]
    return jnp.broadcast_to(inside, like.shape) if segments is None else inside & (shift(segments, by) == segments)


def with_successor(loss_mask: Array, segments: Array | None) -> Array:
    """Float32 `[N, T]`: supervised tokens but the last one of each document, which has nothing left to draft."""
    mask = loss_mask > 0
    length = mask.shape[1]
    where = jnp.where(mask, jnp.arange(length), length)
    following = jax.lax.cummin(where, axis=1, reverse=True)  # first supervised token from here on
    following = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=length)  # and behind here, T without any
    some = following < length
    if segments is not None:
        some &= jnp.take_along_axis(segments, jnp.minimum(following, length - 1), axis=1) == segments
    return (mask & some).astype(jnp.float32)


def unroll(model: Model, params: Params, config: Any, embed: Array, batch: Batch, steps: int) -> list[Array]:
    """The drafter's states after each step, float32 `[D, N * T]` each; those beyond a sequence's end are meaningless.

    Args:
        params: trainable parameters in the compute dtype. embed: the target's embedding `[V, D]`.
    """
    sequences, length = batch.input_ids.shape
    flat = lambda x: x.reshape(sequences * length, -1)  # noqa: E731
    if isinstance(config, Eagle3Config):
        state = linear_rows(params["fc"], flat(batch.features))  # [D, N * T]
    else:
        state = model.enter(params, config, Hidden(flat(batch.final).T.astype(jnp.float32), jnp.zeros((0, 0))))
    position = jnp.tile(jnp.arange(length), sequences)
    if batch.segments is not None:
        position = document_positions(batch.segments).reshape(-1)
    keys: tuple[tuple[Array, Array], ...] = ()
    states = []

    @partial(jax.checkpoint, static_argnums=(3,))
    def step(params: Params, state: Array, keys: tuple, number: int) -> tuple[Array, tuple[Array, Array]]:
        ids = shift(batch.input_ids, number + 1).reshape(-1)
        attend = _attention(keys, sequences, config.score_scale, params["norm"].dtype, batch.segments)
        return advance(model, params | {"embed": embed}, config, ids, state, position + number, attend)

    for number in range(steps):
        state, new = step(params, state, keys, number)
        keys = (*keys, new)
        states.append(state)
    return states


def _attention(
    earlier: tuple[tuple[Array, Array], ...], sequences: int, scale: float, dtype: Any, segments: Array | None
) -> Callable:
    """Attention of step s: causal to step 0's keys, and to the same position's of steps 1 .. s; keeps keys and values.

    `earlier` and what is kept: keys and values `[G, hd, N * T]` of each step. `segments`: documents of packed rows.
    """

    def by_sequence(x: Array) -> Array:  # [..., hd, N * T] -> [..., hd, N, T]
        return x.astype(dtype).reshape(*x.shape[:-1], sequences, -1)

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
        chunks = (*earlier, (k, v))
        first_k, first_v = (by_sequence(x) for x in chunks[0])
        query = by_sequence(q * scale)  # [G, Q, hd, N, T]
        length = query.shape[-1]
        far = jnp.einsum("gqhnt,ghns->ngqts", query, first_k, preferred_element_type=jnp.float32)
        seen = jnp.tril(jnp.ones((length, length), bool))  # [T, T]
        if segments is not None:
            seen = (seen & (segments[:, None] == segments[..., None]))[:, None, None]  # [N, 1, 1, T, T]
        far = jnp.where(seen, far, _MASKED)
        near = [jnp.sum(query * by_sequence(key)[:, None], axis=2, dtype=jnp.float32) for key, _ in chunks[1:]]
        near = [jnp.transpose(x, (2, 0, 1, 3))[..., None] for x in near]  # [N, G, Q, T, 1]
        weights = jax.nn.softmax(jnp.concatenate([far, *near], axis=-1), axis=-1)  # [N, G, Q, T, T + s]
        out = jnp.einsum(
            "ngqts,ghns->gqhnt", weights[..., :length].astype(dtype), first_v, preferred_element_type=jnp.float32
        )
        for index, (_, value) in enumerate(chunks[1:]):
            own = jnp.transpose(weights[..., length + index], (1, 2, 0, 3))[:, :, None]  # [G, Q, 1, N, T]
            out = out + own * by_sequence(value)[:, None].astype(jnp.float32)
        return out.reshape(q.shape), (k, v)

    return attend


def eagle3_loss(
    trainable: Params,
    frozen: Params,
    config: Eagle3Config,
    loss: LossConfig,
    batch: Batch,
    compute_dtype: Any,
    counts: Counts | None = None,
    lengths: Array | None = None,
) -> tuple[Array, Metrics]:
    """Eagle3's loss of a batch.

    Args:
        trainable: float32 masters; products run in `compute_dtype`. frozen: as `losses.block_loss` takes it.
        counts: from `eagle3_counts`, of a larger batch that this one is a part of; its own without.
        lengths: int32 `[N]`, tokens of each (unpacked) sequence; by default documents end at their last supervised one.

    Returns:
        The loss, float32 `[]`, and metrics as (sum, count) pairs.
    """
    params, frozen = cast(trainable, frozen, compute_dtype)
    counts = eagle3_counts(batch.input_ids) if counts is None else counts
    sequences, length = batch.input_ids.shape
    steps = config.train_steps
    states = unroll(eagle3.MODEL, params, config, frozen["embed"], batch, steps)
    inputs = [eagle3.MODEL.read(params, config, state) for state in states]  # [D, N * T] each
    if lengths is None:
        mask = with_successor(batch.loss_mask, batch.segments)
    else:
        mask = jnp.where(jnp.arange(length) < lengths[:, None] - 1, batch.loss_mask.astype(jnp.float32), 0.0)
    masks = jnp.stack([shift(mask, s) * reaches(batch.segments, s, mask) for s in range(steps)])  # [S, N, T]
    scale = jnp.exp(-jnp.arange(steps) / loss.decay) if loss.decay > 0 else jnp.ones(steps)
    weights = loss.ce * scale[:, None, None] * masks / counts["positions"]
    finals = [shift(batch.final, s + 1) for s in range(steps)]
    whole = None
    if draft_ids(frozen) is not None:
        said = _whole_vocabulary(frozen, batch.final, config.final_softcap)
        whole = [Whole(*(shift(x, s + 1) for x in said)) for s in range(steps)]
    total, terms = _soft_terms(inputs, finals, whole, frozen, weights, config.final_softcap)
    by_step = StepTerms(*(x.reshape(steps, sequences, length) for x in terms))
    share = sequences * length / counts["positions"]  # of the whole batch
    metrics = step_metrics(by_step, masks, share) | {
        f"ploss_{s}": (jnp.sum(by_step.ce[s] * masks[s]), jnp.float32(sequences * length)) for s in range(steps)
    }
    return total, jax.tree.map(jax.lax.stop_gradient, metrics)


def eagle3_counts(input_ids: Array) -> Counts:
    """Denominator of Eagle3's loss: all positions, padding included, as in the reference."""
    return {"positions": jnp.float32(input_ids.size)}


def step_metrics(terms: StepTerms, masks: Array, share: Array) -> Metrics:
    """Accuracy and accept rate of each step, supervised positions, and expected accepted lengths (tau).

    Args:
        terms: `[S, N, T]` each. masks: `[S, N, T]`, 1 where the position counts in that step.
        share: float32 `[]`, the part of a batch that these sequences are; supervised positions are counted per batch.
    """
    metrics: Metrics = {}
    for s in range(masks.shape[0]):
        count = jnp.sum(masks[s])
        metrics[f"accuracy@{s}"] = (jnp.sum(terms.correct[s] * masks[s]), count)
        metrics[f"accept_rate@{s}"] = (jnp.sum(terms.accept[s] * masks[s]), count)
        metrics[f"valid_tokens@{s}"] = (count, share)
    starts = jnp.sum(masks[0])
    for name, rate in (("tau_greedy", terms.correct), ("tau_probabilistic", terms.accept)):
        survival = jnp.sum(jnp.cumprod(rate * masks, axis=0), axis=0)  # [N, T]
        metrics[name] = (jnp.sum((1 + survival) * masks[0]), starts)
    return metrics


class Whole(NamedTuple):
    """What the target says over its whole vocabulary: the log-sum-exp of its logits, float32, and the draft id of its
    most likely token, int32, -1 where that cannot be drafted."""

    normalizer: Array
    best: Array


def _whole_vocabulary(frozen: Params, final: Array, cap: float) -> Whole:
    """`[N, T]` each, for states `final [N, T, D]`, in chunks: once, and not in every step of the training-time test."""
    sequences, length = final.shape[:2]
    lookup = vocabulary_lookup(frozen)
    assert lookup is not None  # a full draft vocabulary needs no second look

    def said(logits: Array) -> Whole:
        return Whole(jax.nn.logsumexp(logits, axis=0), jnp.take(lookup, jnp.argmax(logits, axis=0)))

    flat = final.reshape(-1, final.shape[-1]).T  # [D, N * T]
    made = of_whole_logits(said, frozen["head"], flat, cap, sequences)
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x).reshape(sequences, length), made)


def _soft_terms(
    inputs: list[Array], finals: list[Array], whole: list[Whole] | None, frozen: Params, weights: Array, cap: float
) -> tuple[Array, StepTerms]:
    """Weighted sum of the soft cross entropies of all steps, in chunks, and the terms `[S, N * T]` of each row.

    Args:
        inputs: what the head reads, `[D, N * T]` a step. finals: aligned target states `[N, T, D]` a step.
        whole: aligned `[N, T]`, a step; None for a full vocabulary.
        weights: float32 `[S, N, T]`. cap: soft cap on logits, 0 for none.
    """
    steps, sequences, length = weights.shape

    def in_chunks(rows: Sequence[Array]) -> Array:  # [N, T] each -> [S * C, chunk]
        return jnp.concatenate([split_rows(x.reshape(-1), sequences) for x in rows])

    hidden = jnp.concatenate([split_rows(x, sequences) for x in inputs])  # [S * C, D, chunk]
    final = jnp.concatenate([split_rows(x.reshape(-1, x.shape[-1]), sequences, axis=0) for x in finals])
    hidden, final = constrain(hidden, None, None, "batch"), constrain(final, None, "batch", None)
    said = None if whole is None else Whole(*(in_chunks(rows) for rows in zip(*whole, strict=True)))
    total, terms = _chunked(hidden, draft_head(frozen), said, final, in_chunks(list(weights)), cap)

    def by_step(x: Array) -> Array:
        return jnp.stack([join_rows(part, sequences, length) for part in x.reshape(steps, -1, x.shape[1])])

    return total, StepTerms(*(jax.lax.stop_gradient(by_step(x)) for x in terms))


def _soft_chunk(hidden: Array, head: Array, whole: Whole | None, final: Array, weights: Array, cap: float) -> Any:
    """Weighted sum of one chunk, and its terms. `head [Vd, D]`: of the draft vocabulary."""
    draft = constrain(linear(head, hidden), "vocab", "batch")
    log_draft = jax.nn.log_softmax(softcap(draft, cap), axis=0)  # [Vd, chunk]
    logits = softcap(constrain(linear_rows(head, final), "vocab", "batch"), cap)
    if whole is None:
        whole = Whole(jax.nn.logsumexp(logits, axis=0), jnp.argmax(logits, axis=0))
    target = jnp.exp(logits - whole.normalizer)
    ce = -jnp.sum(target * log_draft, axis=0)
    accept = jnp.sum(jnp.minimum(target, jnp.exp(log_draft)), axis=0)
    hit = jnp.argmax(log_draft, axis=0) == whole.best
    return jnp.sum(weights * ce), StepTerms(ce, accept, hit.astype(jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _chunked(
    hidden: Array, head: Array, whole: Whole | None, final: Array, weights: Array, cap: float
) -> tuple[Array, StepTerms]:
    """`_soft_chunk` over chunks `[C, ..]`; the gradient reaches `hidden` alone."""
    chunks = (hidden, whole, final, weights)
    sums, terms = jax.lax.map(lambda x: _soft_chunk(x[0], head, x[1], x[2], x[3], cap), chunks)
    return jnp.sum(sums), terms


def _chunked_forward(
    hidden: Array, head: Array, whole: Whole | None, final: Array, weights: Array, cap: float
) -> tuple:
    """The value, and as residual the gradient: made along with it, so nothing of the vocabulary's size is kept."""

    def one(x: tuple) -> tuple:
        (value, terms), grad = jax.value_and_grad(_soft_chunk, has_aux=True)(x[0], head, x[1], x[2], x[3], cap)
        return value, terms, grad

    sums, terms, grad = jax.lax.map(one, (hidden, whole, final, weights))
    return (jnp.sum(sums), terms), grad


def _chunked_backward(cap: float, grad: Array, cotangent: tuple[Array, StepTerms]) -> tuple:
    return (grad * cotangent[0]).astype(grad.dtype), None, None, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def mtp_counts(frozen: Params, input_ids: Array, loss_mask: Array, segments: Array | None = None) -> Counts:
    """Denominators of MTP's loss: positions that count, and those whose label can be drafted."""
    labels, weights = _mtp_labels(input_ids, loss_mask, segments)
    lookup = vocabulary_lookup(frozen)
    drafted = weights if lookup is None else weights * (jnp.take(lookup, labels) >= 0)
    return {"weights": jnp.sum(weights), "in_vocab": jnp.sum(drafted)}


def _mtp_labels(input_ids: Array, loss_mask: Array, segments: Array | None) -> tuple[Array, Array]:
    """What each position predicts, int32 `[N * T]`, and whether it counts, float32 `[N * T]`."""
    weights = shift(loss_mask.astype(jnp.float32), 2) * reaches(segments, 2, input_ids)
    return shift(input_ids, 2).reshape(-1), weights.reshape(-1)


def mtp_loss(
    trainable: Params,
    frozen: Params,
    config: MTPConfig,
    loss: LossConfig,
    batch: Batch,
    compute_dtype: Any,
    counts: Counts | None = None,
) -> tuple[Array, Metrics]:
    """MTP's loss of a batch: position i counts where the token i + 2, which it predicts, is supervised.

    Arguments and result as `eagle3_loss`; the terms are those of `losses.block_loss`.
    """
    params, frozen = cast(trainable, frozen, compute_dtype)
    if counts is None:
        counts = mtp_counts(frozen, batch.input_ids, batch.loss_mask, batch.segments)
    sequences, length = batch.input_ids.shape
    state = unroll(mtp.MODEL, params, config, frozen["embed"], batch, 1)[0]  # [D, N * T]
    labels, weights = _mtp_labels(batch.input_ids, batch.loss_mask, batch.segments)
    final = shift(batch.final, 1).reshape(sequences * length, -1)
    normalizer, lookup = None, vocabulary_lookup(frozen)
    if lookup is not None:
        normalizer = shift(batch_normalizer(frozen, batch, config.final_softcap), 1).reshape(-1)
        labels = jnp.take(lookup, labels)
    scaled = slot_weights(loss, weights, labels, counts)
    states = BlockStates(mtp.MODEL.read(params, config, state), jnp.zeros((0, sequences * length)))
    head, cap = draft_head(frozen), config.final_softcap
    total, terms = all_slot_terms(params, head, states, final, normalizer, labels, scaled, sequences, cap, loss.lk_eta)
    accept = jnp.clip(1 - 0.5 * terms.l1, 0.0, 1.0)
    metrics: Metrics = {"accept_rate@0": (jnp.sum(accept * weights), jnp.sum(weights))}
    metrics["tau_probabilistic"] = (jnp.sum((1 + accept) * weights), jnp.sum(weights))
    if loss.ce > 0:
        in_vocab = weights * terms.in_vocab
        metrics["ce_loss"] = (jnp.sum(terms.ce * in_vocab), jnp.sum(in_vocab))
    if loss.tv > 0:
        metrics["l1_loss"] = (jnp.sum(terms.l1 * weights), jnp.sum(weights))
    metrics |= lk_metrics((terms.lk, terms.lk_hybrid), weights)
    return total, jax.tree.map(jax.lax.stop_gradient, metrics)
