"""Filters against a sort-based reference, draws against their distributions, and what random numbers depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dspark_jax.decoding.sampling import (
    DRAW_ACCEPT,
    DRAW_DRAFT,
    DRAW_TARGET,
    MODES,
    Sampling,
    SamplingParams,
    best_token,
    categorical,
    choose,
    choose_as_needed,
    distribution,
    filter_probs,
    sampling_of,
    uniforms,
)

run_filter = jax.jit(filter_probs)
run_categorical = jax.jit(categorical)
VOCAB = 11


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 63, 64, 65, 300]), st.integers(0, 2**31))
def test_best_token_is_the_first_argmax(vocab: int, seed: int) -> None:
    logits = np.random.default_rng(seed).integers(-3, 3, (vocab, 4)).astype(np.float32)  # full of ties
    logits[:, 0] = -np.inf
    logits[seed % vocab, 0] = -100.0
    np.testing.assert_array_equal(jax.jit(best_token)(logits), np.argmax(logits, axis=0))


def test_settings_that_float32_would_round_to_nothing() -> None:
    """A tiny top_p keeps the most likely token; a huge temperature is uniform, but not over what is impossible."""
    best, flat, whole = (0, 1, 0), (0.5, 0.5, 0), (1 / (1 + np.e**2), 1 / (1 + np.e**-2), 0)
    cases = [
        *((SamplingParams(1.0, top_p=share), best) for share in (1e-300, 1e-50, 1e-40, 1e-9)),
        *((SamplingParams(heat), flat) for heat in (1e30, 1e39, 1e300)),
        (SamplingParams(1.0, min_p=1 - 1e-12), best),  # 1 in float32
        (SamplingParams(1.0, min_p=1e-50), whole),
        (SamplingParams(1.0, top_p=1 - 1e-12), whole),
    ]
    settings, expected = zip(*cases, strict=True)
    logits = jnp.tile(jnp.asarray([[0.0], [2.0], [-jnp.inf]]), len(cases))
    probs = distribution(logits, jax.device_put(sampling_of(settings, [(0, 0)] * len(cases))), "filtered")
    np.testing.assert_allclose(probs, np.transpose(expected), rtol=1e-6)


def make_sampling(temperature: float, top_p: float, top_k: int, min_p: float, rows: int = 1) -> Sampling:
    """Equal settings for all rows."""
    full = lambda value, dtype: jnp.full(rows, value, dtype)  # noqa: E731
    return Sampling(
        full(temperature, jnp.float32),
        full(top_p, jnp.float32),
        full(top_k, jnp.int32),
        full(min_p, jnp.float32),
        jnp.zeros((rows, 2), jnp.uint32),
    )


def filter_reference(probs: np.ndarray, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """The same filters by sorting one distribution `[V]`, in float64."""
    probs = probs.astype(np.float64)
    if top_k:
        probs = np.where(probs >= np.sort(probs)[-min(top_k, len(probs))], probs, 0)
        probs = probs / probs.sum()
    if top_p < 1:
        ordered = np.sort(probs)[::-1]
        last = min(np.searchsorted(np.cumsum(ordered), top_p), len(probs) - 1)
        probs = np.where(probs >= ordered[last], probs, 0)
        probs = probs / probs.sum()
    probs = np.where(probs >= min_p * probs.max(), probs, 0)
    return probs / probs.sum()


@settings(max_examples=150)
@given(
    weights=st.lists(st.integers(0, 40), min_size=VOCAB, max_size=VOCAB).filter(any),
    top_p=st.sampled_from([0.013, 0.217, 0.503, 0.871, 0.9773, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB, 100]),
    min_p=st.sampled_from([0.0, 0.0513, 0.3127, 0.917]),
)
def test_filters(weights: list[int], top_p: float, top_k: int, min_p: float) -> None:
    """Ties and zero probabilities included; thresholds are chosen off the sums that integer weights can reach."""
    probs = np.asarray(weights, np.float32) / np.float32(sum(weights))
    got = run_filter(jnp.asarray(probs)[:, None], make_sampling(1.0, top_p, top_k, min_p))[:, 0]
    np.testing.assert_allclose(got, filter_reference(probs, top_p, top_k, min_p), atol=1e-6)


def test_temperature_and_greedy_rows() -> None:
    logits = np.random.default_rng(0).normal(size=(VOCAB, 3)).astype(np.float32)
    sampling = make_sampling(1.0, 1.0, 0, 0.0, rows=3)._replace(temperature=jnp.asarray([0.0, 0.5, 2.0]))
    for mode in ("plain", "filtered"):
        got = np.asarray(distribution(jnp.asarray(logits), sampling, mode))
        np.testing.assert_array_equal(got[:, 0], np.arange(VOCAB) == logits[:, 0].argmax())
        for row, temperature in ((1, 0.5), (2, 2.0)):
            expected = np.exp(logits[:, row].astype(np.float64) / temperature)
            np.testing.assert_allclose(got[:, row], expected / expected.sum(), atol=1e-6)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31), vocab=st.sampled_from([1, 7, 256, 257, 1500]), share=st.sampled_from([0.01, 0.3, 1.0])
)
def test_zero_probability_is_never_drawn(seed: int, vocab: int, share: float) -> None:
    """Also at the ends of the unit interval and where rounding puts the goal on a boundary."""
    rng = np.random.default_rng(seed)
    probs = rng.random((vocab, 64)).astype(np.float32) * (rng.random((vocab, 64)) < share)
    probs[rng.integers(0, vocab, 64), np.arange(64)] += 0.1
    probs /= probs.sum(axis=0)
    u = rng.random(64).astype(np.float32)
    u[:4] = 0.0, np.nextafter(np.float32(1), np.float32(0)), 0.5, np.float32(1e-30)
    ends = np.cumsum(probs, axis=0)
    at = rng.integers(0, vocab, 32)
    u[32:] = np.minimum(ends[at, np.arange(32, 64)], np.nextafter(np.float32(1), np.float32(0)))
    token = np.asarray(run_categorical(jnp.asarray(probs), jnp.asarray(u)))
    assert token.dtype == np.int32 and np.all((token >= 0) & (token < vocab))
    assert np.all(probs[token, np.arange(64)] > 0)


def test_draws_match_their_distribution() -> None:
    """Inverse CDF over two levels (V > 256): equals a search in the cumulative sums, and passes a chi-square test."""
    rng = np.random.default_rng(2)
    probs = rng.dirichlet(np.full(600, 0.05)).astype(np.float32)
    rows = 20000
    keys = jnp.stack([jnp.arange(rows, dtype=jnp.uint32), jnp.full(rows, 9, jnp.uint32)], axis=1)
    u = uniforms(keys, jnp.full(rows, 4), DRAW_TARGET)
    token = np.asarray(run_categorical(jnp.broadcast_to(jnp.asarray(probs)[:, None], (600, rows)), u))
    exact = np.searchsorted(np.cumsum(probs.astype(np.float64)) / probs.sum(), np.asarray(u), side="right")
    assert np.mean(token == exact) > 0.999
    expected = probs / probs.sum() * rows
    big = expected >= 5
    counts = np.bincount(token, minlength=600)
    merged = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    assert chisquare(merged[0], merged[1] * rows / merged[1].sum()).pvalue > 1e-4


def test_uniforms_depend_on_key_position_and_purpose_only() -> None:
    keys = jnp.asarray([[1, 2], [1, 3], [7, 2], [1, 2]], jnp.uint32)
    batch = np.asarray(uniforms(keys, jnp.asarray([5, 5, 5, 6]), DRAW_DRAFT))
    alone = [float(uniforms(keys[i : i + 1], jnp.asarray([p]), DRAW_DRAFT)[0]) for i, p in enumerate((5, 5, 5, 6))]
    np.testing.assert_array_equal(batch, np.float32(alone))
    others = [float(uniforms(keys[:1], jnp.asarray([5]), purpose)[0]) for purpose in (DRAW_TARGET, DRAW_ACCEPT)]
    assert len({*batch.tolist(), *others}) == 6
    many = np.asarray(uniforms(jnp.tile(keys[:1], (4000, 1)), jnp.arange(4000), DRAW_ACCEPT))
    assert many.min() >= 0 and many.max() < 1
    assert chisquare(np.histogram(many, 20, (0, 1))[0]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0.0)]
    + [("top_p", 1.1), ("top_k", -1), ("min_p", 1.0), ("min_p", -0.1), ("max_tokens", 0)],
)
def test_bad_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} {value}"):
        SamplingParams(**{field: value})


def test_mode_is_the_cheapest_that_serves() -> None:
    assert SamplingParams(top_k=3).mode == "greedy"
    assert SamplingParams(temperature=0.7).mode == "plain"
    assert {SamplingParams(temperature=1, **x).mode for x in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1})} == {
        "filtered"
    }


def test_one_program_chooses_as_each_mode_does() -> None:
    """The cheapest mode that serves all rows; filters of greedy rows ask for nothing."""
    rng = np.random.default_rng(0)
    logits, position = jnp.asarray(rng.normal(size=(VOCAB, 64)) * 2, jnp.float32), jnp.arange(64)
    keys = jnp.asarray(rng.integers(0, 2**32, (64, 2)), jnp.uint32)
    greedy, plain, filtered = (0.0, 0.5, 2, 0.1), (0.8, 1.0, 0, 0.0), (1.2, 0.7, 3, 0.05)
    needed, as_mode = jax.jit(choose_as_needed), jax.jit(choose, static_argnames="mode")
    for kinds, mode in (([greedy], "greedy"), ([greedy, plain], "plain"), ([greedy, plain, filtered], "filtered")):
        columns = (np.resize(column, 64) for column in zip(*kinds, strict=True))
        dtypes = (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
        sampling = Sampling(*(jnp.asarray(c, d) for c, d in zip(columns, dtypes, strict=True)), keys)
        found = {each: as_mode(logits, sampling, position, mode=each) for each in MODES}
        np.testing.assert_array_equal(needed(logits, sampling, position), found[mode])
    assert len({tuple(x.tolist()) for x in found.values()}) == 3  # else this says nothing
    assert needed._cache_size() == 1
