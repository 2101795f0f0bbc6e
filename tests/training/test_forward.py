"""The teacher-forced forward pass against golden drafters, and what a block may see."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.backbone import context_features
from dspark_jax.drafters.heads import confidence_logits, markov_bias
from dspark_jax.models.layers import linear, softcap
from dspark_jax.training.anchors import BlockTargets, block_targets
from dspark_jax.training.forward import BlockStates, block_forward, places
from tests.training.golden_drafters import NAMES, Case, load_case, run_loss

STEPS = [(name, "train") for name in NAMES] + [
    ("dspark_qwen3_vanilla", "train_few"),
    ("dspark_qwen3_vanilla", "train_zero"),
    ("dflash_qwen3", "train_zero"),
    ("dspark_gemma4_vanilla", "train_few"),
]


def forward(case: Case) -> tuple[BlockTargets, BlockStates]:
    batch = case.batch
    targets = block_targets(batch.input_ids, batch.loss_mask, case.anchors, case.keep, case.config.block_size)
    args = (case.trainable, case.frozen["embed"], case.config, batch.features, case.anchors, case.keep, targets)
    return targets, block_forward(*args)


def by_slot(x: jax.Array, case: Case) -> np.ndarray:
    """`[C, N * A * K]` -> kept blocks of `[N, A, K, C]`."""
    return np.asarray(x).T.reshape(*case.keep.shape, case.config.block_size, -1)[np.asarray(case.keep)]


@pytest.mark.parametrize(("name", "variant"), STEPS)
def test_states_and_logits_match_golden(name: str, variant: str) -> None:
    case = load_case(name, variant)
    expected, kept = case.expected, np.asarray(case.keep)
    batch, params, width, cap = case.batch, case.trainable, case.config.hidden_size, case.config.final_softcap
    atol = 1e-3 if "gemma4" in name else 1e-4  # Gemma4's activations and logits are larger
    if "context_feature" in expected:
        features = batch.features.reshape(-1, batch.features.shape[-1]).T
        context = np.asarray(context_features(params, case.config, features)).T
        np.testing.assert_allclose(context, expected["context_feature"].reshape(-1, width), atol=atol)

    targets, states = forward(case)
    np.testing.assert_array_equal(targets.supervised, expected["eval_mask"])
    np.testing.assert_array_equal(np.asarray(targets.prev_ids)[kept], expected["prev_token_ids"][kept])
    np.testing.assert_array_equal(np.asarray(targets.labels)[kept], expected["target_ids"][kept])
    if "backbone_hidden" in expected:
        hidden = expected["backbone_hidden"].reshape(*kept.shape, -1, width)[kept]
        np.testing.assert_allclose(by_slot(states.hidden, case), hidden, atol=atol)

    logits = softcap(linear(case.frozen["head"], states.hidden), cap)
    if case.config.markov_kind != "none":
        logits = logits + markov_bias(params, states.vectors)
    np.testing.assert_allclose(by_slot(logits, case), expected["draft_logits"][kept], atol=atol)
    rows = np.arange(kept.shape[0])[:, None, None]
    final = batch.final[rows, targets.target_positions]  # [N, A, K, D]
    aligned = np.asarray(softcap(final @ case.frozen["head"].T, cap))
    np.testing.assert_allclose(aligned[kept], expected["aligned_target_logits"][kept], atol=atol)
    assert case.config.confidence == ("confidence_logits" in expected)
    if case.config.confidence:
        confidence = confidence_logits(params, case.config, states.hidden, targets.prev_ids.reshape(-1))
        wanted = expected["confidence_logits"][kept]
        np.testing.assert_allclose(by_slot(confidence[None], case)[..., 0], wanted, atol=1e-4)


@pytest.mark.parametrize("block", [0, 3, 7])
def test_a_block_sees_nothing_from_its_anchor_on(block: int) -> None:
    case = load_case("dspark_qwen3_vanilla")
    keep = jnp.zeros_like(case.keep).at[:, block].set(True)
    anchor = np.asarray(case.anchors)[:, block]
    noise = 3 * np.random.default_rng(0).standard_normal(case.batch.features.shape).astype(np.float32)

    def loss(first: np.ndarray) -> float:
        late = np.arange(noise.shape[1]) >= first[:, None]  # [N, T]
        features = case.batch.features + jnp.where(late[..., None], noise, 0.0)
        return run_loss(case._replace(keep=keep, batch=case.batch._replace(features=features)))[0]

    clean = run_loss(case._replace(keep=keep))[0]
    assert clean == loss(anchor)
    assert clean != loss(anchor - 1)


LENGTHS = (24, 31)
ANCHORS = ((1, 6, 14), (0, 9, 20))  # blocks end inside their documents


def documents() -> tuple[Case, list[tuple[jax.Array, jax.Array, jax.Array]]]:
    """A drafter, and two documents as features `[1, T, m * D]`, token ids `[1, T]` and anchors `[1, A]`."""
    case, rng = load_case("dspark_qwen3_vanilla"), np.random.default_rng(0)
    width = case.batch.features.shape[-1]
    made = []
    for length, anchors in zip(LENGTHS, ANCHORS, strict=True):
        features = jnp.asarray(rng.standard_normal((1, length, width)), jnp.float32)
        made.append(
            (features, jnp.asarray(rng.integers(0, 100, (1, length)), jnp.int32), jnp.asarray([anchors], jnp.int32))
        )
    return case, made


def states_and_gradients(
    case: Case, features: jax.Array, ids: jax.Array, anchors: jax.Array, segments: jax.Array | None, remat: bool = False
) -> tuple[BlockStates, dict[str, Any], jax.Array]:
    """States of all blocks, and gradients, for the parameters and the features, of a sum that is one over blocks."""
    keep = jnp.ones(anchors.shape, bool)
    targets = block_targets(ids, jnp.ones_like(ids), anchors, keep, case.config.block_size, segments)

    @jax.jit
    def run(params: Any, features: jax.Array) -> tuple[jax.Array, BlockStates]:
        args = (case.frozen["embed"], case.config, features, anchors, keep, targets, segments)
        states = block_forward(params, *args, remat=remat)
        return jnp.sum(states.hidden**3) + jnp.sum(states.vectors**3), states

    (_, states), grads = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(case.trainable, features)
    return states, *grads


@pytest.mark.parametrize("remat", [False, True])
def test_packed_rows_equal_their_documents_apart(remat: bool) -> None:
    case, made = documents()
    padding = [(0, 0), (0, 5)]
    features = jnp.pad(jnp.concatenate([one[0] for one in made], axis=1), [*padding, (0, 0)])
    ids = jnp.pad(jnp.concatenate([one[1] for one in made], axis=1), padding)
    anchors = jnp.concatenate([made[0][2], made[1][2] + LENGTHS[0]], axis=1)
    segments = jnp.asarray(np.repeat([1, 2, 0], (*LENGTHS, 5))[None], jnp.int32)
    states, grads, into = states_and_gradients(case, features, ids, anchors, segments, remat)
    apart = [states_and_gradients(case, *one, None) for one in made]
    for field, parts in zip(states, zip(*(one[0] for one in apart), strict=True), strict=True):
        np.testing.assert_allclose(field, jnp.concatenate(parts, axis=-1), atol=2e-5)
    summed = jax.tree.map(jnp.add, apart[0][1], apart[1][1])
    for one, two in zip(jax.tree.leaves(grads), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5 * max(float(jnp.abs(two).max()), 1.0))
    wanted = jnp.pad(jnp.concatenate([one[2] for one in apart], axis=1), [*padding, (0, 0)])
    np.testing.assert_allclose(into, wanted, rtol=0, atol=1e-5 * float(jnp.abs(wanted).max()))


def test_places_count_from_a_document_start() -> None:
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0]], jnp.int32)
    place = places(jnp.asarray([[1, 2, 4]], jnp.int32), 6, segments)
    np.testing.assert_array_equal(place.context[0, :5], [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(place.blocks, [[1, 0, 2]])
    np.testing.assert_array_equal(place.first, [[0, 2, 2]])
    whole = places(jnp.asarray([[1, 2, 4]], jnp.int32), 6, None)
    np.testing.assert_array_equal(whole.context, [np.arange(6)])
    np.testing.assert_array_equal(whole.blocks, [[1, 2, 4]])
    assert not np.any(whole.first)


def products(jaxpr: Any) -> list[Any]:
    """All `dot_general` equations of a jaxpr, inner ones too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found += products(getattr(inner, "jaxpr", inner))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_take_operands_of_the_compute_dtype_and_sum_in_float32(dtype: str) -> None:
    case = load_case("dspark_qwen3_rnn")
    trainable, frozen = jax.tree.map(lambda x: x.astype(dtype), (case.trainable, case.frozen))
    found = products(jax.make_jaxpr(lambda p, f: forward(case._replace(trainable=p, frozen=f))[1])(trainable, frozen))
    found = [e for e in found if e.invars[0].aval.ndim > 2 or e.invars[0].aval.shape[0] > 2]  # no sums of squares
    assert len(found) >= 20
    for equation in found:
        assert {v.aval.dtype for v in equation.invars} == {jnp.dtype(dtype)}
        assert equation.outvars[0].aval.dtype == jnp.float32
