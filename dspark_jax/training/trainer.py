"""The training program, from top to bottom: settings, target, data, hidden states, steps, and the drafter it leaves.

A run may be killed at any moment. Started again, it goes on from its last checkpoint with the same batches and anchors;
SIGTERM saves a checkpoint first and leaves with exit code 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh
from tensorboardX import SummaryWriter
from tqdm import tqdm

from dspark_jax.checkpoints.drafters import write_drafter
from dspark_jax.checkpoints.load import Drafter, Target, embedded_target_path, load_drafter, load_target
from dspark_jax.config import log_to_stderr
from dspark_jax.data.hidden_cache import build_cache, cache_key, fingerprint
from dspark_jax.data.pipeline import Pipeline
from dspark_jax.data.records import TrainingSample, samples_from_records
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.models.transformer import head_weight
from dspark_jax.training.checkpoint import Checkpoints
from dspark_jax.training.objectives import TrainableConfig, check_loss, recorded_fields
from dspark_jax.training.optimizer import cosine_schedule, learning_rate, make_optimizer
from dspark_jax.training.settings import TrainSettings, drafter_config, resolve_dtype
from dspark_jax.training.step import Step, TrainState, data_mesh, init_state, make_step, replicate, split

logger = logging.getLogger(__name__)

Params = dict[str, Any]


class Run(NamedTuple):
    """What stays the same from the first step to the last.

    Attributes:
        settings: of the run. target: the frozen model. config: the drafter's. pipeline: the batches.
        held_out: samples whose prompts measure the accepted length. d2t: int32 [Vd] offsets, None for all tokens.
        mesh: the devices. frozen: parameters that the step reads. step: the compiled step. start: the first state.
        total: updates of the whole run.
    """

    settings: TrainSettings
    target: Target
    config: TrainableConfig
    pipeline: Pipeline
    held_out: list[TrainingSample]
    d2t: np.ndarray | None
    mesh: Mesh
    frozen: Params
    step: Step
    start: TrainState
    total: int

    @property
    def output(self) -> Path:
        """The output folder."""
        return Path(self.settings.output)

    @property
    def facts(self) -> dict[str, Any]:
        """What a resumed run must share with the one that wrote the checkpoint."""
        names = ("seed", "initial", "batch_size", "num_anchors", "max_length", "lr", "warmup", "weight_decay", "ema")
        values = {name: getattr(self.settings, name) for name in (*names, "max_grad_norm")}
        return values | {
            "target": fingerprint(self.target.config, self.target.params),
            "drafter": repr(self.config),
            "loss": repr(self.settings.loss),
            "data": self.pipeline.fingerprint(),
            "updates": self.total,
        }


def main(argv: Sequence[str]) -> int:
    """The command `train.py`; returns its exit code. Wrong settings and data are told in one line, with exit code 2."""
    with log_to_stderr("%(asctime)s %(message)s"):
        try:
            train(parse(argv))
        except (ValueError, FileNotFoundError) as error:
            logger.error("%s", error)
            return 2
    return 0


def parse(argv: Sequence[str]) -> TrainSettings:
    """Settings of a command line: `--config FILE` gives the defaults, every other option is a field."""
    door = argparse.ArgumentParser(add_help=False)
    door.add_argument("--config", help="a file that defines `config = TrainSettings(...)`")
    known, rest = door.parse_known_args(list(argv))
    default = read_config(known.config) if known.config else TrainSettings()
    return tyro.cli(TrainSettings, prog="train.py --config FILE", default=default, args=rest)


def read_config(path: str | Path) -> TrainSettings:
    """The `config` of a Python file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it defines no `config`, or one of another type.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"config {path}: no such file")
    spec = importlib.util.spec_from_file_location(f"train_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"config {path}: must be a Python file that defines `config = TrainSettings(...)`")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = getattr(module, "config", None)
    if not isinstance(config, TrainSettings):
        raise ValueError(f"config {path}: must define `config = TrainSettings(...)`, found {type(config).__name__}")
    return config


def train(settings: TrainSettings) -> TrainState:
    """Train to the end, or until SIGTERM; returns the last state.

    Raises:
        FileNotFoundError, ValueError: settings, data, cache or checkpoints that cannot be used; nothing was trained.
    """
    run = prepare(settings)
    with Checkpoints(run.output / "checkpoints") as checkpoints, stop_on_sigterm() as stop:
        state = run.start
        if checkpoints.latest is not None:
            if not settings.resume:
                raise ValueError(f"{run.output}: holds checkpoints and resume is off: give another output folder")
            state = checkpoints.restore(state, run.facts)
            logger.info("resumed at update %d of %d", int(state.step), run.total)
        first = int(state.step)
        with Log(run.output, first) as log, tqdm(total=run.total, initial=first, desc="train", mininterval=1.0) as bar:
            for number, host in enumerate(run.pipeline.batches(first, run.total), start=first + 1):
                epoch = run.pipeline.epoch(number - 1)
                state, metrics = run.step(state, run.frozen, split(host, run.mesh), jnp.int32(epoch))
                log.add(metrics)
                bar.update()
                last = number == run.total
                saves = last or stop.is_set() or due(number, settings.checkpoint_every)
                if saves or due(number, settings.log_every):  # a loss that is not finite is never saved
                    rate = float(learning_rate(number - 1, **schedule_of(run)))
                    bar.set_postfix(log.write(number, {"epoch": epoch, "lr": rate}), refresh=False)
                if saves:
                    checkpoints.save(state, run.facts)
                    export(run, state)
                if last or due(number, settings.eval_every):
                    log.record(number, evaluate(run, state))
                if stop.is_set() and saves and not last:
                    logger.info("SIGTERM: saved at update %d of %d, start again to go on", number, run.total)
                    break
    return state


def due(number: int, every: int) -> bool:
    """Whether something that happens every `every` updates (0: never) happens after update `number`."""
    return every > 0 and number % every == 0


def schedule_of(run: Run) -> dict[str, Any]:
    """Arguments of the learning rate's formula."""
    return {"peak": run.settings.lr, "total": run.total, "warmup_ratio": run.settings.warmup}


def prepare(settings: TrainSettings) -> Run:
    """Everything that the loop needs; hidden states that the cache lacks are computed here.

    Raises:
        FileNotFoundError, ValueError: as `train`.
    """
    if not settings.records:
        raise ValueError("records: names no file; give one or more JSONL files of regenerated answers")
    dtype = resolve_dtype(settings.compute_dtype)
    samples, held_out = read_samples(settings)
    target = load_target(settings.target or embedded_target_path(), dtype=dtype)
    config = drafter_config(settings.drafter, target.config)
    check_loss(config, settings.loss)
    initial = read_initial(settings.initial, config) if settings.initial else None
    check_tokens(samples + held_out, target)
    cache = None
    if not settings.online:
        key = cache_key(target.path, target.config, target.params, config.target_layer_ids, dtype)
        cache = build_cache(settings.cache, key, target.config, target.params, samples)
    pipeline = Pipeline(
        samples, batch_size=settings.batch_size, max_length=settings.max_length, seed=settings.seed, cache=cache
    )
    total = settings.steps or settings.epochs * pipeline.steps_per_epoch
    mesh = data_mesh(settings.batch_size, settings.devices)
    schedule = cosine_schedule(peak=settings.lr, total=total, warmup_ratio=settings.warmup)
    optimizer = make_optimizer(schedule, max_norm=settings.max_grad_norm, weight_decay=settings.weight_decay)
    d2t = None
    if config.trims_vocabulary:
        d2t = draft_vocabulary(samples, config, stop_ids(target)) if initial is None else np.asarray(initial.pop("d2t"))
    frozen = {"embed": target.params["embed"], "head": head_weight(target.params)}
    if d2t is not None:
        frozen["d2t"] = jnp.asarray(d2t)
    if settings.online:
        frozen["target"] = target.params
    step = make_step(
        config,
        settings.loss,
        optimizer,
        mesh,
        num_anchors=settings.num_anchors,
        seed=settings.seed,
        ema=settings.ema,
        compute_dtype=dtype,
        target=target.config if settings.online else None,
    )
    start = replicate(init_state(config, optimizer, settings.seed, settings.ema > 0, initial), mesh)
    logger.info(
        "%d samples, %d held out, %d updates, %s parameters, %s, %d devices",
        len(samples),
        len(held_out),
        total,
        f"{sum(leaf.size for leaf in jax.tree.leaves(start.params)):,}",
        np.dtype(dtype).name,
        mesh.size,
    )
    return Run(settings, target, config, pipeline, held_out, d2t, mesh, replicate(frozen, mesh), step, start, total)


def read_initial(path: str, config: TrainableConfig) -> Params:
    """The float32 weights of an existing drafter of the same shape, with `d2t` where it trims the vocabulary.

    Raises:
        FileNotFoundError, ValueError: no drafter there, or one of another shape; the message names the fields.
    """
    drafter = load_drafter(path)
    if type(drafter.config) is not type(config):
        kinds = type(drafter.config).__name__, type(config).__name__
        raise ValueError(f"initial {path}: a drafter of another kind, with {kinds[0]}; this run has {kinds[1]}")
    other = [
        f"{f.name} {getattr(drafter.config, f.name)!r} (this run has {getattr(config, f.name)!r})"
        for f in dataclasses.fields(config)
        if getattr(drafter.config, f.name) != getattr(config, f.name)
    ]
    if other:
        raise ValueError(f"initial {path}: a drafter of another shape: {', '.join(other)}; set the same in `drafter`")
    return dict(drafter.params)


def read_samples(settings: TrainSettings) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """Samples to train on, and those held out: the last ones of the records.

    Raises:
        ValueError: no sample is left to train on.
    """
    samples = samples_from_records(settings.records, settings.max_length, settings.min_loss_tokens)
    if len(samples) <= settings.eval_samples:
        raise ValueError(
            f"{', '.join(settings.records)}: {len(samples)} samples with at least {settings.min_loss_tokens} "
            f"supervised tokens, of which eval_samples {settings.eval_samples} are held out: none is left to train on"
        )
    cut = len(samples) - settings.eval_samples
    return samples[:cut], samples[cut:]


def check_tokens(samples: Sequence[TrainingSample], target: Target) -> None:
    """Refuses samples of another tokenizer.

    Raises:
        ValueError: a token outside the target's vocabulary.
    """
    for sample in samples:
        top = int(sample.input_ids.max(initial=0))
        if top >= target.config.vocab_size:
            raise ValueError(
                f"sample {sample.id!r} has token {top}, the vocabulary of {target.path} is "
                f"0..{target.config.vocab_size - 1}: the records belong to another target"
            )


def stop_ids(target: Target) -> tuple[int, ...]:
    """The tokens that end an answer; none where the target comes without a tokenizer."""
    try:
        return tuple(target.tokenizer.eos_ids)
    except FileNotFoundError:
        return ()


def draft_vocabulary(
    samples: Sequence[TrainingSample], config: TrainableConfig, always: Sequence[int] = ()
) -> np.ndarray:
    """The draft head's tokens: the most frequent supervised ones and `always`, as ascending offsets.

    Ties go to the lower id, and so do places that are left when there are fewer distinct tokens.

    Returns:
        d2t int32 [Vd]: target id = draft id + d2t[draft id].
    """
    counts = np.zeros(config.vocab_size, np.int64)  # [V]
    for sample in samples:
        counts += np.bincount(sample.input_ids[sample.loss_mask > 0], minlength=config.vocab_size)
    covered = counts.sum()
    rank = counts.copy()
    rank[list(always)] = np.iinfo(np.int64).max
    kept = np.sort(np.argsort(-rank, kind="stable")[: config.draft_vocab_size])  # [Vd]
    share = 100 * counts[kept].sum() / max(covered, 1)
    logger.info("draft vocabulary: %d tokens, %.2f %% of the answers", len(kept), share)
    return (kept - np.arange(len(kept))).astype(np.int32)


def drafter_of(run: Run, state: TrainState) -> Drafter:
    """The drafter that a state makes, with parameters in the target's dtype."""
    dtype = run.target.params["embed"].dtype
    weights = jax.device_put(jax.tree.map(lambda leaf: leaf.astype(dtype), state.best), jax.devices()[0])
    params = weights | ({} if run.d2t is None else {"d2t": jnp.asarray(run.d2t)})
    return Drafter(run.config, params, run.output / "drafter")


def export(run: Run, state: TrainState) -> None:
    """Write the drafter into OUTPUT/drafter, in DeepSpec's format; embedding and head stay with the target."""
    weights = jax.device_get(state.best) | ({} if run.d2t is None else {"d2t": run.d2t})
    extra = recorded_fields(run.config, run.settings.loss, run.settings.num_anchors)
    write_drafter(run.output / "drafter", run.config, weights, extra=extra, include_embeddings=False)


def evaluate(run: Run, state: TrainState) -> dict[str, float]:
    """Greedy decoding of the held-out prompts: committed tokens per round, and tokens per second."""
    if not run.held_out:
        return {}
    sampling = SamplingParams(max_tokens=run.settings.eval_tokens)
    requests = [Request(s.id, tuple(s.input_ids[s.loss_mask == 0].tolist()), sampling) for s in run.held_out]
    requests = [request for request in requests if request.prompt_ids]
    began = time.perf_counter()
    generator = Generator(run.target, drafter_of(run, state), stop_ids=stop_ids(run.target))
    done = list(generator.generate(requests))
    tokens = sum(len(one.token_ids) - 1 for one in done)
    rounds = sum(one.rounds for one in done)
    seconds = time.perf_counter() - began
    result = {"accepted_length": tokens / max(rounds, 1), "eval_tokens": float(tokens), "eval_seconds": seconds}
    logger.info("update %d: accepted length %.3f over %d rounds", int(state.step), result["accepted_length"], rounds)
    return result


@contextmanager
def stop_on_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets. Outside the main thread, where signals cannot be caught, nothing sets it."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


class Log:
    """Metrics as JSON lines (OUTPUT/metrics.jsonl) and for TensorBoard, averaged between two writes."""

    def __init__(self, folder: Path, step: int) -> None:
        """Open the logs of a run that goes on behind update `step`: lines of later updates are dropped."""
        self._pending: list[Any] = []
        self._clock = time.perf_counter()
        file = folder / "metrics.jsonl"
        kept = [line for line in file.read_bytes().splitlines() if _step_of(line) <= step] if file.exists() else []
        fresh = file.with_suffix(".new")
        fresh.write_bytes(b"".join(line + b"\n" for line in kept))
        fresh.replace(file)
        self._file = file.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, metrics: Any) -> None:
        """Take in the metrics of a step, pairs (sum, count) still on the device."""
        self._pending.append(metrics)

    def write(self, step: int, extra: dict[str, float]) -> dict[str, str]:
        """Write the means since the last write, with seconds per update; returns some of them for the progress bar.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        pending = jax.device_get(self._pending)
        now = time.perf_counter()
        means: dict[str, float] = {}
        for name in pending[0]:
            total, count = (float(sum(np.asarray(one[name][i], np.float64) for one in pending)) for i in (0, 1))
            if count:
                means[name] = total / count
        seconds = (now - self._clock) / len(pending)
        self._pending, self._clock = [], now
        self.record(step, means | extra | {"seconds": seconds})
        if not np.isfinite(means["total"]):
            raise FloatingPointError(f"update {step}: the loss is {means['total']}; the last checkpoint is from before")
        return {name: f"{means[name]:.4g}" for name in ("total", "tau_probabilistic") if name in means}

    def record(self, step: int, values: dict[str, float]) -> None:
        """Write values of update `step` as they are."""
        if not values:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name.replace("@", "/"), value, step)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._board.close()


def _step_of(line: bytes) -> float:
    """The update that a log line belongs to; infinite for a half-written line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
