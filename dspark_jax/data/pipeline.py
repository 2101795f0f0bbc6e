"""From samples to batches: shuffled anew in each epoch, and a pure function of (seed, step).

Since batch `step` depends on nothing but the seed and the data, a restarted run simply begins at its step: there is no
state to save. Rows hold one sample or several (`packing`); a process reads the samples of its own rows only. Reading
ahead is grain's. Letters: n samples, N rows of a batch, T tokens of a row, S samples of a row at most, m captured
layers, D hidden.
"""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from dspark_jax.data import packing
from dspark_jax.data.hidden_cache import HiddenCache, check_samples, empty_states, put_rows
from dspark_jax.data.packing import EpochPlan
from dspark_jax.data.records import TrainingSample, sample_id, sample_table

_KEPT_PLANS = 2  # threads that read ahead may be one epoch further


class HostBatch(NamedTuple):
    """A batch in host memory, rows padded on the right.

    Attributes:
        input_ids: int32 [N, T]. loss_mask: uint8 [N, T], 0 on padding.
        sample_ids: uint32 [N, S], a number for each sample of a row; S is 1 where rows are not packed.
        features: [N, T, m*D]. final: [N, T, D]. normalizer: float32 [N, T], log-sum-exp of the target's logits. Arrays,
            the first two also `Quantized`; all three are None where the target runs inside the training step.
        segments: int32 [N, T], 0 on padding, else the token's sample, counted from 1 within its row; None where rows
            are not packed.
    """

    input_ids: Any
    loss_mask: Any
    sample_ids: Any
    features: Any = None
    final: Any = None
    normalizer: Any = None
    segments: Any = None


class Pipeline:
    """Batches of training samples by step.

    In each epoch the samples come in an order of its own, each once; rows that do not fill a last batch are left out.
    Where there are fewer rows than N, every batch holds all of them and empty rows.

    Attributes:
        samples: the data. widths: the values that T takes, ascending. documents: S.
    """

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        *,
        batch_size: int,
        max_length: int,
        seed: int,
        cache: HiddenCache | None = None,
        complete: bool = True,
        pack: bool = False,
        buckets: Sequence[int] = (),
        rows: Collection[int] | None = None,
        num_threads: int = 0,
    ) -> None:
        """Prepare; no tokens are read yet.

        Args:
            samples: the data, no longer than max_length each. batch_size: N. max_length: the largest T.
            seed: of the order, from 0.
            cache: where the hidden states come from; None leaves them out.
            complete: whether the cache must hold all samples now, or only when batches with states are asked for.
            pack: put several samples into a row; T is always max_length then.
            buckets: ascending values of T below max_length: a batch has the smallest that its samples fit in, and
                samples of like length come together. None: T is always max_length.
            rows: rows of a batch that this process loads, in 0..N-1; the others are zeros. None: all.
            num_threads: threads that load batches ahead, at most as many as batches; 0: half the processors, at most 4.

        Raises:
            ValueError: no sample, one that is too long or that the cache does not hold as it is, buckets that do not
                ascend, lie above max_length or come with pack, or a row that there is not.
        """
        if not len(samples):
            raise ValueError("no sample to train on: the records hold none, or all were left out (min_loss_tokens)")
        self.samples = samples
        self._table = sample_table(samples)
        self._batch_size, self._seed, self._cache, self._pack = batch_size, seed, cache, pack
        self._lengths = self._table.lengths
        for number in np.flatnonzero(self._lengths > max_length)[:1]:
            found = f"sample {sample_id(samples, number)!r} has {self._lengths[number]} tokens"
            raise ValueError(f"{found}, max_length is {max_length}")
        self.widths = _check_widths(buckets, max_length, pack)
        self.documents = packing.documents_of_a_row(self._lengths, max_length) if pack else 1
        self._rows = _check_rows(rows, batch_size)
        self._threads = num_threads or max(1, min(4, (os.cpu_count() or 1) // 2))
        self._lock = threading.Lock()
        self._plans: dict[int, EpochPlan] = {}
        self._ends: list[int] = []  # first step behind each epoch, as far as known; for packed rows only
        self._checked = False
        if cache is not None and complete:
            self.check_cache()

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, at least 1.

        Raises:
            ValueError: rows are packed, so that it depends on the epoch: ask `total_steps`.
        """
        if self._pack:
            raise ValueError("steps_per_epoch: differs from epoch to epoch with packed rows, ask total_steps(epochs)")
        return max(1, len(self.samples) // self._batch_size)

    def total_steps(self, epochs: int) -> int:
        """Batches of the first `epochs` epochs. Packed rows are planned to know it, 1 to 2 s per million samples."""
        if not self._pack:
            return epochs * self.steps_per_epoch
        with self._lock:
            while len(self._ends) < epochs:
                self._ends.append((self._ends or [0])[-1] + self._plan_locked(len(self._ends)).steps)
        return self._ends[epochs - 1] if epochs else 0

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return self._locate(step)[0]

    def fingerprint(self) -> str:
        """A checksum of the samples' ids and tokens, in order: two runs with the same one see the same data."""
        total = zlib.crc32(self._table.checksums.astype("<u4").tobytes())
        return f"{len(self.samples)} samples, crc32 {total:08x}"

    def padding(self, epoch: int = 0) -> float:
        """Share of the token slots of an epoch's batches, N*T each, that hold no token."""
        return self._plan(epoch).padding(self._lengths)

    def left_out(self, epoch: int) -> np.ndarray:
        """Numbers of the samples that no batch of an epoch holds, ascending."""
        return np.setdiff1d(np.arange(len(self.samples)), self._plan(epoch).used())

    def width(self, step: int) -> int:
        """T of a step's batch."""
        epoch, inside = self._locate(step)
        return int(self._plan(epoch).widths[inside])

    def indices(self, step: int) -> np.ndarray:
        """Numbers of the samples in a step's batch, row after row."""
        epoch, inside = self._locate(step)
        return np.concatenate(self._plan(epoch).rows(inside))

    def layout(self, step: int) -> list[list[tuple[int, int, int]]]:
        """What each of the N rows of a step's batch holds: (sample number, first token in the row, tokens)."""
        epoch, inside = self._locate(step)
        result = []
        for samples in self._plan(epoch).rows(inside):
            lengths = self._lengths[samples]
            starts = np.cumsum(lengths) - lengths
            result.append(list(zip(samples.tolist(), starts.tolist(), lengths.tolist(), strict=True)))
        return result

    def check_cache(self) -> None:
        """Compare the cache with the samples.

        Raises:
            ValueError: there is no cache, it lacks a sample, or holds another one of the same id.
        """
        if self._cache is None:
            raise ValueError("states: batches with hidden states need a cache, this pipeline has none")
        for number in range(len(self.samples)):
            name = sample_id(self.samples, number)
            if name not in self._cache:
                raise ValueError(f"{self._cache.folder}: sample {name!r} is not in the cache, build it first")
        check_samples(self._cache, self.samples)
        self._checked = True

    def batch(self, step: int, states: bool | None = None) -> HostBatch:
        """The batch of a step; see `batches`."""
        return self._load(step, self._with_states(states))

    def batches(self, start: int, stop: int, prefetch: int = 2, states: bool | None = None) -> Iterator[HostBatch]:
        """Batches of the steps start..stop-1.

        Args:
            prefetch: batches that are loaded ahead, by threads; 0: none, and no thread.
            states: whether with hidden states; None: where there is a cache.

        Raises:
            ValueError: as `check_cache`, at once; or later, samples or states that changed on the disk.
        """
        wanted = self._with_states(states)
        if start >= stop:
            return iter(())
        loaded = grain.MapDataset.range(start, stop).map(lambda step: self._load(step, wanted))
        threads = min(self._threads, prefetch)
        return iter(loaded.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)))

    def _with_states(self, states: bool | None) -> bool:
        wanted = self._cache is not None if states is None else states
        if wanted and not self._checked:
            self.check_cache()
        return wanted

    def _locate(self, step: int) -> tuple[int, int]:
        """(epoch, batch in the epoch) of a step."""
        if not self._pack:
            return divmod(step, self.steps_per_epoch)
        while not self._ends or self._ends[-1] <= step:
            self.total_steps(len(self._ends) + 1)
        epoch = bisect_right(self._ends, step)
        return epoch, step - (self._ends[epoch - 1] if epoch else 0)

    def _plan(self, epoch: int) -> EpochPlan:
        with self._lock:
            return self._plan_locked(epoch)

    def _plan_locked(self, epoch: int) -> EpochPlan:
        """The plan of an epoch; only the last few are kept."""
        if epoch not in self._plans:
            arguments = self._lengths, self._batch_size
            if self._pack:
                plan = packing.plan_packed(*arguments, self.widths[0], self.documents, self._seed, epoch)
            elif len(self.widths) > 1:
                plan = packing.plan_buckets(*arguments, self.widths, self._seed, epoch)
            else:
                plan = packing.plan_rows(*arguments, self.widths[0], self._seed, epoch)
            self._plans = dict([*self._plans.items(), (epoch, plan)][-_KEPT_PLANS:])
        return self._plans[epoch]

    def _load(self, step: int, with_states: bool) -> HostBatch:
        shape = self._batch_size, self.width(step)
        input_ids = np.zeros(shape, np.int32)  # [N, T]
        loss_mask = np.zeros(shape, np.uint8)  # [N, T]
        segments = np.zeros(shape, np.int32)  # [N, T]
        names = np.zeros((shape[0], self.documents), np.uint32)  # [N, S]
        states = empty_states(self._cache.read_key, shape) if with_states and self._cache is not None else {}
        layout = self.layout(step)
        for row in self._rows:
            for place, (number, start, length) in enumerate(layout[row]):
                sample, inside = self.samples[number], slice(start, start + length)
                input_ids[row, inside] = sample.input_ids
                loss_mask[row, inside] = sample.loss_mask
                segments[row, inside] = place + 1
                names[row, place] = self._table.names[number]
                if states and self._cache is not None:
                    cached = self._cache.read(self._cache.number(sample.id))
                    put_rows(states, row, start, cached, length)
        return HostBatch(input_ids, loss_mask, names, **states, segments=segments if self._pack else None)


def _check_widths(buckets: Sequence[int], max_length: int, pack: bool) -> tuple[int, ...]:
    """The values of T, max_length the last; ValueError as `Pipeline`."""
    widths = tuple(buckets)
    if pack and widths:
        raise ValueError(f"buckets {list(widths)} with pack: packed rows all have max_length tokens, drop one of them")
    if widths and (min(widths) < 1 or max(widths) > max_length or list(widths) != sorted(set(widths))):
        raise ValueError(f"buckets {list(widths)}: lengths must ascend and lie in 1..max_length, {max_length}")
    return widths if widths[-1:] == (max_length,) else (*widths, max_length)


def _check_rows(rows: Collection[int] | None, batch_size: int) -> tuple[int, ...]:
    """The rows to load, ascending; ValueError as `Pipeline`."""
    chosen = tuple(range(batch_size)) if rows is None else tuple(sorted(set(rows)))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < batch_size:
        raise ValueError(f"rows {list(chosen)}: must lie in 0..{batch_size - 1}, the rows of a batch")
    return chosen
