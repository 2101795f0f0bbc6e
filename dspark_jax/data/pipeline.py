"""From samples to batches of one shape: shuffled anew in each epoch, and a pure function of (seed, step).

Since batch `step` depends on nothing but the seed and the data, a restarted run simply begins at its step: there is no
state to save. Order and prefetching are grain's. Letters: N sequences of a batch, T tokens, m captured layers, D
hidden.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grain
import numpy as np

from dspark_jax.data.hidden_cache import HiddenCache, check_sample
from dspark_jax.data.records import TrainingSample


class HostBatch(NamedTuple):
    """A batch in host memory, sequences padded on the right.

    Attributes:
        input_ids: int32 [N, T]. loss_mask: uint8 [N, T], 0 on padding. sample_ids: uint32 [N], a number per sample.
        features: [N, T, m*D]. final: [N, T, D]. normalizer: float32 [N, T], log-sum-exp of the target's logits. All
            three are None where the target runs inside the training step.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    sample_ids: np.ndarray
    features: np.ndarray | None = None
    final: np.ndarray | None = None
    normalizer: np.ndarray | None = None


class Pipeline:
    """Batches of training samples by step.

    In each epoch the samples come in an order of its own and a last incomplete batch is left out; where there are fewer
    samples than N, every batch holds all of them and empty sequences.

    Attributes:
        steps_per_epoch: batches of an epoch, at least 1.
    """

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        *,
        batch_size: int,
        max_length: int,
        seed: int,
        cache: HiddenCache | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            samples: the data, no longer than max_length each. batch_size: N. max_length: T. seed: of the order.
            cache: where the hidden states come from; None leaves `features` and `final` out.

        Raises:
            ValueError: no sample, a sample that is too long, or one that the cache does not hold as it is.
        """
        if not samples:
            raise ValueError("no sample to train on: the records hold none, or all were left out (min_loss_tokens)")
        for sample in samples:
            if len(sample.input_ids) > max_length:
                raise ValueError(f"sample {sample.id!r} has {len(sample.input_ids)} tokens, max_length is {max_length}")
            if cache is not None:
                if sample.id not in cache:
                    raise ValueError(f"{cache.folder}: sample {sample.id!r} is not in the cache, build it first")
                check_sample(cache, sample)
        self._samples = samples
        self._cache = cache
        self._shape = (batch_size, max_length)
        self._names = np.asarray([zlib.crc32(sample.id.encode()) for sample in samples], np.uint32)
        self.steps_per_epoch = max(1, len(samples) // batch_size)
        order_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._order = (
            grain.MapDataset.range(len(samples))
            .shuffle(seed=order_seed)
            .batch(batch_size, drop_remainder=len(samples) >= batch_size)
            .repeat()
        )

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return step // self.steps_per_epoch

    def fingerprint(self) -> str:
        """A checksum of the samples' ids and tokens, in order: two runs with the same one see the same data."""
        total = 0
        for sample in self._samples:
            for part in (sample.id.encode(), sample.input_ids.tobytes(), sample.loss_mask.tobytes()):
                total = zlib.crc32(part, total)
        return f"{len(self._samples)} samples, crc32 {total:08x}"

    def indices(self, step: int) -> np.ndarray:
        """Numbers of the samples in a step's batch, at most N."""
        return np.asarray(self._order[step])

    def batch(self, step: int) -> HostBatch:
        """The batch of a step."""
        return self._load(self.indices(step))

    def batches(self, start: int, stop: int, prefetch: int = 2) -> Iterator[HostBatch]:
        """Batches of the steps start..stop-1, read ahead in a thread."""
        loaded = self._order.map(self._load)[start:stop]
        return iter(loaded.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))

    def _load(self, indices: np.ndarray) -> HostBatch:
        input_ids = np.zeros(self._shape, np.int32)  # [N, T]
        loss_mask = np.zeros(self._shape, np.uint8)  # [N, T]
        names = np.zeros(self._shape[0], np.uint32)  # [N]
        names[: len(indices)] = self._names[indices]
        states: dict[str, np.ndarray] = {}
        if self._cache is not None:
            for name in ("features", "final", "normalizer"):
                dtype, width = self._cache.key.fields[name]
                states[name] = np.zeros(self._shape if width == 1 else (*self._shape, width), dtype)
        for row, index in enumerate(indices):
            sample = self._samples[index]
            length = len(sample.input_ids)
            input_ids[row, :length] = sample.input_ids
            loss_mask[row, :length] = sample.loss_mask
            if self._cache is not None:
                cached = self._cache.read(self._cache.number(sample.id))
                for name, array in states.items():
                    array[row, :length] = getattr(cached, name)[:length]
        return HostBatch(input_ids, loss_mask, names, **states)
