"""The training loss of block drafters: 0.1 CE + 0.9 TV + 1.0 confidence, position-weighted (section 4).

Every term is a weighted sum over supervised slots divided once by the sum of the weights of the whole batch, so that it
does not matter how the batch is split over devices or passes. With a reduced draft
vocabulary p_d is zero outside it: TV counts the target's mass there, and CE leaves out labels that cannot be drafted.
Two terms more aim at the acceptance alpha = sum_v min(p_t, p_d) itself ("LK losses", Samarin et al. 2026, arXiv
2602.23881): -log alpha, and lambda KL(p_t || p_d) + (1 - lambda) (1 - alpha), where lambda = exp(-eta alpha) of each
slot is held constant. With a reduced vocabulary KL compares what lies inside it, p_t rescaled.
Vocabulary-sized tensors exist for a chunk of slots at a time: the weights are known beforehand, so the gradient of a
chunk is taken along with its value, and nothing of that size is kept or made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.heads import confidence_logits, markov_bias
from dspark_jax.models.layers import gather_rows, linear, linear_rows, softcap
from dspark_jax.sharding import axis_size, constrain, gathered, stored
from dspark_jax.training.anchors import BlockTargets, block_targets
from dspark_jax.training.chunks import join_rows, split_rows
from dspark_jax.training.forward import BlockStates, block_forward

Array = jax.Array
Params = dict[str, Any]
Metrics = dict[str, tuple[Array, Array]]
Counts = dict[str, Array]  # denominators of the loss terms
_EPS = 1e-6
_LATER = ("lk", "lk_hybrid", "lk_eta")  # fields of LossConfig that earlier checkpoints do not have


@dataclass(frozen=True)
class LossConfig:
    """Weights of the loss.

    Attributes:
        ce, tv, confidence: weight of each term; 0 removes the term, its metric and its cost. (Accept rates are always
            measured; they need the forward half of the TV term, but no gradient.)
        decay: g of the position weights exp(-k / g), in slots; 0 or less gives every slot the same weight.
        lk: weight of the negative log acceptance, -log alpha. lk_hybrid: weight of the blend of KL and 1 - alpha. 0
            removes them in the same way.
        lk_eta: eta of the blend's lambda; 0 is KL alone, and the larger the sooner it is 1 - alpha.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    lk: float = 0.0
    lk_hybrid: float = 0.0
    lk_eta: float = 3.0

    def __post_init__(self) -> None:
        for name in ("ce", "tv", "confidence", "lk", "lk_hybrid"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"loss.{name} {getattr(self, name)}: a weight must be 0 or positive")
        if self.ce == self.tv == self.lk == self.lk_hybrid == 0:
            raise ValueError("loss.ce, loss.tv, loss.lk and loss.lk_hybrid are all 0: the drafter would learn nothing")
        if not 0 <= self.lk_eta < float("inf"):
            raise ValueError(f"loss.lk_eta {self.lk_eta}: must be 0 or positive")

    def __repr__(self) -> str:
        """The first four fields, and of the others those that are set: checkpoints know a loss by this text."""
        names = [f.name for f in fields(self) if f.name not in _LATER or getattr(self, f.name) != f.default]
        return f"LossConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class Batch(NamedTuple):
    """N right-padded sequences of T tokens with the target's states.

    Attributes:
        input_ids: int32 `[N, T]`. loss_mask: `[N, T]`, 1 on supervised tokens.
        features: `[N, T, m * D]`, outputs of the target layers. final: `[N, T, D]`, final-normed states.
        normalizer: float32 `[N, T]`, log-sum-exp of the target's logits; None computes it where it is needed.
        segments: int32 `[N, T]`, number of each token's document in its row, 0 on padding; None: a row is one document.
    """

    input_ids: Array
    loss_mask: Array
    features: Array
    final: Array
    normalizer: Array | None = None
    segments: Array | None = None


class SlotTerms(NamedTuple):
    """Per-slot values `[S]`: cross entropy to the label, ||p_d - p_t||_1, whether the label can be drafted, the
    negative log acceptance and the blend of KL and TV (None where they were not asked for)."""

    ce: Array
    l1: Array
    in_vocab: Array
    lk: Array | None = None
    lk_hybrid: Array | None = None


class SlotWeights(NamedTuple):
    """Weights `[S]` of the terms in the loss; None leaves a term out of the sum, and its gradient undone."""

    ce: Array | None
    l1: Array | None
    lk: Array | None = None
    lk_hybrid: Array | None = None


def draft_ids(frozen: Params) -> Array | None:
    """Target ids of the draft vocabulary, int32 `[Vd]`; None for the full one."""
    if "d2t" not in frozen:
        return None
    return jnp.arange(frozen["d2t"].shape[0], dtype=jnp.int32) + frozen["d2t"]


def target_normalizer(head: Array, final: Array, cap: float = 0.0, sequences: int = 1) -> Array:
    """log-sum-exp of the target's logits over the whole vocabulary, float32 `[B]`, for `final [D, B]`, in chunks.

    Args:
        cap: the target's `final_softcap`. sequences: N that the B rows belong to, sequence-major.
    """
    return of_whole_logits(partial(jax.nn.logsumexp, axis=0), head, final, cap, sequences)


def of_whole_logits(reduce: Callable[[Array], Any], head: Array, final: Array, cap: float, sequences: int) -> Any:
    """What `reduce` makes of the target's logits `[V, chunk]`, arrays `[chunk]`, of all rows `[B]`, in chunks.

    Other arguments as `target_normalizer` takes them.
    """
    rows = final.shape[1] // sequences

    def one(x: Array) -> Any:
        logits = constrain(linear(head, constrain(x, None, "batch")), "vocab", "batch")
        return reduce(softcap(logits, cap))

    made = jax.lax.map(one, split_rows(final, sequences))
    return jax.tree.map(lambda x: join_rows(x, sequences, rows), made)


def vocabulary_lookup(frozen: Params) -> Array | None:
    """Int32 `[V]`: draft id of every token, -1 where it cannot be drafted; None for a full vocabulary."""
    ids = draft_ids(frozen)
    if ids is None:
        return None
    table = jnp.full(frozen["head"].shape[0], -1, jnp.int32)
    return table.at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))


def draft_head(frozen: Params) -> Array:
    """The rows of the target's head that the drafter has, `[Vd, D]`."""
    ids = draft_ids(frozen)
    return frozen["head"] if ids is None else jnp.take(frozen["head"], ids, axis=0)


def pick_rows(table: Array, ids: Array) -> Array:
    """`table [V, B]` at row `ids [B]` of each column, `[B]`."""
    if axis_size("tensor") == 1:
        return jnp.take_along_axis(table, ids[None], axis=0)[0]
    rows = jax.lax.broadcasted_iota(jnp.int32, table.shape, 0)  # rows are cut: a sum needs no device to hold them all
    return jnp.sum(jnp.where(rows == ids, table, 0.0), axis=0)


def slot_terms(
    params: Params,
    head: Array,
    hidden: Array,
    vectors: Array,
    final: Array,
    normalizer: Array | None,
    labels: Array,
    cap: float = 0.0,
    lk: bool = False,
    lk_eta: float | None = None,
) -> SlotTerms:
    """Loss terms of S slots.

    Args:
        params: with `markov.w2` where there is a sequential head. head: draft rows of the target's head `[Vd, D]`.
        hidden: `[D, S]`. vectors: `[r, S]`. final: target states that predict the labels, `[S, D]`.
        normalizer: log-sum-exp of the target's whole logits `[S]`; None where the draft vocabulary is the whole one.
        labels: int32 `[S]`, draft ids; negative where the label is not in the draft vocabulary.
        cap: soft cap on the target's logits and on the draft's base logits; 0 for none.
        lk: whether to give the negative log acceptance. lk_eta: eta of the blend; None: no blend.
    """
    logits = softcap(constrain(linear(head, hidden), "vocab", "batch"), cap)  # [Vd, S]
    if vectors.shape[0]:
        logits = logits + constrain(markov_bias(params, vectors), "vocab", "batch")
    log_draft = jax.nn.log_softmax(logits, axis=0)
    target_logits = constrain(jax.lax.stop_gradient(linear_rows(head, final)), "vocab", "batch")
    target_logits = softcap(target_logits, cap)
    target = jax.nn.softmax(target_logits, 0) if normalizer is None else jnp.exp(target_logits - normalizer)
    outside = jnp.maximum(1.0 - jnp.sum(target, axis=0), 0.0) if normalizer is not None else 0.0
    l1 = jnp.sum(jnp.abs(jnp.exp(log_draft) - target), axis=0) + outside
    picked = pick_rows(log_draft, jnp.maximum(labels, 0))
    terms = SlotTerms(-picked, l1, (labels >= 0).astype(jnp.float32))
    if not lk and lk_eta is None:
        return terms
    log_alpha = log_acceptance(log_draft, target_logits, normalizer)
    hybrid = None if lk_eta is None else lk_blend(log_draft, target_logits, log_alpha, lk_eta)
    return terms._replace(lk=-log_alpha if lk else None, lk_hybrid=hybrid)


def log_acceptance(log_draft: Array, target_logits: Array, normalizer: Array | None) -> Array:
    """log sum_v min(p_t, p_d), float32 `[S]`; from logarithms, so that it is exact however small.

    Args:
        log_draft: log p_d, `[Vd, S]`. target_logits: `[Vd, S]`. normalizer: as `slot_terms` takes it.
    """
    if normalizer is None:
        normalizer = jax.nn.logsumexp(target_logits, axis=0)
    return jax.nn.logsumexp(jnp.minimum(log_draft, target_logits - normalizer), axis=0)


def lk_blend(log_draft: Array, target_logits: Array, log_alpha: Array, eta: float) -> Array:
    """lambda KL(p_t || p_d) + (1 - lambda) (1 - alpha), float32 `[S]`, with lambda = exp(-eta alpha) of each slot."""
    log_target = jax.nn.log_softmax(target_logits, axis=0)
    kl = jnp.sum(jnp.exp(log_target) * (log_target - log_draft), axis=0)
    alpha = jnp.exp(log_alpha)
    share = jax.lax.stop_gradient(jnp.exp(-eta * alpha))
    return share * kl + (1 - share) * (1 - alpha)


def all_slot_terms(
    params: Params,
    head: Array,
    states: BlockStates,
    final: Array,
    normalizer: Array | None,
    labels: Array,
    weights: SlotWeights,
    sequences: int,
    cap: float = 0.0,
    lk_eta: float = 0.0,
) -> tuple[Array, SlotTerms]:
    """`slot_terms` of all S slots, a chunk at a time, and their weighted sum.

    Args:
        params, head, final, normalizer, labels, cap: as `slot_terms` takes them.
        states: hidden `[D, S]`, vectors `[r, S]`. weights: of the terms.
        sequences: N that the slots belong to, sequence-major. lk_eta: eta of the blend, where that has weights.

    Returns:
        The sum, float32 `[]`, whose gradient reaches `states` and `markov.w2` only; the terms carry none.
    """
    rows = labels.shape[0] // sequences

    def chunked(x: Array | None, value: float = 0) -> Array | None:  # [C, ..., chunk]
        if x is None:
            return None
        x = split_rows(x, sequences, value=value)
        return constrain(x, *(None,) * (x.ndim - 1), "batch")

    final = constrain(split_rows(final, sequences, axis=0), None, "batch", None)  # [C, chunk, D]
    fixed = (final, chunked(normalizer), chunked(labels, -1), SlotWeights(*(chunked(w) for w in weights)))
    w2 = gathered({"w2": params["markov"]["w2"]})["w2"] if states.vectors.shape[0] else None
    total, terms = _chunk_sums(w2, chunked(states.hidden), chunked(states.vectors), head, fixed, cap, lk_eta)
    return total, jax.tree.map(lambda x: jax.lax.stop_gradient(join_rows(x, sequences, rows)), terms)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _chunk_sums(
    w2: Array | None, hidden: Array, vectors: Array, head: Array, fixed: tuple, cap: float, lk_eta: float
) -> tuple[Array, SlotTerms]:
    """Weighted sum over C chunks `[C, ..., chunk]`, and their terms `[C, chunk]`."""
    sums, terms = jax.lax.map(lambda x: _chunk_sum(w2, x[0], x[1], head, x[2], cap, lk_eta), (hidden, vectors, fixed))
    return jnp.sum(sums), terms


def _chunk_sums_forward(
    w2: Array | None, hidden: Array, vectors: Array, head: Array, fixed: tuple, cap: float, lk_eta: float
) -> tuple:
    """`_chunk_sums`, and as residuals its gradients."""
    grad = jax.value_and_grad(_chunk_sum, argnums=(0, 1, 2), has_aux=True)

    def body(dw2: Array | None, chunk: tuple) -> tuple:
        (value, terms), (step, *grads) = grad(w2, chunk[0], chunk[1], head, chunk[2], cap, lk_eta)
        added = jax.tree.map(lambda x, y: x + stored({"w2": y})["w2"].astype(jnp.float32), dw2, step)
        return added, (value, terms, grads)

    zeros = jax.tree.map(lambda x: stored({"w2": jnp.zeros(x.shape, jnp.float32)})["w2"], w2)
    scanned: tuple = jax.lax.scan(body, zeros, (hidden, vectors, fixed))
    dw2, (sums, terms, grads) = scanned
    dw2 = jax.tree.map(lambda x, y: x.astype(y.dtype), dw2, w2)
    return (jnp.sum(sums), terms), (dw2, *grads)


def _chunk_sums_backward(cap: float, lk_eta: float, grads: tuple, cotangent: tuple[Array, SlotTerms]) -> tuple:
    return (*jax.tree.map(lambda x: (x * cotangent[0]).astype(x.dtype), grads), None, None)


_chunk_sums.defvjp(_chunk_sums_forward, _chunk_sums_backward)


def _chunk_sum(
    w2: Array | None, hidden: Array, vectors: Array, head: Array, fixed: tuple, cap: float, lk_eta: float
) -> tuple[Array, SlotTerms]:
    """Weighted sum of one chunk, and its terms."""
    final, normalizer, labels, weights = fixed
    wanted = weights.lk is not None, None if weights.lk_hybrid is None else lk_eta
    terms = slot_terms({"markov": {"w2": w2}}, head, hidden, vectors, final, normalizer, labels, cap, *wanted)
    pairs = ((getattr(weights, name), getattr(terms, name)) for name in SlotWeights._fields)
    return sum((jnp.sum(w * x) for w, x in pairs if w is not None), jnp.zeros(())), terms


def position_weights(supervised: Array, decay: float) -> Array:
    """`supervised * exp(-k / decay)`, float32 `[N, A, K]`."""
    slots = jnp.arange(supervised.shape[-1], dtype=jnp.float32)
    return supervised * (jnp.exp(-slots / decay) if decay > 0 else jnp.ones_like(slots))


def block_counts(
    frozen: Params,
    loss: LossConfig,
    block_size: int,
    input_ids: Array,
    loss_mask: Array,
    anchors: Array,
    keep: Array,
    segments: Array | None = None,
) -> Counts:
    """Denominators of `block_loss`: sums of the position weights, of all slots and of those whose label can be drafted.

    Those of several passes are added up and given to each. Arguments as `block_loss` takes them.
    """
    targets = block_targets(input_ids, loss_mask, anchors, keep, block_size, segments)
    weights = position_weights(targets.supervised.astype(jnp.float32), loss.decay)  # [N, A, K]
    lookup = vocabulary_lookup(frozen)
    drafted = weights if lookup is None else weights * (jnp.take(lookup, targets.labels) >= 0)
    return {"weights": jnp.sum(weights), "in_vocab": jnp.sum(drafted)}


def block_loss(
    trainable: Params,
    frozen: Params,
    config: DrafterConfig,
    loss: LossConfig,
    batch: Batch,
    anchors: Array,
    keep: Array,
    compute_dtype: Any,
    counts: Counts | None = None,
    remat: bool = False,
) -> tuple[Array, Metrics]:
    """Loss of a batch.

    Args:
        trainable: float32 masters; products run in `compute_dtype`.
        frozen: `embed [V, D]`, `head [V, D]` of the target, `d2t` for a reduced vocabulary.
        anchors: int32 `[N, A]`. keep: bool `[N, A]`.
        counts: what the terms are divided by, where this batch is a part of a larger one; its own without.
        remat: compute the layers' inner values again in the backward pass instead of keeping them.

    Returns:
        The loss, float32 `[]`, and metrics as (sum, count) pairs.
    """
    params, frozen = cast(trainable, frozen, compute_dtype)
    targets = block_targets(batch.input_ids, batch.loss_mask, anchors, keep, config.block_size, batch.segments)
    if counts is None:
        rest = batch.input_ids, batch.loss_mask, anchors, keep, batch.segments
        counts = block_counts(frozen, loss, config.block_size, *rest)
    features = batch.features.astype(compute_dtype)
    embed = frozen["embed"]
    states = block_forward(params, embed, config, features, anchors, keep, targets, batch.segments, remat=remat)
    shape = targets.labels.shape
    weights = position_weights(targets.supervised.astype(jnp.float32), loss.decay)  # [N, A, K]
    total, terms = _slot_terms_of_batch(
        params, frozen, states, batch, targets, loss, weights, counts, config.final_softcap
    )
    ce, l1, in_vocab, *lk_terms = jax.tree.map(lambda x: x.reshape(shape), terms)
    accept = jnp.clip(1 - 0.5 * l1, 0.0, 1.0)
    sums = {
        "ce_loss": (jnp.sum(ce * weights * in_vocab), jnp.sum(weights * in_vocab)),
        "l1_loss": (jnp.sum(l1 * weights), jnp.sum(weights)),
    }
    sums |= lk_metrics(lk_terms, weights)
    confidence = None
    if config.confidence and loss.confidence > 0:
        confidence = confidence_logits(params, config, states.hidden, targets.prev_ids.reshape(-1)).reshape(shape)
        bce = jnp.maximum(confidence, 0) - confidence * accept + jnp.log1p(jnp.exp(-jnp.abs(confidence)))
        sums["confidence_loss"] = (jnp.sum(bce * weights), jnp.sum(weights))
        total = total + loss.confidence * mean(sums["confidence_loss"][0], counts["weights"])
    scales = {"ce_loss": loss.ce, "l1_loss": loss.tv}
    sums = {name: pair for name, pair in sums.items() if scales.get(name, 1) > 0}
    metrics = sums | slot_metrics(accept, targets, weights, confidence) | anchor_metrics(batch.loss_mask, targets, keep)
    return total, jax.tree.map(jax.lax.stop_gradient, metrics)


def cast(trainable: Params, frozen: Params, dtype: Any) -> tuple[Params, Params]:
    """Both in the dtype of the products; the vocabulary map `d2t` stays as it is."""
    params = jax.tree.map(lambda x: x.astype(dtype), trainable)
    return params, {name: (x if name == "d2t" else x.astype(dtype)) for name, x in frozen.items()}


def batch_normalizer(frozen: Params, batch: Batch, cap: float) -> Array:
    """The batch's normaliser, float32 `[N, T]`: the one that came with it, or computed. `cap`: as in `slot_terms`."""
    sequences = batch.final.shape[0]
    if batch.normalizer is not None:
        return batch.normalizer.reshape(sequences, -1)
    flat = batch.final.reshape(-1, batch.final.shape[-1]).T  # [D, N * T]
    computed = target_normalizer(frozen["head"], flat, cap, sequences)
    return jax.lax.stop_gradient(computed).reshape(sequences, -1)


def mean(num: Array, den: Array) -> Array:
    """A mean from its sums; 0 where there is nothing."""
    return num / (den + _EPS)


def _slot_terms_of_batch(
    params: Params,
    frozen: Params,
    states: BlockStates,
    batch: Batch,
    targets: BlockTargets,
    loss: LossConfig,
    weights: Array,
    counts: Counts,
    cap: float,
) -> tuple[Array, SlotTerms]:
    """Gathers target states and labels of all slots; the loss but for confidence, and the terms `[N * A * K]`.

    `weights`: float32 `[N, A, K]`, of the positions. `counts`: their sums. `cap`: soft cap on logits, 0 for none.
    """
    sequences = batch.input_ids.shape[0]
    source = targets.target_positions.reshape(sequences, -1)  # position anchor + k, [N, A * K]
    final = jax.vmap(gather_rows)(batch.final, source)  # [N, A * K, D]
    labels, normalizer, lookup = targets.labels.reshape(-1), None, vocabulary_lookup(frozen)
    if lookup is not None:
        normalizer = jnp.take_along_axis(batch_normalizer(frozen, batch, cap), source, axis=1).reshape(-1)
        labels = jnp.take(lookup, labels)
    scaled = slot_weights(loss, weights.reshape(-1), labels, counts)
    rows = final.reshape(-1, final.shape[-1])
    return all_slot_terms(
        params, draft_head(frozen), states, rows, normalizer, labels, scaled, sequences, cap, loss.lk_eta
    )


def slot_weights(loss: LossConfig, weights: Array, labels: Array, counts: Counts) -> SlotWeights:
    """What each slot's terms count in the loss: `weights [S]` by the sums of the whole batch (`counts`).

    Args:
        labels: int32 `[S]`, draft ids; CE leaves out negative ones.
    """
    each = mean(weights, counts["weights"])
    return SlotWeights(
        ce=loss.ce * mean(weights * (labels >= 0), counts["in_vocab"]) if loss.ce > 0 else None,
        l1=loss.tv * each if loss.tv > 0 else None,
        lk=loss.lk * each if loss.lk > 0 else None,
        lk_hybrid=loss.lk_hybrid * each if loss.lk_hybrid > 0 else None,
    )


def lk_metrics(terms: Sequence[Array | None], weights: Array) -> Metrics:
    """The weighted means of the terms `lk` and `lk_hybrid`, as (sum, count), of those that there are."""
    total = jnp.sum(weights)
    pairs = zip(("lk_loss", "lk_hybrid_loss"), terms, strict=True)
    return {name: (jnp.sum(term * weights), total) for name, term in pairs if term is not None}


def slot_metrics(accept: Array, targets: BlockTargets, weights: Array, confidence: Array | None) -> Metrics:
    """Accept rate by slot, expected accepted length (tau), and calibration of the confidence head."""
    valid = targets.supervised.astype(jnp.float32)  # [N, A, K]
    metrics: Metrics = {}
    for k in range(accept.shape[-1]):
        metrics[f"accept_rate@{k}"] = (jnp.sum(accept[..., k] * valid[..., k]), jnp.sum(valid[..., k]))
    survival = jnp.cumprod(accept * valid, axis=-1)
    started = jnp.any(targets.supervised, axis=-1).astype(jnp.float32)
    metrics["tau_probabilistic"] = (jnp.sum((1 + jnp.sum(survival, -1)) * started), jnp.sum(started))
    if confidence is not None:
        gap = jax.nn.sigmoid(confidence) - accept
        prefix_gap = jnp.cumprod(jax.nn.sigmoid(confidence) * valid, axis=-1) - survival
        total = jnp.sum(weights)
        metrics["confidence_abs_error"] = (jnp.sum(jnp.abs(gap) * weights), total)
        metrics["confidence_bias"] = (jnp.sum(gap * weights), total)
        metrics["confidence_cumprod_bias"] = (jnp.sum(prefix_gap * weights), total)
    return metrics


def anchor_metrics(loss_mask: Array, targets: BlockTargets, keep: Array) -> Metrics:
    """Anchors drawn and supervised slots, per sequence and per block."""
    sequences = jnp.float32(loss_mask.shape[0])
    blocks = jnp.sum(keep).astype(jnp.float32)
    slots = jnp.sum(targets.supervised).astype(jnp.float32)
    return {"sampled_anchors": (blocks, sequences), "block_supervised_tokens": (slots, blocks)}
