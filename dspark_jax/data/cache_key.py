"""Whose hidden states a cache holds, how they are stored, and how many bytes they take.

A cache's folder has a `manifest.json` with these facts; states of another target, of other layers or of another kind
are refused. Letters: T tokens, m captured layers, D hidden.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from dspark_jax.data import cache_store as store
from dspark_jax.data.quantized import scale_group, value_dtype
from dspark_jax.data.records import RecordSamples, TrainingSample
from dspark_jax.models.config import TransformerConfig

KINDS = ("bfloat16", "float32", "int8", "fp8")
FORMAT = 2

_MANIFEST = "manifest.json"
_WHOLE = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_KIND_OF = {"float8_e4m3fn": "fp8"}  # dtypes whose kind has another name
_INDEX_TOKEN_BYTES = 4  # a token's id in the index of its shard
_UNSEEN = "unseen"
_ROWS = 8  # of a matrix that a fingerprint looks at

Field = tuple[np.dtype, int]  # dtype, and values of a token


@dataclass(frozen=True)
class CacheKey:
    """Whose hidden states a cache holds.

    Attributes:
        target: path of the target, for messages only. fingerprint: hashes of its config and some of its weights.
        layer_ids: captured layers. hidden_size: D. dtype: the stored kind: bfloat16, float32, int8 or fp8.
    """

    target: str
    fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str

    @property
    def quantized(self) -> bool:
        """Whether states are stored in 8 bits with scales."""
        return self.dtype not in _WHOLE

    @property
    def group(self) -> int:
        """Channels that share a scale; 0 without scales."""
        return scale_group(self.hidden_size) if self.quantized else 0

    @property
    def fields(self) -> dict[str, Field]:
        """The arrays of a sample's record: name -> dtype and values of a token."""
        fields: dict[str, Field] = {"input_ids": (np.dtype(np.int32), 1), "loss_mask": (np.dtype(np.uint8), 1)}
        for name, width in (("features", len(self.layer_ids) * self.hidden_size), ("final", self.hidden_size)):
            if self.quantized:
                fields[f"{name}.values"] = (value_dtype(self.dtype), width)
                fields[f"{name}.scales"] = (np.dtype(ml_dtypes.bfloat16), width // self.group)
            else:
                fields[name] = (_WHOLE[self.dtype], width)
        return fields | {"normalizer": (np.dtype(np.float32), 1)}


def cache_key(
    path: str | Path,
    config: TransformerConfig,
    params: dict[str, Any],
    layer_ids: Sequence[int],
    kind: str | DTypeLike,
) -> CacheKey:
    """The key of a target's hidden states.

    Args:
        path, config, params: the target; see `fingerprint` for parameters on several devices.
        layer_ids: captured layers. kind: what is stored: one of KINDS, or a dtype that is one.

    Raises:
        ValueError: a kind that is not stored.
    """
    name = kind if isinstance(kind, str) else np.dtype(kind).name
    name = _KIND_OF.get(name, name)
    if name not in KINDS:
        raise ValueError(f"dtype {name}: hidden states are stored as one of {sorted(KINDS)}")
    return CacheKey(str(path), fingerprint(config, params), tuple(layer_ids), config.hidden_size, name)


def fingerprint(config: TransformerConfig, params: dict[str, Any]) -> str:
    """Hashes of a target's config and of some weights of each of its matrices, which are independent of its path and
    its parameters' dtype: config, final norm, embedding, last layer, all layers with the head.

    Of parameters that lie on devices of several processes, those that this process does not hold as a whole count as
    `unseen`; `same_target` passes over them.
    """
    layers, head = params["layers"], params.get("head", ())
    groups = (params["final_norm"], params["embed"], layers[-1]["down"], (layers, head))
    parts = [repr(config).encode(), *(_bytes_of(group) for group in groups)]
    return "-".join(hashlib.sha256(part).hexdigest()[:8] if part else _UNSEEN for part in parts)


def excerpt(params: dict[str, Any]) -> dict[str, Any]:
    """The part of the parameters that a fingerprint looks at, which has the same fingerprint; may be jitted."""
    return jax.tree.map(_excerpt, params)


def _excerpt(array: Any) -> Any:
    """Eight rows of a matrix, the first ones of the first where there are many; vectors as a whole."""
    return array[(0,) * (array.ndim - 2)][:_ROWS] if array.ndim > 1 else array


def _bytes_of(tree: Any) -> bytes:
    """The excerpts of some arrays in bfloat16, as bytes; none where this process does not hold all of them."""
    found = []
    for array in jax.tree.leaves(tree):
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            if not array.is_fully_replicated:
                return b""
            array = array.addressable_data(0)
        found.append(np.asarray(_excerpt(array).astype(jnp.bfloat16)).tobytes())
    return b"".join(found)


def same_target(one: str, two: str) -> bool:
    """Whether two fingerprints agree in all that both have seen; the last part is missing in those of old caches."""
    pairs = zip(one.split("-"), two.split("-"), strict=False)
    return all(a == b or _UNSEEN in (a, b) for a, b in pairs)


def token_bytes(key: CacheKey) -> int:
    """Bytes of one token in the cache, its id in the index included."""
    return sum(dtype.itemsize * width for dtype, width in key.fields.values()) + _INDEX_TOKEN_BYTES


def size_bytes(key: CacheKey, samples: int, tokens: int) -> int:
    """Bytes that so many samples and tokens take on the disk, at most; in shards of the usual size."""
    payload = samples * store.RECORD_BYTES + tokens * token_bytes(key)
    return payload + (payload // store.SHARD_BYTES + 1) * store.SHARD_OVERHEAD


def estimate_bytes(key: CacheKey, samples: Sequence[TrainingSample] | Sequence[int] | np.ndarray) -> int:
    """`size_bytes` of samples, or of sequences of these lengths."""
    return size_bytes(key, len(samples), int(lengths_of(samples).sum()))


def lengths_of(samples: Sequence[TrainingSample] | Sequence[int] | np.ndarray) -> np.ndarray:
    """Tokens of each sample, int64 [n]; lengths are taken as they are. Samples on disk are not read."""
    if isinstance(samples, RecordSamples):
        return samples.table.lengths.astype(np.int64)
    lengths = [len(s.input_ids) if isinstance(s, TrainingSample) else int(s) for s in samples]
    return np.asarray(lengths, np.int64)


def wider_key(folder: str | Path, key: CacheKey) -> CacheKey:
    """The key of the cache in `folder` where it holds the layers of `key` and more; else `key`."""
    try:
        found = json.loads((Path(folder) / _MANIFEST).read_text(encoding="utf-8"))["layer_ids"]
        layers = tuple(int(layer) for layer in found)
    except (OSError, ValueError, KeyError, TypeError):  # none there, or one that opening it will complain about
        return key
    return replace(key, layer_ids=layers) if set(key.layer_ids) <= set(layers) else key


def open_manifest(folder: Path, key: CacheKey) -> None:
    """Compare a cache's manifest with the key, or write that of a new cache.

    Raises:
        ValueError: the folder holds states of another target or of other layers, of another kind or an earlier format,
            or its manifest is missing or not readable.
        DiskFullError, OSError: the manifest could not be written.
    """
    file = folder / _MANIFEST
    if not file.exists():
        if store.finished(folder) or (folder / "features.bin").exists():
            raise ValueError(f"{file}: missing, but the folder holds states: restore it, or give another folder")
        manifest = {"format": FORMAT, **asdict(key), "group": key.group}
        try:
            store.write_whole(file, lambda out: out.write(json.dumps(manifest, indent=1).encode()))
        except OSError as error:
            store.raise_if_full(error, folder, store.RECORD_BYTES)
            raise
    _check_manifest(file, key)


def _check_manifest(file: Path, key: CacheKey) -> None:
    """Refuse the states of another target, of other layers, of another kind or format; ValueError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not readable as JSON ({error}), restore or remove the cache") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: holds a JSON {type(found).__name__}, must be an object")
    if found.get("format") != FORMAT:
        kind = "an earlier one, of flat .bin files" if found.get("format") == 1 else "not known here"
        raise ValueError(
            f"{file}: format {found.get('format')} is {kind}, this version writes format {FORMAT}: "
            "give another cache folder, or remove this one to compute the states again"
        )
    if not same_target(str(found.get("fingerprint")), key.fingerprint):
        raise ValueError(
            f"{file}: the cache holds states of target {found.get('target')} ({found.get('fingerprint')}), this "
            f"run's target is {key.target} ({key.fingerprint}): give another cache folder"
        )
    wanted = {"layer_ids": list(key.layer_ids), "hidden_size": key.hidden_size, "dtype": key.dtype, "group": key.group}
    for name, value in wanted.items():
        if found.get(name) != value:
            advice = "give another cache folder"
            if name == "dtype":
                advice += f", or keep to the cache's kind ({found.get(name)})"
            raise ValueError(f"{file}: {name} is {found.get(name)} in the cache, {value} in this run: {advice}")
