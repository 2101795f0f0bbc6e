"""Hidden-state cache: what it holds, going on after kills, several writers, full disks, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import sharding
from dspark_jax.checkpoints.load import Target, load_target
from dspark_jax.data import cache_key as keys
from dspark_jax.data import cache_store as store
from dspark_jax.data import hidden_cache
from dspark_jax.data.hidden_cache import (
    KINDS,
    CachedSample,
    CacheKey,
    DiskFullError,
    HiddenCache,
    build_cache,
    cache_key,
    check_sample,
    empty_states,
    estimate_bytes,
    put_rows,
    same_target,
    stored_states,
    token_bytes,
    wider_key,
)
from dspark_jax.data.quantized import Quantized, dequantize
from dspark_jax.data.records import RecordSamples, TrainingSample
from dspark_jax.models import transformer
from tests.training.tiny_run import write_records

LAYERS = (-1, 1, 3)
SMALL = CacheKey("tiny", "0123", (0, 1), 8, "float32")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def target(golden: Path) -> Target:
    return load_target(golden / "targets" / "llama_tied")


def key_of(target: Target, kind: str = "float32") -> CacheKey:
    return cache_key(target.path, target.config, target.params, LAYERS, kind)


def some_samples(count: int = 7, seed: int = 0) -> list[TrainingSample]:
    rng = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate(rng.integers(3, 20, size=count)):
        mask = np.ones(length, np.uint8)
        mask[:2] = 0
        samples.append(TrainingSample(f"s{i}", rng.integers(0, 300, size=length).astype(np.int32), mask))
    return samples


def build(folder: Path, target: Target, samples: Any, kind: str = "float32", **options: Any) -> HiddenCache:
    key = key_of(target, kind)
    options = dict(buckets=(24,), batch_tokens=96) | options  # one shape, compiled once
    return build_cache(folder, key, target.config, target.params, samples, **options)


def raw_states(key: CacheKey, length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random features [T, m*D], final [T, D] and normalizer [T], float32."""
    rng = np.random.default_rng(seed)
    width = key.hidden_size
    shapes = ((length, len(key.layer_ids) * width), (length, width), (length,))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)  # type: ignore[return-value]


def fill(cache: HiddenCache, samples: list[TrainingSample]) -> None:
    """Append states that depend on the sample's number alone."""
    for sample in samples:
        assert cache.append_states(sample, *raw_states(cache.key, len(sample.input_ids), int(sample.id[1:])))


def assert_holds(cache: HiddenCache, samples: list[TrainingSample]) -> None:
    """The cache has exactly the samples that `fill` has put there."""
    assert sorted(cache.ids) == sorted(sample.id for sample in samples) and len(cache) == len(samples)
    for sample in samples:
        found = cache.read(cache.number(sample.id))
        np.testing.assert_array_equal(found.input_ids, sample.input_ids)
        np.testing.assert_array_equal(found.loss_mask, sample.loss_mask)
        states = raw_states(cache.key, len(sample.input_ids), int(sample.id[1:]))
        want = (*stored_states(cache.key, *states[:2]), states[2])
        jax.tree.map(np.testing.assert_array_equal, tuple(found[2:]), want)


def files(folder: Path) -> dict[str, int]:
    """Names of all files but locks, with the time of their last change."""
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir() if file.suffix != ".lock"}


@pytest.fixture(scope="module")
def wanted(target: Target) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """features [T, m*D] and final [T, D] of the first samples, by id: of each sequence without neighbours."""
    forward = jax.jit(transformer.forward, static_argnums=(1, 3))
    found = {}
    for sample in some_samples()[:3]:
        ids = np.pad(sample.input_ids, (0, 20 - len(sample.input_ids)))
        hidden = forward(target.params, target.config, jnp.asarray(ids)[None], LAYERS)
        found[sample.id] = tuple(np.asarray(x.T[: len(sample.input_ids)]) for x in (hidden.features, hidden.final))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_each_sequence_alone(
    tmp_path: Path, target: Target, kind: str, wanted: dict[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    samples = some_samples()
    cache = build(tmp_path, target, samples, kind, **(dict(buckets=(8, 16)) if kind == "float32" else {}))
    assert sorted(cache.ids) == sorted(sample.id for sample in samples)
    wide = {"float32": 1e-4, "bfloat16": 2**-8, "int8": 0.02, "fp8": 2**-4}[kind]  # of the largest value of a sample
    for sample in samples[:3]:
        found = cache.read(cache.number(sample.id))
        np.testing.assert_array_equal(found.input_ids, sample.input_ids)
        np.testing.assert_array_equal(found.loss_mask, sample.loss_mask)
        plain = []
        for stored, want in zip((found.features, found.final), wanted[sample.id], strict=True):
            assert isinstance(stored, Quantized) == (kind in ("int8", "fp8"))
            plain.append(np.asarray(dequantize(stored, jnp.float32) if isinstance(stored, Quantized) else stored))
            assert plain[-1].shape == want.shape
            assert np.abs(plain[-1].astype(np.float32) - want).max() <= wide * np.abs(want).max() + 1e-4
        head = np.asarray(transformer.head_weight(target.params), np.float64)
        logits = plain[1].astype(np.float64) @ head.T  # the normaliser belongs to the states as they are stored
        np.testing.assert_allclose(found.normalizer, np.log(np.exp(logits).sum(1)), rtol=1e-4)


def test_a_mesh_computes_the_same(tmp_path: Path, target: Target) -> None:
    mesh = sharding.make_mesh(sharding.MeshShape(2, 2, 1), jax.devices()[:4])
    params = sharding.put(target.params, sharding.shardings(target.params, mesh))
    samples = some_samples()
    one = build(tmp_path / "one", target, samples)
    many = build(tmp_path / "many", replace(target, params=params), samples)
    assert many.key.fingerprint == one.key.fingerprint
    for sample in samples:
        for a, b in zip(one.read(one.number(sample.id)), many.read(many.number(sample.id)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_in_batches(tmp_path: Path, kind: str) -> None:
    samples = some_samples(6)
    key = replace(SMALL, dtype=kind)
    cache = HiddenCache(tmp_path, key, process_index=0, shard_bytes=1500)
    fill(cache, samples)
    assert not cache.append_states(samples[0], None, None, None)  # there already
    cache.close()
    assert len(list(tmp_path.glob("*.array_record"))) > 1
    for opened in (cache, HiddenCache(tmp_path, key)):
        assert_holds(opened, samples)
    states = empty_states(key, (2, 24))
    cached = cache.read(cache.number("s1"))
    put_rows(states, 1, 4, cached, 3)
    for name in ("features", "final", "normalizer"):
        for batch, one in zip(jax.tree.leaves(states[name]), jax.tree.leaves(getattr(cached, name)), strict=True):
            assert batch.dtype == one.dtype
            np.testing.assert_array_equal(batch[1, 4:7], one[:3])
            rest = batch.astype(np.float32)
            rest[1, 4:7] = 0
            assert not rest.any()


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("layers", [(-1, 3), (3,), ()])
def test_fewer_layers_are_read_from_a_cache_of_more(
    tmp_path: Path, target: Target, kind: str, layers: tuple[int, ...]
) -> None:
    whole = build(tmp_path, target, some_samples(3), kind)
    asked = cache_key(target.path, target.config, target.params, layers, kind)
    key = wider_key(tmp_path, asked)
    assert key == whole.key
    cache = build_cache(tmp_path, key, target.config, target.params, some_samples(3), layer_ids=layers)
    assert cache.read_key == asked
    for sample in some_samples(3):
        all_of_it, some = (one.read(one.number(sample.id)) for one in (whole, cache))
        columns = [LAYERS.index(layer) for layer in layers]
        for got, had in zip(jax.tree.leaves(some.features), jax.tree.leaves(all_of_it.features), strict=True):
            parts = np.split(had, len(LAYERS), axis=1)
            np.testing.assert_array_equal(got, np.concatenate([had[:, :0], *(parts[i] for i in columns)], axis=1))
        jax.tree.map(np.testing.assert_array_equal, some.final, all_of_it.final)
        put_rows(empty_states(cache.read_key, (1, 24)), 0, 0, some, len(sample.input_ids))
    assert wider_key(tmp_path, replace(asked, layer_ids=(0,))).layer_ids == (0,)  # not in there
    assert wider_key(tmp_path / "none", asked) == asked


def test_states_of_a_step_may_be_padded_and_on_the_device(tmp_path: Path) -> None:
    key = replace(SMALL, dtype="int8")
    sample = some_samples(1)[0]
    length = len(sample.input_ids)
    features, final, normalizer = raw_states(key, length + 5)
    cache = HiddenCache(tmp_path, key)
    stored = jax.jit(stored_states, static_argnums=0)(key, jnp.asarray(features), jnp.asarray(final))
    cache.append_states(sample, *stored, jnp.asarray(normalizer))
    cache.append_states(replace(sample, id="host"), features, final, normalizer)
    cache.close()
    one, two = (cache.read(cache.number(name)) for name in (sample.id, "host"))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert one.features.values.shape == (length, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_size_is_estimated(tmp_path: Path, target: Target, kind: str) -> None:
    size = {"float32": 4 * 48 * 4, "bfloat16": 2 * 48 * 4, "int8": 48 * 4 + 2 * 4, "fp8": 48 * 4 + 2 * 4}[kind]
    key = key_of(target, kind)
    assert token_bytes(key) == size + 4 + 1 + 4 + 4  # token, mask, normaliser, and the token in the index
    wide = replace(key, hidden_size=2560, layer_ids=(1, 9, 17, 25, 33))  # Qwen3-4B, the paper's layers
    if kind == "int8":
        assert token_bytes(wide) == 6 * 2560 + 6 * 20 * 2 + 13 == 15613
    length = 200
    cache = HiddenCache(tmp_path, wide, process_index=0)
    states = (*stored_states(wide, *raw_states(wide, length)[:2]), np.zeros(length, np.float32))
    samples = [TrainingSample(f"s{i}", np.zeros(length, np.int32), np.ones(length, np.uint8)) for i in range(3)]
    for sample in samples:
        cache.append_states(sample, *states)
    cache.close()
    found = sum(file.stat().st_size for file in tmp_path.iterdir())
    estimate = estimate_bytes(wide, samples)
    assert 0.95 * estimate < found <= estimate and estimate == estimate_bytes(wide, [length] * 3)


def test_goes_on_where_it_was(tmp_path: Path, target: Target) -> None:
    samples = some_samples()
    whole = build(tmp_path / "whole", target, samples)
    build(tmp_path / "parts", target, samples[:3])
    first = files(tmp_path / "parts")
    for torn in (
        "states-00000-00001.array_record.tmp",
        "states-00000-00001.array_record",
        "states-00000-00002.npz.tmp",
    ):
        (tmp_path / "parts" / torn).write_bytes(b"half a shard")
    (tmp_path / "parts" / "states-00001-00000.array_record.tmp").write_bytes(b"of another process")
    parts = build(tmp_path / "parts", target, samples)
    assert len(parts) == len(samples) and parts.ids[:3] == HiddenCache(tmp_path / "parts", parts.key).ids[:3]
    for sample in samples:
        for one, two in zip(parts.read(parts.number(sample.id)), whole.read(whole.number(sample.id)), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)
    after = files(tmp_path / "parts")
    assert first.items() <= after.items()
    assert {name for name in after if "tmp" in name} == {"states-00001-00000.array_record.tmp"}
    build(tmp_path / "parts", target, samples)  # nothing to do
    assert files(tmp_path / "parts") == after


def test_what_was_not_committed_is_not_there(tmp_path: Path) -> None:
    samples = some_samples(4)
    cache = HiddenCache(tmp_path, SMALL, process_index=0)
    fill(cache, samples[:2])
    cache.commit()
    fill(cache, samples[2:3])
    assert "s2" in cache and len(cache) == 2
    with pytest.raises(KeyError):
        cache.number("s2")
    reader = HiddenCache(tmp_path, SMALL)
    assert_holds(reader, samples[:2])
    for name in ("s0", "s2"):
        with pytest.raises(ValueError, match=f"'{name}' is there already"):
            cache.append(name, reader.read(0))
    del cache  # as a killed process leaves it
    cache = HiddenCache(tmp_path, SMALL, process_index=0)
    fill(cache, samples[2:])
    cache.close()
    assert_holds(cache, samples)
    assert reader.refresh() == 2 and reader.ids[:2] == ["s0", "s1"]
    assert_holds(reader, samples)
    assert not list(tmp_path.glob("*.tmp"))


KILLED = """
import sys, numpy as np
from tests.data.test_hidden_cache import SMALL, HiddenCache, fill, some_samples
cache = HiddenCache(sys.argv[1], SMALL, process_index=0, shard_bytes=20_000)
for sample in some_samples(5000):
    if sample.id not in cache:
        fill(cache, [sample])
        print(len(cache), flush=True)
cache.close()
"""


def test_sigkill_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    samples = some_samples(5000)
    seen = 0
    for wanted in (60, 600):
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                committed = int(line)
                assert committed >= seen  # what the one before has finished is there from the start
                if committed >= seen + wanted:
                    break
            process.send_signal(signal.SIGKILL)
            process.stdout.read()
        assert process.returncode == -signal.SIGKILL
        cache = HiddenCache(tmp_path, SMALL, process_index=0)
        assert len(cache) >= committed > seen
        seen = len(cache)
        assert_holds(cache, samples[:seen])  # in order, none left out and none twice
    fill(cache, samples[seen : seen + 50])
    cache.close()
    assert_holds(cache, samples[: seen + 50])
    assert not list(tmp_path.glob("*.tmp"))


def test_processes_share_the_work(tmp_path: Path, target: Target) -> None:
    """Three at once into one folder, one of which is stopped and goes on as one of two."""
    samples = some_samples(20)
    build(tmp_path, target, samples[:2], process_index=0, process_count=1)
    parts = [build(tmp_path, target, samples, process_index=i, process_count=3) for i in range(2)]
    mine = [set(part.ids) for part in parts]
    assert mine[0] - mine[1] == set() and 4 <= len(mine[0]) < len(mine[1]) < 20
    with ThreadPoolExecutor(2) as pool:
        rest = list(pool.map(lambda i: build(tmp_path, target, samples, process_index=i, process_count=2), range(2)))
    assert {shard[0] for shard in store.finished(tmp_path)} == {0, 1}
    for cache in (*parts, *rest):
        cache.refresh()
        assert sorted(cache.ids) == sorted(sample.id for sample in samples)
        for sample in samples:
            check_sample(cache, sample)
            assert cache.read(cache.number(sample.id)).final.shape == (len(sample.input_ids), 48)
    with pytest.raises(ValueError, match="process_index 2: must lie in 0..process_count - 1, 1"):
        build(tmp_path, target, samples, process_index=2, process_count=2)


def test_two_runs_cannot_write_as_one_process(tmp_path: Path) -> None:
    samples = some_samples(3)
    one, two = (HiddenCache(tmp_path, SMALL, process_index=0) for _ in range(2))
    fill(one, samples[:1])
    with pytest.raises(ValueError, match="another run writes into this cache as process 0"):
        fill(two, samples[1:2])
    fill(HiddenCache(tmp_path, SMALL, process_index=1), samples[1:2])
    one.close()
    fill(two, samples[2:])
    two.close()
    assert one.refresh() == 1
    assert_holds(one, [samples[0], samples[2]])


def test_a_sample_of_two_processes_counts_once(tmp_path: Path) -> None:
    samples = some_samples(3)
    caches = [HiddenCache(tmp_path, SMALL, process_index=i) for i in (1, 0)]
    for cache in caches:
        fill(cache, samples)
        cache.close()
    assert_holds(HiddenCache(tmp_path, SMALL), samples)
    caches[0].refresh()
    assert_holds(caches[0], samples)


def test_threads_read_more_shards_than_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_cache, "_OPEN_SHARDS", 2)
    samples = some_samples(40)
    cache = HiddenCache(tmp_path, SMALL, process_index=0, shard_bytes=2000)
    fill(cache, samples)
    cache.close()
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda i: cache.read(i % 40).final.sum(), range(400)))
    assert read == [read[i % 40] for i in range(400)]
    assert_holds(cache, samples)


def test_another_target_layer_set_or_kind_is_refused(tmp_path: Path, target: Target, golden: Path) -> None:
    build(tmp_path, target, some_samples(2))
    key = key_of(target)
    other = load_target(golden / "targets" / "qwen3_tied")
    with pytest.raises(ValueError, match="llama_tied.*qwen3_tied"):
        HiddenCache(tmp_path, cache_key(other.path, other.config, other.params, LAYERS, jnp.float32))
    with pytest.raises(ValueError, match=r"layer_ids is \[-1, 1, 3\] in the cache, \[0, 1\] in this run"):
        HiddenCache(tmp_path, replace(key, layer_ids=(0, 1)))
    with pytest.raises(ValueError, match="hidden_size is 48 in the cache, 64 in this run"):
        HiddenCache(tmp_path, replace(key, hidden_size=64))
    with pytest.raises(ValueError, match=r"dtype is float32 in the cache, int8 in this run.*cache's kind \(float32\)"):
        HiddenCache(tmp_path, replace(key, dtype="int8"))
    HiddenCache(tmp_path, replace(key, target="/moved/elsewhere"))  # the same weights at another place
    with pytest.raises(ValueError, match="dtype float16"):
        cache_key(target.path, target.config, target.params, LAYERS, jnp.float16)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for version, message in ((1, "format 1 is an earlier one, of flat .bin files"), (9, "format 9 is not known here")):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"format": version}))
        with pytest.raises(ValueError, match=message):
            HiddenCache(tmp_path, key)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="manifest.json: missing, but the folder holds states"):
        HiddenCache(tmp_path, key)


def test_fingerprint_sees_every_weight_but_not_their_dtype(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = keys.fingerprint(target.config, target.params)
    leaves, tree = jax.tree.flatten(target.params)
    for number, leaf in enumerate(leaves):
        changed = jax.tree.unflatten(tree, [*leaves[:number], leaf * 1.5 + 0.1, *leaves[number + 1 :]])
        assert not same_target(keys.fingerprint(target.config, changed), mine), number
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.params)
    assert keys.fingerprint(target.config, narrow) == mine
    assert keys.fingerprint(target.config, jax.jit(keys.excerpt)(target.params)) == mine
    assert same_target(mine.rpartition("-")[0], mine)  # of a cache from before the last part
    real = keys._bytes_of
    monkeypatch.setattr(keys, "_bytes_of", lambda part: real(part) if getattr(part, "ndim", 0) == 1 else b"")
    part = keys.fingerprint(target.config, target.params)  # as of a process that holds the final norm alone
    assert part != mine and same_target(part, mine) and same_target(mine, part)
    other = target.params | {"final_norm": target.params["embed"][0]}
    assert not same_target(keys.fingerprint(target.config, other), mine)
    assert not same_target("0123", mine)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_truncated_corrupt_and_missing_files_are_named(tmp_path: Path) -> None:
    samples = some_samples(3)
    cache = HiddenCache(tmp_path, SMALL, process_index=0)
    fill(cache, samples)
    cache.close()
    shard, index = tmp_path / "states-00000-00000.array_record", tmp_path / "states-00000-00000.npz"
    data = shard.read_bytes()
    flip(shard, data.index(b'"s1"') + 400)
    opened = HiddenCache(tmp_path, SMALL)
    opened.read(opened.number("s0"))
    with pytest.raises(ValueError, match=r"states-00000-00000.array_record: sample 's1' is corrupt"):
        opened.read(opened.number("s1"))
    shard.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"states-00000-00000.array_record: truncated, has .* of"):
        HiddenCache(tmp_path, SMALL)
    shard.unlink()
    with pytest.raises(ValueError, match=r"states-00000-00000.array_record: missing"):
        HiddenCache(tmp_path, SMALL)
    shard.write_bytes(data)
    for name in ("states-00000-00000.npz", "manifest.json"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=name):
            HiddenCache(tmp_path, SMALL)
        (tmp_path / name).write_bytes(content)
    flip(index, index.read_bytes().index(np.asarray(samples[0].input_ids).tobytes()))
    opened = HiddenCache(tmp_path, SMALL)
    with pytest.raises(ValueError, match=index.name):
        opened.tokens(0)


def test_records_are_checked_beyond_the_container(tmp_path: Path) -> None:
    record = store.pack_record("a", {"x": np.arange(5, dtype=np.int32), "y": np.zeros((2, 3), jnp.bfloat16)})
    name, arrays = store.unpack_record(record)
    assert name == "a" and arrays["y"].shape == (2, 3) and arrays["y"].dtype == jnp.bfloat16
    assert not arrays["x"].flags.writeable and arrays["x"].tolist() == [0, 1, 2, 3, 4]
    for place in range(len(record)):
        with pytest.raises(ValueError):
            store.unpack_record(record[:place] + bytes([record[place] ^ 1]) + record[place + 1 :])
    for end in range(len(record)):
        with pytest.raises(ValueError):
            store.unpack_record(record[:end])
    samples = some_samples(2)
    cache = HiddenCache(tmp_path, SMALL, process_index=0, shard_bytes=1)  # a shard for each
    fill(cache, samples)
    cache.close()
    first, second = (store.shard_path(tmp_path, 0, number) for number in (0, 1))
    second.write_bytes(first.read_bytes())
    opened = HiddenCache(tmp_path, SMALL)  # small shards have the same size
    with pytest.raises(ValueError, match="00001.array_record: holds sample 's0' where its index says 's1'"):
        opened.read(opened.number("s1"))


def test_other_tokens_under_a_known_id_are_refused(tmp_path: Path, target: Target) -> None:
    samples = some_samples(2)
    build(tmp_path, target, samples)
    shorter = replace(samples[0], input_ids=samples[0].input_ids[:-1], loss_mask=samples[0].loss_mask[:-1])
    build(tmp_path, target, [shorter])  # the states of a prefix are the first ones
    for wrong in (samples[0].input_ids[::-1].copy(), np.append(samples[0].input_ids, np.int32(5))):
        with pytest.raises(ValueError, match="'s0'"):
            build(tmp_path, target, [replace(samples[0], input_ids=wrong)])


def test_samples_on_disk_are_cached_as_those_in_memory(tmp_path: Path, target: Target) -> None:
    samples = RecordSamples(write_records(tmp_path / "records.jsonl", 6), 24)
    cache = build(tmp_path / "cache", target, samples)
    assert sorted(cache.ids) == sorted(sample.id for sample in samples)
    assert estimate_bytes(cache.key, samples) == estimate_bytes(cache.key, list(samples))
    before = files(tmp_path / "cache")
    build(tmp_path / "cache", target, list(samples))
    assert files(tmp_path / "cache") == before


class Wrong(NamedTuple):
    """States that do not belong into a cache of SMALL, and what is said of them."""

    change: Callable[[CachedSample], CachedSample]
    message: str


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong(lambda s: s._replace(final=s.final[:-1]), r"'a': final has shape .* must be \[4, 8\]"),
        Wrong(lambda s: s._replace(normalizer=s.normalizer * np.inf), "'a': normalizer holds inf or NaN"),
        Wrong(lambda s: s._replace(features=Quantized(s.features, s.final)), "'a': features is of type Quantized"),
    ],
)
def test_states_that_do_not_fit_are_refused(tmp_path: Path, wrong: Wrong) -> None:
    cache = HiddenCache(tmp_path, SMALL)
    good = CachedSample(np.arange(4, dtype=np.int32), np.ones(4, np.uint8), *raw_states(SMALL, 4))
    with pytest.raises(ValueError, match=wrong.message):
        cache.append("a", wrong.change(good))
    eight = HiddenCache(tmp_path / "int8", replace(SMALL, dtype="int8"))
    with pytest.raises(ValueError, match="'a': features is of type ndarray, but the cache stores int8"):
        eight.append("a", good)
    features, final, normalizer = raw_states(SMALL, 4)
    features[1, 1] = np.nan
    with pytest.raises(ValueError, match="'s': features.scales holds inf or NaN"):
        eight.append_states(TrainingSample("s", good.input_ids, good.loss_mask), features, final, normalizer)


def no_space(*args: Any, **more: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["file", "flush_to_disk", "savez"])
def test_a_full_disk_loses_nothing_that_was_finished(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's file is /dev/full, fsync fails, or the index cannot be written."""
    samples = some_samples(9)
    cache = HiddenCache(tmp_path, SMALL, process_index=0)
    fill(cache, samples[:3])
    cache.commit()
    before = files(tmp_path)
    if where == "file":
        Path(f"{store.shard_path(tmp_path, 0, 1)}.tmp").symlink_to("/dev/full")
    with monkeypatch.context() as patch:
        if where == "flush_to_disk":
            patch.setattr(store, "flush_to_disk", no_space)
        elif where == "savez":
            patch.setattr(np, "savez", no_space)
        fill(cache, samples[3:5])
        with pytest.raises(
            DiskFullError, match=f"{tmp_path}: the disk is full, .* needs .* bytes and .* are free"
        ) as full:
            cache.commit()
        assert full.value.errno == errno.ENOSPC
    assert files(tmp_path) == before and "s3" not in cache
    assert_holds(cache, samples[:3])
    fill(cache, samples[3:])  # room was made: the same process can go on
    cache.close()
    assert_holds(HiddenCache(tmp_path, SMALL), samples)


def test_what_does_not_fit_is_refused_before_it_starts(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = some_samples()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1234))
    need = estimate_bytes(key_of(target), samples)
    with pytest.raises(ValueError, match=f"7 samples need about {need:,} bytes .*, 1,234 are free: make room"):
        build(tmp_path, target, samples)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=need))
    assert len(build(tmp_path, target, samples)) == 7
