"""`dspark simulate`: what a fleet would do under loads that do not fit here, from a throughput curve and real rounds.

The curve is of `dspark profile`, for this device or another; the rounds are of `dspark calibrate --records-out`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from tqdm import tqdm

from dspark_jax.calibration.collect import Records, check_drafter, fingerprint, load_records, merge
from dspark_jax.checkpoints.load import embedded_drafter_path, load_drafter
from dspark_jax.checkpoints.store import read_json
from dspark_jax.config import check_json, exit_code, log_to_stderr, settings_as_json, write_json
from dspark_jax.decoding.curve import Curve, Point, Prefill
from dspark_jax.evaluation.loads import Load
from dspark_jax.evaluation.replay import Calibration, make_replay
from dspark_jax.evaluation.simulate_plot import plot
from dspark_jax.evaluation.simulator import LADDER, SYSTEMS, EngineSettings, System, check_curve, simulate
from dspark_jax.evaluation.tally import Result
from dspark_jax.profiling.curves import load_curve

logger = logging.getLogger(__name__)
_PROGRAM = "dspark simulate"
_LOADS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class SimulateSettings:
    """Simulate serving: throughput against speed per user, and verify budget against concurrency.

    Attributes:
        curve: throughput curve of `dspark profile`, of this device or another.
        records: rounds of `dspark calibrate --records-out`, of one drafter; requests are drawn from them.
        systems: what to compare. plain: no drafter. mtp1: one drafted token a round; its acceptance is that of the
            records' first position, which for a DSpark drafter is an optimistic stand-in. fixed: whole blocks.
            threshold, causal, async: the schedules.
        loads: concurrent requests, each replaced as soon as it is answered; 1 2 4 8 16 32 64 times the replicas by
            default.
        rates: in place of loads, Poisson arrivals, in requests/s.
        arrivals: closed: see loads. file: offline generation, all requests are there from the start, and as many slots
            as loads says.
        requests_per_load: answers of each replica that are measured.
        warm_up: answers before that, as a share of requests_per_load, one of each client at least.
        drafter: drafter whose calibration the confidences get, and that the records must be of: a folder or a hub id;
            the embedded one by default.
        calibration: in place of it, JSON report of `dspark calibrate`.
        max_tokens: cuts longer answers, in tokens; 0: as recorded.
        slots: slot counts that the engine has programs for.
        rounds: most rounds between two looks of the host.
        prefill_chunk: prompt tokens that are taken in at once while others decode.
        host_seconds: of each look of the host, in seconds.
        resize_seconds: of each change of the slots or the caches, in seconds.
        threshold: of the schedule of that name, a confidence.
        mtp_draft_share: seconds of the single-token drafter, as a share of the curve's draft; 1 / block by default.
        scale_seconds: factor on all seconds of the curve, for another device.
        replicas: engines that share the load.
        seed: of the order of requests, arrivals and draws.
        json: file for settings and results, as one JSON object; times in seconds, shares of 1.
        plots: folder for throughput.png and budget.png.
    """

    curve: Path
    records: tuple[Path, ...]
    systems: tuple[System, ...] = ("plain", "mtp1", "fixed", "causal", "async")
    loads: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    arrivals: Literal["closed", "file"] = "closed"
    requests_per_load: int = 200
    warm_up: float = 0.25
    drafter: str | None = None
    calibration: Path | None = None
    max_tokens: int = 0
    slots: tuple[int, ...] = LADDER
    rounds: int = 4
    prefill_chunk: int = 512
    host_seconds: float = 0.0
    resize_seconds: float = 0.0
    threshold: float = 0.5
    mtp_draft_share: float | None = None
    scale_seconds: float = 1.0
    replicas: int = 1
    seed: int = 0
    json: Path | None = None
    plots: Path | None = None

    def check(self) -> None:
        """Refuses what cannot run, before anything is loaded.

        Raises:
            ValueError, FileNotFoundError: naming the option, its value and what would be right.
        """
        for name, least in (("requests_per_load", 1), ("replicas", 1), ("max_tokens", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {least}")
        if not 0 < self.scale_seconds < float("inf"):
            raise ValueError(f"scale_seconds {self.scale_seconds}: must be a positive, finite factor")
        if not 0 <= self.warm_up < float("inf"):
            raise ValueError(f"warm_up {self.warm_up}: must be a share of at least 0")
        for name in ("records", "systems"):
            if not getattr(self, name):
                raise ValueError(f"{name}: must be at least one")
        unknown = [system for system in self.systems if system not in SYSTEMS]
        if unknown:
            raise ValueError(f"systems {unknown[0]!r}: must be of {', '.join(SYSTEMS)}")
        if self.rates and (self.loads or self.arrivals == "file"):
            raise ValueError("rates: are an open load, give neither loads nor --arrivals file with them")
        if self.drafter is not None and self.calibration is not None:
            raise ValueError("drafter, calibration: both say how confidences are calibrated, give one of them")
        check_json(self.json)
        self.engine()
        self.all_loads()

    def engine(self) -> EngineSettings:
        """The engine that is modelled."""
        return EngineSettings(**{field.name: getattr(self, field.name) for field in fields(EngineSettings)})

    def all_loads(self) -> list[Load]:
        """The loads of one replica.

        Raises:
            ValueError: a load below 1, or one that the replicas cannot share evenly.
        """
        warm_up = round(self.warm_up * self.requests_per_load)
        if self.rates:
            return [Load("open", rate / self.replicas, self.requests_per_load, warm_up) for rate in self.rates]
        loads = []
        for load in self.loads or [size * self.replicas for size in _LOADS]:
            if self.arrivals == "file":
                loads.append(Load("file", load, self.requests_per_load))
                continue
            if load < 1 or load % self.replicas:
                raise ValueError(f"loads {load}: must be a multiple of replicas, {self.replicas}, and at least that")
            each = load // self.replicas
            before = max(warm_up, each) if self.warm_up else 0
            loads.append(Load("closed", each, self.requests_per_load, before))
        return loads


# --- inputs ---


def read_curve(path: Path) -> tuple[Curve, dict[str, Any]]:
    """The curve of a file of `dspark profile`, and what it was measured on, as JSON values.

    Raises:
        FileNotFoundError, ValueError: no such file, or a damaged one.
    """
    profile = load_curve(path)
    return profile.curve, asdict(profile.key)


def scaled(curve: Curve, factor: float) -> Curve:
    """The curve of a device that takes `factor` times as long for everything."""

    def point(old: Point) -> Point:
        return replace(old, drafted=tuple(factor * s for s in old.drafted), plain=factor * old.plain)

    prefills = tuple(Prefill(entry.tokens, factor * entry.seconds) for entry in curve.prefills)
    return Curve(tuple(map(point, curve.points)), prefills)


def read_calibration(path: Path) -> Calibration:
    """The calibration that a report of `dspark calibrate` ends with.

    Raises:
        FileNotFoundError, ValueError: no such file, or another one.
    """
    values = read_json(path)
    found = {}
    for name in ("temperatures", "biases"):
        numbers = values.get(name, [])
        if not isinstance(numbers, list) or not all(type(x) in (int, float) for x in numbers):
            raise ValueError(f"calibration {path}: {name} {numbers!r} must be a list of numbers")
        found[name] = tuple(map(float, numbers))
    if not found["temperatures"]:
        raise ValueError(f"calibration {path}: has no temperatures, must be a report of `dspark calibrate --json`")
    return Calibration(**found)


def read_rounds(settings: SimulateSettings) -> tuple[list[Records], Calibration]:
    """The records, and what calibrates them.

    Raises:
        FileNotFoundError, ValueError: missing or damaged files, records of several drafters or of another one than
            `settings.drafter`, or a request twice.
    """
    parts = [load_records(path) for path in settings.records]
    merge(parts)  # its checks
    if settings.calibration is not None:
        return parts, read_calibration(settings.calibration)
    named = settings.drafter or embedded_drafter_path()
    drafter = load_drafter(named)
    config = check_drafter(drafter.config)
    if parts[0].about.get("fingerprint") != fingerprint(drafter.params):
        raise ValueError(
            f"records {settings.records[0]}: made with another drafter ({parts[0].about.get('drafter')}) than {named}; "
            "name theirs with --drafter, or a report of `dspark calibrate` with --calibration"
        )
    return parts, Calibration(config.confidence_temperatures, config.confidence_biases)


# --- the command ---


def run(settings: SimulateSettings) -> dict[str, Any]:
    """Does what the settings ask, and prints the table; returns the report as JSON values.

    Raises:
        FileNotFoundError, ValueError: bad settings or files, or a curve that lacks what a load needs.
    """
    settings.check()
    curve, measured_on = read_curve(settings.curve)
    curve = scaled(curve, settings.scale_seconds)
    parts, calibration = read_rounds(settings)
    replay = make_replay(parts, calibration, settings.max_tokens)
    loads, engine = settings.all_loads(), settings.engine()
    for load in loads:
        check_curve(curve, replay.block, engine, load)
    began = time.perf_counter()
    results = []
    todo = [(system, load) for system in settings.systems for load in loads]
    for system, load in tqdm(todo, desc="loads", unit="load", disable=not sys.stderr.isatty()):
        results.append(simulate(system, load, replay, curve, engine, seed=settings.seed, replicas=settings.replicas))
    print(table(results))
    if settings.plots is not None:
        for path in plot(settings.plots, results):
            logger.info("%s: written", path)
    return {
        "settings": settings_as_json(settings),
        "curve": measured_on,
        "calibration": asdict(calibration),
        "recorded": {"requests": replay.requests, "rounds": len(replay.accepted), "block_size": replay.block},
        "seconds": time.perf_counter() - began,
        "results": [asdict(result) for result in results],
    }


_HEADS = (
    "system", "load", "tokens/s", "per user", "accepted", "budget", "drafted %", "padding %",
    "first p50 ms", "next p50 ms", "next p99 ms", "prefill %", "draft %", "verify %", "host %",
)  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """The results as lines: tokens/s in all and per user, tokens per round, latencies in ms, shares of the time."""
    rows = [_HEADS, *map(_cells, results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if results and results[0].kind == "open":
        lines.append("load: requests/s")
    return "\n".join(lines)


def _cells(result: Result) -> tuple[str, ...]:
    first, following = result.time_to_first_token or {}, result.inter_token or {}
    shares = result.shares
    numbers: list[tuple[float | None, float, int]] = [
        (result.tokens_per_second, 1, 1),
        (result.tokens_per_second_per_user, 1, 1),
        (result.accepted_length, 1, 2),
        (result.budget, 1, 2),
        (result.drafted, 100, 1),
        (result.padding, 100, 1),
        (first.get("p50"), 1000, 1),
        (following.get("p50"), 1000, 2),
        (following.get("p99"), 1000, 2),
        *((shares[phase], 100, 1) for phase in ("prefill", "draft", "verify")),
        (shares["host"] + shares["resize"], 100, 1),
    ]
    texts = ("-" if value is None else f"{factor * value:.{digits}f}" for value, factor, digits in numbers)
    return (result.system, f"{result.load:g}", *texts)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `dspark simulate`: exit code 0, or 2 (bad input, one line on stderr)."""
    settings = tyro.cli(SimulateSettings, args=argv, prog=_PROGRAM, config=(tyro.conf.FlagCreatePairsOff,))
    return exit_code(_PROGRAM, lambda: _run(settings))


def _run(settings: SimulateSettings) -> None:
    with log_to_stderr():
        done = run(settings)
    if settings.json is not None:
        write_json(settings.json, done)


if __name__ == "__main__":
    sys.exit(main())
