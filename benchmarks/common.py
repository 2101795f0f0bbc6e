"""What the benchmarks share: timing in turns, tables, and the models that they run."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.load import (
    Drafter,
    Target,
    embedded_drafter_path,
    embedded_target_path,
    load_drafter,
    load_target,
)
from dspark_jax.drafters.dspark import init_params
from dspark_jax.models.config import TransformerConfig
from dspark_jax.training.settings import DrafterSettings, drafter_config

Array = jax.Array
Case = Callable[[], Any]
Samples = dict[str, list[float]]  # case -> seconds of one unit (step, round, pass), one entry a turn


def measure(cases: dict[str, tuple[Case, float]], repeats: int) -> Samples:
    """Seconds per unit of each case, which is a function and the units that one call does; two warm-up calls first."""
    for call, _ in cases.values():
        for _ in range(2):
            jax.block_until_ready(call())
    samples: Samples = {name: [] for name in cases}
    order = list(cases)
    for turn in range(repeats):
        for name in order if turn % 2 == 0 else order[::-1]:
            call, units = cases[name]
            began = time.perf_counter()
            jax.block_until_ready(call())
            samples[name].append((time.perf_counter() - began) / units)
    return samples


def of_turns(samples: Samples, names: Sequence[str], formula: Callable[..., float]) -> float:
    """The median over turns of `formula`, called with the seconds of the named cases in one turn."""
    return statistics.median(formula(*turn) for turn in zip(*(samples[name] for name in names), strict=True))


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table under a heading; floats get three significant digits."""

    def show(x: Any) -> str:
        if not isinstance(x, float):
            return str(x)
        return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.3g}"

    lines = ["| " + " | ".join(map(show, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join((f"\n### {title}\n", *lines))


def report(result: dict[str, Any], path: str | None) -> None:
    """Prints the result as one line of JSON, and writes it to `path`."""
    text = json.dumps(result)
    print("\n" + text)
    if path:
        Path(path).write_text(text + "\n", encoding="utf-8")


def planned_memory(compiled: Any) -> dict[str, float]:
    """What the compiler planned, MB (peak = argument + output - alias + temp); empty where it does not say."""
    plan = compiled.memory_analysis()
    if plan is None:
        return {}
    names = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")
    sizes = {name.split("_")[0]: getattr(plan, name) / 1e6 for name in names}
    return sizes | {"peak": sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]}


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0].device_kind
    return {"backend": jax.default_backend(), "device": device, "cores": cores, "jax": jax.__version__}


def random_drafter(target: TransformerConfig, dtype: str) -> Drafter:
    """An untrained drafter of the embedded one's shape: its times are right, its drafts are not."""
    ids = tuple(-(-i * (target.num_layers - 3) // 4) + 1 for i in range(5))  # 1, 8, 15, 22, 28 of 30 layers
    shape = DrafterSettings(
        num_layers=2,
        target_layer_ids=ids,
        mask_token_id=16,
        draft_vocab_size=min(8192, target.vocab_size),
        markov_rank=64,
    )
    config = drafter_config(shape, target)
    params = init_params(config, jax.random.key(0), jnp.dtype(dtype))
    params["markov"]["w2"] = random_w2(config.draft_vocab_size, config.markov_rank, dtype)
    if config.trims_vocabulary:
        chosen = np.sort(np.random.default_rng(0).choice(target.vocab_size, config.draft_vocab_size, replace=False))
        params["d2t"] = jnp.asarray(chosen - np.arange(len(chosen)), jnp.int32)
    return Drafter(config, params, Path("random"))


def random_w2(rows: int, rank: int, dtype: Any) -> Array:
    """A Markov head's W2 `[rows, rank]`, random."""
    return (jax.random.normal(jax.random.key(1), (rows, rank)) * 0.02).astype(dtype)


def load_models(target_path: str | None, drafter_path: str | None, dtype: str) -> tuple[Target, Drafter]:
    """The target, and its drafter or a random one."""
    target = load_target(target_path or embedded_target_path(), dtype=jnp.dtype(dtype))
    path = drafter_path
    if path is None and target_path is None and Path(embedded_drafter_path()).is_dir():
        path = embedded_drafter_path()
    return target, load_drafter(path, dtype=jnp.dtype(dtype)) if path else random_drafter(target.config, dtype)
