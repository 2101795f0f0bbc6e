"""The updates of a run by number: the batch, and the compiled step that takes it, online or with states from a cache.

Where the first epoch fills the cache, its updates run online, and later ones read what it wrote; the loop does not see
the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.data.pipeline import HostBatch, Pipeline
from dspark_jax.data.records import sample_table
from dspark_jax.training.fill import Filler
from dspark_jax.training.log import Counts
from dspark_jax.training.step import Metrics, TrainState, TrainStep, place_batch

Params = dict[str, Any]


@dataclass
class Filling:
    """What the updates need that fill a cache.

    Attributes:
        step: the online step that keeps states. frozen: what it reads, the whole target. filler: takes the states.
        until: updates of the first epoch, after which the cache is read. complete: computes what the cache still lacks.
    """

    step: TrainStep
    frozen: Params
    filler: Filler
    until: int
    complete: Callable[[], None]


class Feed:
    """Batches and updates.

    Attributes:
        pipeline: the data. frozen: what the step reads, on the mesh. total: updates of the whole run.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        step: TrainStep,
        frozen: Params,
        mesh: Mesh,
        *,
        micro_batches: int,
        total: int,
        filling: Filling | None = None,
    ) -> None:
        """`step` is the compiled step of all updates, or of those behind `filling.until`."""
        self.pipeline, self.frozen, self.total = pipeline, frozen, total
        self._step, self._mesh, self._micro_batches = step, mesh, micro_batches
        self._filling = filling
        self._table = sample_table(pipeline.samples)

    def batches(self, first: int) -> Iterator[tuple[int, HostBatch]]:
        """(number of the update, its batch) of the updates behind `first`, read ahead; updates count from 1.

        Raises:
            ValueError, OSError: samples or states that cannot be read, a cache that cannot be completed.
        """
        if self._filling is not None:
            until = self._filling.until
            batches = self.pipeline.batches(first, min(until, self.total), states=False)
            yield from enumerate(batches, start=first + 1)
            if until <= self.total:
                self._finish_filling()
            first = max(first, until)
        yield from enumerate(self.pipeline.batches(first, self.total), start=first + 1)

    def update(self, state: TrainState, number: int, batch: HostBatch) -> tuple[TrainState, Metrics]:
        """The state after update `number`, and its metrics as pairs (sum, count); `state` is consumed."""
        placed = place_batch(batch, self._mesh, self._micro_batches)
        epoch = jnp.int32(self.epoch(number))
        if self._filling is None:
            return self._step(state, self.frozen, placed, epoch)
        state, metrics, states = self._filling.step(state, self._filling.frozen, placed, epoch)
        self._filling.filler.put(number - 1, states, self.frozen)
        return state, metrics

    def epoch(self, number: int) -> int:
        """The epoch of an update, from 0."""
        return self.pipeline.epoch(number - 1)

    def counts(self, number: int) -> Counts:
        """What the batch of an update holds, over all processes."""
        layout = self.pipeline.layout(number - 1)
        samples = [sample for row in layout for sample, _, _ in row]
        tokens, supervised = (int(column[samples].sum()) for column in (self._table.lengths, self._table.supervised))
        return Counts(tokens, supervised, len(layout) * self.pipeline.width(number - 1))

    def commit(self) -> None:
        """Before a checkpoint: what a cache was filled with until now is on the disk.

        Raises:
            OSError: it could not be written.
        """
        if self._filling is not None:
            self._filling.filler.commit()

    def close(self) -> None:
        """Put what was taken for the cache on the disk, and let others write into it."""
        if self._filling is not None:
            self._filling.filler.close()

    def _finish_filling(self) -> None:
        assert self._filling is not None
        self._filling.filler.close()
        self._filling.complete()
        self._filling = None  # with it goes the target from the devices, unless evaluations decode with it
