"""What a run needs before its first update: data, target, drafter, mesh, hidden states, and the compiled steps.

Everything that can be refused is refused before the target's weights are read.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dspark_jax.checkpoints.gguf import GGUFFile, gguf_config
from dspark_jax.checkpoints.hf import read_hf_config, resolve
from dspark_jax.checkpoints.load import Target, embedded_target_path, load_target
from dspark_jax.data.cache_key import excerpt
from dspark_jax.data.hidden_cache import CacheKey, HiddenCache, build_cache, cache_key, check_space, wider_key
from dspark_jax.data.pipeline import Pipeline
from dspark_jax.data.records import RecordSamples, TrainingSample, sample_id, sample_table
from dspark_jax.models.config import TransformerConfig
from dspark_jax.sharding import MeshShape, check_mesh, make_mesh, put, replicated
from dspark_jax.training.distributed import barrier
from dspark_jax.training.evaluate import HeldOut
from dspark_jax.training.export import Exporter
from dspark_jax.training.feed import Feed, Filling
from dspark_jax.training.fill import Filler
from dspark_jax.training.initial import cut_vocabulary, draft_tokens, drop_shared, read_initial
from dspark_jax.training.objectives import TrainableConfig, check_loss, recorded_fields
from dspark_jax.training.optimizer import cosine_schedule, make_optimizer
from dspark_jax.training.settings import TrainSettings, drafter_config, resolve_dtype
from dspark_jax.training.step import (
    TrainState,
    abstract_state,
    addressable_rows,
    init_state,
    make_eval_step,
    make_frozen,
    make_step,
)
from dspark_jax.training.vocabulary import find_vocabulary

logger = logging.getLogger(__name__)

Params = dict[str, Any]


class Run(NamedTuple):
    """What stays the same from the first update to the last.

    Attributes:
        settings: of the run. target: the frozen model; without parameters where nothing decodes.
        identity: a hash of the target. config: the drafter's. held_out: samples kept out of training, and their losses.
        d2t: int32 [Vd] offsets of a reduced vocabulary, None for all tokens. mesh: the devices.
        feed: batches and updates. exporter: writes drafters.
        like: shapes and places of the state. fresh: makes the state to start with.
    """

    settings: TrainSettings
    target: Target
    identity: str
    config: TrainableConfig
    held_out: Sequence[TrainingSample]
    losses: HeldOut
    d2t: np.ndarray | None
    mesh: Mesh
    feed: Feed
    exporter: Exporter
    like: TrainState
    fresh: Callable[[], TrainState]

    @property
    def output(self) -> Path:
        """The output folder."""
        return Path(self.settings.output)

    @property
    def total(self) -> int:
        """Updates of the whole run."""
        return self.feed.total

    @property
    def facts(self) -> dict[str, Any]:
        """What a resumed run must share with the one that wrote the checkpoint."""
        names = ("seed", "initial", "batch_size", "pack", "buckets", "num_anchors", "max_length", "lr", "warmup")
        values = {name: getattr(self.settings, name) for name in (*names, "weight_decay", "ema", "max_grad_norm")}
        return values | {
            "target": self.identity,
            "drafter": repr(self.config),
            "loss": repr(self.settings.loss),
            "data": self.feed.pipeline.fingerprint(),
            "updates": self.total,
        }


def prepare(settings: TrainSettings) -> Run:
    """Everything that the loop needs; hidden states that the cache lacks are computed here (unless it is to be filled).

    Raises:
        FileNotFoundError, ValueError: settings, data, a target or a cache that cannot be used, a mesh that does not
            divide; the message names the field or file. OSError: a cache that cannot be written.
    """
    if not settings.records:
        raise ValueError("records: names no file; give one or more JSONL files of regenerated answers")
    dtype = resolve_dtype(settings.compute_dtype)
    mesh = make_mesh(settings.mesh, jax.devices()[: settings.devices or None])
    path = resolve(settings.target or embedded_target_path())
    target_config = read_target_config(path)
    config = drafter_config(settings.drafter, target_config)
    check_loss(config, settings.loss)
    check_mesh(mesh, target_config, config, settings.batch_size, settings.micro_batches)
    samples, held_out = read_samples(settings)
    check_tokens(samples, target_config, path)
    check_tokens(held_out, target_config, path)
    initial = read_initial(settings.initial, config) if settings.initial else None
    target = load_target(path, dtype=dtype, mesh=mesh)
    if initial is not None:
        initial = drop_shared(str(settings.initial), initial, target.params)
    source = _Source(settings, target, config, mesh, dtype)
    cache = source.open_cache(samples, held_out)
    d2t: np.ndarray | None = None
    if config.trims_vocabulary:
        known = Path(settings.output) / "draft_vocabulary.npz"
        among = None if initial is None else draft_tokens(initial, config.vocab_size)
        d2t = find_vocabulary(known, samples, config, stop_ids(target), among)
        initial = None if initial is None else cut_vocabulary(initial, d2t, config.vocab_size)
    rows = addressable_rows(mesh, settings.batch_size, settings.micro_batches)
    pipeline = Pipeline(
        samples,
        batch_size=settings.batch_size,
        max_length=settings.max_length,
        seed=settings.seed,
        cache=cache,
        complete=settings.states == "cache",
        pack=settings.pack,
        buckets=settings.buckets,
        rows=rows,
    )
    total = settings.steps or pipeline.total_steps(settings.epochs)
    schedule = cosine_schedule(peak=settings.lr, total=total, warmup_ratio=settings.warmup)
    optimizer = make_optimizer(schedule, max_norm=settings.max_grad_norm, weight_decay=settings.weight_decay)
    feed, losses = source.compiled(optimizer, pipeline, total, held_out, cache, d2t)
    averaged = settings.ema > 0
    like = abstract_state(config, optimizer, averaged, mesh)
    fresh = partial(init_state, config, optimizer, settings.seed, averaged, mesh, initial)
    logger.info(
        "%d samples, %d held out, %d updates, %s parameters, %s, mesh %s",
        len(samples),
        len(held_out),
        total,
        f"{sum(leaf.size for leaf in jax.tree.leaves(like.params)):,}",
        np.dtype(dtype).name,
        " x ".join(f"{name} {size}" for name, size in mesh.shape.items()),
    )
    if jax.process_count() > 1 or not len(held_out):  # nothing decodes here, and the steps have what they read
        target = dataclasses.replace(target, params={})
    recorded = recorded_fields(config, settings.loss, settings.num_anchors)
    exporter = Exporter(Path(settings.output), config, d2t, recorded)
    identity = source.key.fingerprint
    return Run(settings, target, identity, config, held_out, losses, d2t, mesh, feed, exporter, like, fresh)


class _Source:
    """The target on the mesh, and what is made of it: hidden states and compiled steps."""

    def __init__(
        self, settings: TrainSettings, target: Target, config: TrainableConfig, mesh: Mesh, dtype: DTypeLike
    ) -> None:
        self.settings, self.target, self.config, self.mesh, self.dtype = settings, target, config, mesh, dtype
        kind = np.dtype(dtype).name if settings.cache_kind == "auto" else settings.cache_kind
        shown = _fingerprinted(target.params, mesh)
        self.key: CacheKey = cache_key(target.path, target.config, shown, config.target_layer_ids, kind)
        if settings.states == "cache":  # states of more layers serve as well, those that a step makes would not
            self.key = wider_key(settings.cache, self.key)

    def open_cache(self, samples: Sequence[TrainingSample], held_out: Sequence[TrainingSample]) -> HiddenCache | None:
        """The cache with all states that must be there before training; None where there is to be none."""
        if self.settings.states == "online":
            return None
        cache = self.complete(held_out) if len(held_out) else self._opened()
        if self.settings.states == "fill":
            lengths = sample_table(samples).lengths
            missing = [number for number in range(len(samples)) if sample_id(samples, number) not in cache]
            check_space(self.settings.cache, self.key, lengths[missing])
            return cache
        return self.complete(samples)

    def _opened(self) -> HiddenCache:
        return HiddenCache(self.settings.cache, self.key, layer_ids=self.config.target_layer_ids)

    def complete(self, samples: Sequence[TrainingSample]) -> HiddenCache:
        """The cache, with the states of these samples; what it lacks is computed, by all processes together."""
        params = self.target.params
        if jax.process_count() > 1:
            found = self._opened()
            if all(sample_id(samples, number) in found for number in range(len(samples))):
                barrier("hidden states")
                return found
            local = make_mesh(_local_shape(self.target.config), jax.local_devices())
            params = load_target(self.target.path, dtype=self.dtype, mesh=local).params
        layers = self.config.target_layer_ids
        cache = build_cache(self.settings.cache, self.key, self.target.config, params, samples, layer_ids=layers)
        barrier("hidden states")
        cache.refresh()
        return cache

    def compiled(
        self,
        optimizer: optax.GradientTransformation,
        pipeline: Pipeline,
        total: int,
        held_out: Sequence[TrainingSample],
        cache: HiddenCache | None,
        d2t: np.ndarray | None,
    ) -> tuple[Feed, HeldOut]:
        """Batches with the steps that take them, and the held-out losses."""
        settings, mesh, target = self.settings, self.mesh, self.target
        common: dict[str, Any] = dict(num_anchors=settings.num_anchors, seed=settings.seed, compute_dtype=self.dtype)
        names = ("ema", "micro_batches", "remat", "regather")
        updates = common | {name: getattr(settings, name) for name in names}
        inside = target.config if cache is None else None  # the target runs in the steps
        step = make_step(self.config, settings.loss, optimizer, mesh, target=inside, **updates)
        frozen = self._frozen(d2t, cache is None)
        filling = None
        if cache is not None and settings.states == "fill":
            online = make_step(
                self.config, settings.loss, optimizer, mesh, target=target.config, keep_states=True, **updates
            )
            filler = Filler(cache, pipeline, mesh, settings.micro_batches, target.config.final_softcap)
            until = pipeline.total_steps(1)
            filling = Filling(online, self._frozen(d2t, True), filler, until, lambda: self._filled(cache, pipeline))
        feed = Feed(pipeline, step, frozen, mesh, micro_batches=settings.micro_batches, total=total, filling=filling)
        evaluation = make_eval_step(self.config, settings.loss, mesh, target=inside, **common)
        size = settings.batch_size // settings.micro_batches
        losses = HeldOut(held_out, evaluation, mesh, batch_size=size, max_length=settings.max_length, cache=cache)
        return feed, losses

    def _frozen(self, d2t: np.ndarray | None, whole: bool) -> Params:
        frozen = make_frozen(self.target.params, None, whole)
        return frozen | ({} if d2t is None else put({"d2t": d2t}, {"d2t": replicated(self.mesh)}))

    def _filled(self, cache: HiddenCache, pipeline: Pipeline) -> None:
        """At the end of an epoch that filled the cache: the rest of the samples, and those of other processes."""
        barrier("cache filled")
        self.complete(pipeline.samples)
        cache.refresh()


def _fingerprinted(params: Params, mesh: Mesh) -> Params:
    """The parameters that a fingerprint looks at, whole in every process."""
    return jax.jit(excerpt, out_shardings=replicated(mesh))(params)


def _local_shape(config: TransformerConfig) -> MeshShape:
    """A mesh of one process's devices that cuts the target's weights as far as they can be."""
    return MeshShape(fsdp=math.gcd(jax.local_device_count(), config.hidden_size))


def read_target_config(path: Path) -> TransformerConfig:
    """The config of a target, without its weights.

    Raises:
        FileNotFoundError, ValueError: as `load_target`.
    """
    return gguf_config(GGUFFile(path)) if path.is_file() else read_hf_config(path)


def read_samples(settings: TrainSettings) -> tuple[RecordSamples, RecordSamples]:
    """Samples to train on, and those held out: the last ones of the records.

    Raises:
        ValueError: no sample is left to train on.
    """
    samples = RecordSamples(settings.records, settings.max_length, settings.min_loss_tokens)
    if len(samples) <= settings.eval_samples:
        raise ValueError(
            f"{', '.join(settings.records)}: {len(samples)} samples with at least {settings.min_loss_tokens} "
            f"supervised tokens, of which eval_samples {settings.eval_samples} are held out: none is left to train on"
        )
    cut = len(samples) - settings.eval_samples
    return samples[:cut], samples[cut:]


def check_tokens(samples: RecordSamples, config: TransformerConfig, path: Path) -> None:
    """Refuses samples of another tokenizer.

    Raises:
        ValueError: a token outside the target's vocabulary.
    """
    for number in np.flatnonzero(samples.table.tops >= config.vocab_size)[:1]:
        raise ValueError(
            f"sample {samples.id(number)!r} has token {samples.table.tops[number]}, the vocabulary of {path} is "
            f"0..{config.vocab_size - 1}: the records belong to another target"
        )


def stop_ids(target: Target) -> tuple[int, ...]:
    """The tokens that end an answer; none where the target comes without a tokenizer."""
    try:
        return tuple(target.tokenizer.eos_ids)
    except FileNotFoundError:
        return ()
