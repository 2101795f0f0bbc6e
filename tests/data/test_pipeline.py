"""Batches: order, restarts, packing, buckets, padding, states, the rows of one process, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.data.hidden_cache import CachedSample, CacheKey, HiddenCache
from dspark_jax.data.pipeline import HostBatch, Pipeline
from dspark_jax.data.quantized import Quantized, quantize
from dspark_jax.data.records import RecordSamples, TrainingSample, samples_from_records

KEY = CacheKey("tiny", "0123", (0, 1), 4, "float32")


@cache
def make_samples(count: int) -> list[TrainingSample]:
    """Samples of 2 to 6 tokens; s1, s6, s11, ... have no supervised token."""
    return [
        TrainingSample(
            f"s{i}", np.arange(i, i + 2 + i % 5, dtype=np.int32), (np.arange(2 + i % 5) > 10 * (i % 5 == 1)).view("u1")
        )
        for i in range(count)
    ]


def make_cache(folder: Path, samples: Sequence[TrainingSample], key: CacheKey = KEY) -> HiddenCache:
    hidden = HiddenCache(folder, key)
    rng = np.random.default_rng(0)
    for sample in samples[::-1]:
        length = len(sample.input_ids)
        states: list[Any] = [rng.normal(size=(length, width)).astype(np.float32) for width in (8, 4)]
        normalizer = rng.normal(size=length).astype(np.float32)
        if key.quantized:
            states = [quantize(part, key.dtype, key.group) for part in states]
        hidden.append(sample.id, CachedSample(sample.input_ids, sample.loss_mask, *states, normalizer))
    hidden.close()
    return hidden


def make(samples: Sequence[TrainingSample], seed: int = 0, batch_size: int = 4, **options: Any) -> Pipeline:
    return Pipeline(samples, **{"batch_size": batch_size, "max_length": 8, "seed": seed, **options})


def assert_equal(one: HostBatch, two: HostBatch) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


KINDS = st.sampled_from([{}, {"pack": True}, {"buckets": (3, 5)}, {"pack": True, "max_length": 20}])


def check_batch(pipeline: Pipeline, step: int, packed: bool) -> list[int]:
    """What the layout says is in the batch and nothing else; returns the sample numbers."""
    batch, layout = pipeline.batch(step), pipeline.layout(step)
    shape = len(layout), pipeline.width(step)
    assert batch.input_ids.shape == batch.loss_mask.shape == shape and batch.sample_ids.shape == (
        shape[0],
        pipeline.documents,
    )
    left = np.ones(shape, bool)
    for row, documents in enumerate(layout):
        for place, (number, start, length) in enumerate(documents):
            sample, inside = pipeline.samples[number], slice(start, start + length)
            np.testing.assert_array_equal(batch.input_ids[row, inside], sample.input_ids)
            np.testing.assert_array_equal(batch.loss_mask[row, inside], sample.loss_mask)
            assert packed or (place == start == 0)
            if packed:
                assert (batch.segments[row, inside] == place + 1).all()
            assert left[row, inside].all()  # no two samples in one place
            left[row, inside] = False
    for part in (batch.input_ids, batch.loss_mask, *([batch.segments] if packed else [])):
        assert not part[left].any()
    assert packed or batch.segments is None
    return [number for documents in layout for number, _, _ in documents]


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**32), KINDS)
def test_every_sample_once_an_epoch(count: int, batch_size: int, seed: int, kind: dict) -> None:
    pipeline = make(make_samples(count), seed, batch_size, **kind)
    for epoch in range(3):
        first, last = pipeline.total_steps(epoch), pipeline.total_steps(epoch + 1)
        assert last > first
        seen = []
        for step in range(first, last):
            assert pipeline.epoch(step) == epoch
            numbers = check_batch(pipeline, step, "pack" in kind)
            assert pipeline.indices(step).tolist() == numbers
            seen += numbers
        assert sorted(seen + pipeline.left_out(epoch).tolist()) == list(range(count))
        tokens = sum(2 + number % 5 for number in seen)
        slots = batch_size * sum(pipeline.width(step) for step in range(first, last))
        assert pipeline.padding(epoch) == pytest.approx(1 - tokens / slots)


@settings(max_examples=15)
@given(st.data(), st.integers(1, 30), KINDS)
def test_restart_at_any_step_gives_the_same_batches(data: st.DataObject, count: int, kind: dict) -> None:
    samples = make_samples(count)
    whole = list(make(samples, 3, **kind).batches(0, 9))
    assert len(whole) == 9
    start = data.draw(st.integers(0, 8))
    for one, two in zip(whole[start:], make(samples, 3, **kind).batches(start, 9), strict=True):
        assert_equal(one, two)
    assert_equal(whole[start], make(samples, 3, **kind).batch(start))


@settings(max_examples=15)
@given(st.sets(st.integers(0, 3)), st.integers(0, 6), KINDS)
def test_rows_of_one_process_are_those_of_the_whole_batch(rows: set[int], step: int, kind: dict) -> None:
    whole = make(make_samples(21), **kind).batch(step)
    part = make(make_samples(21), rows=rows, **kind).batch(step)
    others = sorted(set(range(4)) - rows)
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        np.testing.assert_array_equal(one[sorted(rows)], two[sorted(rows)])
        assert not two[others].any() and one.shape == two.shape


def test_only_the_own_rows_are_read(tmp_path: Path) -> None:
    samples = make_samples(16)
    hidden = make_cache(tmp_path, samples)
    pipeline = make(samples, cache=hidden, rows=[2], pack=True)
    own = {number for number, _, _ in pipeline.layout(0)[2]}
    asked: list[str] = []
    read = hidden.read
    hidden.read = lambda number: (asked.append(hidden.ids[number]), read(number))[1]  # type: ignore[method-assign]
    batch = pipeline.batch(0)
    assert sorted(asked) == sorted(samples[number].id for number in own)
    assert batch.features[2].any() and not batch.features[[0, 1, 3]].any()


def test_epochs_differ_in_order_and_seeds_are_not_shifted() -> None:
    for kind in ({}, {"pack": True}, {"buckets": (4,)}):
        one, two = make(make_samples(12), **kind), make(make_samples(12), seed=1, **kind)
        orders = [
            tuple(np.concatenate([p.indices(step) for step in range(p.total_steps(epoch), p.total_steps(epoch + 1))]))
            for p in (one, two)
            for epoch in range(4)
        ]
        assert len(set(orders)) == 8


def test_incomplete_batches() -> None:
    pipeline = make(make_samples(11))
    assert pipeline.steps_per_epoch == 2 and pipeline.total_steps(3) == 6
    assert [pipeline.epoch(step) for step in (0, 1, 2, 5)] == [0, 0, 1, 2]
    seen = [np.concatenate([pipeline.indices(2 * e + i) for i in range(2)]) for e in range(30)]
    assert all(len(set(order)) == 8 for order in seen)
    assert set(np.concatenate(seen)) == set(range(11))  # who is left out changes
    for kind in ({}, {"pack": True}, {"buckets": (3,)}):
        few = make(make_samples(3), **kind)
        assert few.total_steps(2) == 2
        batch = few.batch(5)
        assert sorted(few.indices(5)) == [0, 1, 2]
        assert batch.input_ids.shape == (4, 8 if few.width(5) == 8 else 3)
        assert not batch.input_ids[3].any() and not batch.loss_mask[3].any() and not batch.sample_ids[3].any()


def test_steps_of_packed_epochs() -> None:
    rng = np.random.default_rng(0)
    samples = [
        TrainingSample(f"s{i}", np.zeros(length, np.int32), np.ones(length, np.uint8))
        for i, length in enumerate(rng.integers(30, 71, 1200))
    ]
    options = {"batch_size": 2, "max_length": 100}
    pipeline = make(samples, pack=True, **options)
    steps = [pipeline.total_steps(epoch) for epoch in range(12)]
    assert steps[0] == 0 and len(set(np.diff(steps))) > 1  # that is why there is no number of steps per epoch
    with pytest.raises(ValueError, match="steps_per_epoch: differs from epoch to epoch"):
        _ = pipeline.steps_per_epoch
    fresh = make(samples, pack=True, **options)
    for epoch in range(11):
        assert fresh.epoch(steps[epoch]) == fresh.epoch(steps[epoch + 1] - 1) == epoch
    assert pipeline.padding(0) < 0.1 < 0.4 < make(samples, **options).padding(0)


def test_buckets_ask_for_the_lengths_given() -> None:
    pipeline = make(make_samples(100), buckets=(3, 5))
    assert pipeline.widths == (3, 5, 8)
    batches = list(pipeline.batches(0, 50))
    assert {batch.input_ids.shape for batch in batches} == {(4, 3), (4, 5), (4, 8)}
    assert all(batch.input_ids.shape[1] == pipeline.width(step) for step, batch in enumerate(batches))
    assert pipeline.padding() < make(make_samples(100)).padding() - 0.2


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("pack", [False, True])
def test_padding_and_states(tmp_path: Path, kind: str, pack: bool) -> None:
    samples = make_samples(16)
    key = CacheKey("tiny", "0123", (0, 1), 4, kind)
    hidden = make_cache(tmp_path, samples, key)
    pipeline = make(samples, cache=hidden, pack=pack, num_threads=2)
    batch = list(pipeline.batches(0, 2))[1]
    assert batch.normalizer.shape == (4, 8) and batch.normalizer.dtype == np.float32
    values = batch.features.values if key.quantized else batch.features
    assert isinstance(batch.final, Quantized) == key.quantized and values.shape == (4, 8, 8)
    left = np.ones((4, 8), bool)
    for row, documents in enumerate(pipeline.layout(1)):
        for number, start, length in documents:
            states = hidden.read(hidden.number(samples[number].id))
            for name in ("features", "final", "normalizer"):
                pairs = jax.tree.leaves(getattr(batch, name)), jax.tree.leaves(getattr(states, name))
                for got, want in zip(*pairs, strict=True):
                    np.testing.assert_array_equal(got[row, start : start + length], want)
            left[row, start : start + length] = False
    for leaf in jax.tree.leaves((batch.features, batch.final, batch.normalizer)):
        assert not leaf[left].any()
    online = pipeline.batch(1, states=False)
    assert online.features is None and online.final is None and online.normalizer is None
    assert_equal(online, make(samples, pack=pack).batch(1))
    np.testing.assert_array_equal(online.input_ids, batch.input_ids)


def test_a_cache_that_is_filled_while_the_first_epoch_trains(tmp_path: Path) -> None:
    samples = make_samples(8)
    hidden = HiddenCache(tmp_path, KEY)
    pipeline = make(samples, cache=hidden, complete=False)
    first = list(pipeline.batches(0, 2, states=False))
    assert len(first) == 2 and first[0].features is None
    with pytest.raises(ValueError, match="'s0' is not in the cache"):
        pipeline.batches(2, 4)
    make_cache(tmp_path, samples)
    hidden.refresh()
    assert all(batch.features.any() for batch in pipeline.batches(2, 4))
    with pytest.raises(ValueError, match="need a cache"):
        make(samples).batches(0, 1, states=True)


def test_damage_that_is_found_while_loading_is_told(tmp_path: Path) -> None:
    samples = make_samples(8)
    hidden = make_cache(tmp_path, samples)
    pipeline = make(samples, cache=hidden)
    hidden.read = lambda number: (_ for _ in ()).throw(ValueError("corrupt"))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="corrupt"):
        list(pipeline.batches(0, 2))
    with pytest.raises(ValueError, match="corrupt"):
        list(pipeline.batches(0, 2, prefetch=0))


def test_a_samples_number_does_not_depend_on_the_others() -> None:
    samples = make_samples(8)
    names: dict[int, int] = {}
    for pipeline in (make(samples), make(samples[2:], 5, 3), make(samples, pack=True, max_length=30)):
        for step in range(3):
            batch = pipeline.batch(step)
            for row, documents in enumerate(pipeline.layout(step)):
                for place, (number, _, _) in enumerate(documents):
                    key = int(pipeline.samples[number].input_ids[0])
                    assert names.setdefault(key, batch.sample_ids[row, place]) == batch.sample_ids[row, place]
    assert len(set(names.values())) == len(names) == 8


def test_fingerprint_sees_order_and_content() -> None:
    samples = make_samples(4)
    changed = [*samples[:3], TrainingSample("s3", samples[3].input_ids, 1 - samples[3].loss_mask)]
    prints = {make(list(s)).fingerprint() for s in (samples, samples[::-1], samples[:3], make_samples(5), changed)}
    assert len(prints) == 5
    assert make(list(samples), pack=True).fingerprint() == make(samples).fingerprint()


def test_records_on_disk_give_the_batches_of_records_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = [{"id": s.id, "prompt_ids": s.input_ids[:1].tolist(), "token_ids": s.input_ids[1:].tolist()} for s in SOME]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    memory, disk = samples_from_records(path, 8, 2), RecordSamples(path, 8, 2)
    hidden = make_cache(tmp_path / "cache", memory)
    one, two = (make(samples, pack=True, cache=hidden, num_threads=3) for samples in (memory, disk))
    assert one.fingerprint() == two.fingerprint()
    for left, right in zip(one.batches(0, 6, prefetch=4), two.batches(0, 6, prefetch=4), strict=True):
        assert_equal(left, right)
    assert make(disk[3:9]).fingerprint() == make(memory[3:9]).fingerprint()


SOME = make_samples(30)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    samples = make_samples(4)
    with pytest.raises(ValueError, match="no sample to train on"):
        make([])
    with pytest.raises(ValueError, match="'long' has 9 tokens, max_length is 8"):
        make([TrainingSample("long", np.zeros(9, np.int32), np.ones(9, np.uint8))])
    hidden = make_cache(tmp_path, samples[:3])
    with pytest.raises(ValueError, match="'s3' is not in the cache"):
        make(samples, cache=hidden)
    other = TrainingSample("s2", samples[2].input_ids + 1, samples[2].loss_mask)
    with pytest.raises(ValueError, match="'s2' has 4 tokens in the cache that do not begin with the 4"):
        make([*samples[:2], other], cache=hidden)
    make([TrainingSample("s2", samples[2].input_ids[:3], samples[2].loss_mask[:3])], cache=hidden)  # cut shorter
    for buckets in ((5, 3), (3, 3), (0, 3), (3, 9)):
        with pytest.raises(ValueError, match=r"buckets \[.*ascend and lie in 1..max_length, 8"):
            make(samples, buckets=buckets)
    with pytest.raises(ValueError, match="buckets .* with pack"):
        make(samples, buckets=(3,), pack=True)
    with pytest.raises(ValueError, match=r"rows \[1, 4\]: must lie in 0..3"):
        make(samples, rows=(4, 1))
