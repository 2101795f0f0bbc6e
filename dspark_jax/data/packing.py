"""Which samples stand in which row of which batch in an epoch, from their lengths alone.

A plan is a pure function of (lengths, seed, epoch): samples are shuffled, brought into rows of T tokens, and the rows
into batches. Three ways to make rows: one sample each; one sample each with samples of like length in one batch, so
that a batch is no longer than it must be (length bucketing); several whole samples a row (packing), by best fit, the
longest first, within windows of the shuffled order.

Letters: n samples, N rows of a batch, T tokens of a row, S samples of a row at most, R rows of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BUCKET_WINDOW = 64  # batches that are formed together, of samples sorted by length
_WINDOW_ROWS = 256  # rows, about, that are packed together: the last one of a window stays half empty
_WINDOW = (256, 4096)  # samples of a packing window, at least and at most
_BLOCK = 64  # windows that are packed at once, side by side: what fits into a processor's cache


@dataclass(frozen=True)
class EpochPlan:
    """The rows of an epoch.

    Attributes:
        samples: int [k], sample numbers, row after row. bounds: int [R+1]: row r holds samples[bounds[r]:bounds[r+1]].
        batch_size: N. widths: int [steps], T of each batch. Batch b holds the rows b*N..b*N+N-1, as far as there are
            any; rows behind the last batch are left out of the epoch.
    """

    samples: np.ndarray
    bounds: np.ndarray
    batch_size: int
    widths: np.ndarray

    @property
    def steps(self) -> int:
        """Batches of the epoch, at least 1."""
        return len(self.widths)

    def row(self, number: int) -> np.ndarray:
        """Sample numbers of a row, in their order; none behind the last row."""
        if number >= len(self.bounds) - 1:
            return self.samples[:0]
        return self.samples[self.bounds[number] : self.bounds[number + 1]]

    def rows(self, step: int) -> list[np.ndarray]:
        """Sample numbers of each of the N rows of a batch."""
        return [self.row(number) for number in range(step * self.batch_size, (step + 1) * self.batch_size)]

    def used(self) -> np.ndarray:
        """Numbers of the samples that are in a batch."""
        rows = min(self.steps * self.batch_size, len(self.bounds) - 1)
        return self.samples[: self.bounds[rows]]

    def padding(self, lengths: np.ndarray) -> float:
        """Share of the epoch's token slots, batch by batch N*T, that hold no token; `lengths` int [n]."""
        slots = self.batch_size * int(self.widths.sum(dtype=np.int64))
        return 1.0 - int(lengths[self.used()].sum(dtype=np.int64)) / slots


def shuffled(count: int, seed: int, epoch: int, stream: int = 0) -> np.ndarray:
    """The numbers 0..count-1 in a random order of (seed, epoch, stream): int64 [count].

    Sorted by raw bits of Philox, which, unlike the methods of numpy's generators, no numpy version may change.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch, stream])).random_raw(count)
    return np.argsort(bits, kind="stable")


def plan_rows(lengths: np.ndarray, batch_size: int, width: int, seed: int, epoch: int) -> EpochPlan:
    """One sample a row, every batch of the same T: `width`. lengths: int [n], n >= 1."""
    return _plan(shuffled(len(lengths), seed, epoch), np.arange(len(lengths) + 1), batch_size, width)


def plan_buckets(lengths: np.ndarray, batch_size: int, widths: Sequence[int], seed: int, epoch: int) -> EpochPlan:
    """One sample a row; samples of like length come together, and a batch has the smallest T that holds them.

    Args:
        lengths: int [n], n >= 1, none above the last of widths. widths: the T there are, ascending.
    """
    order = shuffled(len(lengths), seed, epoch)
    order = order[: max(len(order) // batch_size * batch_size, min(len(order), batch_size))]  # whole batches
    window = _BUCKET_WINDOW * batch_size
    order = order[np.lexsort((lengths[order], np.arange(len(order)) // window))]  # by length within windows
    starts = np.arange(0, len(order), batch_size)  # [steps]
    longest = np.maximum.reduceat(lengths[order], starts)  # [steps]
    fitting = np.asarray(widths)[np.searchsorted(widths, longest)]  # [steps]
    turn = shuffled(len(starts), seed, epoch, stream=1)
    if len(starts) > 1:
        order = order.reshape(-1, batch_size)[turn].ravel()
    return EpochPlan(order, np.arange(len(order) + 1), batch_size, fitting[turn])


def plan_packed(lengths: np.ndarray, batch_size: int, width: int, documents: int, seed: int, epoch: int) -> EpochPlan:
    """Several whole samples a row of T = `width` tokens.

    Args:
        lengths: int [n], n >= 1, none above width. documents: S.
    """
    order = shuffled(len(lengths), seed, epoch)
    rows = pack(lengths[order], width, documents)  # [n]
    turn = shuffled(int(rows.max()) + 1, seed, epoch, stream=1)
    place = np.argsort(turn)[rows]  # [n], the row's place in the epoch
    counts = np.bincount(place, minlength=len(turn))  # [R]
    bounds = np.concatenate([[0], np.cumsum(counts)])
    return _plan(order[np.argsort(place, kind="stable")], bounds, batch_size, width)


def _plan(samples: np.ndarray, bounds: np.ndarray, batch_size: int, width: int) -> EpochPlan:
    steps = max(1, (len(bounds) - 1) // batch_size)
    return EpochPlan(samples, bounds, batch_size, np.full(steps, width))


def documents_of_a_row(lengths: np.ndarray, width: int) -> int:
    """S for packing: four times the samples that fill a row on average, at least 8. lengths: int [n], n >= 1.

    With twice as many, rows of only short samples would be closed half full: 3 % more padding on log-normal lengths.
    """
    return max(8, -(-4 * width // max(1, int(lengths.mean()))))


def pack(lengths: np.ndarray, width: int, documents: int) -> np.ndarray:
    """Rows of samples: each goes where it leaves the least room, the longest of a window first.

    Args:
        lengths: int [n], n >= 1, in the order of the epoch, none above width. width: T. documents: S, at least 1.

    Returns:
        int [n], the row of each sample; rows are numbered from 0 without gaps.
    """
    window = int(np.clip(_WINDOW_ROWS * width / max(1.0, lengths.mean()), *_WINDOW))
    window = min(window, len(lengths))
    count = -(-len(lengths) // window)
    padded = np.full(count * window, -1, np.int32)  # -1 sorts behind samples without tokens
    padded[: len(lengths)] = lengths
    rows = np.empty(count * window, np.int64)
    first = 0
    for block in range(0, count, _BLOCK):
        part = slice(block * window, min(count, block + _BLOCK) * window)
        local, opened = _pack_windows(padded[part].reshape(-1, window), width, documents)
        starts = first + np.cumsum(opened) - opened  # [windows]
        rows[part] = (local + starts[:, None]).ravel()
        first += int(opened.sum())
    return rows[: len(lengths)]


def _pack_windows(lengths: np.ndarray, width: int, documents: int) -> tuple[np.ndarray, np.ndarray]:
    """`pack` for windows side by side.

    Args:
        lengths: int32 [windows, n], -1 where there is no sample.

    Returns:
        the row of each sample within its window, int64 [windows, n] (any number for a length of -1), and the number of
        rows of each window, int64 [windows].
    """
    windows, size = lengths.shape
    order = np.argsort(-lengths, axis=1, kind="stable")  # [windows, n]
    ranked = np.take_along_axis(lengths, order, axis=1)
    free = np.full((windows, size + 1), width, np.int32)  # tokens left; a row that nothing is in fits everything
    counts = np.zeros((windows, size + 1), np.int32)
    opened = np.zeros(windows, np.int64)
    rows = np.empty_like(order)
    each = np.arange(windows)
    for rank in range(size):
        length = ranked[:, rank]  # [windows]
        view = free[:, : int(opened.max()) + 1]
        best = np.where(view >= length[:, None], view, width + 1).argmin(axis=1)  # ties: the first, so opened ones
        real = length >= 0
        free[each, best] -= np.where(real, length, 0)
        counts[each, best] += real
        free[each[counts[each, best] == documents], best[counts[each, best] == documents]] = -1  # closed
        opened = np.maximum(opened, np.where(real, best + 1, 0))
        np.put_along_axis(rows, order[:, rank : rank + 1], best[:, None], axis=1)
    return rows, opened
