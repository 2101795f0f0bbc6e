"""Calibration metrics against their definitions, and properties that they must have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.calibration.metrics import (
    asked,
    auroc,
    bin_numbers,
    brier,
    ece,
    ece_floor,
    log_loss,
    mean_ece,
    position_metrics,
    reliability,
    survival,
)
from dspark_jax.calibration.sts import scaled

COARSE = st.integers(0, 12).map(lambda i: i / 12)  # many ties
SAMPLES = st.lists(st.tuples(COARSE | st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


def arrays(samples: list[tuple[float, bool]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([p for p, _ in samples]), np.array([y for _, y in samples])


@given(SAMPLES)
def test_auroc_is_the_share_of_pairs_in_order(samples):
    score, outcome = arrays(samples)
    pairs = [(float(a > b) + 0.5 * float(a == b)) for a in score[outcome] for b in score[~outcome]]
    found = auroc(score, outcome)
    assert found == pytest.approx(np.mean(pairs)) if pairs else np.isnan(found)


@given(SAMPLES, st.floats(0.2, 5))
def test_auroc_of_a_position_does_not_see_a_temperature(samples, temperature):
    score, outcome = arrays(samples)
    score = np.clip(score, 1e-3, 1 - 1e-3).round(4)  # different values stay different
    after = scaled(score[:, None], (temperature,))[:, 0]
    np.testing.assert_allclose(auroc(after, outcome), auroc(score, outcome))


@given(SAMPLES)
def test_auroc_turns_around_with_the_outcomes(samples):
    score, outcome = arrays(samples)
    np.testing.assert_allclose(auroc(score, ~outcome), 1 - auroc(score, outcome))


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 7)), min_size=1, max_size=30, unique_by=lambda c: c[0]))
def test_ece_is_zero_where_every_bin_keeps_its_word(cells):
    """In each bin 8 samples whose mean probability, exact in binary, is the share of outcomes."""
    probability, outcome = [], []
    for number, accepted in cells:
        value = accepted / 8
        if bin_numbers(np.array([value]), 15)[0] == number:
            probability += [value] * 8
            outcome += [True] * accepted + [False] * (8 - accepted)
    if probability:
        for kind in ("width", "mass"):
            assert ece(np.array(probability), np.array(outcome), 15, kind) == pytest.approx(0, abs=1e-12)


@given(SAMPLES, st.integers(1, 20), st.sampled_from(["width", "mass"]))
def test_ece_against_its_definition(samples, bins, kind):
    p, y = arrays(samples)
    numbers = bin_numbers(p, bins, kind)
    assert ((numbers >= 0) & (numbers < bins)).all()
    error = sum(
        (numbers == b).mean() * abs(p[numbers == b].mean() - y[numbers == b].mean()) for b in np.unique(numbers)
    )
    assert ece(p, y, bins, kind) == pytest.approx(error, abs=1e-12)
    found = reliability(p, y, bins, kind)
    full = found.counts > 0
    again = np.sum(found.counts[full] * np.abs(found.probability[full] - found.rate[full])) / len(p)
    assert again == pytest.approx(error, abs=1e-12)
    assert 0 <= error <= 1


@given(SAMPLES, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(samples, random):
    mixed = list(samples)
    random.shuffle(mixed)
    for kind in ("width", "mass"):
        assert ece(*arrays(mixed), kind=kind) == pytest.approx(ece(*arrays(samples), kind=kind), abs=1e-12)
    np.testing.assert_allclose(auroc(*arrays(mixed)), auroc(*arrays(samples)))
    assert brier(*arrays(mixed)) == pytest.approx(brier(*arrays(samples)))


@given(SAMPLES)
def test_one_bin_compares_the_means(samples):
    p, y = arrays(samples)
    assert ece(p, y, 1) == pytest.approx(abs(p.mean() - y.mean()), abs=1e-12)
    assert ece(p, y, 15) >= ece(p, y, 1) - 1e-12  # splitting a bin cannot hide an error


def test_bins_of_equal_width_and_mass():
    assert bin_numbers(np.array([0.0, 0.1, 0.2, 0.999, 1.0]), 5).tolist() == [0, 0, 1, 4, 4]
    assert bin_numbers(np.arange(10) / 10, 5, "mass").tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(set(bin_numbers(np.array([0.5] * 9 + [0.7]), 5, "mass")[:9])) == 1


def test_known_values():
    p, y = np.array([0.2, 0.8, 0.8, 0.4]), np.array([0, 1, 0, 1])
    assert brier(p, y) == pytest.approx((0.04 + 0.04 + 0.64 + 0.36) / 4)
    assert log_loss(p, y) == pytest.approx(-(2 * np.log(0.8) + np.log(0.2) + np.log(0.4)) / 4)
    assert auroc(p, y) == pytest.approx((1 + 0.5 + 1 + 0) / 4)
    assert ece(np.array([0.9, 0.9]), np.array([1, 0])) == pytest.approx(0.4)


def test_log_loss_is_finite_for_certain_mistakes():
    """And least, of all constants, at the rate: what makes it a proper score."""
    assert log_loss(np.array([1.0, 0.0]), np.array([0, 1])) == pytest.approx(-np.log(1e-7))
    assert log_loss(np.array([1.0, 0.0]), np.array([1, 0])) == pytest.approx(0, abs=1e-6)
    y = np.arange(10) < 3
    losses = [log_loss(np.full(10, p), y) for p in np.linspace(0.1, 0.9, 9)]
    assert int(np.argmin(losses)) == 2


@pytest.mark.parametrize("count", [300, 4000])
def test_the_floor_is_what_true_probabilities_show(count):
    rng = np.random.default_rng(0)
    p = rng.beta(0.7, 1.5, count)
    draws = [ece(p, rng.random(count) < p) for _ in range(300)]
    assert ece_floor(p) == pytest.approx(np.mean(draws), rel=0.06)
    rare = rng.uniform(0, 0.002, count)
    draws = [ece(rare, rng.random(count) < rare) for _ in range(300)]
    assert 0.8 * np.mean(draws) <= ece_floor(rare) <= 1.6 * np.mean(draws)


def test_nothing_to_measure_is_nan():
    none = np.zeros(0)
    assert all(np.isnan(f(none, none)) for f in (ece, brier, log_loss, auroc)) and np.isnan(ece_floor(none))
    assert np.isnan(auroc(np.array([0.2, 0.3]), np.array([1, 1])))
    found = position_metrics(np.zeros((0, 2)), none, none)
    assert [m.count for m in found] == [0, 0] and np.isnan(found[0].ece) and np.isnan(mean_ece(found))


def test_readings_of_rounds():
    """Three rounds, the last with room for one token: it says nothing about the second."""
    confidence = np.array([[0.5, 0.4], [0.8, 0.5], [0.9, 0.9]])
    accepted, verified = np.array([0, 2, 1]), np.array([2, 2, 1])
    np.testing.assert_allclose(survival(confidence), [[0.5, 0.2], [0.8, 0.4], [0.9, 0.81]])
    assert asked(accepted, verified, 1).tolist() == [True, True, True]
    assert asked(accepted, verified, 2).tolist() == [True, True, False]
    assert asked(accepted, verified, 2, "conditional").tolist() == [False, True, False]
    first, second = position_metrics(confidence, accepted, verified)
    assert (first.count, first.base_rate, first.mean) == (3, pytest.approx(2 / 3), pytest.approx(2.2 / 3))
    assert (second.count, second.base_rate, second.mean) == (2, 0.5, pytest.approx(0.3))
    assert second.auroc == 1 and second.brier == pytest.approx((0.04 + 0.36) / 2)
    conditional = position_metrics(confidence, accepted, verified, "conditional")[1]
    assert (conditional.count, conditional.base_rate, conditional.mean) == (1, 1.0, 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ece(np.array([0.1]), np.array([0, 1])), r"two arrays of one shape"),
        (lambda: ece(np.array([1.5]), np.array([1])), r"probability 1.5: must lie in \[0, 1\]"),
        (lambda: ece(np.array([np.nan]), np.array([1])), r"probability nan"),
        (lambda: brier(np.array([0.5]), np.array([2])), r"outcome 2.0: must be 0 or 1"),
        (lambda: ece(np.array([0.5]), np.array([1]), 0), r"bins 0: must be at least 1"),
        (lambda: ece(np.array([0.5]), np.array([1]), 5, "other"), r"binning 'other': must be width or mass"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
