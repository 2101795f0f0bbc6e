"""Several processes: they train the curve of one, each with its own rows, and stop together."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from dspark_jax.checkpoints.load import load_drafter
from dspark_jax.sharding import MeshShape, make_mesh
from dspark_jax.training import distributed
from dspark_jax.training.distributed import own_rows, stop_on_signals
from dspark_jax.training.settings import TrainSettings
from dspark_jax.training.step import addressable_rows
from tests.training.tiny_run import ROOT, Job, metrics_of

FIELDS: dict[str, Any] = {"devices": 0, "mesh": [0, 2, 1], "batch_size": 8, "steps": 8, "lr": 1e-3, "log_every": 2}


@contextmanager
def two_jobs(folder: Path, output: str, **fields: Any) -> Iterator[tuple[Job, Job]]:
    """Two processes with one device each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    where = {"distributed": True, "coordinator": f"localhost:{port}", "process_count": 2}
    with Job(folder, output, 1, **where, process_id=0, **fields) as one:
        with Job(folder, output, 1, **where, process_id=1, **fields) as two:
            yield one, two


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records, hidden states, and `one`: the run of one process with two devices."""
    path = tmp_path_factory.mktemp("processes")
    with Job(path, "one", 2, **FIELDS) as job:
        job.finish()
    return path


def test_two_processes_train_the_curve_of_one(folder: Path) -> None:
    """Also where the first epoch fills the cache, each process with the samples of its own rows."""
    cache = folder / "filled"
    with two_jobs(folder, "two", **FIELDS, states="fill", cache=str(cache)) as jobs:
        outputs = [job.finish() for job in jobs]
    for two, one in zip(metrics_of(folder, "two"), metrics_of(folder, "one"), strict=True):
        for name in ("accepted_length", "eval_tokens"):  # only a process that has all devices decodes
            one.pop(name, None)
        assert two.keys() == one.keys()
        for name, value in two.items():
            assert value == pytest.approx(one[name], rel=1e-5), name
    assert "2 processes with 2 devices, 1 here" in outputs[0]
    assert "held out" in outputs[0] and "held out" not in outputs[1]  # the first one speaks for both
    shards = {path.name.split("-")[1] for path in cache.glob("states-*.npz")}
    assert shards == {"00000", "00001"}
    drafters = [load_drafter(folder / name / "drafter").params["fc"] for name in ("one", "two")]
    np.testing.assert_allclose(*drafters, rtol=1e-2, atol=1e-4)  # stored as bfloat16


def test_notice_to_one_process_stops_both_at_the_same_update(folder: Path) -> None:
    fields = FIELDS | {"checkpoint_every": 0, "log_every": 1, "steps": 4000, "eval_samples": 0}
    with two_jobs(folder, "stopped", **fields) as jobs:
        while all(job.running for job in jobs) and jobs[0].lines < 3:
            time.sleep(0.01)
        jobs[1].process.send_signal(signal.SIGTERM)
        outputs = [job.finish() for job in jobs]
    saved = [int(path.name) for path in (folder / "stopped" / "checkpoints").iterdir() if path.name.isdecimal()]
    assert len(saved) == 1 and 2 < saved[0] < 4000
    assert f"asked to stop: saved at update {saved[0]} of 4000" in outputs[0]
    assert metrics_of(folder, "stopped")[-1]["step"] == saved[0]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(fsdp=2, tensor=2), MeshShape(tensor=8)])
def test_one_process_has_all_rows(shape: MeshShape, micro_batches: int) -> None:
    mesh = make_mesh(shape)
    assert own_rows(mesh, 16, micro_batches) == set(range(16))
    assert list(addressable_rows(mesh, 16, micro_batches)) == list(range(16))


def test_to_host_gives_whole_arrays() -> None:
    mesh = make_mesh(MeshShape(fsdp=8))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    value = np.arange(16.0, dtype=np.float32)
    whole = distributed.to_host({"a": jax.device_put(value, place)})["a"]
    assert isinstance(whole, np.ndarray)
    np.testing.assert_array_equal(whole, value)


def test_processes_that_cannot_be_connected_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("DEADLINE_EXCEEDED: no answer\nfrom coordinator")

    distributed.start(TrainSettings())  # nothing to do
    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(ValueError, match=r"could not be connected \(DEADLINE_EXCEEDED: no answer from coordinator\)"):
        distributed.start(TrainSettings(distributed=True))


def test_output_folder_that_is_not_shared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As process 1 of two sees it, on another disk than process 0."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x: np.int32(77))
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: np.asarray([True, bool(x)]))
    monkeypatch.setattr(multihost_utils, "sync_global_devices", lambda name: None)
    with pytest.raises(ValueError, match="process 1 does not see what process 0 wrote.*storage that they share"):
        distributed.check_shared(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".shared").write_text("77")
    distributed.check_shared(tmp_path / "out")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_ask_to_stop_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stop_on_signals() as stop:
        assert not stop.at(1)
        signal.raise_signal(number)
        assert stop.at(2) and stop.at(3)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_sigint_ends_at_once() -> None:
    code = (
        "import time; from dspark_jax.training.distributed import stop_on_signals\n"
        "with stop_on_signals() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while not stop.at(1): time.sleep(0.01)\n"
        "    print('asked', flush=True)\n"
        "    time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in ("ready", "asked"):
            assert job.stdout.readline().strip() == line
            job.send_signal(signal.SIGINT)
        assert job.wait(60) == -signal.SIGINT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coordinator": "localhost:1"}, "coordinator 'localhost:1': .*set distributed too"),
        ({"process_id": 0}, "process_id 0: .*set distributed too"),
        ({"distributed": True, "process_count": 2}, "process_count 2.*give all three, or none"),
        ({"distributed": True, "coordinator": "here", "process_count": 2, "process_id": 0}, "must be HOST:PORT"),
        ({"distributed": True, "coordinator": "a:1", "process_count": 2, "process_id": 2}, r"must lie in 0\.\."),
        ({"distributed": True, "devices": 4}, "devices 4.*distributed"),
    ],
)
def test_process_settings_that_do_not_fit_are_told(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**fields)
