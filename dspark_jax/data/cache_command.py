"""The command `dspark data cache`: hidden states of a target for record files, or what they would take on the disk.

An estimate needs the target's sizes only: neither weights nor a network. Several processes, on one machine or many, may
build one cache together: each is given `--shard I/N`.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import tyro

from dspark_jax.checkpoints.gguf import GGUFFile, gguf_config
from dspark_jax.checkpoints.hf import read_hf_config, resolve
from dspark_jax.checkpoints.known_configs import KNOWN_CONFIGS
from dspark_jax.checkpoints.load import embedded_target_path, load_target
from dspark_jax.checkpoints.store import read_json
from dspark_jax.config import exit_code, log_to_stderr
from dspark_jax.data.cache_store import free_bytes
from dspark_jax.data.hidden_cache import KINDS, CacheKey, build_cache, cache_key, size_bytes, token_bytes
from dspark_jax.data.records import RecordSamples
from dspark_jax.models.config import TransformerConfig
from dspark_jax.sharding import MeshShape, make_mesh

if TYPE_CHECKING:
    from dspark_jax.training.settings import TrainSettings

logger = logging.getLogger(__name__)

PROGRAM = "dspark data cache"


@dataclass(frozen=True)
class CacheSettings:
    """Compute the target's hidden states for training (what is there is not computed again), or estimate their size.

    Attributes:
        config: a training config, from which options that are left out are taken.
        records: JSONL files of regenerated answers.
        target: folder, GGUF file or hub id; for an estimate also a config.json. The embedded one without.
        cache: folder of the cache.
        layers: captured layers, increasing from -1 (the embedding) on; the config's drafter's.
        max_length: tokens of a sample; the rest is cut.
        min_loss_tokens: samples with fewer supervised tokens are left out.
        kind: bfloat16, float32, int8 or fp8 (8 bits with scales), or auto, the dtype of the training's products.
        estimate: print samples, tokens, bytes a token, bytes in all and free bytes, and do nothing else.
        tokens: estimate for so many tokens in place of records.
        samples: estimate for so many samples in place of records; without `tokens`, give `mean_length` too.
        mean_length: tokens of a sample on average.
        hidden_size: of a target whose config is not at hand, for an estimate.
        json: write the same figures into this file.
        shard: I/N: do share I, from 0, of N processes that build the cache together.
        batch_tokens: tokens of a forward pass.
    """

    config: Path | None = None
    records: tuple[str, ...] = ()
    target: str | None = None
    cache: Path | None = None
    layers: tuple[int, ...] = ()
    max_length: int | None = None
    min_loss_tokens: int | None = None
    kind: str | None = None
    estimate: bool = False
    tokens: int = 0
    samples: int = 0
    mean_length: float = 0.0
    hidden_size: int = 0
    json: Path | None = None
    shard: str | None = None
    batch_tokens: int = 4096

    def check(self) -> None:
        """Refuses what does not go together; ValueError names option, value and what would be right."""
        kinds = ("auto", *KINDS)
        if self.kind is not None and self.kind not in kinds:
            raise ValueError(f"kind {self.kind!r}: must be one of {', '.join(kinds)}")
        for name in ("tokens", "samples", "mean_length", "hidden_size"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name} {value}: must be positive")
            if value and not self.estimate:
                raise ValueError(f"{name} {value}: is for an estimate, add --estimate")
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens {self.batch_tokens}: must be at least 1")
        if (self.tokens or self.samples) and self.records:
            raise ValueError("records: an estimate is for records, or for --tokens and --samples, not for both")
        if self.samples and not (self.tokens or self.mean_length):
            raise ValueError(f"samples {self.samples}: give their --mean-length, in tokens, too")
        if self.mean_length and not self.samples:
            raise ValueError(f"mean_length {self.mean_length:g}: give the number of --samples too")
        if self.tokens and self.mean_length:
            raise ValueError(f"mean_length {self.mean_length:g}: tokens {self.tokens} says it already, leave one out")


class Counts(NamedTuple):
    """How much there is: samples and their tokens."""

    samples: int
    tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    """The command's entry; returns the exit code, 2 for bad input and for a disk that is full (one line on stderr)."""
    return exit_code(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> None:
    with log_to_stderr():
        settings = tyro.cli(CacheSettings, args=argv, prog=PROGRAM, config=(tyro.conf.FlagCreatePairsOff,))
        settings.check()
        run(settings)


def run(settings: CacheSettings) -> dict[str, Any]:
    """Do what the settings ask, print the figures, and return them.

    Raises:
        ValueError, OSError: settings, files or a cache that cannot be used; no room on the disk.
    """
    train = training_settings(settings)
    folder = Path(train.cache)
    if settings.json is not None and not settings.json.absolute().parent.is_dir():
        raise FileNotFoundError(f"json {settings.json}: its folder does not exist, make it first")
    figures = estimate(settings, train, folder) if settings.estimate else compute(settings, train, folder)
    print(table(figures))
    if settings.json is not None:
        settings.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def training_settings(settings: CacheSettings) -> TrainSettings:
    """The config's settings (or the default ones) with the options that were given.

    Raises:
        FileNotFoundError, ValueError: no such config, or an option that is out of range.
    """
    from dspark_jax.training.settings import TrainSettings, resolve_dtype
    from dspark_jax.training.trainer import read_config

    base = read_config(settings.config) if settings.config else TrainSettings()
    given = {name: getattr(settings, name) for name in ("records", "target", "max_length", "min_loss_tokens")}
    given |= {"cache": settings.cache and str(settings.cache), "cache_kind": settings.kind}
    options = {name: value for name, value in given.items() if value not in (None, ())}
    if "max_length" in options:  # buckets of the config may be longer, and do not matter here
        options["buckets"] = ()
    train = replace(base, **options)
    if train.cache_kind == "auto":
        train = replace(train, cache_kind=np.dtype(resolve_dtype(train.compute_dtype)).name)
    return train


def estimate(settings: CacheSettings, train: TrainSettings, folder: Path) -> dict[str, Any]:
    """What a cache would take; `figures_of`. Reads no weights.

    Raises:
        ValueError, OSError: as `run`.
    """
    if settings.hidden_size:
        hidden, layers = settings.hidden_size, settings.layers or train.drafter.target_layer_ids
        if not layers and train.drafter.kind != "mtp":
            raise ValueError(_NO_LAYERS)
    else:
        config = target_config(train.target)
        hidden, layers = config.hidden_size, captured_layers(settings, train, config)
    key = CacheKey(train.target or "the embedded target", "", tuple(layers), hidden, train.cache_kind)
    figures = figures_of(key, counts(settings, train), folder)
    return figures | {"fits": figures["total_bytes"] <= figures["free_bytes"]}


def compute(settings: CacheSettings, train: TrainSettings, folder: Path) -> dict[str, Any]:
    """Compute this process's share of the states; `figures_of` what is in the cache then.

    Raises:
        ValueError, OSError: as `run`.
    """
    from dspark_jax.training.prepare import check_tokens
    from dspark_jax.training.settings import resolve_dtype

    index, count = shard_of(settings.shard)
    path = resolve(train.target or embedded_target_path())
    if path.suffix == ".json":
        raise ValueError(f"target {path}: holds no weights, which only an estimate can do without: give their folder")
    config = target_config(str(path))
    layers = captured_layers(settings, train, config)
    samples = read_samples(train)
    check_tokens(samples, config, path)
    mesh = None
    if jax.local_device_count() > 1:
        cut = math.gcd(jax.local_device_count(), config.hidden_size)  # the weights, as far as they can be
        mesh = make_mesh(MeshShape(fsdp=cut), jax.local_devices())
    target = load_target(path, dtype=resolve_dtype(train.compute_dtype), mesh=mesh)
    key = cache_key(target.path, target.config, target.params, layers, train.cache_kind)
    cache = build_cache(
        folder,
        key,
        target.config,
        target.params,
        samples,
        batch_tokens=settings.batch_tokens,
        process_index=index,
        process_count=count,
    )
    cache.refresh()
    there = [number for number in range(len(samples)) if samples.id(number) in cache]
    if len(there) < len(samples):
        logger.info("%d of %d samples are there, the others are other processes'", len(there), len(samples))
    return figures_of(key, Counts(len(there), int(samples.table.lengths[there].sum(dtype=np.int64))), folder)


def target_config(target: str | None) -> TransformerConfig:
    """A target's config without its weights: from a config.json, a folder, a GGUF file, or a hub id.

    Raises:
        FileNotFoundError: none of these is there. ValueError: an unsupported or unreadable one.
    """
    path = Path(target or embedded_target_path()).expanduser()
    if path.suffix == ".json" and path.is_file():
        try:
            return TransformerConfig.from_hf(read_json(path))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error
    if not path.exists():
        if str(path) in KNOWN_CONFIGS:
            return TransformerConfig.from_hf(KNOWN_CONFIGS[str(path)])
        try:
            path = resolve(target or embedded_target_path(), ("config.json", "tokenizer.json"))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}; for an estimate, a config.json or --hidden-size will do") from error
    return gguf_config(GGUFFile(path)) if path.is_file() else read_hf_config(path)


_NO_LAYERS = "layers: name the captured layers, as in --layers 1 9 17, or give a --config with a drafter"


def captured_layers(settings: CacheSettings, train: TrainSettings, config: TransformerConfig) -> tuple[int, ...]:
    """The layers given, or those of the config's drafter.

    Raises:
        ValueError: none are named, or some that the target does not have.
    """
    from dspark_jax.training.settings import drafter_config

    if not settings.layers:
        if settings.config is None:
            raise ValueError(_NO_LAYERS)
        return tuple(drafter_config(train.drafter, config).target_layer_ids)
    layers = settings.layers
    rising = all(low < high for low, high in zip(layers, layers[1:], strict=False))
    if not rising or layers[0] < -1 or layers[-1] >= config.num_layers:
        raise ValueError(f"layers {list(layers)}: must increase and lie in -1..{config.num_layers - 1}, the target's")
    return layers


def read_samples(train: TrainSettings) -> RecordSamples:
    """The samples of the records, those held out from training included, as their losses are measured too.

    Raises:
        ValueError: there are none. FileNotFoundError: a file does not exist.
    """
    if not train.records:
        raise ValueError("records: names no file; give --records, one or more JSONL files of regenerated answers")
    samples = RecordSamples(train.records, train.max_length, train.min_loss_tokens)
    if not len(samples):
        raise ValueError(f"{', '.join(train.records)}: no sample has min_loss_tokens {train.min_loss_tokens}")
    return samples


def counts(settings: CacheSettings, train: TrainSettings) -> Counts:
    """Samples and tokens of the records, or as they were given.

    Raises:
        ValueError, FileNotFoundError: as `read_samples`; or no figures and no records.
    """
    if settings.tokens:
        return Counts(settings.samples or math.ceil(settings.tokens / train.max_length), settings.tokens)
    if settings.samples:
        return Counts(settings.samples, round(settings.samples * settings.mean_length))
    try:
        samples = read_samples(train)
    except (FileNotFoundError, ValueError) as error:
        if train.records and all(Path(file).is_file() for file in train.records):
            raise
        raise type(error)(f"{error}; an estimate can do with --tokens, or --samples and --mean-length") from error
    return Counts(len(samples), int(samples.table.lengths.sum(dtype=np.int64)))


def shard_of(text: str | None) -> tuple[int | None, int | None]:
    """(index, count) of `I/N`; without it None, which is JAX's own process.

    Raises:
        ValueError: it is not of that form, or I is not below N.
    """
    if text is None:
        return None, None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(f"shard {text!r}: must be I/N with I from 0 to N - 1, as 0/4")
    return int(match[1]), int(match[2])


def figures_of(key: CacheKey, found: Counts, folder: Path) -> dict[str, Any]:
    """The figures of a report, as JSON takes them; sizes in bytes."""
    total, free = size_bytes(key, *found), free_bytes(folder)
    return {
        "target": key.target,
        "hidden_size": key.hidden_size,
        "layers": list(key.layer_ids),
        "kind": key.dtype,
        "samples": found.samples,
        "tokens": found.tokens,
        "bytes_per_token": token_bytes(key),
        "bytes_per_token_of_kinds": {kind: token_bytes(replace(key, dtype=kind)) for kind in KINDS},
        "total_bytes": total,
        "free_bytes": free,
        "cache": str(folder),
    }


def table(figures: dict[str, Any]) -> str:
    """The figures as lines of text."""
    layers = " ".join(map(str, figures["layers"])) or "none"
    kinds = figures["bytes_per_token_of_kinds"].items()
    others = ", ".join(f"{kind} {size:,}" for kind, size in kinds if kind != figures["kind"])
    free = f"{figures['free_bytes']:,} ({_short(figures['free_bytes'])}) in {figures['cache']}"
    rows = {
        "target": f"{figures['target']}, {figures['hidden_size']:,} channels",
        "states": f"layers {layers}, and the final norm",
        "samples": f"{figures['samples']:,}",
        "tokens": f"{figures['tokens']:,}",
        "bytes a token": f"{figures['bytes_per_token']:,} in {figures['kind']} ({others})",
        "bytes in all": f"{figures['total_bytes']:,} ({_short(figures['total_bytes'])})",
        "bytes free": free if figures.get("fits", True) else f"{free}: does not fit",
    }
    return "\n".join(f"{name:<14} {text}" for name, text in rows.items())


def _short(size: float) -> str:
    """A size in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
