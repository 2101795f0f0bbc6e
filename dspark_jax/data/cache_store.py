"""Shards of a cache on disk: ArrayRecord files of samples, each with an index beside it; knows nothing of models.

A process writes its own shards, one after another, of a bounded size:

    states-PROCESS-NUMBER.array_record    one record a sample: its arrays, self-describing, with a CRC-32
    states-PROCESS-NUMBER.npz             the index: ids, lengths, checksums, tokens, and the shard's size

A shard is written as `.tmp`, flushed to the disk and renamed; its index is written after it, in the same way, and makes
it part of the cache. So at any moment all that has an index is whole, and what has none is thrown away by the process
that wrote it when it goes on. A lock keeps a second process of the same number away.

Record: magic, CRC-32 of what follows the three numbers, length of the description; JSON {"id", "fields": [[name, dtype,
shape]]}; then the arrays, each from a multiple of 16 bytes on.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

SHARD_BYTES = 256 * 2**20  # of records in a shard; a shard ends with the sample that reaches it
RECORD_BYTES = 1024  # room for the description of a sample, and for its part of the index
SHARD_OVERHEAD = 192 * 1024  # room for the container's header, footer and padding, and for the index

_MAGIC, _HEAD, _ALIGN = b"DSHS", struct.Struct("<4sII"), 16
_WRITER_OPTIONS = "group_size:1,uncompressed"  # one record a chunk: random access
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OWN_DTYPES = {np.dtype(kind).name: np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)}
_INDEX_NAME = re.compile(r"states-(\d+)-(\d+)\.npz")

Value = TypeVar("Value")


class DiskFullError(OSError):
    """The disk has no room for a shard (errno ENOSPC); what was committed before is still there."""

    def __init__(self, folder: Path, need: int) -> None:
        super().__init__(
            f"{folder}: the disk is full, writing a shard needs {need:,} bytes and {free_bytes(folder):,} are free: "
            "make room and start again; finished shards are kept, only the unfinished one is computed again"
        )
        self.errno = errno.ENOSPC


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that `folder` lies on, or will lie on."""
    folder = folder.absolute()
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free


def raise_if_full(error: Exception, folder: Path, need: int) -> None:
    """Tell an error of writing `need` bytes that means a full disk (or quota) as such.

    Raises:
        DiskFullError: it does.
    """
    texts = [os.strerror(code) for code in _FULL]  # the container's library gives the text only
    if getattr(error, "errno", None) in _FULL or any(text in str(error) for text in texts):
        raise DiskFullError(folder, need) from error


def pack_record(sample_id: str, arrays: Mapping[str, np.ndarray]) -> bytes:
    """A sample's record: the arrays with their names, dtypes and shapes."""
    fields = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({"id": sample_id, "fields": fields}).encode()
    text += b" " * (-(_HEAD.size + len(text)) % _ALIGN)
    parts: list[Any] = [text]
    for array in arrays.values():
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        parts += [data, bytes(-len(data) % _ALIGN)]
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return b"".join([_HEAD.pack(_MAGIC, total, len(text)), *parts])


def unpack_record(record: bytes, check: bool = True) -> tuple[str, dict[str, np.ndarray]]:
    """Id and arrays of a record; the arrays are read-only views of it. `check`: compare the checksum.

    Raises:
        ValueError: the bytes are not those that were written.
    """
    magic, total, size = _HEAD.unpack_from(record) if len(record) >= _HEAD.size else (b"", 0, 0)
    if magic != _MAGIC:
        raise ValueError("not a record of hidden states")
    if check and zlib.crc32(memoryview(record)[_HEAD.size :]) != total:
        raise ValueError("the record does not have its checksum")
    start = _HEAD.size + size
    description = json.loads(record[_HEAD.size : start])
    arrays = {}
    for name, dtype_name, shape in description["fields"]:
        dtype = _OWN_DTYPES.get(dtype_name) or np.dtype(dtype_name)
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(record, dtype, count, start).reshape(shape)
        start += count * dtype.itemsize
        start += -start % _ALIGN
    return description["id"], arrays


class Shard(NamedTuple):
    """A finished shard.

    Attributes:
        path: the ArrayRecord file. ids: of its samples, in order. lengths: int64, tokens of each.
        sums: uint32, a checksum of each sample's tokens and mask, as given to the writer.
    """

    path: Path
    ids: list[str]
    lengths: np.ndarray
    sums: np.ndarray


def finished(folder: Path) -> list[tuple[int, int]]:
    """(process, number) of all finished shards, sorted."""
    found = (_INDEX_NAME.fullmatch(name) for name in os.listdir(folder))
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def shard_path(folder: Path, process: int, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"states-{process:05d}-{number:05d}.array_record"


def read_shard(folder: Path, process: int, number: int) -> Shard:
    """What a shard's index says; the shard's size is compared with it.

    Raises:
        ValueError: the index cannot be read, or the shard is missing or truncated; the message names the file.
    """
    path = shard_path(folder, process, number)
    ids, lengths, sums, size = _read_index(index_path(path), "ids", "lengths", "sums", "size")
    if not len(ids) == len(lengths) == len(sums):
        raise ValueError(f"{index_path(path)}: ids, lengths and sums differ in length: {_REPAIR}")
    if not path.exists():
        raise ValueError(f"{path}: missing, its index is there: restore it, or remove the index to compute it again")
    if path.stat().st_size != int(size):
        raise ValueError(f"{path}: truncated, has {path.stat().st_size:,} bytes of {int(size):,}: {_REPAIR}")
    return Shard(path, ids.tolist(), lengths, sums)


_REPAIR = "restore it, or remove it and its index to compute its samples again"


def index_path(shard: Path) -> Path:
    """The index beside a shard."""
    return shard.with_suffix(".npz")


def shard_tokens(shard: Path) -> np.ndarray:
    """Token ids int32 of all samples of a shard, one after another, from its index; ValueError as `read_shard`."""
    return _read_index(index_path(shard), "tokens")[0]


def _read_index(file: Path, *names: str) -> list[np.ndarray]:
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as data:
            return [data[name] for name in names]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file}: not readable as a shard's index ({error}): {_REPAIR}") from error


def write_whole(file: Path, write: Callable[[Any], None]) -> None:
    """Write a file under another name, flush it to the disk and rename it: it is there as a whole or not at all.

    Raises:
        OSError: it could not be written; nothing is left.
    """
    fresh = file.with_name(f"{file.name}.{os.urandom(4).hex()}.tmp")
    try:
        with fresh.open("wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(file)
        flush_to_disk(file.parent)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class WriterLock:
    """Holds the right to write as one process number into a folder, until `release` or the end of the process."""

    def __init__(self, folder: Path, process: int) -> None:
        """Take it.

        Raises:
            ValueError: another process (or another open cache of this one) has it.
        """
        file = folder / f"writer-{process:05d}.lock"
        self._handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise ValueError(
                f"{file}: another run writes into this cache as process {process}: wait for it, or give another folder"
            ) from error
        except OSError as error:  # a file system without locks
            if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL):
                self.release()
                raise

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.release()


def remove_unfinished(folder: Path, process: int) -> int:
    """Remove what a killed process of this number left without an index; returns the number of the next shard."""
    done = {number for owner, number in finished(folder) if owner == process}
    for name in os.listdir(folder):
        match = re.match(rf"states-0*{process}-(\d+)\.", name)
        if match and (name.endswith(".tmp") or int(match[1]) not in done):
            (folder / name).unlink(missing_ok=True)
    return max(done, default=-1) + 1


class ShardWriter:
    """One shard being written."""

    def __init__(self, path: Path) -> None:
        """Begin the shard that will lie at `path`.

        Raises:
            OSError: the folder cannot be written to. DiskFullError: no room.
        """
        self.path = path
        self.bytes = 0
        self.ids: list[str] = []
        self._lengths: list[int] = []
        self._sums: list[int] = []
        self._tokens: list[np.ndarray] = []
        self._part = path.with_suffix(".array_record.tmp")
        with self._errors():
            self._file = ArrayRecordWriter(str(self._part), _WRITER_OPTIONS)

    def add(self, record: bytes, sample_id: str, tokens: np.ndarray, checksum: int) -> None:
        """Add a sample: its packed record, and what the index holds of it.

        Raises:
            DiskFullError, OSError: it could not be written; the shard is gone.
        """
        self.bytes += len(record)
        with self._errors():
            self._file.write(record)
        self.ids.append(sample_id)
        self._lengths.append(len(tokens))
        self._sums.append(checksum)
        self._tokens.append(np.array(tokens, np.int32))

    def finish(self) -> Shard:
        """Put the shard on the disk, then its index.

        Raises:
            DiskFullError, OSError: it could not be written; the shard is gone.
        """
        lengths, sums = np.asarray(self._lengths, np.int64), np.asarray(self._sums, np.uint32)
        shard = Shard(self.path, self.ids, lengths, sums)
        with self._errors():
            self._file.close()
            flush_to_disk(self._part)
            size = self._part.stat().st_size
            self._part.replace(self.path)
            ids, tokens = np.asarray(self.ids), np.concatenate(self._tokens)
            write_whole(
                index_path(self.path),
                lambda out: np.savez(out, ids=ids, lengths=lengths, sums=sums, tokens=tokens, size=np.int64(size)),
            )
        return shard

    def discard(self) -> None:
        """Remove what was written."""
        try:
            self._file.close()
        except (AttributeError, OSError, RuntimeError):
            pass  # it could not be written, and goes anyway
        for path in (self._part, self.path):
            path.unlink(missing_ok=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of writing, told apart; the shard is discarded."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            need = self.bytes + SHARD_OVERHEAD
            self.discard()
            raise_if_full(error, self.path.parent, need)
            raise OSError(f"{self.path}: could not be written ({error})") from error


class Recent(Generic[Value]):
    """The values used last, made when they are asked for; for several threads."""

    def __init__(self, make: Callable[[Path], Value], size: int) -> None:
        self._make, self._size = make, size
        self._values: OrderedDict[Path, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, path: Path) -> Value:
        """The value of `path`. One that is dropped lives on as long as a thread still uses it."""
        with self._lock:
            if path in self._values:
                self._values.move_to_end(path)
                return self._values[path]
        value = self._make(path)
        with self._lock:
            self._values[path] = value
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return value


def open_reader(path: Path) -> ArrayRecordReader:
    """A reader of a shard, for several threads."""
    return ArrayRecordReader(str(path), _READER_OPTIONS, file_reader_buffer_size=32768)


def read_record(reader: ArrayRecordReader, path: Path, position: int, sample_id: str, check: bool) -> dict[str, Any]:
    """The arrays of the sample at a position of a shard.

    Raises:
        ValueError: the bytes are not those that were written; the message names file and sample.
    """
    try:
        found, arrays = unpack_record(reader.read([position])[0], check)
    except (ValueError, KeyError, RuntimeError, IndexError) as error:
        raise ValueError(f"{path}: sample {sample_id!r} is corrupt ({error}): {_REPAIR}") from error
    if found != sample_id:
        raise ValueError(f"{path}: holds sample {found!r} where its index says {sample_id!r}: {_REPAIR}")
    return arrays
