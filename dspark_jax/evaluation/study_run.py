"""Trains and answers what studies need, each once: studies share drafters and outcomes, and a stopped run goes on.

OUTPUT/drafters/KIND-HASH    a training run, with done.json when it is at its end; HASH is over all that its weights
                             follow from (data, target and settings by their contents, places of files left out)
OUTPUT/outcomes/HOW/SYSTEM   answers of a drafter under one protocol (`evaluation.store`)
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.hf import resolve
from dspark_jax.checkpoints.load import Drafter, Target, embedded_target_path, load_drafter, load_target
from dspark_jax.config import named_dtype, replace_json, settings_as_json
from dspark_jax.data import cache_key
from dspark_jax.data.pipeline import Pipeline
from dspark_jax.data.records import RecordSamples, read_records, sample_table
from dspark_jax.drafters.interface import AnyConfig
from dspark_jax.drafters.ngram import NgramConfig
from dspark_jax.evaluation import store
from dspark_jax.evaluation.answering import PLAIN, Answerer, Protocol, System, expected_ids
from dspark_jax.evaluation.benchmarks import Benchmark
from dspark_jax.evaluation.outcomes import Outcome
from dspark_jax.evaluation.reading import Reader
from dspark_jax.evaluation.studies import NGRAM, Changes, Variant, changed
from dspark_jax.models.config import TransformerConfig
from dspark_jax.training import trainer
from dspark_jax.training.evaluate import PREFIX, SCORES
from dspark_jax.training.objectives import TrainableConfig, check_loss
from dspark_jax.training.prepare import read_samples, read_target_config
from dspark_jax.training.settings import TrainSettings, drafter_config, resolve_dtype

logger = logging.getLogger(__name__)

DONE = "done.json"  # marks a drafter whose training is at its end
# fields of TrainSettings that the weights do not follow from: places of files, and what happens on the way
INDIFFERENT = (
    "records", "target", "output", "cache", "checkpoint_every", "keep_checkpoints", "eval_every", "eval_tokens",
    "log_every", "devices", "resume", "distributed", "coordinator", "process_count", "process_id", "json",
)  # fmt: skip
# fields that are looked at by what comes of them
RESOLVED = (
    "drafter", "loss", "epochs", "steps", "compute_dtype", "states", "cache_kind", "min_loss_tokens", "eval_samples",
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A drafter at the end of its training.

    Attributes:
        name: KIND-HASH. folder: the drafter's. config: its shape.
        facts: `updates`, `seconds_per_update` (median), `held_out` (metrics by name), and of the hidden states
            `states`, `bytes_per_token` and `bytes` (0: none on the disk).
    """

    name: str
    folder: Path
    config: TrainableConfig
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Lab:
    """Where studies are made.

    Attributes:
        base: the config that variants change. output: folder of all that is kept.
        rows: conversations that are answered together.
    """

    base: TrainSettings
    output: Path
    rows: int = 1

    def check(self) -> None:
        """Refuses a base that studies cannot change, before anything is loaded.

        Raises:
            ValueError, FileNotFoundError: names the field and what would be right; or missing records.
        """
        shape = self.base.drafter
        right = {"kind": "dspark", "markov_kind": "vanilla", "confidence": True}
        for name, value in right.items():
            if getattr(shape, name) != value:
                raise ValueError(
                    f"config: drafter.{name} {getattr(shape, name)!r}: studies start from a DSpark drafter with the "
                    f"vanilla head and a confidence head, must be {value!r}"
                )
        if self.base.initial is not None:
            raise ValueError(
                f"config: initial {self.base.initial!r}: variants have other shapes, so all start from random weights, "
                "must be None"
            )
        if self.base.distributed:
            raise ValueError("config: distributed True: studies run in one process, must be False")
        if not self.base.records:
            raise ValueError("config: records name no file, must be JSONL files of regenerated answers")
        check_loss(self.shape({}), self.base.loss)
        _ = self.samples
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output {self.output}: is a file, must be a folder")

    # --- what there is ---

    @cached_property
    def target_config(self) -> TransformerConfig:
        """The target's config, which needs no weights."""
        return read_target_config(self.target_path)

    @cached_property
    def target_path(self) -> Path:
        """The target's file or folder."""
        return resolve(self.base.target or embedded_target_path())

    @cached_property
    def target(self) -> Target:
        """The target, in the dtype of decoding."""
        return load_target(self.target_path, dtype=jnp.dtype(self.dtype))

    @cached_property
    def target_fingerprint(self) -> str:
        """Hashes of the target's config and some of its weights."""
        return cache_key.fingerprint(self.target.config, self.target.params)

    @cached_property
    def samples(self) -> RecordSamples:
        """What drafters are trained on."""
        return read_samples(self.base)[0]

    @cached_property
    def reader(self) -> Reader:
        """What the target says of its answers, for all drafters that are forced along them."""
        return Reader(self.base.drafter.target_layer_ids)

    @property
    def dtype(self) -> str:
        """Name of the dtype that answers are made in: the config's, or where that is auto, what decodes fastest."""
        return named_dtype(self.base.compute_dtype, rows=self.rows)

    @cached_property
    def clocked(self) -> Lab:
        """The lab with the dtype that answers few requests fastest, for timings."""
        return replace(self, rows=1)

    @property
    def training_dtype(self) -> str:
        """Name of the dtype of the products in training."""
        return np.dtype(resolve_dtype(self.base.compute_dtype)).name

    def shape(self, changes: Changes) -> TrainableConfig:
        """The config of a variant's drafter.

        Raises:
            ValueError: it does not fit the target; the message names the field.
        """
        return drafter_config(changed(self.base, changes).drafter, self.target_config)

    def lacks(self, variant: Variant) -> str:
        """Why this target has no such drafter; '' where it has."""
        try:
            if variant.trained:
                self.shape(variant.changes)
        except ValueError as error:
            return str(error)
        return ""

    # --- drafters ---

    def settings(self, changes: Changes) -> TrainSettings:
        """The training run of a variant, without its output.

        Hidden states of other layers or of another kind than the base's have a folder beside its cache; those of fewer
        layers are in it (a cache that is filled by training steps has all that they read, and no more).
        """
        settings = changed(self.base, changes)
        ids, here = settings.drafter.target_layer_ids, self.base.drafter.target_layer_ids
        shared = ids == here or (settings.states == "cache" and set(ids) < set(here))
        parts = [] if shared else ["-".join(map(str, ids)) or "final"]
        parts += [] if self._kind(settings) == self._kind(self.base) else [self._kind(settings)]
        return replace(settings, cache="-".join([settings.cache, *parts]))

    def _kind(self, settings: TrainSettings) -> str:
        """How hidden states are stored."""
        return self.training_dtype if settings.cache_kind == "auto" else settings.cache_kind

    def updates(self, settings: TrainSettings) -> int:
        """Updates of a run."""
        names = ("batch_size", "max_length", "seed", "pack", "buckets")
        how: dict[str, Any] = {name: getattr(settings, name) for name in names}
        return settings.steps or Pipeline(self.samples, **how).total_steps(settings.epochs)

    def origin(self, changes: Changes) -> dict[str, Any]:
        """What the weights of a variant follow from, as JSON values."""
        settings = self.settings(changes)
        known = {
            name: value for name, value in settings_as_json(settings).items() if name not in (*INDIFFERENT, *RESOLVED)
        }
        sums = sample_table(self.samples).checksums.astype("<u4").tobytes()
        return known | {
            "target": self.target_fingerprint,
            "data": hashlib.sha256(sums).hexdigest(),
            "drafter": repr(self.shape(changes)),
            "loss": repr(settings.loss),
            "updates": self.updates(settings),
            "compute_dtype": self.training_dtype,
            "states": "online" if settings.states == "online" else self._kind(settings),
            "filled": settings.states == "fill",
        }

    def name(self, changes: Changes) -> str:
        """KIND-HASH of a variant's drafter."""
        kind = changed(self.base, changes).drafter.kind
        return f"{kind}-{digest(self.origin(changes))}"

    def trained(self, changes: Changes) -> Trained:
        """The drafter of a variant, which is trained where it is not there yet.

        Raises:
            FileNotFoundError, ValueError, OSError, FloatingPointError: as `trainer.train`.
            KeyboardInterrupt: a signal asked the training to stop; it saved, and goes on from there next time.
        """
        name, settings = self.name(changes), self.settings(changes)
        folder = self.output / "drafters" / name
        if not (folder / DONE).exists():
            self._train(replace(settings, output=str(folder), resume=True), name)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # large, and nothing goes on from them
        facts = json.loads((folder / DONE).read_text(encoding="utf-8"))
        return Trained(name, folder / "drafter", self.shape(changes), facts)

    def _train(self, settings: TrainSettings, name: str) -> None:
        logger.info("training %s", name)
        total = self.updates(settings)
        self.forget()
        state = trainer.train(settings)
        done = int(state.step)
        del state
        self.forget()
        if done < total:
            raise KeyboardInterrupt(f"training of {name} stopped at update {done} of {total}")
        facts = {"updates": total, **_logged(Path(settings.output)), **self._states(settings)}
        replace_json(Path(settings.output) / DONE, facts | {"settings": settings_as_json(settings)})

    def _states(self, settings: TrainSettings) -> dict[str, Any]:
        """What a run's hidden states take."""
        if settings.states == "online":
            return {"states": "online", "bytes_per_token": 0, "bytes": 0}
        ids = settings.drafter.target_layer_ids
        key = cache_key.CacheKey("", "", ids, self.target.config.hidden_size, self._kind(settings))
        took = {"bytes_per_token": cache_key.token_bytes(key), "bytes": cache_key.estimate_bytes(key, self.samples)}
        return {"states": self._kind(settings), **took}

    def forget(self) -> None:
        """Drops the target and all compiled programs, of which a process holds so many only; what it said stays."""
        self.__dict__.pop("target", None)
        jax.clear_caches()
        gc.collect()

    def drafter(self, trained: Trained) -> Drafter:
        """A trained drafter, loaded.

        Raises:
            FileNotFoundError, ValueError: it is damaged, or of another target.
        """
        drafter = load_drafter(trained.folder, dtype=jnp.dtype(self.dtype), target=self.target.config)
        drafter.config.check_target(self.target.config)
        return drafter

    def system(self, variant: Variant, threshold: float | None = None) -> System:
        """The system of a variant, by the name that its outcomes are kept under.

        Args:
            threshold: verify the drafts before the first confidence below it; None: whole blocks. With 0, too, blocks
                are verified whole, but rounds found along given texts then tell their confidences.
        """
        if variant.name == PLAIN:
            return System(PLAIN, None)
        if variant.name == NGRAM:
            config: AnyConfig = NgramConfig(self.base.drafter.block_size)
            return System(f"{NGRAM}-{config.block_size}", Drafter(config, {}, Path(NGRAM)))
        trained = self.trained(variant.changes)
        drafter = self.drafter(trained)
        if threshold is None:
            return System(trained.name, drafter)
        return System(f"{trained.name}-confidence-{threshold:g}", drafter, "threshold", threshold)

    # --- answers ---

    def answered(self, system: System, benchmarks: Sequence[Benchmark], protocol: Protocol) -> list[Outcome]:
        """The answers of a system, in the order of their ids; what is not there yet is answered.

        Raises:
            ValueError: outcomes in the folder were made otherwise; a prompt that does not fit the context.
        """
        return [one for _, one in sorted(self._outcomes(system, benchmarks, protocol).items()) if one.answered]

    def _outcomes(self, system: System, benchmarks: Sequence[Benchmark], protocol: Protocol) -> dict[str, Outcome]:
        """The outcomes of a system by id, those of turns without room for an answer included."""
        plain: dict[str, Outcome] = {}
        if system.drafter is not None and protocol.method == "forced":
            plain = self._outcomes(System(PLAIN, None), benchmarks, protocol)
        about = self._about(system, benchmarks, protocol)
        how = digest({name: about[name] for name in ("protocol", "target", "dtype", "chat")}, 8)
        folder = self.output / "outcomes" / f"T{protocol.temperature:g}-{how}" / system.name
        conversations = [one for benchmark in benchmarks for one in benchmark.conversations]
        wanted = expected_ids(system.name, conversations)
        with store.OutcomeStore(folder, about) as kept:
            if not wanted <= set(kept.done):
                logger.info("answers of %s at temperature %g", system.name, protocol.temperature)
                answerer = Answerer(self.target, system, protocol, reader=self.reader)
                answerer.answer(conversations, kept.keep, plain | kept.done)
            return {name: kept.done[name] for name in wanted}

    def _about(self, system: System, benchmarks: Sequence[Benchmark], protocol: Protocol) -> dict[str, Any]:
        """What outcomes depend on."""
        about: dict[str, Any] = {"protocol": asdict(protocol), "target": self.target_fingerprint, "dtype": self.dtype}
        about["chat"] = store.chat_digest(self.target.tokenizer)
        about["system"] = {"schedule": system.schedule, "threshold": system.threshold}
        if system.drafter is not None:
            about["system"]["drafter"] = store.fingerprint(system.drafter.config, system.drafter.params)
        if protocol.method == "decode":  # what wall-clocks are of
            about["device"] = store.device()
        return about | {"prompts": store.prompt_digests(benchmarks)}


def digest(values: Mapping[str, Any], digits: int = 10) -> str:
    """Hex digits of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:digits]


def _logged(folder: Path) -> dict[str, Any]:
    """What a run's log says: seconds of an update (the median; the first line compiles), and the held-out metrics."""
    lines = list(read_records(folder / "metrics.jsonl"))
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    last: dict[str, Any] = next((line for line in reversed(lines) if any(name.startswith(PREFIX) for name in line)), {})
    held_out = {name: value for name, value in last.items() if name.startswith(PREFIX) or name in SCORES}
    return {"seconds_per_update": float(np.median(seconds[1:] or seconds)), "held_out": held_out}
