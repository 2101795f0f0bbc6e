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
from dspark_jax.training.forward import BlockStates, block_attention, block_forward
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


def attention_inputs(seed: int = 0) -> tuple[list[jax.Array], np.ndarray, np.ndarray]:
    """q, k, v, context k and v of G = 2, Q = 2, hd = 4, N = 2, A = 3, K = 2, T = 5; visible, keep."""
    rng = np.random.default_rng(seed)
    shapes = [(2, 2, 4, 12), (2, 4, 12), (2, 4, 12), (2, 4, 10), (2, 4, 10)]
    anchors = np.array([[0, 2, 4], [1, 3, 3]])
    keep = np.array([[True, True, True], [True, True, False]])
    visible = (np.arange(5) < anchors[..., None]) & keep[..., None]
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes], visible, keep


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-6), ("bfloat16", 4e-2)])
def test_block_attention_is_one_softmax_over_context_and_block(dtype: str, atol: float) -> None:
    inputs, visible, keep = attention_inputs()
    out = block_attention(*inputs, jnp.asarray(visible), jnp.asarray(keep), 0.5, jnp.dtype(dtype))
    assert out.dtype == jnp.float32
    q, k, v, far_k, far_v = (np.asarray(x).reshape(*x.shape[:-1], 2, -1) for x in inputs)
    got = np.asarray(out).reshape(2, 2, 4, 2, 3, 2)
    for g, m, n, a, s in np.ndindex(2, 2, 2, 3, 2):
        own = slice(2 * a, 2 * a + 2)
        keys = np.concatenate([far_k[g, :, n, visible[n, a]], k[g, :, n, own].T])
        values = np.concatenate([far_v[g, :, n, visible[n, a]], v[g, :, n, own].T])
        scores = np.exp(0.5 * keys @ q[g, m, :, n, 2 * a + s])
        wanted = scores @ values / scores.sum() * keep[n, a]
        np.testing.assert_allclose(got[g, m, :, n, a, s], wanted, atol=atol)


def plain_attention(inputs: list[jax.Array], visible: jax.Array, keep: jax.Array, scale: float) -> jax.Array:
    """What `block_attention` computes, over all slots of a sequence and in float32."""
    q, k, v, far_k, far_v = (x.reshape(*x.shape[:-1], keep.shape[0], -1) for x in inputs)
    slots = q.shape[-1] // keep.shape[1]
    keys, values = jnp.concatenate([far_k, k], -1), jnp.concatenate([far_v, v], -1)  # [G, hd, N, T + A * K]
    block = jnp.arange(q.shape[-1]) // slots
    own = jnp.broadcast_to(block[:, None] == block, (keep.shape[0], block.size, block.size))
    mask = jnp.concatenate([jnp.repeat(visible, slots, axis=1), own], -1)  # [N, A * K, T + A * K]
    scores = jnp.where(mask, scale * jnp.einsum("gqhns,ghnt->gqnst", q, keys), -jnp.inf)
    out = jnp.einsum("gqnst,ghnt->gqhns", jax.nn.softmax(scores, axis=-1), values)
    return jnp.where(jnp.repeat(keep, slots, axis=1), out, 0.0).reshape(inputs[0].shape)


@pytest.mark.parametrize(("blocks", "slots", "length"), [(3, 2, 5), (8, 1, 7), (19, 3, 40)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 3e-2)])
def test_gradients_of_block_attention_are_those_of_plain_attention(
    blocks: int, slots: int, length: int, dtype: str, tolerance: float
) -> None:
    rng = np.random.default_rng(blocks)
    rows, context = 2 * blocks * slots, 2 * length
    shapes = [(2, 3, 8, rows), (2, 8, rows), (2, 8, rows), (2, 8, context), (2, 8, context), (2, 3, 8, rows)]
    *inputs, cotangent = [jnp.asarray(2 * rng.standard_normal(s), jnp.float32) for s in shapes]
    anchors = rng.integers(0, length, (2, blocks))  # the first slots of a sequence see no context
    keep = jnp.asarray(rng.random((2, blocks)) < 0.8).at[0, 0].set(False)
    visible = (jnp.arange(length) < anchors[..., None]) & keep[..., None]

    def ours(inputs: list[jax.Array]) -> jax.Array:
        return block_attention(*inputs, visible, keep, 0.3, jnp.dtype(dtype))

    def plain(inputs: list[jax.Array]) -> jax.Array:
        return plain_attention(inputs, visible, keep, 0.3)

    def with_gradients(function: Any) -> list[jax.Array]:
        out, pull = jax.vjp(function, inputs)
        return [out, *pull(cotangent)[0]]

    results = (jax.jit(with_gradients, static_argnums=0)(function) for function in (ours, plain))
    for got, exact in zip(*results, strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=tolerance * float(jnp.abs(exact).max()))


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
