"""Records on disk, one JSON object a line, that survive being killed; and training samples made of them.

`RecordWriter` appends a record with one write and knows which ids are there, so a job that was stopped goes on where it
was: a half-written last line is dropped, nothing is skipped or repeated. `samples_from_records` holds the samples of
small files in memory; `RecordSamples` holds where they lie and parses one when it is asked for. Letters: T tokens of a
sequence, n samples.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, overload

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
    good = isinstance(value, list) and set(map(type, value)) <= {int}
    if not good or (value and not (0 <= min(value) and max(value) < 2**31)):
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


class SampleTable(NamedTuple):
    """What is known of n samples without their tokens; each field is an array [n].

    Attributes:
        lengths: int32, tokens. supervised: int32, supervised tokens. tops: int32, the largest token id, -1 for none.
        names: uint32, the CRC-32 of the id: a number of the sample that does not depend on the others.
        checksums: uint32, the CRC-32 of id, tokens and mask.
    """

    lengths: np.ndarray
    supervised: np.ndarray
    tops: np.ndarray
    names: np.ndarray
    checksums: np.ndarray


_TABLE_TYPES = (np.int32, np.int32, np.int32, np.uint32, np.uint32)


def sample_table(samples: Sequence[TrainingSample]) -> SampleTable:
    """The table of samples; that of a `RecordSamples` is there already and reads nothing."""
    if isinstance(samples, RecordSamples):
        return samples.table
    return _as_table(array("q", (fact for sample in samples for fact in _facts(sample))))


def sample_id(samples: Sequence[TrainingSample], number: int) -> str:
    """The id of sample `number`; one of a `RecordSamples` is not read for it."""
    return samples.id(number) if isinstance(samples, RecordSamples) else samples[number].id


def _as_table(facts: array[int] | np.ndarray) -> SampleTable:
    """The table of n samples from their rows, one behind another or int64 [n, 5]."""
    columns = np.asarray(facts, np.int64).reshape(-1, len(_TABLE_TYPES)).T
    return SampleTable(*(column.astype(dtype) for column, dtype in zip(columns, _TABLE_TYPES, strict=True)))


def _facts(sample: TrainingSample) -> tuple[int, ...]:
    """A sample's row of the table."""
    name = zlib.crc32(sample.id.encode())
    total = zlib.crc32(sample.loss_mask.tobytes(), zlib.crc32(sample.input_ids.tobytes(), name))
    top = int(sample.input_ids.max(initial=-1))
    return len(sample.input_ids), int(np.count_nonzero(sample.loss_mask)), top, name, total


def _check_files(paths: str | Path | Iterable[str | Path], max_length: int) -> list[Path]:
    """The record files as a list; ValueError for a max_length without room for an anchor and its label."""
    if max_length < 2:
        raise ValueError(f"max_length {max_length}: must be at least 2 tokens")
    return [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]


def _scan_samples(path: Path, max_length: int, seen: set[str]) -> Iterator[tuple[int, int, TrainingSample]]:
    """(first byte, byte behind, sample) of every record of a file, whose ids go into `seen`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a wrong record or an id that has been seen, naming file and record.
    """
    if not path.is_file():
        raise FileNotFoundError(f"records file {path}: not found")
    start = 0
    for number, (end, record) in enumerate(_scan(path), start=1):
        try:
            sample = sample_from_record(record, max_length)
            if sample.id in seen:
                raise ValueError(f"id {sample.id!r} comes twice, ids must differ over all files")
        except ValueError as error:
            raise ValueError(f"{path}, record {number}: {error}") from error
        seen.add(sample.id)
        yield start, end, sample
        start = end


def _log_counts(kept: int, dropped: int, min_loss_tokens: int) -> None:
    logger.info("%d samples, %d dropped with fewer than %d supervised tokens", kept, dropped, min_loss_tokens)


def samples_from_records(
    paths: str | Path | Iterable[str | Path], max_length: int, min_loss_tokens: int = 14
) -> list[TrainingSample]:
    """Training samples of regenerated record files, in the order of the files and lines, in memory.

    Args:
        paths: one or more JSONL files of records {"id", "prompt_ids", "token_ids", ...}.
        max_length: tokens to keep of a sequence; the mask is cut alike.
        min_loss_tokens: samples with fewer supervised tokens, counted after the cut, are dropped (and logged).

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: max_length below 2 (an anchor and its label), a wrong record or an id that comes twice.
    """
    samples: list[TrainingSample] = []
    seen: set[str] = set()
    for path in _check_files(paths, max_length):
        for _, _, sample in _scan_samples(path, max_length, seen):
            if int(sample.loss_mask.sum()) >= min_loss_tokens:
                samples.append(sample)
    _log_counts(len(samples), len(seen) - len(samples), min_loss_tokens)
    return samples


_INDEX_FORMAT = 1


class _Index(NamedTuple):
    """Where the n records of a file lie, and what is known of their samples.

    Attributes:
        spans: int64 [4, n]: first byte of a record and the byte behind it, and the same of its id in `ids`.
        ids: uint8, all ids in UTF-8, one behind another. table: of the samples.
    """

    spans: np.ndarray
    ids: np.ndarray
    table: SampleTable

    def names(self) -> Iterator[str]:
        """The ids, in order."""
        blob = self.ids.tobytes()
        return (blob[start:end].decode() for start, end in self.spans[2:].T.tolist())


def _build_index(path: Path, max_length: int, seen: set[str]) -> _Index:
    """Read a whole file once; errors as `_scan_samples`."""
    spans, facts, ids = array("q"), array("q"), bytearray()  # flat, since there may be millions
    for start, end, sample in _scan_samples(path, max_length, seen):
        name = sample.id.encode()
        spans.extend((start, end, len(ids), len(ids) + len(name)))
        facts.extend(_facts(sample))
        ids += name
    return _Index(np.asarray(spans, np.int64).reshape(-1, 4).T, np.frombuffer(ids, np.uint8), _as_table(facts))


def _stamp(path: Path, max_length: int) -> np.ndarray:
    """What an index on disk must share with the file as it is: int64 [4]."""
    status = path.stat()
    return np.asarray([_INDEX_FORMAT, status.st_size, status.st_mtime_ns, max_length], np.int64)


def _load_index(file: Path, stamp: np.ndarray) -> _Index | None:
    """An index from the disk; None where there is none, or one of another state of the records."""
    if not file.exists():
        return None
    try:
        with file.open("rb") as raw, np.load(raw, allow_pickle=False) as data:
            if not np.array_equal(data["stamp"], stamp):
                return None
            table = SampleTable(*(data[name] for name in SampleTable._fields))
            return _Index(data["spans"], data["ids"], table)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s: not readable (%s), the records are indexed again", file, error)
        return None


def _save_index(file: Path, stamp: np.ndarray, index: _Index) -> None:
    """Write an index as a whole; in a folder that cannot be written to, none."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}-{os.urandom(4).hex()}.new")
    try:
        with fresh.open("wb") as out:
            np.savez(out, stamp=stamp, spans=index.spans, ids=index.ids, **index.table._asdict())
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(file)
    except OSError as error:
        logger.info("%s: not written (%s), the next run indexes the records again", file, error)
        with suppress(OSError):
            fresh.unlink()


class _OpenFiles:
    """Files open for reading until this object goes; `paths` and file `numbers`."""

    def __init__(self, paths: list[Path]) -> None:
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"records file {path}: not found")
        self.paths = paths
        self.numbers = [os.open(path, os.O_RDONLY) for path in paths]
        weakref.finalize(self, _close_files, self.numbers)


def _close_files(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)


class RecordSamples(Sequence[TrainingSample]):
    """The samples of `samples_from_records`, parsed when they are asked for; for files that do not fit into memory.

    A first pass over each file notes where every record lies, its id and its `SampleTable` row; tokens are not kept.
    The notes go into `NAME.index-MAXLENGTH.npz` beside the file, and the next run takes them from there as long as size
    and modification time of the file are the same. May be read by several threads. Slices share the open files.

    Attributes:
        table: of the samples, arrays [n].
    """

    def __init__(
        self,
        paths: str | Path | Iterable[str | Path],
        max_length: int,
        min_loss_tokens: int = 14,
        *,
        persist: bool = True,
    ) -> None:
        """Index the files, or take the index from the disk.

        Args:
            paths, max_length, min_loss_tokens: as `samples_from_records`.
            persist: whether indices are read from and written to the disk.

        Raises:
            FileNotFoundError, ValueError: as `samples_from_records`.
        """
        self._max_length = max_length
        self._files = _OpenFiles(_check_files(paths, max_length))
        index = _merge(_index_files(self._files.paths, max_length, persist))
        self._spans, self._ids, self.table = index.spans, index.ids.tobytes(), index.table
        kept = np.flatnonzero(self.table.supervised >= min_loss_tokens)
        _log_counts(len(kept), len(self) - len(kept), min_loss_tokens)
        self._select(kept)

    def _select(self, rows: np.ndarray | slice) -> None:
        """Keep some of the samples, by number."""
        self._spans = np.ascontiguousarray(self._spans[:, rows])  # [5, n]
        self.table = SampleTable(*(column[rows] for column in self.table))

    def __len__(self) -> int:
        return self._spans.shape[1]

    def id(self, number: int) -> str:
        """The id of sample `number`, without reading it."""
        start, end, _ = self._spans[2:, number].tolist()
        return self._ids[start:end].decode()

    @overload
    def __getitem__(self, number: int) -> TrainingSample: ...
    @overload
    def __getitem__(self, number: slice) -> RecordSamples: ...
    def __getitem__(self, number: int | slice) -> TrainingSample | RecordSamples:
        """Sample `number`, or a slice that shares the open files.

        Raises:
            IndexError: no such sample.
            ValueError: the file has changed since it was indexed.
        """
        if isinstance(number, slice):
            part = object.__new__(RecordSamples)
            part.__dict__.update(self.__dict__)
            part._select(number)
            return part
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number}: there are {len(self)}")
        start, end, _, _, file = self._spans[:, number].tolist()
        path = self._files.paths[file]
        try:
            line = os.pread(self._files.numbers[file], end - start, start)
            sample = sample_from_record(_parse(path, number, line), self._max_length)
            if _facts(sample)[-1] == self.table.checksums[number]:
                return sample
        except ValueError:
            pass  # told below, as any other change
        raise ValueError(
            f"{path}: bytes {start}..{end - 1} are no longer sample {self.id(number)!r}, the file has "
            "changed since it was indexed: start again"
        )


def _index_files(paths: Sequence[Path], max_length: int, persist: bool) -> list[_Index]:
    """The index of each file, from the disk or made anew; errors as `samples_from_records`."""
    seen: set[str] = set()
    indices = []
    for path in paths:
        stamp = _stamp(path, max_length)
        file = path.with_name(f"{path.name}.index-{max_length}.npz")
        index = _load_index(file, stamp) if persist else None
        if index is None:
            logger.info("indexing %s, %.1f MB", path, stamp[1] / 1e6)
            index = _build_index(path, max_length, seen)
            if persist:
                _save_index(file, stamp, index)
        elif len(paths) > 1:
            for number, name in enumerate(index.names(), start=1):
                if name in seen:
                    raise ValueError(
                        f"{path}, record {number}: id {name!r} comes twice, ids must differ over all files"
                    )
                seen.add(name)
        indices.append(index)
    return indices


def _merge(indices: Sequence[_Index]) -> _Index:
    """The index of all files together, with the number of the file as a fifth row of `spans`."""
    spans = [np.zeros((5, 0), np.int64)]
    ids = [np.zeros(0, np.uint8)]
    tables = [_as_table(array("q"))]
    for number, index in enumerate(indices):
        shifted = index.spans + np.asarray([[0], [0], [1], [1]]) * sum(map(len, ids))
        spans.append(np.concatenate([shifted, np.full((1, shifted.shape[1]), number)]))
        ids.append(index.ids)
        tables.append(index.table)
    table = SampleTable(*(np.concatenate(columns) for columns in zip(*tables, strict=True)))
    return _Index(np.concatenate(spans, axis=1), np.concatenate(ids), table)
