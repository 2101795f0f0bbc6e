"""Hidden states of the frozen target on disk: computed once, read in every epoch.

For each token the cache holds the raw outputs of the captured layers, [m*D], and the final-normed state, [D], from
which the target's distribution is one product with its head (paper, training section), and the distribution's
normaliser, so that a training step needs only the head's rows of the draft vocabulary. All samples lie one behind
another in flat files, and `index.json` says which there are:

    features.bin [tokens, m*D]    final.bin [tokens, D]    normalizer.bin float32 [tokens]
    input_ids.bin int32 [tokens]    loss_mask.bin uint8 [tokens]
    manifest.json: whose states these are    index.json: id, length and checksum of every sample

The index is replaced atomically after the data is on the disk. What lies behind it was written by a job that was
killed, and is cut off when the next one goes on. Letters: N sequences, T tokens, m captured layers, D hidden.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from tqdm import tqdm

from dspark_jax.data.records import TrainingSample
from dspark_jax.models import transformer
from dspark_jax.models.config import TransformerConfig
from dspark_jax.training.losses import target_normalizer

logger = logging.getLogger(__name__)

_MANIFEST, _INDEX = "manifest.json", "index.json"
_STORAGE: dict[str, np.dtype] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_FORMAT = 1
_COMMIT_BATCHES = 16  # batches between two writes of the index: what a killed job computes again at most


class CachedSample(NamedTuple):
    """One sample of a cache.

    Attributes:
        input_ids: int32 [T]. loss_mask: uint8 [T]. features: [T, m*D]. final: [T, D].
        normalizer: float32 [T], log-sum-exp of the target's logits.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    features: np.ndarray
    final: np.ndarray
    normalizer: np.ndarray


@dataclass(frozen=True)
class CacheKey:
    """Whose hidden states a cache holds.

    Attributes:
        target: path of the target, for messages only. fingerprint: hash of its config and some of its weights.
        layer_ids: captured layers. hidden_size: D. dtype: "bfloat16" or "float32", of the stored states.
    """

    target: str
    fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str

    @property
    def fields(self) -> dict[str, tuple[np.dtype, int]]:
        """The data files: name -> dtype and values of a token."""
        state, width = _STORAGE[self.dtype], self.hidden_size
        return {
            "input_ids": (np.dtype(np.int32), 1),
            "loss_mask": (np.dtype(np.uint8), 1),
            "features": (state, len(self.layer_ids) * width),
            "final": (state, width),
            "normalizer": (np.dtype(np.float32), 1),
        }


def cache_key(
    path: str | Path, config: TransformerConfig, params: dict[str, Any], layer_ids: Sequence[int], dtype: DTypeLike
) -> CacheKey:
    """The key of a target's hidden states.

    Raises:
        ValueError: a dtype that is not stored.
    """
    name = np.dtype(dtype).name
    if name not in _STORAGE:
        raise ValueError(f"dtype {name}: hidden states are stored as one of {sorted(_STORAGE)}")
    return CacheKey(str(path), fingerprint(config, params), tuple(layer_ids), config.hidden_size, name)


def fingerprint(config: TransformerConfig, params: dict[str, Any]) -> str:
    """A hash of a target's config and some of its weights; independent of its path and its parameters' dtype."""
    digest = hashlib.sha256(repr(config).encode())
    for part in (params["final_norm"], params["embed"][:8], params["layers"][-1]["down"][:8]):
        digest.update(np.asarray(part.astype(jnp.bfloat16)).tobytes())
    return digest.hexdigest()[:16]


def token_bytes(key: CacheKey) -> int:
    """Bytes of one token in the cache."""
    return sum(dtype.itemsize * width for dtype, width in key.fields.values())


def estimate_bytes(key: CacheKey, samples: Sequence[TrainingSample]) -> int:
    """Bytes that the samples take in the cache (without the index)."""
    return token_bytes(key) * sum(len(sample.input_ids) for sample in samples)


class HiddenCache:
    """An open cache: read samples by number, or append new ones.

    Attributes:
        folder: where it lies. key: whose states it holds. ids: sample ids in the order of the files.
    """

    def __init__(self, folder: str | Path, key: CacheKey) -> None:
        """Open a cache, or make an empty one; data behind the index is cut off at the first append.

        Raises:
            ValueError: the cache belongs to another target, layer set or dtype, or a file is truncated or corrupt.
        """
        self.folder = Path(folder)
        self.key = key
        self.ids: list[str] = []
        self._lengths: list[int] = []
        self._sums: list[int] = []
        self._starts: list[int] = [0]
        self._files: dict[str, Any] = {}
        self._maps: dict[str, np.ndarray] = {}
        self._checked: set[int] = set()
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / _MANIFEST).exists():
            self._check_manifest()
            self._read_index()
        else:
            _write_json(self.folder / _MANIFEST, {"format": _FORMAT, **asdict(key)})
        self._numbers = {name: number for number, name in enumerate(self.ids)}

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._numbers

    def number(self, sample_id: str) -> int:
        """Number of a sample in the cache; KeyError where it is not there."""
        return self._numbers[sample_id]

    def length(self, number: int) -> int:
        """Tokens of sample `number`."""
        return self._lengths[number]

    def tokens(self, number: int) -> np.ndarray:
        """Token ids int32 [T] of sample `number`, unchecked."""
        return self._mapped()["input_ids"][self._starts[number] : self._starts[number + 1]]

    def read(self, number: int) -> CachedSample:
        """Sample `number`, views of the mapped files; checked against its checksum when it is first read.

        Raises:
            ValueError: the sample's bytes have changed since they were written.
        """
        rows = slice(self._starts[number], self._starts[number + 1])
        maps = self._mapped()
        arrays = {name: maps[name][rows] for name in self.key.fields}
        if number not in self._checked:
            if _checksum(arrays) != self._sums[number]:
                raise ValueError(
                    f"{self.folder}: sample {self.ids[number]!r} (tokens {rows.start}..{rows.stop - 1} of the .bin "
                    "files) does not have its checksum, the cache is corrupt: remove the folder and build it again"
                )
            self._checked.add(number)
        return CachedSample(**arrays)

    def append(self, sample_id: str, sample: CachedSample) -> None:
        """Add a sample; it is part of the cache from the next `commit` on.

        Raises:
            ValueError: the id is there already, or arrays that do not fit the key.
        """
        if sample_id in self._numbers:
            raise ValueError(f"{self.folder}: sample {sample_id!r} is there already")
        if not self._files:
            self._open_files()
        length = len(sample.input_ids)
        arrays = {}
        for name, (dtype, width) in self.key.fields.items():
            array = np.ascontiguousarray(getattr(sample, name), dtype=dtype)
            if array.size != length * width:
                raise ValueError(f"sample {sample_id!r}: {name} has shape {array.shape}, must be [{length}, {width}]")
            arrays[name] = array
        for name, array in arrays.items():
            self._files[name].write(array.view(np.uint8).data)
        self._numbers[sample_id] = len(self.ids)
        self.ids.append(sample_id)
        self._lengths.append(length)
        self._sums.append(_checksum(arrays))
        self._starts.append(self._starts[-1] + length)

    def commit(self) -> None:
        """Put what was appended on the disk, then replace the index."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        _write_json(self.folder / _INDEX, {"ids": self.ids, "lengths": self._lengths, "crc32": self._sums})
        self._maps = {}

    def close(self) -> None:
        """Commit, and close the files; the cache can still be read."""
        if self._files:
            self.commit()
        for file in self._files.values():
            file.close()
        self._files = {}

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def _check_manifest(self) -> None:
        file = self.folder / _MANIFEST
        found = _read_json(file)
        mine = {"format": _FORMAT, **asdict(self.key)}
        if found.get("fingerprint") != mine["fingerprint"]:
            raise ValueError(
                f"{file}: the cache holds states of target {found.get('target')} ({found.get('fingerprint')}), this "
                f"run's target is {mine['target']} ({mine['fingerprint']}): give another cache folder"
            )
        for name in ("format", "layer_ids", "hidden_size", "dtype"):
            wanted = list(self.key.layer_ids) if name == "layer_ids" else mine[name]
            if found.get(name) != wanted:
                raise ValueError(
                    f"{file}: {name} is {found.get(name)} in the cache, {wanted} in this run: give another cache folder"
                )

    def _read_index(self) -> None:
        file = self.folder / _INDEX
        if not file.exists():
            return
        index = _read_json(file)
        columns: list[Any] = [index.get(name) for name in ("ids", "lengths", "crc32")]
        if not all(isinstance(column, list) for column in columns) or len({len(column) for column in columns}) != 1:
            raise ValueError(f"{file}: must hold lists ids, lengths and crc32 of one length, the cache is corrupt")
        self.ids, self._lengths, self._sums = columns
        self._starts = [0, *np.cumsum(self._lengths, dtype=np.int64).tolist()]
        for name, (dtype, width) in self.key.fields.items():
            need = self._starts[-1] * dtype.itemsize * width
            path = self._path(name)
            size = path.stat().st_size if path.exists() else 0
            if size < need:
                raise ValueError(
                    f"{path}: truncated, has {size} bytes, the index needs {need}: restore or remove the cache"
                )

    def _open_files(self) -> None:
        """Open the data files for appending, behind the last sample of the index."""
        for name, (dtype, width) in self.key.fields.items():
            path = self._path(name)
            path.touch()
            file = path.open("r+b", buffering=1 << 20)
            end = self._starts[-1] * dtype.itemsize * width
            file.truncate(end)
            file.seek(end)
            self._files[name] = file

    def _mapped(self) -> dict[str, np.ndarray]:
        """The data files as read-only arrays, [tokens] or [tokens, width]."""
        if not self._maps:
            maps = {}
            for name, (dtype, width) in self.key.fields.items():
                shape = (self._starts[-1],) if width == 1 else (self._starts[-1], width)
                size = int(np.prod(shape)) * dtype.itemsize
                raw = np.memmap(self._path(name), np.uint8, "r", shape=(size,)) if size else np.zeros(0, np.uint8)
                maps[name] = raw.view(dtype).reshape(shape)
            self._maps = maps
        return self._maps


def _checksum(arrays: dict[str, np.ndarray]) -> int:
    total = 0
    for array in arrays.values():
        total = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, total)
    return total


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not readable as JSON ({error}), restore or remove the cache") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: holds a JSON {type(value).__name__}, must be an object")
    return value


def _write_json(file: Path, value: dict[str, Any]) -> None:
    """Replace a file by another as a whole."""
    fresh = file.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(file)


@partial(jax.jit, static_argnames=("config", "layer_ids", "dtype"))
def hidden_states(
    params: dict[str, Any], ids: jax.Array, config: TransformerConfig, layer_ids: tuple[int, ...], dtype: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The target's states on sequences `ids [N, T]`, padded on the right (attention is causal, so nothing sees it).

    Returns:
        features [N, T, m*D] and final [N, T, D] in `dtype`, and the logits' log-sum-exp, float32 [N, T].
    """
    hidden = transformer.forward(params, config, ids, layer_ids)  # features [m*D, N*T], final [D, N*T]
    head = transformer.head_weight(params)
    normalizer = target_normalizer(head, hidden.final.astype(dtype), config.final_softcap).reshape(ids.shape)
    features, final = (part.astype(dtype).T.reshape(*ids.shape, -1) for part in (hidden.features, hidden.final))
    return features, final, normalizer


def _batches(
    samples: Sequence[TrainingSample], buckets: Sequence[int], batch_tokens: int
) -> Iterator[tuple[int, int, list[TrainingSample]]]:
    """Samples by length bucket: (bucket, sequences of a batch, samples), the last batch of a bucket may be short."""
    longest = max(len(sample.input_ids) for sample in samples)
    edges = sorted({b for b in buckets if b < longest} | {min((b for b in buckets if b >= longest), default=longest)})
    low = 0
    for edge in edges:
        inside = [sample for sample in samples if low < len(sample.input_ids) <= edge]
        size = max(1, batch_tokens // edge)
        for start in range(0, len(inside), size):
            yield edge, size, inside[start : start + size]
        low = edge


def build_cache(
    folder: str | Path,
    key: CacheKey,
    config: TransformerConfig,
    params: dict[str, Any],
    samples: Sequence[TrainingSample],
    *,
    buckets: Sequence[int] = (128, 256, 384, 512, 1024, 2048, 4096),
    batch_tokens: int = 4096,
) -> HiddenCache:
    """Compute the states of all samples that the cache lacks, and return the cache.

    Args:
        folder, key: the cache. config, params: the target.
        samples: wanted samples; those in the cache are compared and not computed again.
        buckets: lengths to pad to. batch_tokens: tokens of a forward pass, padding included.

    Raises:
        ValueError: as `HiddenCache`; or a sample whose tokens in the cache are others.
    """
    cache = HiddenCache(folder, key)
    missing = [sample for sample in samples if sample.id not in cache]
    for sample in samples:
        if sample.id in cache:
            check_sample(cache, sample)
    if not missing:
        return cache
    size_gb = estimate_bytes(key, missing) / 1e9
    logger.info("hidden states of %d samples, %.2f GB, into %s", len(missing), size_gb, folder)
    dtype = _STORAGE[key.dtype]
    try:
        with tqdm(total=len(missing), desc="hidden states", unit="sample", mininterval=5.0) as bar:
            for count, (length, size, group) in enumerate(_batches(missing, buckets, batch_tokens), start=1):
                ids = np.zeros((size, length), np.int32)  # [N, T]
                for row, sample in enumerate(group):
                    ids[row, : len(sample.input_ids)] = sample.input_ids
                states = [np.asarray(part) for part in hidden_states(params, ids, config, key.layer_ids, dtype)]
                for row, sample in enumerate(group):
                    end = len(sample.input_ids)
                    own = (part[row, :end] for part in states)
                    cache.append(sample.id, CachedSample(sample.input_ids, sample.loss_mask, *own))
                if count % _COMMIT_BATCHES == 0:
                    cache.commit()
                bar.update(len(group))
    finally:
        cache.close()
    return cache


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
