"""Records on disk, one JSON object a line, that survive being killed; and training samples made of them.

`RecordWriter` appends a record with one write and knows which ids are there, so a job that was stopped goes on where it
was: a half-written last line is dropped, nothing is skipped or repeated. Letter: T tokens of a sequence.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The object on a complete line; ValueError names file and line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}), remove the line or restore the file") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: {type(record).__name__}, must be a JSON object")
    return record


def _is_whole(path: Path, number: int, line: bytes) -> bool:
    """Whether an unterminated last line is a whole record (no proper prefix of a JSON object is one).

    Raises:
        ValueError: the line cannot be the beginning of a record, so the file is something else and is left alone.
    """
    if line.strip(b"\0 \t\r") and not line.startswith(b"{"):  # zero bytes are what a power cut may leave
        raise ValueError(
            f"{path}, line {number}: begins with {line[:20]!r}, not a file of JSON records, choose another"
        )
    try:
        return isinstance(json.loads(line.decode("utf-8")), dict)
    except ValueError:
        return False


def _scan(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte offset behind the line, record) of every whole record; a half-written last line is left out."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") and not _is_whole(path, number, line):
                return
            end += len(line)
            if line.strip():
                yield end, _parse(path, number, line)


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """Records of a JSONL file, in order. Blank lines and a half-written last line are passed over.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a complete line that is not a JSON object, naming file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"records file {path}: not found")
    return (record for _, record in _scan(path))


class RecordWriter:
    """Append-only JSONL file with resume.

    On opening, the ids already in the file are read and a half-written last line is cut off. A record is with the
    operating system (with `fsync`: on the disk) when `write` returns. One writer a file.

    Attributes:
        path: the file. key: the field that identifies a record. done: ids in the file, those just written included.
    """

    def __init__(self, path: str | Path, key: str = "id", *, fsync: bool = False) -> None:
        """Open for appending, making folders as needed.

        Raises:
            ValueError: a complete line that is no JSON object, that lacks the key, or whose key came before.
        """
        self.path = Path(path)
        self.key = key
        self.done: set[str] = set()
        self._fsync = fsync
        self.path.parent.mkdir(parents=True, exist_ok=True)
        end = 0
        if self.path.exists():
            for offset, record in _scan(self.path):
                self.done.add(self._identity(record))
                end = offset
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        if end and os.pread(self._file, 1, end - 1) != b"\n":
            self._append(b"\n")

    def _identity(self, record: Mapping[str, Any]) -> str:
        """The record's id; ValueError where it is missing, not a string, or there already."""
        name = record.get(self.key)
        if not isinstance(name, str) or not name:
            raise ValueError(f"{self.path}: {self.key} {name!r}, must be a non-empty string")
        if name in self.done:
            raise ValueError(f"{self.path}: {self.key} {name!r} is there already, ids must differ")
        return name

    def _append(self, data: bytes) -> None:
        """Write all bytes at the end; after a failure the file ends where it did before."""
        start = os.lseek(self._file, 0, os.SEEK_CUR)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
            if self._fsync:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, start)
            os.lseek(self._file, start, os.SEEK_SET)
            raise

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            ValueError: the writer is closed, the id is missing or there already, or a value is not finite.
            TypeError: a value that JSON does not know (turn arrays into lists first).
        """
        if self._file < 0:
            raise ValueError(f"{self.path}: the writer is closed, open a new one")
        name = self._identity(record)
        self._append(json.dumps(dict(record), ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n")
        self.done.add(name)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class TrainingSample:
    """A tokenised sequence to train on.

    Attributes:
        id: unique name of the sample.
        input_ids: int32 [T], prompt then answer.
        loss_mask: uint8 [T], 1 = supervised.
    """

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


def _token_ids(record: Mapping[str, Any], name: str) -> np.ndarray:
    """A field of token ids as int32 [n]; ValueError where it is no list of integers >= 0."""
    value = record.get(name)
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ValueError(f"{name}: must be a list of token ids (integers from 0)")
    return np.asarray(value, np.int32)


def sample_from_record(record: Mapping[str, Any], max_length: int) -> TrainingSample:
    """A sample of a regenerated record: prompt_ids + token_ids, the latter supervised, cut on the right to max_length.

    token_ids holds the answer with its stop token, so the stop is supervised too.

    Raises:
        ValueError: id, prompt_ids or token_ids are missing or of a wrong type.
    """
    name = record.get("id")
    if not isinstance(name, str) or not name:
        raise ValueError(f"id {name!r}: must be a non-empty string")
    prompt = _token_ids(record, "prompt_ids")
    answer = _token_ids(record, "token_ids")
    input_ids = np.concatenate([prompt, answer])[:max_length]  # [T]
    loss_mask = np.zeros(len(input_ids), np.uint8)  # [T]
    loss_mask[len(prompt) :] = 1
    return TrainingSample(name, input_ids, loss_mask)


def samples_from_records(
    paths: str | Path | Iterable[str | Path], max_length: int, min_loss_tokens: int = 14
) -> list[TrainingSample]:
    """Training samples of regenerated record files, in the order of the files and lines.

    Args:
        paths: one or more JSONL files of records {"id", "prompt_ids", "token_ids", ...}.
        max_length: tokens to keep of a sequence; the mask is cut alike.
        min_loss_tokens: samples with fewer supervised tokens, counted after the cut, are dropped (and logged).

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: max_length below 2 (an anchor and its label), a wrong record or an id that comes twice.
    """
    if max_length < 2:
        raise ValueError(f"max_length {max_length}: must be at least 2 tokens")
    files = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    samples: list[TrainingSample] = []
    seen: set[str] = set()
    for path in files:
        for number, record in enumerate(read_records(path), start=1):
            try:
                sample = sample_from_record(record, max_length)
                if sample.id in seen:
                    raise ValueError(f"id {sample.id!r} comes twice, ids must differ over all files")
            except ValueError as error:
                raise ValueError(f"{path}, record {number}: {error}") from error
            seen.add(sample.id)
            if int(sample.loss_mask.sum()) >= min_loss_tokens:
                samples.append(sample)
    dropped = len(seen) - len(samples)
    logger.info("%d samples, %d dropped with fewer than %d supervised tokens", len(samples), dropped, min_loss_tokens)
    return samples
