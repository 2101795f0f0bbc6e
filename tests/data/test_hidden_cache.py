"""Hidden-state cache: what it holds, resuming, and refusing what does not belong or is damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.load import Target, load_target
from dspark_jax.data.hidden_cache import (
    CachedSample,
    CacheKey,
    HiddenCache,
    build_cache,
    cache_key,
    estimate_bytes,
    token_bytes,
)
from dspark_jax.data.records import TrainingSample
from dspark_jax.models import transformer

LAYERS = (-1, 1, 3)


@pytest.fixture(scope="module")
def target(golden: Path) -> Target:
    return load_target(golden / "targets" / "llama_tied")


def key_of(target: Target, dtype: str = "float32") -> CacheKey:
    return cache_key(target.path, target.config, target.params, LAYERS, np.dtype(jnp.dtype(dtype)))


def some_samples(count: int = 7, seed: int = 0) -> list[TrainingSample]:
    rng = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate(rng.integers(3, 20, size=count)):
        mask = np.ones(length, np.uint8)
        mask[:2] = 0
        samples.append(TrainingSample(f"s{i}", rng.integers(0, 300, size=length).astype(np.int32), mask))
    return samples


def build(folder: Path, target: Target, samples: list[TrainingSample], dtype: str = "float32") -> HiddenCache:
    key = key_of(target, dtype)
    return build_cache(folder, key, target.config, target.params, samples, buckets=(8, 16), batch_tokens=32)


def test_states_are_those_of_each_sequence_alone(tmp_path: Path, target: Target) -> None:
    samples = some_samples()
    cache = build(tmp_path, target, samples)
    assert sorted(cache.ids) == sorted(sample.id for sample in samples)
    forward = jax.jit(transformer.forward, static_argnums=(1, 3))
    for sample in samples[:3]:
        found = cache.read(cache.number(sample.id))
        want = forward(target.params, target.config, jnp.asarray(sample.input_ids)[None], LAYERS)
        np.testing.assert_array_equal(found.input_ids, sample.input_ids)
        np.testing.assert_array_equal(found.loss_mask, sample.loss_mask)
        np.testing.assert_allclose(found.features, want.features.T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.final, want.final.T, rtol=1e-4, atol=1e-4)
        logits = np.asarray(transformer.logits(target.params, want.final), np.float64)  # [V, T]
        np.testing.assert_allclose(found.normalizer, np.log(np.exp(logits).sum(0)), rtol=1e-5)


def test_size_is_estimated_to_the_byte(tmp_path: Path, target: Target) -> None:
    samples = some_samples()
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        cache = build(tmp_path / dtype, target, samples, dtype)
        assert token_bytes(cache.key) == size * 4 * 48 + 4 + 4 + 1
        found = sum(file.stat().st_size for file in (tmp_path / dtype).glob("*.bin"))
        assert estimate_bytes(cache.key, samples) == found


def test_goes_on_where_it_was_and_drops_a_torn_tail(tmp_path: Path, target: Target) -> None:
    samples = some_samples()
    whole = build(tmp_path / "whole", target, samples)
    build(tmp_path / "parts", target, samples[:3])
    with (tmp_path / "parts" / "features.bin").open("ab") as file:
        file.write(b"half a sample")
    parts = build(tmp_path / "parts", target, samples)
    assert len(parts) == len(samples) and parts.ids[:3] == HiddenCache(tmp_path / "parts", parts.key).ids[:3]
    for sample in samples:
        for one, two in zip(parts.read(parts.number(sample.id)), whole.read(whole.number(sample.id)), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)
    before = (tmp_path / "parts" / "index.json").stat().st_mtime_ns
    build(tmp_path / "parts", target, samples)  # nothing to do
    assert (tmp_path / "parts" / "index.json").stat().st_mtime_ns == before


def test_what_was_not_committed_is_not_there(tmp_path: Path, target: Target) -> None:
    samples = some_samples(3)
    build(tmp_path, target, samples[:2])
    cache = HiddenCache(tmp_path, key_of(target))
    states = cache.read(0)
    cache.append("late", CachedSample(*(np.array(part) for part in states)))
    assert "late" in cache
    reopened = HiddenCache(tmp_path, key_of(target))
    assert "late" not in reopened and len(reopened) == 2
    cache.close()
    assert "late" in HiddenCache(tmp_path, key_of(target))
    with pytest.raises(ValueError, match="'late' is there already"):
        cache.append("late", states)


def test_another_target_layer_set_or_dtype_is_refused(tmp_path: Path, target: Target, golden: Path) -> None:
    build(tmp_path, target, some_samples(2))
    key = key_of(target)
    other = load_target(golden / "targets" / "qwen3_tied")
    with pytest.raises(ValueError, match="llama_tied.*qwen3_tied"):
        HiddenCache(tmp_path, cache_key(other.path, other.config, other.params, LAYERS, jnp.float32))
    with pytest.raises(ValueError, match=r"layer_ids is \[-1, 1, 3\] in the cache, \[0, 1\] in this run"):
        HiddenCache(tmp_path, replace(key, layer_ids=(0, 1)))
    with pytest.raises(ValueError, match="dtype is float32 in the cache, bfloat16 in this run"):
        HiddenCache(tmp_path, replace(key, dtype="bfloat16"))
    HiddenCache(tmp_path, replace(key, target="/moved/elsewhere"))  # the same weights at another place
    with pytest.raises(ValueError, match="dtype float16"):
        cache_key(target.path, target.config, target.params, LAYERS, jnp.float16)


def test_fingerprint_sees_weights_but_not_their_dtype(target: Target) -> None:
    changed = target.params | {"final_norm": target.params["final_norm"] * 1.5}
    key = key_of(target)
    assert cache_key("", target.config, changed, LAYERS, jnp.float32).fingerprint != key.fingerprint
    narrow = {name: target.params[name] for name in ("embed", "final_norm", "layers")}
    narrow["final_norm"] = narrow["final_norm"].astype(jnp.bfloat16)
    assert cache_key("", target.config, narrow, LAYERS, jnp.float32).fingerprint == key.fingerprint


def test_truncated_and_corrupt_files_are_named(tmp_path: Path, target: Target) -> None:
    samples = some_samples(3)
    key = build(tmp_path, target, samples).key
    file = tmp_path / "final.bin"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"final\.bin: truncated"):
        HiddenCache(tmp_path, key)
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    cache = HiddenCache(tmp_path, key)
    cache.read(0)
    with pytest.raises(ValueError, match=f"{tmp_path}.*checksum"):
        cache.read(2)
    for name in ("index.json", "manifest.json"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text[: len(text) // 2])
        with pytest.raises(ValueError, match=name):
            HiddenCache(tmp_path, key)
        (tmp_path / name).write_text(text)
    (tmp_path / "index.json").write_text(json.dumps({"ids": ["a"], "lengths": [], "crc32": []}))
    with pytest.raises(ValueError, match="index.json: must hold lists"):
        HiddenCache(tmp_path, key)


def test_other_tokens_under_a_known_id_are_refused(tmp_path: Path, target: Target) -> None:
    samples = some_samples(2)
    build(tmp_path, target, samples)
    shorter = replace(samples[0], input_ids=samples[0].input_ids[:-1], loss_mask=samples[0].loss_mask[:-1])
    build(tmp_path, target, [shorter])  # the states of a prefix are the first ones
    for wrong in (samples[0].input_ids[::-1].copy(), np.append(samples[0].input_ids, np.int32(5))):
        with pytest.raises(ValueError, match="'s0'"):
            build(tmp_path, target, [replace(samples[0], input_ids=wrong)])
