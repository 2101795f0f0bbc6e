"""Sequential temperature scaling: finds what was done to true confidences, repeatably, and says where it cannot."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.calibration.metrics import asked, ece, log_loss, mean_ece, position_metrics, survival
from dspark_jax.calibration.sts import STSSettings, fit_temperatures, fit_with_biases, logits, scaled


def rounds(
    count: int, distortion: tuple[float, ...], seed: int = 0, *, shift: tuple[float, ...] = (), spread: float = 1.5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidences whose true logits are the given ones divided by `distortion`, plus `shift`, and what was accepted."""
    rng = np.random.default_rng(seed)
    true = rng.normal(0.8, spread, (count, len(distortion)))
    ok = rng.random(true.shape) < 1 / (1 + np.exp(-true))
    accepted = np.cumprod(ok, axis=1).sum(axis=1)
    confidence = 1 / (1 + np.exp(-(true - np.asarray(shift or 0.0)) * np.asarray(distortion)))
    return confidence, accepted, np.full(count, len(distortion))


def test_temperatures_that_were_put_in_are_found():
    distortion = (1.8, 1.0, 0.6, 2.5)
    confidence, accepted, verified = rounds(20_000, distortion)
    fit = fit_temperatures(confidence, accepted, verified)
    assert fit.temperatures == pytest.approx(distortion, rel=0.2) and all(fit.fitted)
    assert fit.counts == tuple(int((accepted >= k).sum()) for k in range(4))
    others = rounds(20_000, distortion, seed=1)
    before = mean_ece(position_metrics(*others))
    after = mean_ece(position_metrics(scaled(others[0], fit.temperatures), *others[1:]))
    assert after < 0.01 < 0.03 < before


def test_each_temperature_is_the_best_with_the_earlier_ones_held():
    confidence, accepted, verified = rounds(4000, (2.0, 0.5))
    search = STSSettings(refinements=0)
    fit = fit_temperatures(confidence, accepted, verified, search)
    grid = np.exp(np.linspace(np.log(search.low), np.log(search.high), search.points))
    held: tuple[float, ...] = ()
    for k, found in enumerate(fit.temperatures):

        def error(t: float, k: int = k, held: tuple[float, ...] = held) -> float:
            return ece(survival(scaled(confidence[:, : k + 1], (*held, t)))[:, k], accepted > k)

        assert error(found) == pytest.approx(min(error(t) for t in (*grid, 1.0)), abs=1e-12)
        held = (*held, found)


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(0, 400))
def test_a_fit_is_repeatable_and_never_worse_on_its_own_rounds(seed, block, count):
    confidence, accepted, verified = rounds(count, (1.7,) * block, seed)
    search = STSSettings(points=17, refinements=1)
    fit = fit_temperatures(confidence, accepted, verified, search)
    order = np.random.default_rng(seed).permutation(count)
    again = fit_temperatures(confidence[order], accepted[order], verified[order], search)
    assert fit.fitted == again.fitted and len(fit.temperatures) == block
    assert all(search.low - 1e-9 <= t <= search.high + 1e-9 for t in fit.temperatures)
    if fit.fitted[0]:
        first = scaled(confidence[:, :1], fit.temperatures[:1])[:, 0]
        assert ece(first, accepted >= 1) <= ece(confidence[:, 0], accepted >= 1) + 1e-9
    assert fit == fit_temperatures(confidence, accepted, verified, search)


SHIFTED = {"distortion": (1.8, 1.0, 0.6, 2.0), "shift": (-0.8, 0.0, 0.5, -0.4)}


def test_temperatures_and_biases_that_were_put_in_are_found():
    """Those of every position; temperatures alone leave most of the error, the biases leave chance."""
    confidence, accepted, verified = rounds(20_000, **SHIFTED)
    fit = fit_with_biases(confidence, accepted, verified, STSSettings(pair_points=13))
    assert fit.temperatures == pytest.approx(SHIFTED["distortion"], rel=0.2) and all(fit.fitted)
    assert fit.biases == pytest.approx(SHIFTED["shift"], abs=0.15)
    plain = fit_temperatures(confidence, accepted, verified)
    assert plain.biases == () and plain.counts == fit.counts
    others = rounds(20_000, **SHIFTED, seed=1)
    errors = [
        mean_ece(position_metrics(scaled(others[0], t, b), *others[1:]))
        for t, b in (((1.0,) * 4, ()), (plain.temperatures, ()), (fit.temperatures, fit.biases))
    ]
    assert errors[2] < 0.01 < 0.03 < errors[1] < errors[0]


def test_confidences_of_little_spread_are_not_made_constant():
    """A constant would have no calibration error at all, and would tell nothing."""
    confidence, accepted, verified = rounds(20_000, (0.5,), shift=(-1.0,), spread=0.4)
    fit = fit_with_biases(confidence, accepted, verified)
    assert fit.temperatures == pytest.approx((0.5,), rel=0.2) and fit.biases == pytest.approx((-1.0,), abs=0.2)


@settings(max_examples=10)
@given(st.integers(0, 2**31), st.lists(st.floats(-1.5, 1.5), min_size=2, max_size=2))
def test_biases_keep_the_order_of_each_position(seed, shift):
    confidence, accepted, verified = rounds(400, (1.5, 0.7), seed, shift=tuple(shift))
    search = STSSettings(pair_points=9, refinements=1)
    fit = fit_with_biases(confidence, accepted, verified, search)
    after = scaled(confidence, fit.temperatures, fit.biases)
    for k in range(2):
        order = np.argsort(confidence[:, k], kind="stable")
        assert (np.diff(after[order, k]) >= 0).all()
    assert all(search.low - 1e-9 <= t <= search.high + 1e-9 for t in fit.temperatures)
    assert all(abs(b) <= search.bias + 1e-9 for b in fit.biases)
    assert fit == fit_with_biases(confidence, accepted, verified, search)


def test_each_pair_is_the_best_with_the_earlier_ones_held():
    confidence, accepted, verified = rounds(2000, (2.0, 0.5), shift=(-0.7, 0.4))
    verified = np.where(np.arange(2000) % 10 == 0, 1, verified)
    accepted = np.minimum(accepted, verified)
    search = STSSettings(pair_points=9, refinements=0)
    fit = fit_with_biases(confidence, accepted, verified, search)
    grid = np.exp(np.linspace(np.log(search.low), np.log(search.high), 9))
    pairs = [(1.0, 0.0), *((t, b) for t in grid for b in np.linspace(-search.bias, search.bias, 9))]
    for k, found in enumerate(zip(fit.temperatures, fit.biases, strict=True)):
        rows = asked(accepted, verified, k + 1)

        def error(pair: tuple[float, float], k: int = k, rows: np.ndarray = rows) -> float:
            t, b = ((*values[:k], new) for values, new in zip((fit.temperatures, fit.biases), pair, strict=True))
            return log_loss(survival(scaled(confidence[rows, : k + 1], t, b))[:, k], accepted[rows] > k)

        assert error(found) == pytest.approx(min(map(error, pairs)), abs=1e-12)


def test_late_positions_with_too_few_rounds_take_the_temperature_before():
    confidence, accepted, verified = rounds(3000, (2.0, 2.0, 2.0))
    accepted = np.minimum(accepted, np.where(np.arange(3000) < 60, 3, 1))  # hardly any round gets past the first
    fit = fit_temperatures(confidence, accepted, verified, STSSettings(minimum=40))
    assert fit.fitted[0] and not fit.fitted[2]
    assert fit.temperatures[2] == fit.temperatures[1]
    few = fit_temperatures(confidence[:30], accepted[:30], verified[:30])
    assert few.temperatures == (1.0, 1.0, 1.0) and not any(few.fitted)
    always = fit_temperatures(confidence, np.full(3000, 3), verified)  # one outcome only
    assert always.temperatures == (1.0, 1.0, 1.0) and always.counts == (3000, 3000, 3000)
    shifted = fit_with_biases(confidence, accepted, verified, STSSettings(minimum=40))
    assert shifted.fitted == fit.fitted and shifted.biases[2] == shifted.biases[1] != 0
    assert fit_with_biases(confidence[:30], accepted[:30], verified[:30]).biases == (0.0, 0.0, 0.0)


def test_rounds_without_room_do_not_count():
    """Rounds that could not verify a position look like rejections there; they must change nothing."""
    confidence, accepted, verified = rounds(5000, (2.0, 2.0))
    whole = fit_temperatures(confidence, accepted, verified)
    cut = np.arange(1000)
    more = (
        np.concatenate([confidence, confidence[cut]]),
        np.concatenate([accepted, np.zeros(1000, int)]),
        np.concatenate([verified, np.zeros(1000, int)]),
    )
    assert fit_temperatures(*more) == whole


def test_of_equal_errors_the_one_nearest_to_1_wins():
    confidence = np.full((200, 1), 0.5)  # logit 0: no temperature changes anything
    outcome = np.arange(200) % 3 == 0
    assert fit_temperatures(confidence, outcome, np.ones(200)).temperatures == (1.0,)
    fit = fit_with_biases(confidence, outcome, np.ones(200))
    assert fit.temperatures == pytest.approx((1.0,)) and fit.biases == pytest.approx((np.log(0.335 / 0.665),), abs=0.01)
    half = fit_with_biases(confidence, np.arange(200) % 2 == 0, np.ones(200))
    assert half.temperatures == (1.0,) and half.biases == (0.0,)


BASE = STSSettings(points=9, pair_points=7, refinements=1)
OTHER = {
    "low": 0.7, "high": 1.5, "points": 12, "bias": 0.3, "pair_points": 9, "refinements": 2, "bins": 3, "minimum": 1990,
    "minimum_each": 900,
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(STSSettings)])
def test_every_field_changes_a_fit(name):
    """Temperatures beyond the middle at the first position, below it at the second, and biases."""
    confidence, accepted, verified = rounds(2000, (2.3, 0.45), shift=(-0.7, 0.9))
    other = replace(BASE, **{name: OTHER[name]})
    fit = fit_with_biases if name in ("bias", "pair_points") else fit_temperatures
    assert fit(confidence, accepted, verified, other) != fit(confidence, accepted, verified, BASE)


@given(st.floats(0.01, 0.99), st.floats(0.2, 5), st.floats(-3, 3))
def test_biases_shift_the_divided_logit(confidence, temperature, bias):
    plain = scaled(np.array([[confidence]]), (temperature,))
    np.testing.assert_array_equal(scaled(np.array([[confidence]]), (temperature,), (0.0,)), plain)
    shifted = logits(np.array(confidence)) / temperature + bias
    after = scaled(np.array([[confidence]]), (temperature,), (bias,))
    assert after[0, 0] == pytest.approx(1 / (1 + np.exp(-shifted)), rel=1e-9)


@given(st.floats(0.01, 0.99), st.floats(0.2, 5))
def test_scaling_divides_the_logit(confidence, temperature):
    after, wanted = scaled(np.array([[confidence]]), (temperature,)), logits(np.array(confidence)) / temperature
    assert logits(after)[0, 0] == pytest.approx(np.clip(wanted, -16, 16), abs=0.2 if abs(wanted) > 15.9 else 1e-4)
    assert scaled(np.array([[confidence]]), (1.0,))[0, 0] == pytest.approx(confidence)


def test_certain_confidences_stay_finite():
    after = scaled(np.array([[0.0, 1.0]], np.float32), (0.2, 5.0))
    assert np.isfinite(after).all() and np.isfinite(logits(np.array([0.0, 1.0]))).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scaled(np.zeros((3, 2)), (1.0,)), r"temperatures \[1.0\]: must be 2 positive numbers"),
        (lambda: scaled(np.zeros((3, 2)), (1.0, 0.0)), r"must be 2 positive numbers"),
        (lambda: scaled(np.zeros((3, 2)), (1.0, 1.0), (0.5,)), r"biases \[0.5\]: must be 2 numbers or none"),
        (lambda: fit_with_biases(np.zeros((3, 2)), np.zeros(2), np.zeros(3)), r"must be \[n, K\], \[n\] and \[n\]"),
        (lambda: fit_temperatures(np.zeros((3, 2)), np.zeros(2), np.zeros(3)), r"must be \[n, K\], \[n\] and \[n\]"),
        (lambda: STSSettings(low=2.0), r"low 2.0, high 5.0: temperatures must lie around 1"),
        (lambda: STSSettings(points=2), r"points 2: must be at least 3"),
        (lambda: STSSettings(pair_points=2), r"pair_points 2: must be at least 3"),
        (lambda: STSSettings(bias=0.0), r"bias 0.0: must be positive and finite"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
