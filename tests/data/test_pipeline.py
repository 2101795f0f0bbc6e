"""Batches: order, restarts, padding and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dspark_jax.data.hidden_cache import CachedSample, CacheKey, HiddenCache
from dspark_jax.data.pipeline import HostBatch, Pipeline
from dspark_jax.data.records import TrainingSample

KEY = CacheKey("tiny", "0123", (0, 1), 4, "float32")


def make_samples(count: int) -> list[TrainingSample]:
    return [
        TrainingSample(f"s{i}", np.arange(i, i + 2 + i % 5, dtype=np.int32), np.arange(2 + i % 5) > 0)
        for i in range(count)
    ]


def make_cache(folder: Path, samples: list[TrainingSample]) -> HiddenCache:
    cache = HiddenCache(folder, KEY)
    rng = np.random.default_rng(0)
    for sample in samples[::-1]:
        length = len(sample.input_ids)
        states = (rng.normal(size=(length, width)).astype(np.float32) for width in (8, 4))
        normalizer = rng.normal(size=length).astype(np.float32)
        cache.append(sample.id, CachedSample(sample.input_ids, sample.loss_mask, *states, normalizer))
    cache.close()
    return cache


def make(
    samples: list[TrainingSample], seed: int = 0, batch_size: int = 4, cache: HiddenCache | None = None
) -> Pipeline:
    return Pipeline(samples, batch_size=batch_size, max_length=8, seed=seed, cache=cache)


def assert_equal(one: HostBatch, two: HostBatch) -> None:
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_epoch_has_each_sample_once_in_its_own_order() -> None:
    pipeline = make(make_samples(12))
    assert pipeline.steps_per_epoch == 3
    epochs = [np.concatenate([pipeline.indices(3 * e + i) for i in range(3)]) for e in range(4)]
    for order in epochs:
        assert sorted(order) == list(range(12))
    assert len({tuple(order) for order in epochs}) == 4
    assert [pipeline.epoch(step) for step in (0, 2, 3, 8)] == [0, 0, 1, 2]
    other = make(make_samples(12), seed=1)
    assert tuple(np.concatenate([other.indices(i) for i in range(3)])) != tuple(epochs[0])
    assert tuple(np.concatenate([other.indices(i) for i in range(3)])) != tuple(epochs[1])  # no shifted seeds


def test_incomplete_batches() -> None:
    pipeline = make(make_samples(11))
    assert pipeline.steps_per_epoch == 2
    seen = [np.concatenate([pipeline.indices(2 * e + i) for i in range(2)]) for e in range(30)]
    assert all(len(set(order)) == 8 for order in seen)
    assert set(np.concatenate(seen)) == set(range(11))  # who is left out changes
    few = make(make_samples(3))
    assert few.steps_per_epoch == 1
    batch = few.batch(5)
    assert sorted(few.indices(5)) == [0, 1, 2]
    assert batch.input_ids.shape == (4, 8) and not batch.loss_mask[3].any()


def test_restart_gives_the_same_batches(tmp_path: Path) -> None:
    samples = make_samples(9)
    cache = make_cache(tmp_path, samples)
    whole = list(make(samples, seed=3, cache=cache).batches(0, 7))
    assert len(whole) == 7
    rest = list(make(samples, seed=3, cache=HiddenCache(tmp_path, KEY)).batches(4, 7))
    assert len(rest) == 3
    for one, two in zip(whole[4:], rest, strict=True):
        assert_equal(one, two)
    assert_equal(whole[5], make(samples, seed=3, cache=cache).batch(5))
    assert list(make(samples).batches(7, 7)) == []


def test_padding_and_states(tmp_path: Path) -> None:
    samples = make_samples(8)
    pipeline = make(samples, cache=make_cache(tmp_path, samples))
    batch = pipeline.batch(1)
    assert batch.features is not None and batch.final is not None and batch.normalizer is not None
    assert batch.features.shape == (4, 8, 8) and batch.final.shape == (4, 8, 4) and batch.normalizer.shape == (4, 8)
    cache = HiddenCache(tmp_path, KEY)
    for row, index in enumerate(pipeline.indices(1)):
        length = len(samples[index].input_ids)
        np.testing.assert_array_equal(batch.input_ids[row, :length], samples[index].input_ids)
        np.testing.assert_array_equal(batch.loss_mask[row, :length], samples[index].loss_mask)
        states = cache.read(cache.number(samples[index].id))
        for name in ("features", "final", "normalizer"):
            np.testing.assert_array_equal(getattr(batch, name)[row, :length], getattr(states, name))
            assert not getattr(batch, name)[row, length:].any()
        assert not batch.loss_mask[row, length:].any()
    online = make(samples).batch(1)
    assert online.features is None and online.final is None and online.normalizer is None
    np.testing.assert_array_equal(online.input_ids, batch.input_ids)


def test_a_samples_number_does_not_depend_on_the_others() -> None:
    samples = make_samples(8)
    names = {}
    for pipeline in (make(samples), make(samples[2:], seed=5, batch_size=3)):
        for step in range(3):
            batch = pipeline.batch(step)
            for ids, name in zip(batch.input_ids, batch.sample_ids, strict=True):
                assert names.setdefault(tuple(ids), name) == name
    assert len(set(names.values())) == len(names)


def test_fingerprint_sees_order_and_content() -> None:
    samples = make_samples(4)
    prints = {make(list(s)).fingerprint() for s in (samples, samples[::-1], samples[:3], make_samples(5))}
    assert len(prints) == 4
    assert make(make_samples(4)).fingerprint() == make(samples).fingerprint()


def test_bad_input_is_refused(tmp_path: Path) -> None:
    samples = make_samples(4)
    with pytest.raises(ValueError, match="no sample to train on"):
        make([])
    with pytest.raises(ValueError, match="'long' has 9 tokens, max_length is 8"):
        make([TrainingSample("long", np.zeros(9, np.int32), np.ones(9, np.uint8))])
    with pytest.raises(ValueError, match="'s3' is not in the cache"):
        make(samples, cache=make_cache(tmp_path, samples[:3]))
