"""The simulator against the engine: throughput of every system at every load that `benchmarks/load.py` measured.

    python benchmarks/load.py --prompts DIR --curve CURVE.json --json load.json
    dspark calibrate --prompts DIR/*.jsonl --temperature 0 --fit-lines even --test-lines none --records-out rounds.npz
    python benchmarks/simulator.py --load load.json --curve CURVE.json --records rounds.npz

The records must be of the prompts, the temperature and the answer length of the load. The simulated engine has the
slots, the chunks and the looks of the measured one; it is measured in its steady state, over more answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from common import report, table
from load import limits_of

from dspark_jax.evaluation.loads import Load
from dspark_jax.evaluation.replay import make_replay
from dspark_jax.evaluation.simulate_command import SimulateSettings, read_curve, read_rounds
from dspark_jax.evaluation.simulator import EngineSettings, simulate


@dataclass(frozen=True)
class Options:
    """Compare simulated with measured throughput.

    Attributes:
        load: results of `benchmarks/load.py`. curve: the one that they were made with. records: of `dspark calibrate`.
        requests: answers that are simulated at each load. seeds: orders of requests, averaged.
        json: file for the results.
    """

    load: Path
    curve: Path
    records: tuple[Path, ...]
    requests: int = 200
    seeds: int = 3
    json: str | None = None


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    measured = json.loads(options.load.read_text(encoding="utf-8"))
    how = measured["options"]
    curve, _ = read_curve(options.curve)
    parts, calibration = read_rounds(SimulateSettings(options.curve, options.records))
    limits = limits_of(int(how["max_tokens"]), sum(len(part.tokens) for part in parts))
    replay = make_replay(parts, calibration, limits)
    results: dict[str, dict[str, Any]] = {}
    rows = []
    for name, entry in measured["results"].items():
        clients = int(name)
        settings = EngineSettings((1 << (clients - 1).bit_length(),), int(how["rounds"]), prefill_chunk=256)
        load = Load("closed", clients, options.requests, clients)
        results[name] = {}
        for system, one in entry.items():
            done = [simulate(system, load, replay, curve, settings, seed=seed) for seed in range(options.seeds)]
            simulated = sum(result.tokens_per_second for result in done) / len(done)
            real = one["tokens_per_second"]
            budget = sum(result.budget or 0.0 for result in done) / len(done)
            results[name][system] = {"engine": real, "simulated": simulated, "ratio": simulated / real}
            rows.append([clients, system, real, simulated, simulated / real, one["budget"], budget])
    header = ["load", "system", "engine tokens/s", "simulated", "ratio", "budget", "simulated"]
    print(table("Simulator against engine", header, rows))
    report(results, options.json)


if __name__ == "__main__":
    main()
