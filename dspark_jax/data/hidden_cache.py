"""Hidden states of the frozen target on disk: computed once, read in every epoch.

For each token the cache holds the raw outputs of the captured layers, [m*D], and the final-normed state, [D], from
which the target's distribution is one product with its head (paper, training section), and the distribution's
normaliser, so that a training step needs only the head's rows of the draft vocabulary. States are stored in bfloat16,
float32, or in 8 bits with scales (`quantized`). Samples lie in shards with random access (`cache_store`); several
processes write at once into one folder, each its own shards, and a reader takes all of them; `manifest.json` says whose
states they are (`cache_key`). Letters: N sequences, T tokens, m captured layers, D hidden.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from dspark_jax.data import cache_store as store
from dspark_jax.data.cache_key import (
    KINDS,
    CacheKey,
    cache_key,
    estimate_bytes,
    fingerprint,
    lengths_of,
    open_manifest,
    same_target,
    size_bytes,
    token_bytes,
    wider_key,
)
from dspark_jax.data.cache_store import DiskFullError, free_bytes
from dspark_jax.data.quantized import Quantized, dequantize, quantize
from dspark_jax.data.records import TrainingSample, sample_id, sample_table
from dspark_jax.models import transformer
from dspark_jax.models.config import TransformerConfig
from dspark_jax.sharding import RULES
from dspark_jax.training.losses import target_normalizer

__all__ = [
    "KINDS",
    "CacheKey",
    "CachedSample",
    "DiskFullError",
    "HiddenCache",
    "build_cache",
    "cache_key",
    "check_sample",
    "check_samples",
    "check_space",
    "empty_states",
    "estimate_bytes",
    "fingerprint",
    "put_rows",
    "same_target",
    "size_bytes",
    "stored_states",
    "token_bytes",
    "wider_key",
]

logger = logging.getLogger(__name__)

_COMMIT_SECONDS = 120  # between two finished shards: what a killed job computes again at most
_OPEN_SHARDS = 64  # kept open for reading


class CachedSample(NamedTuple):
    """One sample of a cache.

    Attributes:
        input_ids: int32 [T]. loss_mask: uint8 [T].
        features: [T, m*D]. final: [T, D]. Arrays, or `Quantized` where the cache stores 8 bits.
        normalizer: float32 [T], log-sum-exp of the target's logits.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    features: Any
    final: Any
    normalizer: np.ndarray


class HiddenCache:
    """An open cache: read samples by number, or append new ones. Reading is safe in several threads.

    Attributes:
        folder: where it lies. key: whose states it holds. ids: sample ids by number; those of finished shards.
        read_key: what `read` gives: the key, or that of fewer layers.
    """

    def __init__(
        self,
        folder: str | Path,
        key: CacheKey,
        *,
        layer_ids: Sequence[int] | None = None,
        process_index: int | None = None,
        shard_bytes: int | None = None,
    ) -> None:
        """Open a cache, or make an empty one.

        Args:
            folder, key: of the cache. layer_ids: layers that are read, of those of the key; all by default.
            process_index: the process that appends its own shards; JAX's by default.
            shard_bytes: of the records of a shard; `cache_store.SHARD_BYTES` by default.

        Raises:
            ValueError: the cache belongs to another target or layer set, stores another kind or has an earlier format;
                or a file is missing, truncated or corrupt.
            DiskFullError, OSError: a new cache cannot be written.
        """
        self.folder = Path(folder)
        self.key = key
        self.read_key = key if layer_ids is None else replace(key, layer_ids=tuple(layer_ids))
        self._columns = [key.layer_ids.index(layer) for layer in self.read_key.layer_ids]
        self.ids: list[str] = []
        self._process = process_index
        self._shard_bytes = shard_bytes or store.SHARD_BYTES
        self._shards: list[store.Shard] = []
        self._starts: list[np.ndarray] = []  # of each shard: where a sample's tokens begin in the index
        self._known: set[tuple[int, int]] = set()
        self._numbers: dict[str, int] = {}
        self._shard_of, self._position = array("q"), array("q")  # by number
        self._checked: set[int] = set()
        self._change = threading.Lock()
        self._readers = store.Recent(store.open_reader, _OPEN_SHARDS)
        self._tokens = store.Recent(store.shard_tokens, _OPEN_SHARDS)
        self._lock: store.WriterLock | None = None
        self._writer: store.ShardWriter | None = None
        self._pending: set[str] = set()
        self._next = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        open_manifest(self.folder, key)
        self.refresh()

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, sample_id: str) -> bool:
        """Whether a sample is there, or was appended and is not committed yet."""
        return sample_id in self._numbers or sample_id in self._pending

    def number(self, sample_id: str) -> int:
        """Number of a sample in the open cache; KeyError where it is not there or not committed yet."""
        return self._numbers[sample_id]

    def length(self, number: int) -> int:
        """Tokens of sample `number`."""
        return int(self._shards[self._shard_of[number]].lengths[self._position[number]])

    def checksum(self, number: int) -> int:
        """CRC-32 of id, tokens and mask of sample `number`, as in `records.SampleTable`."""
        return int(self._shards[self._shard_of[number]].sums[self._position[number]])

    def tokens(self, number: int) -> np.ndarray:
        """Token ids int32 [T] of sample `number`, from its shard's index.

        Raises:
            ValueError: the index cannot be read.
        """
        shard = self._shard_of[number]
        start = self._starts[shard][self._position[number]]
        return self._tokens(self._shards[shard].path)[start : start + self.length(number)]

    def read(self, number: int) -> CachedSample:
        """Sample `number`, as read-only arrays of the layers that are read; compared with its checksum the first time.

        Raises:
            ValueError: the bytes are not those that were written; the message names file and sample.
        """
        path, position = self._shards[self._shard_of[number]].path, self._position[number]
        check = number not in self._checked
        arrays = store.read_record(self._readers(path), path, position, self.ids[number], check)
        self._checked.add(number)
        if self.key.quantized:
            for name in ("features", "final"):
                arrays[name] = Quantized(arrays.pop(f"{name}.values"), arrays.pop(f"{name}.scales"))
        if self.read_key.layer_ids != self.key.layer_ids:
            arrays["features"] = jax.tree.map(self._pick, arrays["features"])
        return CachedSample(**arrays)

    def _pick(self, features: np.ndarray) -> np.ndarray:
        """The columns of the layers that are read, out of `[T, m*W]`."""
        length, layers = len(features), len(self.key.layer_ids)
        return features.reshape(length, layers, -1)[:, self._columns].reshape(length, -1)

    def refresh(self) -> int:
        """Take in shards that others have finished since; numbers stay. Returns how many samples are new.

        Raises:
            ValueError: a file is missing, truncated or corrupt.
        """
        with self._change:
            before = len(self.ids)
            fresh = [name for name in store.finished(self.folder) if name not in self._known]
            with ThreadPoolExecutor(16) as pool:
                shards = pool.map(lambda name: store.read_shard(self.folder, *name), fresh)
                for name, shard in zip(fresh, shards, strict=True):
                    self._take(name, shard)
            return len(self.ids) - before

    def open_for_writing(self) -> None:
        """Take the right to append as this process, and remove what a killed one left; `append` does it by itself.

        Raises:
            ValueError: another run writes into this cache as the same process.
        """
        if self._lock is None:
            self._process = jax.process_index() if self._process is None else self._process
            self._lock = store.WriterLock(self.folder, self._process)
            self._next = store.remove_unfinished(self.folder, self._process)

    def append(self, sample_id: str, sample: CachedSample) -> None:
        """Add a sample; it is part of the cache when its shard is full, and from the next `commit` on.

        Raises:
            ValueError: the id is there already, arrays that do not fit the key, states that are not finite, or another
                run writes into this cache as the same process.
            DiskFullError: no room: samples since the last finished shard are lost, and no longer in the cache.
            OSError: the folder cannot be written to; samples as before.
        """
        if sample_id in self:
            raise ValueError(f"{self.folder}: sample {sample_id!r} is there already")
        arrays = _flat(sample_id, sample, self.key)
        record = store.pack_record(sample_id, arrays)
        ids, mask = arrays["input_ids"], arrays["loss_mask"]
        total = zlib.crc32(mask.tobytes(), zlib.crc32(ids.tobytes(), zlib.crc32(sample_id.encode())))
        self.open_for_writing()
        try:
            if self._writer is None:
                self._writer = store.ShardWriter(store.shard_path(self.folder, self._process or 0, self._next))
            self._writer.add(record, sample_id, ids, total)
        except OSError:
            self._writer, self._pending = None, set()
            raise
        self._pending.add(sample_id)
        if self._writer.bytes >= self._shard_bytes:
            self.commit()

    def append_states(self, sample: TrainingSample, features: Any, final: Any, normalizer: Any) -> bool:
        """Add the states of a sample that came out of a training step; False where the sample is there already.

        Args:
            sample: T tokens.
            features: [T or more, m*D]. final: [T or more, D]. Floating-point values, which are put into the key's kind
                here, or what `stored_states` made of them; rows behind T are left out.
            normalizer: float32 [T or more].

        Raises:
            ValueError, OSError: as `append`.
        """
        if sample.id in self:
            return False
        length = len(sample.input_ids)
        states = jax.tree.map(lambda x: np.asarray(x)[:length], (features, final, normalizer))
        if not isinstance(features, Quantized):
            states = (*stored_states(self.key, *states[:2]), states[2])
        self.append(sample.id, CachedSample(sample.input_ids, sample.loss_mask, *states))
        return True

    def commit(self) -> None:
        """Finish the shard that is being written: what was appended is on the disk and part of the cache.

        Raises:
            DiskFullError, OSError: as `append`.
        """
        writer, self._writer = self._writer, None
        self._pending = set()
        if writer is None:
            return
        shard = writer.finish()
        with self._change:
            self._take((self._process or 0, self._next), shard)
            self._next += 1

    def close(self) -> None:
        """Commit, and let others write as this process; the cache can still be read."""
        try:
            self.commit()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._lock = None

    def _take(self, name: tuple[int, int], shard: store.Shard) -> None:
        """Give the samples of a finished shard their numbers; of one that two processes computed, the first counts."""
        if name in self._known:
            return
        self._known.add(name)
        self._shards.append(shard)
        self._starts.append(np.cumsum(shard.lengths) - shard.lengths)
        for position, sample in enumerate(shard.ids):
            if sample not in self._numbers:
                self.ids.append(sample)
                self._shard_of.append(len(self._shards) - 1)
                self._position.append(position)
                self._numbers[sample] = len(self.ids) - 1


def _flat(sample_id: str, sample: CachedSample, key: CacheKey) -> dict[str, np.ndarray]:
    """The arrays of a sample's record, checked against the key; ValueError."""
    parts: dict[str, Any] = sample._asdict()
    for name in ("features", "final"):
        if isinstance(parts[name], Quantized) != key.quantized:
            raise ValueError(
                f"sample {sample_id!r}: {name} is of type {type(parts[name]).__name__}, but the cache stores "
                f"{key.dtype}: int8 and fp8 take Quantized states, and others arrays"
            )
        if key.quantized:
            q = parts.pop(name)
            parts |= {f"{name}.values": q.values, f"{name}.scales": q.scales}
    length = len(sample.input_ids)
    arrays = {}
    for name, (dtype, width) in key.fields.items():
        values = np.ascontiguousarray(parts[name])
        if values.size != length * width:
            raise ValueError(f"sample {sample_id!r}: {name} has shape {values.shape}, must be [{length}, {width}]")
        if "." in name and values.dtype != dtype:
            raise ValueError(f"sample {sample_id!r}: {name} has dtype {values.dtype}, {key.dtype} takes {dtype}")
        arrays[name] = values.astype(dtype, copy=False)
    for name in ("normalizer", *(name for name in arrays if name.endswith(".scales"))):
        if not np.isfinite(arrays[name].astype(np.float32)).all():
            raise ValueError(f"sample {sample_id!r}: {name} holds inf or NaN, the target's states are not finite")
    return arrays


def empty_states(key: CacheKey, shape: tuple[int, int]) -> dict[str, Any]:
    """Zeros for the states of a batch `(N, T)`: features, final (arrays or `Quantized`) and normalizer, by name."""
    arrays = {
        name: np.zeros(shape if name == "normalizer" else (*shape, width), dtype)
        for name, (dtype, width) in key.fields.items()
        if name not in ("input_ids", "loss_mask")
    }
    if key.quantized:
        for name in ("features", "final"):
            arrays[name] = Quantized(arrays.pop(f"{name}.values"), arrays.pop(f"{name}.scales"))  # type: ignore
    return arrays


def put_rows(states: Mapping[str, Any], row: int, start: int, cached: CachedSample, length: int) -> None:
    """Put the first `length` tokens of a sample into a batch of `empty_states`, from token `start` of a row on."""
    for name, target in states.items():
        source = getattr(cached, name)
        for into, values in zip(*((x if isinstance(x, Quantized) else (x,)) for x in (target, source)), strict=True):
            into[row, start : start + length] = values[:length]


def stored_states(key: CacheKey, features: Any, final: Any) -> tuple[Any, Any]:
    """States [..., m*D] and [..., D] in the key's kind: arrays, or `Quantized`. jit-able."""
    if key.quantized:
        return quantize(features, key.dtype, key.group), quantize(final, key.dtype, key.group)
    dtype = key.fields["final"][0]
    return features.astype(dtype), final.astype(dtype)


@partial(jax.jit, static_argnames=("config", "key"))
def hidden_states(
    params: dict[str, Any], ids: jax.Array, config: TransformerConfig, key: CacheKey
) -> tuple[Any, Any, jax.Array]:
    """The target's states on sequences `ids [N, T]`, padded on the right (attention is causal, so nothing sees it).

    Returns:
        features [N, T, m*D] and final [N, T, D] in the key's kind, and the log-sum-exp of the logits of the final
        states as stored, float32 [N, T].
    """
    hidden = transformer.forward(params, config, ids, key.layer_ids)  # features [m*D, N*T], final [D, N*T]
    head = transformer.head_weight(params)
    features, final = stored_states(key, hidden.features.T, hidden.final.T)
    read = dequantize(final, head.dtype) if key.quantized else final  # [N*T, D]
    normalizer = target_normalizer(head, read.T, config.final_softcap)
    return jax.tree.map(lambda x: x.reshape(*ids.shape, *x.shape[1:]), (features, final, normalizer))


def build_cache(
    folder: str | Path,
    key: CacheKey,
    config: TransformerConfig,
    params: dict[str, Any],
    samples: Sequence[TrainingSample],
    *,
    buckets: Sequence[int] = (128, 256, 384, 512, 1024, 2048, 4096),
    batch_tokens: int = 4096,
    layer_ids: Sequence[int] | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
    shard_bytes: int | None = None,
) -> HiddenCache:
    """Compute this process's share of the states that the cache lacks, and return the cache.

    Several processes that are given the same samples share them out evenly. Each returns when its own share is done:
    wait for all, then `refresh` the cache.

    Args:
        folder, key: the cache. config, params: the target, on devices of this process; where the parameters lie on a
            mesh, batches are split over its data axes.
        samples: wanted samples; those in the cache are compared and not computed again.
        buckets: lengths to pad to. batch_tokens: tokens of a forward pass, padding included.
        layer_ids: layers that are read from the cache, as `HiddenCache`'s.
        process_index, process_count: this process among those that share the work; JAX's by default.
        shard_bytes: as `HiddenCache`.

    Raises:
        ValueError: as `HiddenCache`; a sample whose tokens in the cache are others; not enough room on the disk.
        DiskFullError, OSError: as `HiddenCache.append`; what was finished stays, and the next call goes on from there.
    """
    index = jax.process_index() if process_index is None else process_index
    count = jax.process_count() if process_count is None else process_count
    if not 0 <= index < count:
        raise ValueError(f"process_index {index}: must lie in 0..process_count - 1, {count - 1}")
    cache = HiddenCache(folder, key, layer_ids=layer_ids, process_index=index, shard_bytes=shard_bytes)
    check_samples(cache, samples)
    ids, lengths = _ids_of(samples), lengths_of(samples)
    missing = np.asarray([name not in cache for name in ids], bool)
    share = np.argsort(-lengths, kind="stable")[index::count]
    todo = np.sort(share[missing[share]])
    if not len(todo):
        return cache
    mesh = _mesh_of(params)
    try:
        cache.open_for_writing()
        check_space(folder, key, lengths[missing])
        logger.info("hidden states of %d samples, %.2f GB", len(todo), estimate_bytes(key, lengths[todo]) / 1e9)
        batches = _batches(lengths, todo, buckets, batch_tokens, _data_devices(mesh))
        last = time.monotonic()
        with tqdm(total=len(todo), desc="hidden states", unit="sample", mininterval=5.0) as bar:
            for group, states in _computed(batches, samples, config, params, key, mesh):
                for row, sample in enumerate(group):
                    cache.append_states(sample, *jax.tree.map(lambda x, row=row: x[row], states))
                if time.monotonic() - last > _COMMIT_SECONDS:
                    cache.commit()
                    last = time.monotonic()
                bar.update(len(group))
    finally:
        cache.close()
    return cache


def check_space(folder: str | Path, key: CacheKey, samples: Sequence[TrainingSample] | np.ndarray) -> None:
    """Compare the estimate for samples (or their lengths) that a cache lacks with the disk's free space.

    Raises:
        ValueError: they do not fit; names both sizes.
    """
    need, free = estimate_bytes(key, samples), free_bytes(Path(folder))
    if need > free:
        raise ValueError(
            f"{folder}: the states of {len(samples):,} samples need about {need:,} bytes ({token_bytes(key):,} a token "
            f"in {key.dtype}), {free:,} are free: make room, give a folder on another disk or a smaller kind (int8, "
            "fp8, bfloat16), or train online, which needs no cache"
        )


def _ids_of(samples: Sequence[TrainingSample]) -> list[str]:
    """Ids of samples; those on disk are not read."""
    return [sample_id(samples, number) for number in range(len(samples))]


def _mesh_of(params: dict[str, Any]) -> Mesh | None:
    """The mesh that parameters lie on, if they do.

    Raises:
        ValueError: it has devices of other processes.
    """
    sharding = getattr(params["final_norm"], "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "params: lie on devices of several processes, which compute their shares of a cache each on its own: give "
            "this process's copy, or fill the cache while training"
        )
    return sharding.mesh if sharding.mesh.size > 1 else None


def _data_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in RULES["batch"] if axis in mesh.axis_names)


def _data_devices(mesh: Mesh | None) -> int:
    return 1 if mesh is None else int(np.prod([mesh.shape[axis] for axis in _data_axes(mesh)], dtype=int))


def _batches(
    lengths: np.ndarray, todo: np.ndarray, buckets: Sequence[int], batch_tokens: int, multiple: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Samples `todo` by length bucket: (bucket, sequences of a batch, numbers of samples, fewer in a bucket's last)."""
    longest = int(lengths[todo].max())
    edges = sorted({b for b in buckets if b < longest} | {min((b for b in buckets if b >= longest), default=longest)})
    low = -1
    for edge in edges:
        inside = todo[(low < lengths[todo]) & (lengths[todo] <= edge)]
        size = max(1, batch_tokens // edge // multiple) * multiple
        for start in range(0, len(inside), size):
            yield edge, size, inside[start : start + size]
        low = edge


def _computed(
    batches: Iterable[tuple[int, int, np.ndarray]],
    samples: Sequence[TrainingSample],
    config: TransformerConfig,
    params: dict[str, Any],
    key: CacheKey,
    mesh: Mesh | None,
) -> Iterator[tuple[list[TrainingSample], Any]]:
    """(samples, their states in host memory [N, T, ...]) of each batch; the next one is computed meanwhile."""
    waiting: tuple[list[TrainingSample], Any] | None = None
    for length, size, numbers in batches:
        group = [samples[int(number)] for number in numbers]
        ids: Any = np.zeros((size, length), np.int32)  # [N, T]
        for row, sample in enumerate(group):
            ids[row, : len(sample.input_ids)] = sample.input_ids
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            if mesh is not None:
                ids = jax.device_put(ids, NamedSharding(mesh, PartitionSpec(_data_axes(mesh))))
            states = hidden_states(params, ids, config, key)
        if waiting is not None:
            yield waiting[0], jax.tree.map(np.asarray, waiting[1])
        waiting = group, states
    if waiting is not None:
        yield waiting[0], jax.tree.map(np.asarray, waiting[1])


def check_samples(cache: HiddenCache, samples: Sequence[TrainingSample]) -> None:
    """`check_sample` of all samples that are in the cache; those with the same checksum are not read.

    Raises:
        ValueError: as `check_sample`.
    """
    if not len(cache):
        return
    sums = sample_table(samples).checksums
    for number, name in enumerate(_ids_of(samples)):
        place = cache._numbers.get(name)
        if place is not None and cache.checksum(place) != sums[number]:
            check_sample(cache, samples[number])


def check_sample(cache: HiddenCache, sample: TrainingSample) -> None:
    """Checks that the cached sample begins with this sample's tokens (states of a prefix do not depend on the rest).

    Raises:
        ValueError: it does not.
    """
    number = cache.number(sample.id)
    length = len(sample.input_ids)
    if not np.array_equal(cache.tokens(number)[:length], sample.input_ids):
        raise ValueError(
            f"{cache.folder}: sample {sample.id!r} has {cache.length(number)} tokens in the cache that do not begin "
            f"with the {length} of the records: remove the folder to build it again, or give another"
        )
