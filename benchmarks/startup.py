"""Start-up of the engine: seconds to the first token, with an empty and a filled compilation cache, by bucket count.

    python benchmarks/startup.py --json startup.json

Each case is a process of its own. It loads the models, compiles every program of one number of slots ahead of time
(prompts of up to 64 tokens, caches of 256 tokens, the schedule `causal`), and answers one prompt.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from common import report, table

SLOTS, BLOCK = 4, 7
BUCKETS: dict[int, tuple[int, ...]] = {
    1: (32,),
    2: (4, 32),
    4: (4, 8, 16, 32),
    8: (4, 8, 12, 16, 20, 24, 28, 32),
}


@dataclass(frozen=True)
class Options:
    """Measure the engine's start-up.

    Attributes:
        counts: numbers of buckets, of 1, 2, 4 and 8.
        turns: runs of each case with a filled cache; one is made with an empty one.
        json: file for the results.
        child: (internal) number of buckets that this process runs.
        cache: (internal) its compilation cache.
    """

    counts: tuple[int, ...] = tuple(BUCKETS)
    turns: int = 2
    json: str | None = None
    child: int = 0
    cache: str | None = None


def child(count: int, cache: str, began: float) -> dict[str, float]:
    """What one process does, in seconds since it began."""
    from dspark_jax.checkpoints.load import embedded_drafter_path, embedded_target_path, load_drafter, load_target
    from dspark_jax.config import auto_dtype, keep_programs
    from dspark_jax.decoding.engine import Engine
    from dspark_jax.decoding.generate import Generator, Request
    from dspark_jax.decoding.sampling import SamplingParams

    keep_programs(cache)
    dtype = auto_dtype()
    target = load_target(embedded_target_path(), dtype=dtype)
    drafter = load_drafter(embedded_drafter_path(), dtype=dtype, target=target.config)
    loaded = time.perf_counter() - began
    generator = Generator(target, drafter, SLOTS, "causal", buckets=BUCKETS[count])
    engine = Engine(generator)
    engine.warm_up(longest=240, longest_prompt=64, modes=("greedy",))
    warm = time.perf_counter() - began
    with engine:
        next(iter(engine.submit(Request("a", tuple(range(40, 80)), SamplingParams(max_tokens=8)))))
        first = time.perf_counter() - began
    return {"loaded": loaded, "compiled": warm - loaded, "first_token": first}


def run(count: int, cache: str) -> dict[str, float]:
    """One process; its own figures, and `process`: until it had ended, interpreter and imports included."""
    began = time.perf_counter()
    words = [sys.executable, __file__, "--child", str(count), "--cache", cache]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"process": time.perf_counter() - began}


def main() -> None:
    began = time.perf_counter()
    options = tyro.cli(Options, description=__doc__)
    if options.child:
        print(json.dumps(child(options.child, options.cache or "", began)))
        return
    results: dict[str, Any] = {}
    rows = []
    for count in options.counts:
        with tempfile.TemporaryDirectory() as folder:
            cold = run(count, folder)
            size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            warm = min((run(count, folder) for _ in range(options.turns)), key=lambda one: one["first_token"])
        results[str(count)] = {"cold": cold, "warm": warm, "cache_bytes": size}
        row = [cold["first_token"], cold["compiled"], warm["first_token"], warm["compiled"], warm["loaded"], size / 1e6]
        rows.append([count, *row])
        print(f"{count} buckets: {cold['first_token']:.1f} s cold, {warm['first_token']:.1f} s warm", flush=True)
    header = [
        "buckets",
        "first token s, cold",
        "compiling s, cold",
        "first token s, warm",
        "compiling s, warm",
        "loading s",
    ]
    print(table("Seconds to the first token", [*header, "cache MB"], rows))
    report(results, options.json)


if __name__ == "__main__":
    main()
