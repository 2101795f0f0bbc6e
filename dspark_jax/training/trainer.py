"""The training program, from top to bottom: settings, processes, data and target, updates, and the drafter it leaves.

A run may be killed at any moment. Started again, on the same or on another mesh, it goes on from its last checkpoint
with the same batches and anchors; SIGTERM (a preemption notice) saves a checkpoint first and leaves with exit code 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from dspark_jax.config import check_json, log_to_stderr, settings_as_json, write_json
from dspark_jax.training.checkpoint import Checkpoints
from dspark_jax.training.distributed import check_shared, is_main, start, stop_on_signals
from dspark_jax.training.evaluate import Best, better, decoded
from dspark_jax.training.log import Log
from dspark_jax.training.optimizer import learning_rate
from dspark_jax.training.prepare import Run, prepare, stop_ids
from dspark_jax.training.settings import TrainSettings
from dspark_jax.training.step import TrainState

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """The command `train.py`; returns its exit code. What is wrong is told in one line.

    Exit codes: 2 for wrong settings and data, 1 for a disk that cannot be written to and a loss or gradient that is not
    finite, 0 also for a run that was asked to stop.
    """
    with log_to_stderr("%(asctime)s %(message)s"):
        try:
            settings = parse(argv)
            start(settings)
            train(settings)
        except (ValueError, FileNotFoundError) as error:
            logger.error("%s", error)
            return 2
        except (OSError, FloatingPointError) as error:
            logger.error("%s", error)
            return 1
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
    """Train to the end, or until a signal asks to stop; returns the last state.

    Raises:
        FileNotFoundError, ValueError: settings, data, cache or checkpoints that cannot be used; nothing was trained.
        OSError: the disk is full, or cannot be written to. FloatingPointError: a loss or a gradient that is not finite.
            In both cases the last checkpoint is good.
    """
    check_json(settings.json)
    check_shared(Path(settings.output))
    began = time.perf_counter()
    run = prepare(settings)
    folder = run.output / "checkpoints"
    with (
        Checkpoints(folder, settings.keep_checkpoints) as checkpoints,
        stop_on_signals() as stop,
        closing(run.exporter),
        closing(run.feed),
    ):
        state, best, window = resume(run, checkpoints)
        first = int(state.step)
        bar = tqdm(total=run.total, initial=first, desc="train", mininterval=1.0, disable=not is_main())
        with Log(run.output, first, window, writes=is_main()) as log, bar:
            for number, batch in log.waiting(run.feed.batches(first)):
                state, metrics = run.feed.update(state, number, batch)
                log.add(metrics, run.feed.counts(number))
                bar.update()
                last, stopped = number == run.total, stop.at(number)
                if last or due(number, settings.log_every):
                    bar.set_postfix(log.write(number, position(run, number)), refresh=False)
                if last or due(number, settings.eval_every):
                    log.settle(number)
                    best = evaluate(run, state, number, best, log)
                if last or stopped or due(number, settings.eval_every) or due(number, settings.checkpoint_every):
                    log.settle(number)  # what a loss or gradient that is not finite has left is never saved
                    run.feed.commit()
                    progress = {"best": asdict(best) if best else None, "window": log.window}
                    checkpoints.save(number, state, run.facts, progress, best.step if best else None)
                    run.exporter.write("drafter", state)
                if stopped and not last:
                    logger.info("asked to stop: saved at update %d of %d, start again to go on", number, run.total)
                    break
    if settings.json is not None and is_main():  # not before: the drafter is on the disk now
        write_json(settings.json, report(run, first, int(state.step), best, log, time.perf_counter() - began))
    return state


def report(run: Run, first: int, last: int, best: Best | None, log: Log, seconds: float) -> dict[str, Any]:
    """What `--json` tells of a run that went from update `first` to `last` in `seconds`, loading included.

    `tokens` are those of these updates, without padding. A metric that is not finite is null.
    """
    return {
        "settings": settings_as_json(run.settings),
        "drafter": str(run.output / "drafter"),
        "updates": {"total": run.total, "first": first, "last": last, "finished": last == run.total},
        "tokens": log.tokens,
        "seconds": seconds,
        "best": asdict(best) if best else None,
        "metrics": {name: value if math.isfinite(value) else None for name, value in log.newest.items()},
    }


def resume(run: Run, checkpoints: Checkpoints) -> tuple[TrainState, Best | None, dict[str, Any]]:
    """The state to begin with, the best evaluation so far, and the log's open window: of the last checkpoint, if any.

    Raises:
        ValueError: the checkpoints are of another run, cannot be read, or shall not be used.
    """
    if checkpoints.latest is None:
        return run.fresh(), None, {}
    if not run.settings.resume:
        raise ValueError(f"{run.output}: holds checkpoints and resume is off: give another output folder")
    state, progress = checkpoints.restore(run.like, run.facts)
    number = int(state.step)
    logger.info("resumed at update %d of %d", number, run.total)
    best = Best(**progress["best"]) if progress["best"] else None
    if number == run.total:  # exports that were not done when it was killed, and will not be done again
        run.exporter.write("drafter", state)
    if best is not None and best.step == number:
        run.exporter.write("best", state, evaluation=asdict(best))
    return state, best, progress["window"]


def due(number: int, every: int) -> bool:
    """Whether something that happens every `every` updates (0: never) happens after update `number`."""
    return every > 0 and number % every == 0


def position(run: Run, number: int) -> dict[str, float]:
    """Where update `number` stands: its epoch and learning rate."""
    settings = run.settings
    rate = learning_rate(number - 1, peak=settings.lr, total=run.total, warmup_ratio=settings.warmup)
    return {"epoch": run.feed.epoch(number), "lr": float(rate)}


def evaluate(run: Run, state: TrainState, number: int, best: Best | None, log: Log) -> Best | None:
    """Measure the drafter and log it; where it is the best one so far, write it to OUTPUT/best. Returns the best."""
    settings = run.settings
    result = run.losses.losses(state.best, run.feed.frozen)
    if run.target.params:
        samples, tokens, stops = run.held_out, settings.eval_tokens, stop_ids(run.target)
        result |= decoded(run.target, run.config, state.best, run.d2t, samples, tokens, stops)
    log.record(number, result)
    new = better(best, result, number)
    if new is not None:
        logger.info("update %d: %s %.3f, the best so far", number, new.name, new.value)
        run.exporter.write("best", state, evaluation=asdict(new))
    return new or best
