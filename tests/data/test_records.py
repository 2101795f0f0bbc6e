"""The record store: resume, torn lines, killed writers; and training samples made of records, in memory and indexed."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.data import records
from dspark_jax.data.records import (
    RecordSamples,
    RecordWriter,
    TrainingSample,
    read_records,
    sample_table,
    samples_from_records,
)


def record(number: int, answer: int = 20) -> dict:
    return {"id": f"r{number}", "prompt_ids": [1, 2, 3], "token_ids": list(range(answer)), "text": "né\u2028\n"}


def fill(path: Path, count: int) -> None:
    with RecordWriter(path) as writer:
        for number in range(count):
            writer.write(record(number))


def test_write_read_resume(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.jsonl"
    fill(path, 2)
    with RecordWriter(path, fsync=True) as writer:
        assert writer.done == {"r0", "r1"}
        writer.write(record(2))
        assert writer.done == {"r0", "r1", "r2"}
        assert list(read_records(path)) == [record(0), record(1), record(2)]  # on disk before the file is closed


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_resume_after_a_cut_at_any_byte(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("cut") / "out.jsonl"
    fill(path, 3)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    survivors = [
        record(number)["id"] for number in range(3) if cut >= whole.index(b"\n" * 1, whole.index(b'"r%d"' % number))
    ]
    assert [r["id"] for r in read_records(path)] == survivors
    with RecordWriter(path) as writer:
        assert writer.done == set(survivors)
        for number in range(3):
            if f"r{number}" not in writer.done:
                writer.write(record(number))
    assert path.read_bytes() == whole


def test_tail_of_zero_bytes_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 500)
    assert len(list(read_records(path))) == 1
    RecordWriter(path).close()
    assert path.read_bytes() == whole


def test_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "a"}\n\n{"id": "b"}')
    assert [r["id"] for r in read_records(path)] == ["a", "b"]
    with RecordWriter(path) as writer:
        writer.write({"id": "c"})
    assert [r["id"] for r in read_records(path)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "content,words",
    [
        ('{"id": "a"}\n{"id": "b\n{"id": "c"}\n', "line 2: not JSON"),
        ('{"id": "a"}\n[1]\n', "line 2: list"),
        ("[1, 2, 3]", r"line 1: begins with b'\[1, 2, 3\]', not a file of JSON records"),
        ("precious notes", "line 1: begins with"),
    ],
)
def test_other_files_are_refused_and_left_alone(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"out.jsonl, {words}"):
        RecordWriter(path)
    with pytest.raises(ValueError, match=f"out.jsonl, {words}"):
        list(read_records(path))
    assert path.read_text() == content


def test_wrong_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = RecordWriter(path, key="name")
    writer.write({"name": "a"})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="name 'a' is there already"):
        writer.write({"name": "a"})
    for wrong in (None, "", 3):
        with pytest.raises(ValueError, match="name .* must be a non-empty string"):
            writer.write({"name": wrong})
    with pytest.raises(ValueError):
        writer.write({"name": "b", "score": float("nan")})
    with pytest.raises(TypeError):
        writer.write({"name": "b", "ids": np.arange(3)})
    assert path.read_bytes() == before and writer.done == {"a"}
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write({"name": "b"})
    with pytest.raises(ValueError, match="id None"):
        RecordWriter(path)  # the file has another key
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_records(tmp_path / "nowhere.jsonl")


def test_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write, calls = tmp_path / "out.jsonl", os.write, []

    def short_then_full(file: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "full")
        return write(file, data[:5])

    with RecordWriter(path) as writer:
        writer.write(record(0))
        before = path.read_bytes()
        monkeypatch.setattr(os, "write", short_then_full)
        with pytest.raises(OSError, match="full"):
            writer.write(record(1))
        assert path.read_bytes() == before and writer.done == {"r0"}
        writer.write(record(1))  # now in pieces of five bytes
    assert list(read_records(path)) == [record(0), record(1)]


def test_killed_writer_can_go_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    script = (
        "import sys\n"
        "from dspark_jax.data.records import RecordWriter\n"
        "with RecordWriter(sys.argv[1]) as writer:\n"
        "    for number in range(10**9):\n"
        "        if f'r{number}' not in writer.done:\n"
        "            writer.write({'id': f'r{number}', 'text': 'x' * 1000})\n"
        "            print(number, flush=True)\n"
    )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    reported = -1
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            for _ in range(20):
                reported = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
        with path.open("ab") as file:
            file.write(b'{"id": "r')  # a write that was cut short
    names = [r["id"] for r in read_records(path)]
    assert names == [f"r{number}" for number in range(len(names))]  # none skipped, none twice
    assert len(names) > reported >= 39  # what was reported as written is there


def test_samples_from_records(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with RecordWriter(path) as writer:
        writer.write({**record(0, answer=20), "finish_reason": "stop"})
        writer.write(record(1, answer=13))
        writer.write(record(2, answer=14))
    samples = samples_from_records([path], max_length=64)
    assert [sample.id for sample in samples] == ["r0", "r2"]
    assert samples[0].input_ids.tolist() == [1, 2, 3, *range(20)] and samples[0].input_ids.dtype == np.int32
    assert samples[0].loss_mask.tolist() == [0] * 3 + [1] * 20 and samples[0].loss_mask.dtype == np.uint8
    cut = samples_from_records(path, max_length=18)  # 15 supervised tokens are left
    assert cut[0].input_ids.tolist() == [1, 2, 3, *range(15)] and cut[0].loss_mask.sum() == 15
    assert samples_from_records(path, max_length=16) == []
    assert len(samples_from_records(path, max_length=16, min_loss_tokens=13)) == 3
    short = samples_from_records(path, max_length=2, min_loss_tokens=0)
    assert [sample.loss_mask.tolist() for sample in short] == [[0, 0]] * 3


@pytest.mark.parametrize(
    "change,words",
    [
        ({"prompt_ids": None}, "prompt_ids: must be a list of token ids"),
        ({"token_ids": [1, "2"]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [2**31]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"id": 4}, "id 4: must be a non-empty string"),
        ({"id": "r0"}, "id 'r0' comes twice"),
    ],
)
def test_wrong_training_records_are_named(tmp_path: Path, change: dict, words: str) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps(record(0)) + "\n")
    second.write_text(json.dumps({**record(1), **change}) + "\n")
    with pytest.raises(ValueError, match=f"b.jsonl, record 1: {words}"):
        samples_from_records([first, second], 64)
    for _ in range(2):  # the second time the first file's index is on the disk
        with pytest.raises(ValueError, match=f"b.jsonl, record 1: {words}"):
            RecordSamples([first, second], 64)
    for make in (samples_from_records, RecordSamples):
        with pytest.raises(ValueError, match="max_length 1"):
            make(first, 1)
        with pytest.raises(FileNotFoundError, match="nowhere.jsonl: not found"):
            make([first, tmp_path / "nowhere.jsonl"], 64)


def assert_same_samples(one: Sequence[TrainingSample], two: Sequence[TrainingSample]) -> None:
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a.id == b.id and a.input_ids.dtype == b.input_ids.dtype and a.loss_mask.dtype == b.loss_mask.dtype
        np.testing.assert_array_equal(a.input_ids, b.input_ids)
        np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
    for left, right in zip(sample_table(one), sample_table(two), strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype


ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
some_records = st.lists(st.tuples(ids, ids, st.sampled_from(["", "\n", "  \n"])), max_size=8)


@settings(max_examples=25)
@given(st.lists(some_records, min_size=1, max_size=3), st.integers(2, 8), st.integers(0, 5), st.booleans())
def test_indexed_samples_are_those_in_memory(
    tmp_path_factory: pytest.TempPathFactory, files: list, max_length: int, least: int, torn: bool
) -> None:
    folder = tmp_path_factory.mktemp("indexed")
    paths = [folder / f"{number}.jsonl" for number in range(len(files))]
    for number, (path, content) in enumerate(zip(paths, files, strict=True)):
        lines = [
            json.dumps({"id": f"ä{number}-{i}", "prompt_ids": prompt, "token_ids": answer}) + "\n" + blank
            for i, (prompt, answer, blank) in enumerate(content)
        ]
        path.write_text("".join(lines) + ('{"id": "half' if torn else ""), encoding="utf-8")
    want = samples_from_records(paths, max_length, least)
    for indexed in (RecordSamples(paths, max_length, least), RecordSamples(paths, max_length, least)):
        assert_same_samples(indexed, want)
        assert [indexed.id(number) for number in range(len(indexed))] == [sample.id for sample in want]
        assert_same_samples(indexed[1:5:2], want[1:5:2])
        assert_same_samples(indexed[1:][1:], want[2:])
    assert_same_samples(RecordSamples(paths, max_length, least, persist=False), want)


def test_table_of_samples(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    fill(path, 3)
    table = RecordSamples(path, 18).table
    assert (
        table.lengths.tolist() == [18] * 3 and table.supervised.tolist() == [15] * 3 and table.tops.tolist() == [14] * 3
    )
    assert len(set(table.names)) == len(set(table.checksums)) == 3
    assert [len(column) for column in sample_table([])] == [0] * 5
    assert sample_table([TrainingSample("e", np.zeros(0, np.int32), np.zeros(0, np.uint8))]).tops.tolist() == [-1]


def test_index_is_used_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, index = tmp_path / "a.jsonl", tmp_path / "a.jsonl.index-64.npz"
    fill(path, 3)
    scanned: list[Path] = []
    scan = records._scan
    monkeypatch.setattr(records, "_scan", lambda path: (scanned.append(path), scan(path))[1])

    def passes(max_length: int = 64, persist: bool = True) -> int:
        scanned.clear()
        assert len(RecordSamples(path, max_length, persist=persist)) == len(list(read_records(path)))
        return len(scanned) - 1  # `read_records` scans too

    assert passes(persist=False) == 1 and not index.exists()
    assert [passes() for _ in range(3)] == [1, 0, 0] and index.exists()
    assert [passes(32), passes(32), passes()] == [1, 0, 0]  # an index for each length
    with RecordWriter(path) as writer:
        writer.write(record(3))
    assert [passes(), passes()] == [1, 0]
    os.utime(path, ns=(0, 0))
    assert [passes(), passes()] == [1, 0]
    index.write_bytes(index.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert [passes(), passes()] == [1, 0]
    assert "index-64.npz: not readable" in caplog.text
    assert not list(tmp_path.glob("*.new"))


def test_index_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    fill(path, 3)

    def full(*args: object, **arrays: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(np, "savez", full)
    with caplog.at_level(logging.INFO):
        assert len(RecordSamples(path, 64)) == 3
    assert "index-64.npz: not written" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_file_that_changes_while_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    fill(path, 3)
    samples = RecordSamples(path, 64)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content.replace(b"[0, 1, 2", b"[0, 1, 9"))
    for number in range(3):
        with pytest.raises(ValueError, match=f"a.jsonl: bytes .* no longer sample 'r{number}', the file has changed"):
            samples[number]
    path.write_bytes(content[:50])
    with pytest.raises(ValueError, match="start again"):
        samples[-1]
    with pytest.raises(IndexError):
        samples[3]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system does not list open files")
def test_files_close_with_the_last_slice(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    fill(path, 4)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    samples = RecordSamples(path, 64)
    part = samples[1:]
    del samples
    assert part[0].id == "r1" and len(os.listdir("/proc/self/fd")) == before + 1
    del part
    assert len(os.listdir("/proc/self/fd")) == before


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    fill(path, 50)
    want, samples = samples_from_records(path, 64), RecordSamples(path, 64)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(samples.__getitem__, list(range(50)) * 10))
    assert all(np.array_equal(sample.input_ids, want[i % 50].input_ids) for i, sample in enumerate(got))
    assert [sample.id for sample in got] == [sample.id for sample in want] * 10
