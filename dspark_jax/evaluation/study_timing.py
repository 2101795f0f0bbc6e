"""Timings of studies, on this machine: whole rounds by sequential head, drafts by vocabulary.

What is compared takes turns, forwards and then backwards, so that a machine whose speed drifts slows all of it alike;
ratios are medians of the ratios within a turn. Timings are kept in a file: a study that is made again shows the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.load import Drafter
from dspark_jax.config import replace_json
from dspark_jax.decoding.budget import PLAIN
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import init_params
from dspark_jax.evaluation.study_run import digest
from dspark_jax.profiling.measure import Models, Rounds, Timing

Case = Callable[[], float]  # gives the seconds of a round
Samples = dict[str, list[float]]  # seconds by case, one a turn


def untrained(config: DrafterConfig, dtype: Any) -> Drafter:
    """A drafter of this shape with random weights, which drafts the first tokens where it trims the vocabulary: its
    times are right, its drafts mean nothing."""
    params = init_params(config, jax.random.key(0), dtype)
    if config.trims_vocabulary:
        params["d2t"] = jnp.zeros(config.draft_vocab_size, jnp.int32)
    return Drafter(config, params, Path("untrained"))


def rounds_of(models: Models, slots: int, context: int, seconds: float, whole: bool) -> dict[str, Case]:
    """Cases `draft` (rounds of `slots` slots with a draft) and `plain` (without), each of about `seconds` a call.

    Args:
        context: tokens of the caches. whole: verify whole blocks; else one row a slot, as without a draft.
    """
    bench = Rounds(models, slots, context)
    bench.buckets = bench.buckets[-1:] if whole else bench.buckets[:1]  # only what is timed is compiled

    def case(force: int) -> Case:
        bench.run(force, 1)  # the first one compiles
        once = bench.run(force, 1).seconds
        rounds = min(max(math.ceil(seconds / once), 1), bench.most)
        calls = max(math.ceil(seconds / (once * rounds)), 1)

        def run() -> float:
            taken = bench.run(force, rounds, calls)
            return taken.seconds / taken.rounds

        return run

    return {"draft": case(0), "plain": case(PLAIN)}


def in_turns(cases: Mapping[str, Case], repeats: int) -> Samples:
    """Seconds of each case, `repeats` times."""
    samples: Samples = {name: [] for name in cases}
    order = list(cases)
    for repeat in range(repeats):
        for name in order[:: 1 if repeat % 2 == 0 else -1]:
            samples[name].append(cases[name]())
    return samples


def kept(file: Path, key: Mapping[str, Any], measure: Callable[[], Samples]) -> Samples:
    """The samples in `file`, where they are of this key, else measured and kept there."""
    named = digest(key, 16)
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.get("key") == named:
            return found["samples"]
    samples = measure()
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_json(file, {"key": named, "of": dict(key), "samples": samples})
    return samples


def median(samples: Sequence[float]) -> float:
    """Median."""
    return float(np.median(samples))


def ratio(samples: Samples, one: str, other: str) -> tuple[float, float, float]:
    """Median of one by the other within a turn, and its quartiles."""
    ratios = np.asarray(samples[one]) / np.asarray(samples[other])
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return float(middle), float(low), float(high)


def head_rounds(target: Any, drafters: Mapping[str, Drafter], slots: int, context: int, timing: Timing) -> Samples:
    """Seconds of a round of `slots` slots that verifies whole blocks, by drafter."""
    cases: dict[str, Case] = {}
    for name, drafter in drafters.items():
        models = Models(target, drafter, stop_ids=())
        cases[name] = rounds_of(models, slots, context, timing.seconds, whole=True)["draft"]
    return in_turns(cases, timing.repeats)


def draft_rounds(target: Any, drafters: Mapping[str, Drafter], slots: int, context: int, timing: Timing) -> Samples:
    """Seconds of a round with a draft, by drafter, and of one without (`NAME plain`); both verify a row a slot."""
    cases: dict[str, Case] = {}
    for name, drafter in drafters.items():
        found = rounds_of(Models(target, drafter, stop_ids=()), slots, context, timing.seconds, whole=False)
        cases |= {name: found["draft"], f"{name} plain": found["plain"]}
    return in_turns(cases, timing.repeats)
