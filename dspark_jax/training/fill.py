"""A cache of hidden states that the first epoch fills while it trains.

The training step hands out the states that it computed; they are brought into the cache's form on the devices, and a
thread writes them while the devices go on. Each process writes the rows that it answers for. What the first epoch does
not see (rows that fill no batch) or a killed job lost is computed at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.data.hidden_cache import CacheKey, HiddenCache, stored_states
from dspark_jax.data.pipeline import Pipeline
from dspark_jax.data.quantized import dequantize
from dspark_jax.training.distributed import own_rows
from dspark_jax.training.losses import target_normalizer
from dspark_jax.training.step import States, TrainStep, batch_sharding, shared_parts

Params = dict[str, Any]


class Filler:
    """Writes the states of training steps into a cache."""

    def __init__(self, cache: HiddenCache, pipeline: Pipeline, mesh: Mesh, micro_batches: int, softcap: float) -> None:
        """Take the right to write.

        Args:
            cache: still without some samples. pipeline: whose batches are trained on. mesh, micro_batches: of the step.
            softcap: of the target's logits, 0 for none.

        Raises:
            ValueError: another run writes into this cache.
        """
        cache.open_for_writing()
        self._cache, self._pipeline, self._mesh, self._micro_batches = cache, pipeline, mesh, micro_batches
        self._stored = _storing(cache.key, mesh, softcap)
        self._thread = ThreadPoolExecutor(1, "cache")
        self._writing: Future[None] | None = None

    def put(self, step: int, states: States, frozen: Params) -> None:
        """Take the states of the batch of a step (from 0); waits until those of the one before it are written.

        Raises:
            OSError: a write failed; ValueError: states that are not finite.
        """
        kept = self._stored(states, frozen)
        self._wait()
        self._writing = self._thread.submit(self._write, step, kept)

    def commit(self) -> None:
        """Put all that was taken on the disk.

        Raises:
            OSError, ValueError: as `put`.
        """
        self._wait()
        self._cache.commit()

    def close(self) -> None:
        """Commit, and let others write."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            self._cache.close()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, step: int, kept: Any) -> None:
        layout = self._pipeline.layout(step)
        own = own_rows(self._mesh, len(layout), self._micro_batches)
        for row, (features, final, normalizer) in local_rows(kept):
            if row not in own:
                continue
            for number, start, length in layout[row]:
                parts = jax.tree.map(lambda x, s=start, n=length: x[s : s + n], (features, final, normalizer))
                self._cache.append_states(self._pipeline.samples[number], *parts)


def local_rows(tree: Any) -> Iterator[tuple[int, Any]]:
    """(row of the batch, its part of the tree, as numpy arrays [T, ...]) of the rows on this process's devices, once.

    Args:
        tree: pytree of arrays [M, N / M, T, ...], placed as `batch_sharding` says.
    """
    leaves, structure = jax.tree.flatten(tree)
    per_pass = leaves[0].shape[1]
    seen: set[int] = set()
    for shards in zip(*(leaf.addressable_shards for leaf in leaves), strict=True):
        first = shards[0].index[1].start or 0
        if first in seen:  # devices that share their rows hold the same ones
            continue
        seen.add(first)
        parts = [np.asarray(shard.data) for shard in shards]
        for number, inner in np.ndindex(parts[0].shape[:2]):
            yield number * per_pass + first + inner, jax.tree.unflatten(structure, [p[number, inner] for p in parts])


def _storing(key: CacheKey, mesh: Mesh, softcap: float) -> TrainStep:
    """(states, frozen) -> features, final and normalizer (of the stored `final`) as the cache has them."""

    def store(states: States, frozen: Params) -> tuple[Any, Any, jax.Array]:
        features, final = stored_states(key, states.features, states.final)
        if not key.quantized and final.dtype == states.final.dtype:
            return features, final, states.normalizer
        head = shared_parts(frozen, states.final.dtype)["head"]
        read = dequantize(final, head.dtype) if key.quantized else final
        flat = read.reshape(-1, read.shape[-1]).T  # [D, M * N / M * T]
        normalizer = target_normalizer(head, flat, softcap, states.final.shape[0] * states.final.shape[1])
        return features, final, normalizer.reshape(states.normalizer.shape)

    return TrainStep(store, mesh, out_shardings=batch_sharding(mesh))
