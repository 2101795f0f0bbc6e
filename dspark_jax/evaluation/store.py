"""Outcomes in a folder, kept as they come, with a description of what made them: others are refused.

OUTPUT/outcomes.jsonl holds an outcome a line; OUTPUT/outcomes.about.json says by which settings, models and prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from dspark_jax.checkpoints.store import read_json
from dspark_jax.config import replace_json
from dspark_jax.data.records import RecordWriter, read_records
from dspark_jax.evaluation.benchmarks import Benchmark
from dspark_jax.evaluation.outcomes import Outcome, from_json

OUTCOMES, ABOUT = "outcomes.jsonl", "outcomes.about.json"
_SAMPLED = 1 << 16  # values of an array that a fingerprint looks at


def fingerprint(config: Any, params: Any) -> str:
    """16 hex digits of a config and of weights: of each array its shape and up to 65,536 evenly spaced values."""
    digest = hashlib.sha256(repr(config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        flat = leaf.reshape(-1)
        values = np.asarray(flat[:: max(flat.size // _SAMPLED, 1)])
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {values.dtype}".encode() + values.tobytes())
    return digest.hexdigest()[:16]


def device() -> dict[str, Any]:
    """What wall-clocks are of."""
    here = jax.devices()[0]
    return {"platform": here.platform, "kind": here.device_kind}


def chat_digest(tokenizer: Any) -> str:
    """8 hex digits of what a tokenizer makes of a conversation: chat template, prefix and stop tokens."""
    parts = (tokenizer.chat_template, tuple(tokenizer.prefix_ids), tuple(tokenizer.eos_ids))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def prompt_digests(benchmarks: Iterable[Benchmark]) -> dict[str, dict[str, str]]:
    """Benchmark to conversation to 8 hex digits of its turns."""

    def digest(turns: tuple[str, ...]) -> str:
        return hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:8]

    return {one.name: {c.id: digest(c.turns) for c in one.conversations} for one in benchmarks}


class OutcomeStore:
    """The outcomes of a folder.

    Attributes:
        folder: where. done: outcomes by id, those just kept included.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Opens a folder, which is made if needed; a half-written last line is dropped.

        Args:
            about: nested JSON objects; what is new is added to what the folder says.

        Raises:
            ValueError: the folder's outcomes were made otherwise, or its files are something else.
        """
        self.folder = folder
        file, description = folder / OUTCOMES, folder / ABOUT
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"output {folder}: is a file, must be a folder")
        earlier = read_json(description) if description.exists() else {}
        if file.exists() and not description.exists():
            raise ValueError(f"output {folder}: has {OUTCOMES} and no {ABOUT}, give another folder")
        try:
            joined = _joined(earlier, about, "")
        except ValueError as error:
            raise ValueError(
                f"output {folder}: its outcomes were made otherwise: {error}; give another --output, or remove it"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        if joined != earlier:
            replace_json(description, joined)
        self.done: dict[str, Outcome] = {}
        if file.exists():
            self.done = {one.id: one for one in map(from_json, read_records(file))}
        self._writer = RecordWriter(file)

    def keep(self, outcome: Outcome) -> None:
        """Adds an outcome; it is with the operating system when this returns. `done` has it as it was written."""
        values = outcome.as_json()
        self._writer.write(values)
        self.done[outcome.id] = from_json(values)

    def __enter__(self) -> OutcomeStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()


def _joined(there: Mapping[str, Any], here: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Both objects together; ValueError where they say different things."""
    found = dict(there)
    for name, value in here.items():
        where = f"{place}{name}"
        if name not in found:
            found[name] = value
        elif isinstance(value, Mapping) and isinstance(found[name], Mapping):
            found[name] = _joined(found[name], value, f"{where}.")
        elif found[name] != value:
            raise ValueError(f"{where} was {found[name]!r} and is {value!r} now")
    return found
