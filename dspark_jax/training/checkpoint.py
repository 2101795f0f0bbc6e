"""Checkpoints of a training run, by Orbax: written beside and renamed, so that a killed job leaves the last whole one.

A checkpoint holds the whole `TrainState` and a few facts about the run. The position in the data and the random keys
follow from the step, so nothing else is saved. The two newest checkpoints are kept.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from dspark_jax.training.step import TrainState

logger = logging.getLogger(__name__)

KEPT = 2


class Checkpoints:
    """The checkpoints of one output folder."""

    def __init__(self, folder: str | Path) -> None:
        """Open a folder of checkpoints, made if needed; what a killed job left half written is ignored."""
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "facts"))

    @property
    def latest(self) -> int | None:
        """Updates made at the newest whole checkpoint, None without any."""
        return self._manager.latest_step()

    def save(self, state: TrainState, facts: dict[str, Any]) -> None:
        """Write a checkpoint and return when it is on the disk. One that is there for this step is left as it is.

        Args:
            state: of any sharding. facts: JSON values that a resumed run must share (`restore` compares them).
        """
        step = int(state.step)
        if step == self.latest:
            return
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        self._manager.save(step, args=items)
        self._manager.wait_until_finished()

    def restore(self, like: TrainState, facts: dict[str, Any]) -> TrainState:
        """The newest checkpoint.

        Args:
            like: a state of the right structure, shapes and sharding. facts: those of this run.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: the run that wrote it differs in a fact, or in the shape of its parameters.
        """
        step = self.latest
        if step is None:
            raise FileNotFoundError(f"{self.folder}: holds no checkpoint")
        where = self.folder / str(step)
        found = self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
        for name, value in facts.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{where}: {name} is {found.get(name)!r} in the checkpoint, {value!r} in this run: "
                    "give the same or another output folder"
                )
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))["state"]

    def close(self) -> None:
        """Release the folder."""
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
