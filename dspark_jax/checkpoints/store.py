"""Reads a folder of safetensors files, one or many shards, and the JSON beside them; every error names its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from `file`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, or not an object.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: holds a JSON {type(value).__name__}, must be an object")
    return value


class TensorStore:
    """The tensors of a checkpoint folder. Files stay open and mapped; a tensor is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.

        Raises:
            FileNotFoundError: neither is there, or a shard is missing.
            ValueError: a truncated or corrupt file; an index that does not fit its shards.
        """
        if (folder / INDEX_FILE).is_file():
            self.path = folder / INDEX_FILE
            where = self._read_index()
            files = {name: self._open(folder / name) for name in sorted(set(where.values()))}
            self._handles = {tensor: files[file] for tensor, file in where.items()}
            self._check_index(where, files)
        else:
            self.path = folder / SINGLE_FILE
            handle = self._open(self.path)
            self._handles = {name: handle for name in handle.keys()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors by name, from the headers."""
        return {name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._handles.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the dtype that it is stored in.

        Raises:
            ValueError: a dtype that numpy has no type for, or one with block scales.
        """
        try:
            return self._handles[name].get_tensor(name)
        except (SafetensorError, TypeError, AttributeError, KeyError) as error:
            kind = self._handles[name].get_slice(name).get_dtype()
            raise ValueError(f"{self.path}: tensor {name} of type {kind} is not readable ({error})") from error

    def _open(self, file: Path) -> Any:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        try:
            return safe_open(file, framework="np")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a readable safetensors file, truncated or corrupt ({error})") from error

    def _read_index(self) -> dict[str, str]:
        where = read_json(self.path).get("weight_map")
        if not isinstance(where, dict) or not where or not all(isinstance(v, str) for v in where.values()):
            raise ValueError(f"{self.path}: weight_map must map tensor names to file names")
        for file in where.values():
            if Path(file).name != file:
                raise ValueError(f"{self.path}: weight_map names {file!r}, shards must lie in the same folder")
        return where

    def _check_index(self, where: Mapping[str, str], files: Mapping[str, Any]) -> None:
        stored = {name: set(handle.keys()) for name, handle in files.items()}
        for tensor, file in where.items():
            if tensor not in stored[file]:
                raise ValueError(f"{self.path.parent / file}: tensor {tensor} of {self.path.name} is missing")
        for file, names in stored.items():
            extra = sorted(names - set(where))
            if extra:
                raise ValueError(f"{self.path.parent / file}: tensor {extra[0]} is not listed in {self.path.name}")
