"""A run that is killed, over and over, at any moment: its curve and its end are those of an uninterrupted one."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.tiny_run import Job, metrics_of

FIELDS: dict[str, Any] = {"steps": 96, "checkpoint_every": 4, "log_every": 3, "lr": 1e-3}


def finish(folder: Path, output: str, **fields: Any) -> None:
    with Job(folder, output, **FIELDS | fields) as job:
        job.finish()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records, hidden states, and `whole`: a run that nothing interrupts."""
    path = tmp_path_factory.mktemp("killed")
    finish(path, "whole")
    return path


def wait_for(moment: str, job: Job, chance: random.Random) -> None:
    """Return at a random moment of a kind: while the run starts, between updates, or while a checkpoint is written."""
    if moment == "start":
        time.sleep(chance.uniform(0.2, 3.0))
        return
    checkpoints, lines = job.folder / "checkpoints", job.lines
    while job.running:
        if moment == "save" and checkpoints.is_dir() and any("tmp" in path.name for path in checkpoints.iterdir()):
            time.sleep(chance.uniform(0, 0.05))
            return
        if moment == "update" and job.lines > lines:
            time.sleep(chance.uniform(0, 0.2))
            return
        time.sleep(0.001)


def test_ten_kills_leave_no_trace(folder: Path) -> None:
    chance = random.Random(4)
    moments = ["start", "save", "update"] * 3 + ["start"]
    chance.shuffle(moments)
    for moment in moments:
        with Job(folder, "killed", **FIELDS) as job:
            wait_for(moment, job, chance)
            assert job.running, "it came to its end before it was killed"
            job.process.kill()
            job.finish(-signal.SIGKILL)
    finish(folder, "killed")
    assert metrics_of(folder, "killed") == metrics_of(folder, "whole")
    for name in ("drafter", "best"):
        weights = [(folder / output / name / "model.safetensors").read_bytes() for output in ("killed", "whole")]
        assert weights[0] == weights[1]
    left = [sorted(path.name for path in (folder / output / "checkpoints").iterdir()) for output in ("killed", "whole")]
    assert left[0] == left[1] == ["92", "96"]


def test_killed_and_moved_to_another_mesh(folder: Path) -> None:
    with Job(folder, "moved", **FIELDS) as job:
        while job.running and not (job.folder / "checkpoints" / "48").exists():
            time.sleep(0.001)
        assert job.running
    assert len(metrics_of(folder, "moved")) < len(metrics_of(folder, "whole"))
    finish(folder, "moved", devices=8, mesh=[2, 2, 2])
    for moved, still in zip(metrics_of(folder, "moved"), metrics_of(folder, "whole"), strict=True):
        assert moved.keys() == still.keys()
        for name in ("total", "grad_norm", "tau_probabilistic"):
            if name in still:
                assert moved[name] == pytest.approx(still[name], rel=1e-5)
