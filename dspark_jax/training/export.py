"""Drafters that a run leaves while it trains: OUTPUT/drafter, and OUTPUT/best. Files are written in the background."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.drafters import write_drafter
from dspark_jax.training.distributed import is_main, to_host
from dspark_jax.training.objectives import TrainableConfig
from dspark_jax.training.step import TrainState

Params = dict[str, Any]


class Exporter:
    """Writes drafters in DeepSpec's format; embedding and head stay with the target."""

    def __init__(self, output: Path, config: TrainableConfig, d2t: np.ndarray | None, fields: dict[str, Any]) -> None:
        """Prepare.

        Args:
            output: folder of the run. config: the drafter's. d2t: int32 [Vd] offsets of a reduced vocabulary, or None.
            fields: for `config.json`, beside the config's own.
        """
        self._output, self._config, self._d2t, self._fields = output, config, d2t, fields
        self._thread = ThreadPoolExecutor(1, "export")
        self._writing: Future[None] | None = None

    def write(self, name: str, state: TrainState, **fields: Any) -> None:
        """Write the drafter of a state (its average of the weights where there is one) to OUTPUT/NAME.

        Returns when the weights are in host memory; a folder that is there is replaced as a whole. All processes must
        call it, the first one writes.

        Raises:
            OSError: the drafter before it could not be written.
        """
        weights = to_host(_halved(state.best)) | ({} if self._d2t is None else {"d2t": self._d2t})
        if is_main():
            self.wait()
            self._writing = self._thread.submit(
                write_drafter,
                self._output / name,
                self._config,
                weights,
                extra=self._fields | fields,
                include_embeddings=False,
            )

    def wait(self) -> None:
        """Return when what was given to write is on the disk.

        Raises:
            OSError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait, and end; errors as `wait`."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


@jax.jit
def _halved(weights: Params) -> Params:
    """Weights as they are stored, in bfloat16: half as much to bring together."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
