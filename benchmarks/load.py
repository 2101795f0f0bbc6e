"""Throughput of the engine under load: plain decoding, whole blocks, and both budgets, in turns.

    python benchmarks/load.py --prompts DIR --curve CURVE.json --json load.json --plot load.png

A closed loop: N requests are there all the time, each that ends is replaced at once; prompts of many domains, answers
of different lengths. What counts are the tokens and the seconds of the engine between the N-th answer and the last one,
with prefills; what is still at work then is cancelled. The systems take turns at each load, and ratios are of runs of a
turn (their median), so that a machine whose speed drifts slows all of them alike.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from common import report, table

from dspark_jax.checkpoints.load import embedded_drafter_path, embedded_target_path, load_drafter, load_target
from dspark_jax.checkpoints.tokenizer import prompt_ids
from dspark_jax.config import auto_dtype
from dspark_jax.data.prompts import iter_prompts
from dspark_jax.decoding.batching import Event, capacity_for
from dspark_jax.decoding.curve import Curve
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.statistics import Statistics
from dspark_jax.profiling.curves import load_curve

SCHEDULES = {"plain": "fixed", "fixed": "fixed", "causal": "causal", "async": "async"}


@dataclass(frozen=True)
class Options:
    """Measure the engine's throughput at several loads.

    Attributes:
        prompts: folder of JSONL files; their even lines are used.
        curve: throughput curve of this machine and these models (`dspark profile`).
        domains: names of the files.
        loads: numbers of requests at work at once.
        systems: plain (no drafter), fixed (whole blocks), causal and async.
        answers: that are measured at each load; 0: as many as the load, but 12 at least.
        turns: runs of each system and load.
        temperature: of sampling; 0 is greedy.
        max_tokens: of an answer on average; from half of it to half more. longest: of a prompt, tokens.
        rounds: rounds between two looks of the host.
        drafter: a folder; the embedded one by default.
        json: file for the results; loads that it has from an earlier call are kept. plot: file for the picture (PNG).
    """

    prompts: Path
    curve: Path
    domains: tuple[str, ...] = ("gsm8k", "math500", "mbpp", "humaneval", "mt-bench")
    loads: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    systems: tuple[str, ...] = ("plain", "fixed", "causal", "async")
    answers: int = 0
    turns: int = 3
    temperature: float = 0.0
    max_tokens: int = 64
    longest: int = 120
    rounds: int = 4
    drafter: str | None = None
    json: Path | None = None
    plot: Path | None = None


@dataclass
class Loop:
    """`load` requests at work at once; counts what comes between as many answers and `answers` more."""

    engine: Engine
    requests: Iterator[Request]
    load: int
    answers: int
    done: int = 0
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    finished: threading.Event = field(default_factory=threading.Event)
    speeds: list[float] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        """In the engine's thread."""
        if event.completion is None or self.finished.is_set():
            return
        self.done += 1
        if self.done > self.load:
            self.speeds.append(len(event.completion.token_ids) / event.completion.seconds)
        if self.done == self.load:
            self.before = copy.deepcopy(vars(self.engine.batch.statistics))
        if self.done == self.load + self.answers:
            self.after = copy.deepcopy(vars(self.engine.batch.statistics))
            self.finished.set()
        else:
            self.engine.submit(next(self.requests), self.hear)

    def run(self) -> dict[str, Any]:
        """One run, by the engine's statistics of the measured part."""
        self.engine.start()
        for _ in range(self.load):
            self.engine.submit(next(self.requests), self.hear)
        self.finished.wait()
        self.engine.close(drain=False)
        did = Statistics()
        for name in vars(did):
            if not name.startswith("_"):
                setattr(did, name, self.after[name] - self.before[name])
        return {
            "tokens_per_second": did.tokens / did.busy_seconds,
            "tokens_per_second_per_user": statistics.median(self.speeds),
            "engine": did.as_json(),
        }


def prompts_of(options: Options, target: Any) -> list[tuple[int, ...]]:
    """Prompts of all domains in turn, as ids."""
    columns = []
    for domain in options.domains:
        ids = (
            prompt_ids(target.tokenizer, r.messages)
            for r in iter_prompts(str(options.prompts / f"{domain}.jsonl"), line_filter="even")
        )
        columns.append(list(itertools.islice((i for i in ids if len(i) <= options.longest), 64)))
    return [ids for row in itertools.zip_longest(*columns) for ids in row if ids is not None]


def make(system: str, options: Options, target: Any, drafter: Any, curve: Curve, slots: int) -> Generator:
    return Generator(
        target,
        None if system == "plain" else drafter,
        batch_size=slots,
        schedule=SCHEDULES[system],  # type: ignore[arg-type]
        curve=curve,
        prefill_chunk=256,
    )


def limits_of(max_tokens: int, count: int) -> list[int]:
    """Tokens of so many answers: from half of `max_tokens` to half more, the same ones every time."""
    return np.random.default_rng(0).integers(max_tokens // 2, max_tokens * 3 // 2, count, endpoint=True).tolist()


def requests_of(options: Options, prompts: list[tuple[int, ...]]) -> Iterator[Request]:
    """Requests without end; the same ones for every system."""
    limits = limits_of(options.max_tokens, len(prompts))
    for i in itertools.count():
        which = i % len(prompts)
        sampling = SamplingParams(options.temperature, max_tokens=limits[which])
        yield Request(str(i), prompts[which], sampling)


def at_load(
    options: Options, load: int, target: Any, drafter: Any, curve: Curve, prompts: list[tuple[int, ...]]
) -> dict[str, Any]:
    """All systems at one load, in turns, each warmed up."""
    slots = 1 << (load - 1).bit_length()  # the power of two that holds it
    engines = {name: make(name, options, target, drafter, curve, slots) for name in options.systems}
    mode = SamplingParams(options.temperature).mode
    for generator in engines.values():
        warm = Engine(generator, options.rounds)
        end = options.longest + options.max_tokens * 3 // 2
        warm.warm_up(end, options.longest, (mode,))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for turn in range(options.turns):
        for name in list(engines)[:: 1 if turn % 2 == 0 else -1]:
            engine, answers = Engine(engines[name], options.rounds), options.answers or max(load, 12)
            loop = Loop(engine, requests_of(options, prompts), load, answers)
            runs[name].append(loop.run())
            print(f"load {load} {name}: {runs[name][-1]['tokens_per_second']:.1f} tokens/s", flush=True)
    return {name: summary(entries) for name, entries in runs.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the runs; all of them beside."""
    names = ("tokens_per_second", "tokens_per_second_per_user")
    of_engine = ("accepted_length", "budget", "padding")
    medians = {name: statistics.median(run[name] for run in runs) for name in names}
    medians |= {name: statistics.median(run["engine"][name] for run in runs) for name in of_engine}
    medians["host"] = statistics.median(run["engine"]["time_shares"]["host"] for run in runs)
    medians["drafted"] = statistics.median(
        run["engine"]["drafted_rounds"] / max(run["engine"]["rounds"], 1) for run in runs
    )
    return medians | {"runs": runs}


def ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Throughput of one system against another's: the median over turns."""
    pairs = zip(one["runs"], other["runs"], strict=True)
    return statistics.median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs)


def show(results: dict[str, dict[str, Any]]) -> str:
    """The table: tokens per second, and each budget against the better of plain and fixed."""
    rows = []
    for load, entry in results.items():
        speed = {name: one["tokens_per_second"] for name, one in entry.items()}
        best = max((name for name in ("plain", "fixed") if name in speed), key=lambda name: speed[name])
        row: list[Any] = [load, *(round(s, 1) for s in speed.values())]
        for name in ("causal", "async"):
            if name in entry:
                one = entry[name]
                row += [
                    f"{ratio(one, entry[best]):.3f}",
                    f"{one['budget']:.2f}",
                    f"{one['padding']:.1%}",
                    f"{one['host']:.2%}",
                ]
        rows.append(row)
    names = [name for name in ("causal", "async") if name in next(iter(results.values()))]
    extra = [f"{name} {what}" for name in names for what in ("/ best", "budget", "padding", "host")]
    return table("Tokens per second under load", ["load", *next(iter(results.values())), *extra], rows)


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Throughput and budget against load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    loads = [int(load) for load in results]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for number, name in enumerate(next(iter(results.values()))):
        style = {"marker": "o", "label": name, "color": f"C{number}"}
        left.plot(loads, [entry[name]["tokens_per_second"] for entry in results.values()], **style)
        if name != "plain":
            right.plot(loads, [entry[name]["budget"] for entry in results.values()], **style)
    for axis, title in ((left, "tokens per second"), (right, "verified rows of a request and round")):
        axis.set(xscale="log", xlabel="concurrent requests", title=title, xticks=loads, xticklabels=loads)
        axis.set_ylim(bottom=0)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    dtype = auto_dtype()
    target = load_target(embedded_target_path(), dtype=dtype)
    drafter = load_drafter(options.drafter or embedded_drafter_path(), dtype=dtype, target=target.config)
    curve = load_curve(options.curve).curve
    prompts = prompts_of(options, target)
    print(
        f"{len(prompts)} prompts, caches of {capacity_for(options.longest + options.max_tokens * 3 // 2 + 8)} tokens",
        flush=True,
    )
    results: dict[str, dict[str, Any]] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))["results"]
    for load in options.loads:
        results[str(load)] = at_load(options, load, target, drafter, curve, prompts)
        if options.json:
            options.json.write_text(
                json.dumps({"options": vars(options) | {}, "results": results}, default=str), encoding="utf-8"
            )
    print(show(results))
    if options.plot:
        draw(results, options.plot)
    report(
        {
            "dtype": dtype,
            "results": {
                k: {n: {a: b for a, b in e.items() if a != "runs"} for n, e in v.items()} for k, v in results.items()
            },
        },
        None,
    )


if __name__ == "__main__":
    main()
