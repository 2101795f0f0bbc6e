"""Learning-rate schedule, clipping and AdamW against golden runs; moving average."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.training.optimizer import (
    average_weights,
    clip_by_global_norm,
    cosine_schedule,
    global_norm,
    learning_rate,
    make_optimizer,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "optim"
SCHEDULE = json.loads((GOLDEN / "schedule.json").read_text())
UPDATES = dict(np.load(GOLDEN / "updates.npz"))


def test_schedule_is_the_closed_form() -> None:
    steps = jnp.arange(1000)
    got = jax.jit(lambda k: learning_rate(k, peak=6e-4, total=1000, warmup_ratio=0.04))(steps)
    assert got.dtype == jnp.float32
    want = SCHEDULE["lr_used_by_update_cosine_starts_at_peak"]
    np.testing.assert_allclose(got, want, rtol=3e-6)  # relative, so the tail near 0 counts as well
    np.testing.assert_allclose(got, SCHEDULE["lr_used_by_update"], rtol=5e-5)


def in_force(step: int, total: int, ratio: float) -> float:
    warmup = int(ratio * total)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


@pytest.mark.parametrize(
    "total,ratio", [(1, 0.0), (1, 0.04), (10, 0.04), (24, 0.04), (50, 0.0), (7, 0.5), (25410, 0.04)]
)
def test_schedule_of_other_lengths(total: int, ratio: float) -> None:
    steps = range(0, total, max(1, total // 50))
    got = learning_rate(jnp.asarray(list(steps)), peak=2.0, total=total, warmup_ratio=ratio)
    np.testing.assert_allclose(got, [2 * in_force(k, total, ratio) for k in steps], rtol=1e-5)


def test_schedule_edges() -> None:
    rate = cosine_schedule(peak=1.0, total=20, warmup_ratio=0.15)
    assert float(rate(2)) == float(rate(3)) == 1.0
    assert 0 < float(rate(19)) < 0.01
    assert float(rate(20)) == float(rate(1000)) == 0.0
    assert float(learning_rate(3, peak=1.0, total=4, warmup_ratio=1.0)) == 1.0
    for name, wrong in [("peak", dict(peak=0.0)), ("total", dict(total=0)), ("warmup_ratio", dict(warmup_ratio=1.5))]:
        with pytest.raises(ValueError, match=name):
            cosine_schedule(**{**dict(peak=1.0, total=20, warmup_ratio=0.1), **wrong})


def golden(prefix: str, kind: str, step: int) -> dict[str, jax.Array]:
    return {name: jnp.asarray(UPDATES[f"{prefix}{kind}_{name}_{step}"], jnp.float32) for name in "ab"}


def run(prefix: str, weight_decay: float, kind: str, max_norm: float | None) -> list[tuple[dict, optax.OptState]]:
    """Masters and state after each golden update, fed with the gradients called `kind`."""
    rates = jnp.asarray([UPDATES[f"{prefix}lr_{step}"] for step in range(5)], jnp.float32)
    optimizer = make_optimizer(lambda step: rates[step], max_norm=max_norm, weight_decay=weight_decay)
    masters = {name: jnp.asarray(UPDATES[f"{prefix}{name}_init"], jnp.float32) for name in "ab"}
    state = optimizer.init(masters)
    update, out = jax.jit(optimizer.update), []
    for step in range(5):
        change, state = update(golden(prefix, kind, step), state, masters)
        masters = optax.apply_updates(masters, change)
        out.append((masters, state))
    return out


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_updates_match_golden(dtype: str, weight_decay: float) -> None:
    prefix = f"{dtype}_wd{weight_decay}_"
    # The bf16 run clips in bf16 (the gradients' dtype there), ours in float32: feed it what was clipped already.
    kind, max_norm = ("grad", 1.0) if dtype == "fp32" else ("clipped", None)
    for step, (masters, state) in enumerate(run(prefix, weight_decay, kind, max_norm)):
        for name in "ab":
            want = UPDATES[f"{prefix}master_{name}_{step}"]
            np.testing.assert_allclose(masters[name], want, rtol=2e-6, atol=2e-8)
        adam = optax.tree.get(state, "mu"), optax.tree.get(state, "nu")
        np.testing.assert_allclose(adam[0]["a"], UPDATES[f"{prefix}exp_avg_a_{step}"], rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(adam[1]["a"], UPDATES[f"{prefix}exp_avg_sq_a_{step}"], rtol=1e-5, atol=1e-10)
        if dtype == "bf16":  # the model's weights are the rounded masters
            rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), masters)
            np.testing.assert_allclose(rounded["b"], UPDATES[f"{prefix}b_{step}"], rtol=2**-8)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_clipping_matches_golden(dtype: str) -> None:
    prefix, clip = f"{dtype}_wd0.0_", clip_by_global_norm(1.0)
    rtol = 2e-6 if dtype == "fp32" else 2**-7
    for step in range(5):
        grads = golden(prefix, "grad", step)
        np.testing.assert_allclose(global_norm(grads), UPDATES[f"{prefix}grad_norm_{step}"], rtol=rtol)
        got, _ = clip.update(grads, optax.EmptyState())
        for name in "ab":
            np.testing.assert_allclose(got[name], UPDATES[f"{prefix}clipped_{name}_{step}"], rtol=rtol, atol=1e-7)


def test_bf16_gradients_are_widened_before_the_norm() -> None:
    grads = {"a": jnp.ones(100_000, jnp.bfloat16)}
    np.testing.assert_allclose(global_norm(grads), math.sqrt(100_000), rtol=1e-6)
    got, _ = clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    assert got["a"].dtype == jnp.float32
    np.testing.assert_allclose(global_norm(got), 1.0, rtol=1e-5)
    assert float(global_norm({})) == 0.0


def test_clip_factor_holds_the_small_constant() -> None:
    got, _ = clip_by_global_norm(1e-6).update({"a": jnp.asarray([1e-6])}, optax.EmptyState())
    np.testing.assert_allclose(got["a"], [0.5e-6], rtol=1e-5)  # 1e-6 / (1e-6 + 1e-6)


def test_zero_gradients_change_nothing() -> None:
    optimizer = make_optimizer(1e-3)
    masters = {"a": jnp.ones(3)}
    change, _ = optimizer.update({"a": jnp.zeros(3)}, optimizer.init(masters), masters)
    np.testing.assert_array_equal(change["a"], jnp.zeros(3))


def test_every_setting_changes_the_update() -> None:
    def second_step(**settings: float | None) -> np.ndarray:
        optimizer = make_optimizer(1e-2, **settings)
        masters = {"a": jnp.asarray([1.0, -2.0])}
        state = optimizer.init(masters)
        for gradient in ([3.0, 7.0], [0.1, -0.2]):  # the first one is clipped
            change, state = optimizer.update({"a": jnp.asarray(gradient)}, state, masters)
        return np.asarray(change["a"])

    plain = second_step()
    for settings in (
        {"max_norm": None},
        {"max_norm": 2.0},
        {"weight_decay": 0.1},
        {"b1": 0.5},
        {"b2": 0.9},
        {"eps": 0.1},
    ):
        assert np.abs(second_step(**settings) - plain).max() > 1e-5, settings


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="max_norm 0"):
        make_optimizer(1e-3, max_norm=0.0)
    with pytest.raises(ValueError, match="weight_decay -1"):
        make_optimizer(1e-3, weight_decay=-1.0)
    with pytest.raises(ValueError, match=r"\['layer'\]\['w'\].*bfloat16"):
        make_optimizer(1e-3).init({"layer": {"w": jnp.ones(2, jnp.bfloat16)}})
    with pytest.raises(ValueError, match="decay 1"):
        average_weights({}, {}, step=0, decay=1.0)


def test_average_weights() -> None:
    average = masters = {"a": jnp.zeros(2)}
    for step in range(400):
        masters = {"a": jnp.full(2, float(step))}
        average = average_weights(average, masters, step=step, decay=0.9)
    np.testing.assert_allclose(average["a"], 399 - 9, atol=0.05)  # a ramp is followed decay / (1 - decay) steps behind
    early = average_weights({"a": jnp.zeros(1)}, {"a": jnp.ones(1, jnp.bfloat16)}, step=0, decay=0.999)
    assert early["a"].dtype == jnp.float32
    np.testing.assert_allclose(early["a"], 0.9, rtol=1e-6)
