"""Folders of any kind of drafter: the class in `config.json`, or the config's type, says which format it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from dspark_jax.checkpoints import deepspec, recurrent
from dspark_jax.checkpoints.store import read_json
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.interface import AnyConfig
from dspark_jax.drafters.mtp import MTPConfig


def read_drafter(folder: str | Path, dtype: DTypeLike) -> tuple[AnyConfig, dict[str, Any]]:
    """Reads a drafter's config and parameters; arguments and errors as `deepspec.read_drafter`."""
    folder = Path(folder)
    if recurrent.class_name(read_json(folder / deepspec.CONFIG_FILE)) in recurrent.CLASSES:
        return recurrent.read_drafter(folder, dtype)
    return deepspec.read_drafter(folder, dtype)


def write_drafter(folder: str | Path, config: AnyConfig, params: Mapping[str, Any], **options: Any) -> None:
    """Writes a drafter as a folder; options and errors as `deepspec.write_drafter`.

    Raises:
        ValueError: also for a drafter without weights.
    """
    if isinstance(config, DrafterConfig):
        deepspec.write_drafter(folder, config, params, **options)
    elif isinstance(config, Eagle3Config | MTPConfig):
        recurrent.write_drafter(folder, config, params, **options)
    else:
        raise ValueError(f"{folder}: a drafter of type {type(config).__name__} has no weights to write")
