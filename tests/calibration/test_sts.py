"""Sequential temperature scaling: finds what was done to true confidences, repeatably, and says where it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.calibration.metrics import ece, mean_ece, position_metrics, survival
from dspark_jax.calibration.sts import STSSettings, fit_temperatures, logits, scaled


def rounds(count: int, distortion: tuple[float, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidences whose true logits are the given ones divided by `distortion`, with what was accepted and verified."""
    rng = np.random.default_rng(seed)
    true = rng.normal(0.8, 1.5, (count, len(distortion)))
    ok = rng.random(true.shape) < 1 / (1 + np.exp(-true))
    accepted = np.cumprod(ok, axis=1).sum(axis=1)
    confidence = 1 / (1 + np.exp(-true * np.asarray(distortion)))
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
    assert fit_temperatures(confidence, np.arange(200) % 3 == 0, np.ones(200)).temperatures == (1.0,)


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
        (lambda: fit_temperatures(np.zeros((3, 2)), np.zeros(2), np.zeros(3)), r"must be \[n, K\], \[n\] and \[n\]"),
        (lambda: STSSettings(low=2.0), r"low 2.0, high 5.0: temperatures must lie around 1"),
        (lambda: STSSettings(points=2), r"points 2: must be at least 3"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
