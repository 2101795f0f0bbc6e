"""The LK terms of the loss against plain formulas: values, gradients, limits, and what a weight of 0 removes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import xlogy

from dspark_jax.drafters import mtp
from dspark_jax.models.layers import linear
from dspark_jax.training.chunks import chunk_size
from dspark_jax.training.losses import LossConfig, lk_blend, log_acceptance, slot_terms
from dspark_jax.training.recurrent import check_loss, mtp_loss, unroll
from tests.training.golden_drafters import load_case, run_loss
from tests.training.test_losses import TERMS, full_vocabulary_reference, has_operation, reduced
from tests.training.test_recurrent import DRAFTER, GOLDEN, mtp_case

ETA = 3.0


def plain_terms(logits: Any, target_logits: Any, kept: int, eta: float = ETA) -> tuple[Any, Any]:
    """-log sum_v min(p_t, p_d), and the blend, of `[V, S]` logits, p_d zero from row `kept` on; no care for digits."""
    draft = jnp.zeros(target_logits.shape, logits.dtype).at[:kept].set(jax.nn.softmax(logits[:kept], axis=0))
    target = jax.nn.softmax(target_logits, axis=0)
    alpha = jnp.minimum(draft, target).sum(axis=0)
    inside = target[:kept] / target[:kept].sum(axis=0)
    kl = (xlogy(inside, inside) - inside * jnp.log(draft[:kept])).sum(axis=0)
    share = jax.lax.stop_gradient(jnp.exp(-eta * alpha))
    return -jnp.log(alpha), share * kl + (1 - share) * (1 - alpha)


def random_slots(vocab: int = 30, slots: int = 50, scale: float = 2.0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((vocab, slots)) * scale, jnp.float32) for _ in range(2))  # type: ignore


@pytest.mark.parametrize("kept", [30, 17])
def test_terms_and_gradients_are_those_of_the_plain_formulas(kept: int) -> None:
    """With a head that is the identity, logits go in as states; a reduced vocabulary has p_t's mass outside it."""
    logits, target_logits = random_slots()
    head = jnp.eye(30)[:kept]
    normalizer = jax.nn.logsumexp(target_logits, axis=0) if kept < 30 else None
    labels, vectors = jnp.zeros(50, jnp.int32), jnp.zeros((0, 50))

    def mine(x: jax.Array) -> Any:
        terms = slot_terms({}, head, x, vectors, target_logits.T, normalizer, labels, 0.0, True, ETA)
        return terms.lk, terms.lk_hybrid

    def plain(x: jax.Array) -> Any:
        return plain_terms(x, target_logits, kept)

    for number in range(2):
        np.testing.assert_allclose(mine(logits)[number], plain(logits)[number], rtol=1e-5, atol=1e-6)
        got, wanted = (jax.grad(lambda x, f=f, n=number: jnp.sum(f(x)[n] ** 2))(logits) for f in (mine, plain))
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert not np.allclose(mine(logits)[1], plain_terms(logits, target_logits, kept, 1.0)[1], rtol=1e-2)


def test_acceptance_is_what_the_rule_accepts() -> None:
    """exp(-lk) is 1 - ||p_d - p_t||_1 / 2; it is 1 for equal distributions."""
    logits, target_logits = random_slots()
    head, labels, vectors = jnp.eye(30), jnp.zeros(50, jnp.int32), jnp.zeros((0, 50))
    terms = slot_terms({}, head, logits, vectors, target_logits.T, None, labels, 0.0, True)
    np.testing.assert_allclose(jnp.exp(-terms.lk), 1 - 0.5 * terms.l1, atol=1e-5)
    same = slot_terms({}, head, logits, vectors, logits.T, None, labels, 0.0, True, ETA)
    np.testing.assert_allclose(same.lk, 0, atol=1e-6)
    np.testing.assert_allclose(same.lk_hybrid, 0, atol=1e-6)


def test_at_a_point_mass_it_is_the_cross_entropy_however_unlikely_the_token() -> None:
    """The gradient of TV vanishes with the probability; that of the negative log acceptance does not."""
    logits = jnp.asarray([[0.0], [60.0], [55.0]])
    target_logits = jnp.asarray([[1000.0], [0.0], [0.0]])
    value, grad = jax.value_and_grad(lambda x: -log_acceptance(jax.nn.log_softmax(x, axis=0), target_logits, None)[0])(
        logits
    )
    wanted, slope = jax.value_and_grad(lambda x: -jax.nn.log_softmax(x, axis=0)[0, 0])(logits)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(grad, slope, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slope[0, 0], -1, rtol=1e-5)


@pytest.mark.parametrize(("eta", "which"), [(0.0, "kl"), (1e6, "tv")])
def test_the_blend_goes_from_kl_to_tv(eta: float, which: str) -> None:
    logits, target_logits = random_slots()
    log_draft, log_target = (jax.nn.log_softmax(x, axis=0) for x in (logits, target_logits))
    ends = {
        "kl": jnp.sum(jnp.exp(log_target) * (log_target - log_draft), axis=0),
        "tv": 0.5 * jnp.abs(jnp.exp(log_draft) - jnp.exp(log_target)).sum(axis=0),
    }
    alpha = log_acceptance(log_draft, target_logits, None)
    np.testing.assert_allclose(lk_blend(log_draft, target_logits, alpha, eta), ends[which], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "metric"), [("lk", "lk_loss"), ("lk_hybrid", "lk_hybrid_loss")])
def test_each_term_enters_a_batch_with_its_weight(name: str, metric: str) -> None:
    """Weighted by position, over supervised slots, on top of the golden loss."""
    case = load_case("dspark_qwen3_vanilla")
    base, without = run_loss(case)
    total, metrics = run_loss(case._replace(loss=replace(case.loss, **{name: 0.7})))
    num, den = metrics[metric]
    assert metric not in without and den == metrics["l1_loss"][1] and num > 0
    np.testing.assert_allclose(total, base + 0.7 * num / den, rtol=1e-5)


def test_a_term_alone_trains_and_another_eta_is_another_loss() -> None:
    case = load_case("dspark_qwen3_vanilla")
    alone = LossConfig(ce=0, tv=0, confidence=0, lk_hybrid=1.0)
    total, metrics = run_loss(case._replace(loss=alone))
    assert not set(TERMS) & set(metrics) and total > 0
    assert run_loss(case._replace(loss=replace(alone, lk_eta=0.5)))[0] != pytest.approx(total, rel=1e-3)


def test_a_reduced_vocabulary_accepts_nothing_outside_it() -> None:
    ids = np.sort(np.random.default_rng(0).permutation(300)[:140])
    case = reduced(load_case("dspark_qwen3_vanilla"), ids)
    metrics = run_loss(case._replace(loss=replace(case.loss, lk=1.0)))[1]
    l1, weights = full_vocabulary_reference(case, ids)["l1_loss"]
    mean_alpha = 1 - 0.5 * l1 / weights
    assert metrics["lk_loss"][0] / metrics["lk_loss"][1] >= -np.log(mean_alpha)  # Jensen


@pytest.mark.parametrize(("name", "operation"), [("lk", "min"), ("lk_hybrid", "min")])
def test_a_weight_of_zero_removes_the_cost(name: str, operation: str) -> None:
    case = load_case("dspark_qwen3_vanilla")
    sequences, anchors = case.anchors.shape
    rows = sequences * chunk_size(sequences, anchors * case.config.block_size)
    assert has_operation(case, replace(case.loss, **{name: 1.0}), operation, f"300,{rows}")
    assert not has_operation(case, case.loss, operation, f"300,{rows}")


def test_mtp_takes_both_terms() -> None:
    config, params = mtp_case()
    data, _, frozen, _, batch, _ = GOLDEN["eagle3_qwen3"]
    loss = LossConfig(ce=0, tv=0, confidence=0, lk=0.25, lk_hybrid=0.5)
    run = jax.jit(partial(mtp_loss, config=config, loss=loss, compute_dtype=jnp.float32))
    total, metrics = run(params, frozen, batch=batch)
    state = unroll(mtp.MODEL, params, config, frozen["embed"], batch, 1)[0]
    draft = linear(frozen["head"], state).reshape(300, 2, 32)[:, :, :-2].reshape(300, -1)
    target = jnp.asarray(data["target_logits"])[:, 1:-1].reshape(-1, 300).T
    mask = data["loss_mask"][:, 2:].reshape(-1)
    means = [float((np.asarray(x) * mask).sum() / mask.sum()) for x in plain_terms(draft, target, 300)]
    np.testing.assert_allclose(total, 0.25 * means[0] + 0.5 * means[1], rtol=1e-4)
    np.testing.assert_allclose(metrics["lk_loss"][0] / metrics["lk_loss"][1], means[0], rtol=1e-4)


@pytest.mark.parametrize("name", ["lk", "lk_hybrid"])
def test_eagle3_refuses_them(name: str) -> None:
    loss = replace(LossConfig(ce=1.0, tv=0.0, confidence=0.0), **{name: 0.5})
    with pytest.raises(ValueError, match=f"loss.{name} 0.5: Eagle3 trains on the soft cross entropy alone"):
        check_loss(DRAFTER.config, loss)


def test_a_loss_without_them_has_the_text_that_earlier_checkpoints_know() -> None:
    assert repr(LossConfig()) == "LossConfig(ce=0.1, tv=0.9, confidence=1.0, decay=4.0)"
    assert repr(LossConfig(lk=0.5)) == "LossConfig(ce=0.1, tv=0.9, confidence=1.0, decay=4.0, lk=0.5)"
    assert repr(LossConfig(lk_hybrid=1.0, lk_eta=2.0)).endswith("lk_hybrid=1.0, lk_eta=2.0)")
