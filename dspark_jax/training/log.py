"""The log of a training run: means over the updates between two lines, as JSON lines and for TensorBoard.

Metrics of an update are pairs (sum, count) that stay on the device until a line is due, so that the loop does not wait
for them. Sums of a window that is still open when a checkpoint is written go into it: the lines of a resumed run are
those of an uninterrupted one.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from tensorboardX import SummaryWriter

Item = TypeVar("Item")

TIMINGS = ("seconds", "tokens_per_second", "wait_share")  # what differs from run to run
# What tells of weights that are not finite: the loss those before an update, the gradient those behind it.
_FINITE = {"total": "the loss", "grad_norm": "the gradient's norm"}
_AHEAD = 2  # updates that the devices may be behind: more would only keep more batches in their memory


class Counts(NamedTuple):
    """What a batch holds, over all processes.

    Attributes:
        tokens: without padding. supervised: tokens with loss mask 1. slots: N * T.
    """

    tokens: int
    supervised: int
    slots: int


class Log:
    """Metrics in OUTPUT/metrics.jsonl and OUTPUT/tensorboard, written by one process and gathered by all.

    Attributes:
        newest: the newest value of each metric, of this process's lines. tokens: of all updates since it was opened, by
            all processes, without padding.
    """

    def __init__(self, folder: Path, step: int, window: dict[str, Any] | None = None, writes: bool = True) -> None:
        """Open the log of a run that goes on behind update `step`: lines of later updates are dropped.

        Args:
            window: the open window of the checkpoint (`window`), None for a fresh run. writes: whether this process
                writes; the others only check that losses and gradients are finite.
        """
        self._sums: dict[str, list[float]] = {name: list(pair) for name, pair in (window or {}).items()}
        self._pending: list[Any] = []
        self._running: deque[Any] = deque()
        self._tokens = self._updates = 0
        self._waited = 0.0
        self.newest: dict[str, float] = {}
        self.tokens = 0
        self._clock = time.perf_counter()
        self._file, self._board = None, None
        if writes:
            file = folder / "metrics.jsonl"
            kept = [line for line in file.read_bytes().splitlines() if _step_of(line) <= step] if file.exists() else []
            fresh = file.with_suffix(".new")
            fresh.write_bytes(b"".join(line + b"\n" for line in kept))
            fresh.replace(file)
            self._file = file.open("a", encoding="utf-8")
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    @property
    def window(self) -> dict[str, list[float]]:
        """Sums and counts since the last line: JSON values for a checkpoint, after `settle`."""
        return {name: list(pair) for name, pair in self._sums.items()}

    def waiting(self, items: Iterable[Item]) -> Iterator[Item]:
        """The same items; the time until each is there counts as waiting for data."""
        iterator = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._waited += time.perf_counter() - began
            yield item

    def add(self, metrics: dict[str, Any], counts: Counts) -> None:
        """Take in an update: its metrics, pairs (sum, count) on the device, and what its batch holds.

        Returns while the devices still work, but lets them be no more than two updates behind.
        """
        host = {
            "tokens": (counts.tokens, 1),
            "supervised_tokens": (counts.supervised, 1),
            "padding_share": (counts.slots - counts.tokens, counts.slots),
        }
        self._pending.append((metrics, host))
        self._tokens += counts.tokens
        self.tokens += counts.tokens
        self._updates += 1
        self._running.append(metrics)
        if len(self._running) > _AHEAD:
            jax.block_until_ready(self._running.popleft())

    def settle(self, step: int) -> None:
        """Wait for all updates so far, and add up their metrics.

        Raises:
            FloatingPointError: a loss or a gradient is not finite.
        """
        for metrics, host in jax.device_get(self._pending):
            for name, (total, count) in (metrics | host).items():
                pair = self._sums.setdefault(name, [0.0, 0.0])
                pair[0] += float(total)
                pair[1] += float(count)
        self._pending.clear()
        self._running.clear()
        for name, what in _FINITE.items():
            value = self._sums[name][0] if name in self._sums else 0.0
            if not np.isfinite(value):
                raise FloatingPointError(f"update {step}: {what} is {value}; the last checkpoint is from before")

    def write(self, step: int, extra: dict[str, float]) -> dict[str, str]:
        """Write the means since the last line, and `extra`; returns some of them for the progress bar.

        Raises:
            FloatingPointError: as `settle`; the line is written.
        """
        try:
            self.settle(step)
        finally:
            means = {name: total / count for name, (total, count) in self._sums.items() if count}
            seconds = time.perf_counter() - self._clock
            means |= {"seconds": seconds / max(self._updates, 1), "tokens_per_second": self._tokens / seconds}
            means["wait_share"] = min(self._waited / seconds, 1.0)
            self.record(step, means | extra)
            self._sums, self._tokens, self._updates, self._waited = {}, 0, 0, 0.0
            self._clock = time.perf_counter()
        return {name: f"{means[name]:.4g}" for name in ("total", "tau_probabilistic") if name in means}

    def record(self, step: int, values: dict[str, float]) -> None:
        """Write values of update `step` as they are."""
        self.newest |= values
        if not values or self._file is None or self._board is None:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name.replace("@", "/"), value, step)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()


def _step_of(line: bytes) -> float:
    """The update that a log line belongs to; infinite for a half-written line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
