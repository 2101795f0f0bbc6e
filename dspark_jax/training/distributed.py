"""Several processes that train together: start-up, who writes, what each one loads, and stopping at the same update.

Every process runs the same program over its own devices; `jax.distributed` connects them, on TPU pods without being
told how. Process 0 writes logs and drafters, all write their pieces of checkpoints. In a run of one process every
function here does the obvious thing.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dspark_jax.config import one_line
from dspark_jax.training.settings import TrainSettings
from dspark_jax.training.step import batch_sharding

logger = logging.getLogger(__name__)


def start(settings: TrainSettings) -> None:
    """Connect this process with the others; before anything else uses JAX. Nothing happens unless `distributed` is on.

    Raises:
        ValueError: the other processes could not be found or reached.
    """
    if not settings.distributed:
        return
    try:
        if settings.coordinator:
            jax.distributed.initialize(
                settings.coordinator,
                settings.process_count,
                settings.process_id,
                cluster_detection_method="deactivate",
            )
        else:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        reason = one_line(error)
        raise ValueError(f"distributed: the processes could not be connected ({reason})") from error
    if not is_main():
        logging.getLogger("dspark_jax").setLevel(logging.WARNING)
    logger.info(
        "%d processes with %d devices, %d here", jax.process_count(), jax.device_count(), jax.local_device_count()
    )


def is_main() -> bool:
    """Whether this is the process that writes logs and drafters."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Return when all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"dspark {name}")


def all_agree(value: bool) -> bool:
    """Whether the value is true in every process."""
    if jax.process_count() == 1:
        return value
    return bool(np.all(multihost_utils.process_allgather(np.asarray(value))))


def check_shared(folder: Path) -> None:
    """Refuses a folder that is not one and the same for all processes (checkpoints are written by all of them).

    Raises:
        ValueError: this process does not see what process 0 wrote there.
    """
    if jax.process_count() == 1:
        return
    mark = folder / ".shared"
    number = int(multihost_utils.broadcast_one_to_all(np.int32(os.getpid())))
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(str(number))
    barrier("shared folder")
    seen = mark.is_file() and mark.read_text() == str(number)
    if not all_agree(seen):
        raise ValueError(
            f"output {folder}: process {jax.process_index()} {'sees' if seen else 'does not see'} what process 0 wrote "
            "there; all processes need one folder, on storage that they share"
        )


def to_host(tree: Any) -> Any:
    """Whole numpy arrays of a pytree of global ones, in every process; all processes must call it."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda leaf: np.asarray(multihost_utils.process_allgather(leaf, tiled=True)), tree)


def own_rows(mesh: Mesh, batch_size: int, micro_batches: int = 1) -> frozenset[int]:
    """Rows of a batch that this process alone answers for: each row has one process, the first of those that hold it.

    Args:
        batch_size: N. micro_batches: M, as `step.place_batch` splits the rows.
    """
    per_pass = batch_size // micro_batches
    places = batch_sharding(mesh).devices_indices_map((micro_batches, per_pass))
    owner: dict[int, int] = {}
    for device, piece in places.items():
        for j in range(*piece[1].indices(per_pass)):  # type: ignore[index]
            owner[j] = min(owner.get(j, device.process_index), device.process_index)  # type: ignore[attr-defined]
    mine = [j for j, process in owner.items() if process == jax.process_index()]
    return frozenset(number * per_pass + j for number in range(micro_batches) for j in mine)


class Stop:
    """Whether the run shall end, asked after each update; the answer is the same in all processes."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._reached = False

    def at(self, step: int) -> bool:
        """Whether to save and leave after update `step`; all processes must ask for each update."""
        if jax.process_count() > 1:  # the notice of one process reaches all, which agree on an update to come
            self._reached = self._reached or multihost_utils.reached_preemption_sync_point(step)
            return self._reached
        return self.asked.is_set()


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """A `Stop` for SIGTERM, which is how preemption is announced too, and for SIGINT; a second SIGINT ends at once.

    In runs of several processes JAX's own handler takes SIGTERM, and SIGINT is passed on to it. Outside the main
    thread, where signals cannot be caught, nothing is.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_sigint(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is half written is taken care of as after SIGKILL
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        stop.asked.set()

    handlers: dict[int, Any] = {signal.SIGINT: on_sigint}
    if jax.process_count() == 1:
        handlers[signal.SIGTERM] = lambda number, frame: stop.asked.set()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
