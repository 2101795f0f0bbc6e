"""The training loss: golden terms, metrics and gradients, empty batches, reduced vocabularies, chunks, bfloat16."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_jaxpr
from safetensors.numpy import load_file

from dspark_jax.models.layers import linear
from dspark_jax.training.anchors import block_targets
from dspark_jax.training.chunks import chunk_size
from dspark_jax.training.forward import BlockStates, block_forward
from dspark_jax.training.losses import (
    Batch,
    LossConfig,
    SlotWeights,
    all_slot_terms,
    block_loss,
    position_weights,
    slot_terms,
    target_normalizer,
)
from tests.training.golden_drafters import FOLDER, NAMES, Case, load_case, named_gradients, run_case, run_loss

EDGES = (
    ("dspark_qwen3_vanilla", "train_few"),
    ("dspark_qwen3_vanilla", "train_zero"),
    ("dflash_qwen3", "train_zero"),
    ("dspark_qwen3_vanilla", "train_allzero"),
    ("dspark_gemma4_vanilla", "train_few"),
)
TERMS = ("ce_loss", "l1_loss", "confidence_loss")


def check_terms(case: Case, total: float, metrics: dict[str, Any]) -> None:
    """Loss, numerators, denominators and metrics against the golden values."""
    np.testing.assert_allclose(total, case.expected["loss_total"], rtol=1e-5)
    for name in TERMS:
        pair = metrics.get(name, (0.0, 0.0))  # DeepSpec, too, leaves out what has weight 0
        for value, part in zip(pair, ("num", "den"), strict=True):
            np.testing.assert_allclose(value, case.expected[f"{name}_{part}"], rtol=1e-5, err_msg=f"{name}_{part}")
    mean = {name: float(num / den) for name, (num, den) in metrics.items() if den > 0}
    golden = {name.removeprefix("train/"): value for name, value in case.meta["metrics"].items()}
    compared = [name for name in mean if golden.get(name) is not None]
    for name in compared:
        np.testing.assert_allclose(mean[name], golden[name], rtol=1e-4, atol=1e-6, err_msg=name)
    blocks = case.expected["block_keep_mask"].sum()
    assert metrics["block_supervised_tokens"] == (case.expected["eval_mask"].sum(), blocks)
    assert metrics["sampled_anchors"] == (blocks, len(case.keep))
    wanted = {n for n, v in golden.items() if v is not None} - {"loss"}
    missing = {n for n in wanted if not n.endswith(("_abs", "_ratio"))} - set(metrics)
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_golden_loss_metrics_and_every_gradient(name: str, tmp_path: Path) -> None:
    case = load_case(name)
    total, metrics, grads = run_case(case)
    check_terms(case, total, metrics)
    got = named_gradients(case, grads, tmp_path)
    wanted = load_file(FOLDER / name / "grads.safetensors")
    assert set(got) == set(wanted) == set(case.meta["trainable"])
    for tensor, value in wanted.items():
        np.testing.assert_allclose(got[tensor], value, rtol=0, atol=1e-4 * np.abs(value).max(), err_msg=tensor)


@pytest.mark.parametrize(("name", "variant"), EDGES)
def test_golden_batches_with_few_or_no_anchors(name: str, variant: str, tmp_path: Path) -> None:
    case = load_case(name, variant)
    total, metrics, grads = run_case(case)
    check_terms(case, total, metrics)
    got = named_gradients(case, grads, tmp_path)
    assert set(got) == set(case.meta["grad_l2"])
    for tensor, value in got.items():
        norm = case.meta["grad_l2"][tensor]
        np.testing.assert_allclose(np.linalg.norm(value), norm, rtol=1e-4, err_msg=tensor)
        difference = abs(value.sum(dtype=np.float64) - case.meta["grad_sum"][tensor])
        assert difference <= 1e-4 * norm * np.sqrt(value.size), tensor


def test_no_anchor_at_all_gives_exactly_zero() -> None:
    total, metrics, grads = run_case(load_case("dspark_qwen3_vanilla", "train_allzero"))
    assert total == 0.0
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(grads))  # NaN would count as non-zero
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(metrics))


@pytest.mark.parametrize("name", ["ce", "tv", "confidence"])
def test_each_term_enters_with_its_weight_and_zero_removes_it(name: str) -> None:
    case = load_case("dspark_qwen3_vanilla")
    metrics = run_loss(case)[1]
    metric = {"ce": "ce_loss", "tv": "l1_loss", "confidence": "confidence_loss"}[name]
    total, without = run_loss(case._replace(loss=replace(case.loss, **{name: 0.0})))
    num, den = metrics[metric]
    np.testing.assert_allclose(total + getattr(case.loss, name) * num / den, case.expected["loss_total"], rtol=1e-5)
    assert metric not in without
    assert all(f"accept_rate@{k}" in without for k in range(case.config.block_size))


@pytest.mark.parametrize(("name", "operation"), [("ce", "scatter-add"), ("tv", "ge"), ("confidence", "log1p")])
def test_a_weight_of_zero_removes_the_cost(name: str, operation: str) -> None:
    """Looks for an operation that only this term brings: in its gradient for CE and TV (metrics need TV's value)."""
    case = load_case("dspark_qwen3_vanilla")
    sequences, anchors = case.anchors.shape
    rows = sequences * chunk_size(sequences, anchors * case.config.block_size)
    shape = "" if name == "confidence" else f"300,{rows}"  # the vocabulary-sized tensors
    assert has_operation(case, case.loss, operation, shape)
    assert not has_operation(case, replace(case.loss, **{name: 0.0}), operation, shape)


def has_operation(case: Case, loss: LossConfig, operation: str, shape: str) -> bool:
    """Whether the live part of the jaxpr of loss and gradient has a line with `operation` and a result of `shape`."""

    def run(trainable: Any) -> Any:
        args = (case.frozen, case.config, loss, case.batch, case.anchors, case.keep, jnp.float32)
        return block_loss(trainable, *args)

    closed = jax.make_jaxpr(jax.value_and_grad(run, has_aux=True))(case.trainable)
    live, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals))
    lines = str(live).splitlines()
    return any(f"= {operation}" in line and f"[{shape}" in line for line in lines)


def reduced(case: Case, ids: np.ndarray) -> Case:
    """The case with a draft vocabulary of target tokens `ids [Vd]`."""
    markov = case.trainable["markov"] | {"w2": case.trainable["markov"]["w2"][ids]}
    offsets = jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
    return case._replace(
        trainable=case.trainable | {"markov": markov},
        frozen=case.frozen | {"d2t": offsets},
        config=replace(case.config, draft_vocab_size=len(ids)),
    )


def full_vocabulary_reference(case: Case, ids: np.ndarray) -> dict[str, tuple[float, float]]:
    """Numerators and denominators of CE and TV, in numpy over the whole vocabulary, p_d zero outside `ids`."""
    batch = case.batch
    targets = block_targets(batch.input_ids, batch.loss_mask, case.anchors, case.keep, case.config.block_size)
    args = (case.config, batch.features, case.anchors, case.keep, targets)
    states = block_forward(case.trainable, case.frozen["embed"], *args)
    head = np.asarray(case.frozen["head"], np.float64)
    logits = head[ids] @ np.asarray(states.hidden) + np.asarray(case.trainable["markov"]["w2"]) @ np.asarray(
        states.vectors
    )
    draft = np.zeros((head.shape[0], logits.shape[1]))
    draft[ids] = np.exp(logits) / np.exp(logits).sum(0)
    rows = np.arange(case.keep.shape[0])[:, None, None]
    scores = head @ np.asarray(batch.final)[rows, targets.target_positions].reshape(-1, head.shape[1]).T
    target = np.exp(scores) / np.exp(scores).sum(0)
    labels = np.asarray(targets.labels).reshape(-1)
    weights = np.asarray(position_weights(targets.supervised, case.loss.decay)).reshape(-1)
    drawn = np.isin(labels, ids) * weights
    picked = draft[labels, np.arange(len(labels))]
    l1 = np.abs(draft - target).sum(0)
    ce = -np.log(np.where(drawn > 0, picked, 1.0))
    return {"ce_loss": ((ce * drawn).sum(), drawn.sum()), "l1_loss": ((l1 * weights).sum(), weights.sum())}


@pytest.mark.parametrize("given_normalizer", [False, True])
def test_reduced_vocabulary_equals_a_full_one_with_no_mass_outside(given_normalizer: bool) -> None:
    full = load_case("dspark_qwen3_vanilla")
    ids = np.sort(np.random.default_rng(0).permutation(300)[:140])
    case = reduced(full, ids)
    if given_normalizer:
        scores = np.asarray(case.batch.final, np.float64) @ np.asarray(case.frozen["head"], np.float64).T
        normalizer = jnp.asarray(np.log(np.exp(scores).sum(-1)), jnp.float32)
        case = case._replace(batch=case.batch._replace(normalizer=normalizer))
    total, metrics = run_loss(case)
    wanted = full_vocabulary_reference(case, ids)
    assert 0 < wanted["ce_loss"][1] < wanted["l1_loss"][1]  # some labels cannot be drafted
    for name, pair in wanted.items():
        np.testing.assert_allclose(metrics[name], pair, rtol=1e-5, err_msg=name)
    means = {name: float(num / den) for name, (num, den) in metrics.items() if name in TERMS}
    weighted = zip((case.loss.ce, case.loss.tv, case.loss.confidence), TERMS, strict=True)
    np.testing.assert_allclose(total, sum(weight * means[name] for weight, name in weighted), rtol=1e-5)


def test_a_map_of_the_whole_vocabulary_changes_nothing() -> None:
    case = load_case("dspark_qwen3_vanilla")
    np.testing.assert_allclose(run_loss(reduced(case, np.arange(300)))[0], run_loss(case)[0], rtol=1e-6)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(("slots", "sequences"), [(512, 1), (700, 1), (1400, 4), (1200, 600)])
def test_chunks_change_neither_terms_nor_gradients(rank: int, slots: int, sequences: int) -> None:
    rng = np.random.default_rng(1)
    hidden, vectors, final, head, w2 = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((8, slots), (rank, slots), (slots, 8), (20, 8), (20, rank))
    )
    labels = jnp.asarray(rng.integers(-1, 20, slots), jnp.int32)
    normalizer = jax.nn.logsumexp(linear(head, final.T), axis=0) + 0.3
    weights = SlotWeights(*jnp.asarray(rng.random((4, slots)), jnp.float32))

    def chunked(hidden: jax.Array, vectors: jax.Array, w2: jax.Array) -> Any:
        params, states = {"markov": {"w2": w2}}, BlockStates(hidden, vectors)
        total, terms = all_slot_terms(params, head, states, final, normalizer, labels, weights, sequences, 0.0, 2.0)
        return total**2, terms  # a cotangent other than 1

    def whole(hidden: jax.Array, vectors: jax.Array, w2: jax.Array) -> Any:
        terms = slot_terms({"markov": {"w2": w2}}, head, hidden, vectors, final, normalizer, labels, 0.0, True, 2.0)
        parts = (getattr(weights, name) * getattr(terms, name) for name in SlotWeights._fields)
        return jnp.sum(sum(parts)) ** 2, terms

    results = []
    for function in (chunked, whole):
        (value, terms), grads = jax.value_and_grad(function, (0, 1, 2), has_aux=True)(hidden, vectors, w2)
        scale = jnp.sqrt(value)
        results.append((scale / slots, terms, jax.tree.map(lambda x, scale=scale: x / scale, grads)))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), function(hidden, vectors, w2), (value, terms))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *results)
    normal = target_normalizer(head, final.T, sequences=sequences)
    np.testing.assert_allclose(normal, normalizer - 0.3, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_close() -> None:
    case = load_case("dspark_qwen3_rnn")
    exact, _, exact_grads = run_case(case)
    total, metrics, grads = run_case(case, "bfloat16")
    np.testing.assert_allclose(total, exact, rtol=2e-2)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((metrics, grads)))
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (grads, exact_grads))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99
    np.testing.assert_allclose(np.linalg.norm(a), np.linalg.norm(b), rtol=5e-2)


@pytest.mark.parametrize("extra", [1, 16])
def test_the_length_of_the_padding_does_not_matter(extra: int) -> None:
    case = load_case("dspark_qwen3_rnn")
    rng = np.random.default_rng(extra)
    n, _, width = case.batch.features.shape

    def longer(x: jax.Array, tail: np.ndarray) -> jax.Array:
        return jnp.concatenate([x, jnp.asarray(tail, x.dtype)], axis=1)

    batch = Batch(
        longer(case.batch.input_ids, rng.integers(0, 300, (n, extra))),
        longer(case.batch.loss_mask, np.zeros((n, extra))),
        longer(case.batch.features, rng.standard_normal((n, extra, width))),
        longer(case.batch.final, rng.standard_normal((n, extra, case.config.hidden_size))),
    )
    total, metrics = run_loss(case._replace(batch=batch))
    exact, wanted = run_loss(case)
    np.testing.assert_allclose(total, exact, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), metrics, wanted)


@pytest.mark.parametrize("decay", [0.0, -1.0])
def test_no_decay_weighs_all_slots_alike(decay: float) -> None:
    supervised = jnp.asarray([[[1.0, 1.0, 0.0]]])
    np.testing.assert_array_equal(position_weights(supervised, decay), supervised)
    wanted = np.asarray(supervised) * np.exp(-np.arange(3) / 4)
    np.testing.assert_allclose(position_weights(supervised, 4.0), wanted, rtol=1e-6)


def test_a_loss_has_the_decay_that_it_is_given() -> None:
    case, ids = load_case("dspark_qwen3_vanilla"), np.arange(300)
    for decay in (case.loss.decay, 1.0):
        other = case._replace(loss=replace(case.loss, decay=decay))
        wanted = full_vocabulary_reference(other, ids)
        metrics = run_loss(reduced(other, ids))[1]
        for name, pair in wanted.items():
            np.testing.assert_allclose(metrics[name], pair, rtol=1e-5, err_msg=f"{name} at {decay}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ce": -0.1}, "loss.ce -0.1"),
        ({"tv": float("nan")}, "loss.tv nan"),
        ({"ce": 0, "tv": 0}, "would learn nothing"),
        ({"lk": -1.0}, "loss.lk -1.0"),
        ({"lk_hybrid": float("inf")}, "loss.lk_hybrid inf"),
        ({"lk_eta": -1.0}, "loss.lk_eta -1.0"),
    ],
)
def test_useless_weights_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**fields)
