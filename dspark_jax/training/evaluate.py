"""How good a drafter is while it trains: its losses on held-out samples, and the accepted length after their prompts.

Losses come from the training step's own forward pass on any mesh. The accepted length is that of real greedy decoding,
where one process has all devices. The better of the two that there is decides which drafter is the best one so far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.checkpoints.load import Drafter, Target
from dspark_jax.data.hidden_cache import HiddenCache
from dspark_jax.data.pipeline import Pipeline
from dspark_jax.data.records import TrainingSample
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.training.objectives import TrainableConfig
from dspark_jax.training.step import TrainStep, addressable_rows, place_batch

logger = logging.getLogger(__name__)

Params = dict[str, Any]

PREFIX = "held_out_"  # of the names of held-out metrics
SCORES = ("accepted_length", f"{PREFIX}tau_probabilistic")  # what decides, the first that there is


@dataclass(frozen=True)
class Best:
    """The best evaluation so far: what was measured, how much, and after which update."""

    name: str
    value: float
    step: int


def better(best: Best | None, result: dict[str, float], step: int) -> Best | None:
    """The evaluation of this step where it beats the best one (or measures something else), else None.

    A value that is not finite beats nothing.
    """
    name = next((name for name in SCORES if name in result), None)
    if name is None or not np.isfinite(result[name]):
        return None
    if best is not None and best.name == name and best.value >= result[name]:
        return None
    return Best(name, result[name], step)


class HeldOut:
    """Losses on held-out samples."""

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        step: TrainStep,
        mesh: Mesh,
        *,
        batch_size: int,
        max_length: int,
        cache: HiddenCache | None,
    ) -> None:
        """`step` is from `make_eval_step`, without a target where there is a cache, which holds the samples then.

        Args:
            batch_size: N of a forward pass. max_length: T.
        """
        self._step, self._mesh = step, mesh
        rows = addressable_rows(mesh, batch_size)
        self._pipelines = [
            Pipeline(
                samples[start : start + batch_size],
                batch_size=batch_size,
                max_length=max_length,
                seed=0,
                cache=cache,
                rows=rows,
                num_threads=1,
            )
            for start in range(0, len(samples), batch_size)
        ]  # one batch each, the last one with empty rows

    def losses(self, params: Params, frozen: Params) -> dict[str, float]:
        """Means over all samples, by the metrics' names with `held_out_` before them; {} without samples.

        `total` comes as one number for each batch; batches count by their samples.
        """
        sums: dict[str, np.ndarray] = {}
        pending = []
        for pipeline in self._pipelines:
            pending.append(self._step(params, frozen, place_batch(pipeline.batch(0), self._mesh)))
        for pipeline, metrics in zip(self._pipelines, jax.device_get(pending), strict=True):
            for name, pair in metrics.items():
                weight = len(pipeline.samples) if name == "total" else 1
                sums[name] = sums.get(name, np.zeros(2)) + weight * np.asarray(pair, np.float64)
        return {PREFIX + name: float(total / count) for name, (total, count) in sums.items() if count}


def accepted_length(
    target: Target, drafter: Drafter, samples: Sequence[TrainingSample], tokens: int, stop_ids: Sequence[int]
) -> dict[str, float]:
    """Greedy decoding of the samples' prompts: committed tokens per round, tokens, and seconds; {} without prompts.

    Args:
        tokens: tokens to generate for each prompt. stop_ids: tokens that end an answer.
    """
    sampling = SamplingParams(max_tokens=tokens)
    requests = [Request(s.id, tuple(s.input_ids[s.loss_mask == 0].tolist()), sampling) for s in samples]
    requests = [request for request in requests if request.prompt_ids]
    if not requests:
        return {}
    began = time.perf_counter()
    done = list(Generator(target, drafter, stop_ids=tuple(stop_ids)).generate(requests))
    total = sum(len(one.token_ids) - 1 for one in done)
    rounds = sum(one.rounds for one in done)
    seconds = time.perf_counter() - began
    return {"accepted_length": total / max(rounds, 1), "eval_tokens": float(total), "eval_seconds": seconds}


def decoded(
    target: Target,
    config: TrainableConfig,
    weights: Params,
    d2t: np.ndarray | None,
    samples: Sequence[TrainingSample],
    tokens: int,
    stop_ids: Sequence[int],
) -> dict[str, float]:
    """`accepted_length` of the drafter that `weights` make, on one device; {} where that cannot hold the models.

    Args:
        weights: float32, on any mesh of this process. d2t: int32 [Vd] offsets of a reduced vocabulary, or None.
    """
    device = jax.local_devices()[0]
    dtype = target.params["embed"].dtype
    try:
        params = jax.device_put(jax.tree.map(lambda leaf: leaf.astype(dtype), weights), device)
        params |= {} if d2t is None else {"d2t": jnp.asarray(d2t)}
        local = Target(target.config, jax.device_put(target.params, device), target.path)
        return accepted_length(local, Drafter(config, params, target.path), samples, tokens, stop_ids)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        logger.warning("no accepted length: %s cannot hold target and drafter, held-out losses decide", device)
        return {}
