"""Checkpoints of a training run, by Orbax: written in the background and put in place whole.

A checkpoint holds the whole `TrainState`, facts about the run that a resumed one must share, and its progress (the best
accepted length so far, sums of the log's open window). The position in the data, the schedule and the random keys
follow from the step, so nothing else is saved. What was saved on one mesh is restored on any other. The newest ones are
kept, and the one with the best drafter.

A save blocks for the copy from the devices to the host. A job that is killed leaves a temporary folder, which the next
one removes. A checkpoint that cannot be read is set aside, and the one before it is used.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dspark_jax.config import one_line
from dspark_jax.training.step import TrainState

logger = logging.getLogger(__name__)

_ITEMS = ("state", "facts", "progress")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what Orbax raises on damaged files


class SaveError(OSError):
    """A checkpoint could not be written; those before it are as they were."""


class Restored(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        state: on the devices that were asked for. progress: the JSON values that were saved with it.
    """

    state: TrainState
    progress: dict[str, Any]


class _Keep:
    """Orbax's rule of what stays: the newest checkpoints, and the best one."""

    def __init__(self, newest: int) -> None:
        self.newest = newest
        self.best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether each checkpoint, in ascending order of steps, is kept."""
        young = len(checkpoints) - self.newest
        return [i >= young or one.step == self.best for i, one in enumerate(checkpoints)]


class Checkpoints:
    """The checkpoints of one output folder; every process of a run opens it, and calls the same methods."""

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        """Open a folder of checkpoints, made if needed; what a killed job left half written is removed.

        Args:
            keep: number of newest checkpoints that stay, >= 1.
        """
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep = _Keep(keep)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=_ITEMS)

    @property
    def latest(self) -> int | None:
        """Updates made at the newest whole checkpoint, None without any."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: TrainState, facts: dict[str, Any], progress: dict[str, Any], best: int | None = None
    ) -> None:
        """Write a checkpoint in the background; waits for the one before it. One that is there is left as it is.

        Args:
            step: updates made. state: of any sharding; its buffers may be donated when this returns.
            facts: JSON values that a resumed run must share (`restore` compares them). progress: other JSON values.
            best: step of the checkpoint that is kept for its drafter, however old.

        Raises:
            SaveError: this checkpoint or the one before it could not be written.
        """
        if step == self.latest:
            return
        self._keep.best = best
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            facts=ocp.args.JsonSave(facts),
            progress=ocp.args.JsonSave(progress),
        )
        with self._told():
            self._manager.save(step, args=items, force=True)

    def wait(self) -> None:
        """Return when what was saved is on the disk.

        Raises:
            SaveError: it could not be written.
        """
        with self._told():
            self._manager.wait_until_finished()

    def restore(self, like: TrainState, facts: dict[str, Any]) -> Restored:
        """The newest checkpoint that can be read; newer ones are renamed to `damaged-STEP`, with a warning.

        Args:
            like: a state, or abstract values, of the right structure, shapes and sharding. facts: those of this run.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: the run that wrote it differs in a fact, or none of the checkpoints can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        if not steps:
            raise FileNotFoundError(f"{self.folder}: holds no checkpoint")
        damaged: list[int] = []
        for step in steps:
            found = self._read(step, {"facts": ocp.args.JsonRestore(), "progress": ocp.args.JsonRestore()})
            if found is not None:
                self._compare(step, found["facts"], facts)
                shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
                whole = self._read(step, {"state": ocp.args.StandardRestore(shapes)})
                if whole is not None:
                    self._set_aside(damaged, step)
                    return Restored(whole["state"], found["progress"])
            damaged.append(step)
        raise ValueError(
            f"{self.folder}: none of the checkpoints {damaged} can be read; restore one from a copy, or give another "
            "output folder to start afresh"
        )

    def close(self) -> None:
        """Wait for what is being written, and release the folder.

        Raises:
            SaveError: the last checkpoint could not be written.
        """
        with self._told():
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, SaveError):  # it is told already
            self.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns what goes wrong while writing, also in the background, into one line."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            whole = [step for step in self._steps_on_disk() if step]
            left = f"the last whole one is {max(whole)}" if whole else "there is none before it"
            reason = one_line(error)
            raise SaveError(f"{self.folder}: a checkpoint could not be written ({reason}); {left}") from error

    def _steps_on_disk(self) -> list[int]:
        return [int(path.name) for path in self.folder.iterdir() if path.is_dir() and path.name.isdecimal()]

    def _read(self, step: int, items: dict[str, Any]) -> Any:
        """Some items of a checkpoint, None where any process finds them damaged."""
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
            readable = all(found[name] is not None for name in items)
        except _UNREADABLE as error:
            reason = one_line(error)[:300]
            logger.warning("%s: damaged, its %s cannot be read (%s)", self.folder / str(step), "/".join(items), reason)
            found, readable = None, False
        if jax.process_count() > 1:
            readable = bool(np.all(multihost_utils.process_allgather(np.asarray(readable))))
        return found if readable else None

    def _compare(self, step: int, found: dict[str, Any], mine: dict[str, Any]) -> None:
        for name, value in json.loads(json.dumps(mine)).items():
            if found.get(name) != value:
                raise ValueError(
                    f"{self.folder / str(step)}: {name} is {found.get(name)!r} in the checkpoint, {value!r} in this "
                    "run: give the same or another output folder"
                )

    def _set_aside(self, damaged: list[int], used: int) -> None:
        """Moves damaged checkpoints out of the way of new ones, by renaming."""
        if not damaged:
            return
        if jax.process_index() == 0:
            for step in damaged:
                place = self.folder / f"damaged-{step}"
                number = 1
                while place.exists():
                    number += 1
                    place = self.folder / f"damaged-{step}.{number}"
                (self.folder / str(step)).rename(place)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("dspark damaged checkpoints")
        self._manager.reload()
        logger.warning("going on from checkpoint %d; the damaged ones are now %s/damaged-*", used, self.folder)
