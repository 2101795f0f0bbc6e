"""Norms, products and RoPE against plain float64 formulas."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.config import RopeConfig, rope_from_hf
from dspark_jax.models.layers import (
    gated_mlp,
    gather_rows,
    head_norm,
    linear,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate,
    take_rows,
)
from dspark_jax.models.platform import compiling_for


def turns(dimension: float, rope: RopeConfig, head_dim: int) -> float:
    """Full turns over the original context of the pair at a (fractional) index."""
    return rope.original_max_position * rope.theta ** (-2 * dimension / head_dim) / (2 * math.pi)


def pair_with_turns(wanted: float, rope: RopeConfig, head_dim: int) -> float:
    """The fractional pair index that makes `wanted` turns, by bisection (turns fall as the index grows)."""
    low, high = -10.0 * head_dim, 10.0 * head_dim
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if turns(middle, rope, head_dim) > wanted else (low, middle)
    return low


def reference_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Frequencies pair by pair in float64, `[hd/2]`.

    linear: Chen et al. 2023 (positions divided by the factor). llama3: pairs with fewer than `low_freq_factor` turns
    are interpolated, those with more than `high_freq_factor` kept, a linear mix by turns between them. yarn: Peng et
    al. 2023, section 3.2, with the ramp of their code: linear in the pair's index between the rounded band edges.
    """
    result = []
    for pair in range(head_dim // 2):
        kept = rope.theta ** (-2 * pair / head_dim)
        interpolated = kept / rope.factor
        if rope.kind == "default":
            share = 1.0  # of the frequency that is kept
        elif rope.kind == "linear":
            share = 0.0
        elif rope.kind == "llama3":
            count = turns(pair, rope, head_dim)
            if count < rope.low_freq_factor:
                share = 0.0
            elif count > rope.high_freq_factor:
                share = 1.0
            else:
                share = (count - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        else:
            first = max(math.floor(pair_with_turns(rope.beta_fast, rope, head_dim)), 0)
            last = min(math.ceil(pair_with_turns(rope.beta_slow, rope, head_dim)), head_dim - 1)
            share = 1.0 - min(max((pair - first) / max(last - first, 0.001), 0.0), 1.0)
        result.append(share * kept + (1 - share) * interpolated)
    return np.array(result)


ROPES = [
    RopeConfig(),
    RopeConfig(theta=1e6),
    RopeConfig(theta=1e5, kind="linear", factor=4.0),
    RopeConfig(theta=1e4, kind="linear", factor=2.5),
    RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=8192),
    RopeConfig(theta=5e5, kind="llama3", factor=32.0, original_max_position=8192),
    RopeConfig(1e4, "llama3", 4.0, 2048, low_freq_factor=0.5, high_freq_factor=16.0),
    RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=32768),
    RopeConfig(theta=1e4, kind="yarn", factor=16.0, original_max_position=4096, beta_fast=16.0, beta_slow=2.0),
    RopeConfig(theta=1.5e5, kind="yarn", factor=32.0, original_max_position=512),
]


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope.kind}-{rope.theta:g}-{rope.factor:g}")
def test_frequencies(rope, head_dim):
    ours = rope_frequencies(rope, head_dim)
    assert (ours.shape, ours.dtype) == ((head_dim // 2,), jnp.float32)
    np.testing.assert_allclose(ours, reference_frequencies(rope, head_dim), rtol=2e-6)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scalings_keep_fast_pairs_and_interpolate_slow_ones(kind):
    rope = RopeConfig(theta=5e5, kind=kind, factor=8.0, original_max_position=8192)
    ratio = np.asarray(rope_frequencies(rope, 128) / rope_frequencies(RopeConfig(theta=5e5), 128))
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / 8)
    assert (np.diff(ratio) <= 1e-7).all()
    assert ((ratio > 0.13) & (ratio < 0.99)).sum() >= 5  # there is a mixed band


def test_a_config_file_to_frequencies():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = rope_from_hf({"rope_theta": 1e6, "rope_scaling": scaling}, 131072)
    np.testing.assert_allclose(rope_frequencies(rope, 128), reference_frequencies(ROPES[7], 128), rtol=2e-6)
    cos, sin = rope_tables(rope, 128, jnp.arange(3))
    np.testing.assert_allclose(np.asarray(cos)[:, 0], 0.1 * math.log(4) + 1, rtol=1e-6)  # yarn's factor, at position 0
    np.testing.assert_array_equal(np.asarray(sin)[:, 0], 0)


@pytest.mark.parametrize("rope", [ROPES[1], ROPES[5], RopeConfig(1e6, "yarn", 4.0, 32768, attention_factor=1.25)])
def test_rotation_is_a_complex_product(rope):
    positions = np.array([0, 1, 17, 500, 4095])
    x = np.random.default_rng(0).normal(size=(2, 3, 16, 5))  # [G, Q, hd, B]
    angles = reference_frequencies(rope, 16)[:, None] * positions
    turned = (x[:, :, :8] + 1j * x[:, :, 8:]) * np.exp(1j * angles) * rope.attention_factor
    want = np.concatenate([turned.real, turned.imag], axis=2)
    tables = rope_tables(rope, 16, jnp.asarray(positions, jnp.int32))
    assert tables[0].shape == tables[1].shape == (8, 5)
    np.testing.assert_allclose(rotate(jnp.asarray(x, jnp.float32), tables), want, atol=3e-3)  # float32 angles to 4095
    np.testing.assert_allclose(rotate(jnp.asarray(x, jnp.float32), tables)[..., :3], want[..., :3], atol=1e-5)


def test_scores_depend_on_the_distance_only():
    q, k = np.random.default_rng(1).normal(size=(2, 16)).astype(np.float32)

    def score(at: int, to: int) -> float:
        tables = rope_tables(RopeConfig(theta=1e4), 16, jnp.array([at, to]))
        turned = rotate(jnp.stack([q, k], axis=1), tables)  # [hd, 2]
        return float(turned[:, 0] @ turned[:, 1])

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-2)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norms(eps):
    rng = np.random.default_rng(2)
    x, weight = rng.normal(size=(24, 5)) * 0.1, rng.normal(size=24)
    want = x / np.sqrt((x**2).mean(0) + eps) * weight[:, None]
    ours = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), eps)
    np.testing.assert_allclose(ours, want, atol=1e-5)
    heads = np.stack([x, 3 * x, -x])  # [heads, hd, B]
    ours = head_norm(jnp.asarray(heads, jnp.float32), jnp.asarray(weight, jnp.float32), eps)
    want = heads / np.sqrt((heads**2).mean(1, keepdims=True) + eps) * weight[:, None]
    np.testing.assert_allclose(ours, want, atol=1e-5)
    assert rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), eps).dtype == jnp.float32
    assert not np.isnan(rms_norm(jnp.zeros((24, 2)), jnp.ones(24), eps)).any()


def test_gated_mlp():
    rng = np.random.default_rng(3)
    gate_up, down, x = rng.normal(size=(2, 12, 8)), rng.normal(size=(8, 12)), rng.normal(size=(8, 4))
    gate = gate_up[0] @ x
    want = down @ (gate / (1 + np.exp(-gate)) * (gate_up[1] @ x))
    np.testing.assert_allclose(gated_mlp(*(jnp.asarray(a, jnp.float32) for a in (gate_up, down, x))), want, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_linear(rows, dtype):
    rng = np.random.default_rng(4)
    weight = jnp.asarray(rng.normal(size=(6, 2, 3, 4)), dtype)  # [D, G, Q, hd]
    x = jnp.asarray(rng.normal(size=(2, 3, 4, rows)), dtype)
    want = np.einsum("dgqh,gqhb->db", np.asarray(weight, np.float64), np.asarray(x, np.float64))
    ours = linear(weight, x.astype(jnp.float32), num_inputs=3)
    assert (ours.shape, ours.dtype) == ((6, rows), jnp.float32)  # sums are float32 whatever the operands
    np.testing.assert_allclose(ours, want, atol=1e-5)
    out = linear(jnp.swapaxes(weight, 0, 3), jax.random.normal(jax.random.key(0), (6, rows)))
    assert out.shape == (4, 2, 3, rows)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_a_table_and_their_gradient(dtype):
    """A row that is read often gets the sum of all, though each is too small to change a sum in bfloat16."""
    table = jax.random.normal(jax.random.key(0), (50, 4)).astype(dtype)
    ids = jnp.asarray([3] * 1000 + [7, 49])
    np.testing.assert_array_equal(jax.jit(gather_rows)(table, ids), np.asarray(table)[np.asarray(ids)])
    np.testing.assert_array_equal(take_rows(table, ids), np.asarray(table, np.float32)[np.asarray(ids)].T)
    found = jax.jit(jax.grad(lambda t: jnp.sum(take_rows(t, ids))))(table)
    want = np.zeros((50, 4))
    want[3], want[[7, 49]] = 1000, 1
    np.testing.assert_allclose(np.asarray(found, np.float32), want, rtol=2**-8)
    assert found.dtype == dtype


def test_compiling_for_another_platform_leaves_the_rules_of_cpus() -> None:
    weight, x = jnp.ones((4, 3), jnp.bfloat16), jnp.ones((3, 2))
    traced = lambda: str(jax.make_jaxpr(lambda w, x: linear(w, x))(weight, x))  # noqa: E731
    with compiling_for("cpu"):
        assert "optimization_barrier" in traced()
        with compiling_for("tpu"):
            assert "optimization_barrier" not in traced()
        assert "optimization_barrier" in traced()
