"""Checkpoints: everything comes back, the newest and the best are kept, damaged and foreign ones are told."""

from __future__ import annotations

import errno
import logging
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dspark_jax.sharding import MeshShape, make_mesh, put, shardings
from dspark_jax.training.checkpoint import Checkpoints, SaveError
from dspark_jax.training.optimizer import make_optimizer
from dspark_jax.training.step import TrainState

# Orbax's threads outlive the event loop of a save or restore that fails, and complain.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

OPTIMIZER = make_optimizer(1e-3)
FACTS = {"seed": 3, "lr": 6e-4, "data": "2 samples", "buckets": (8, 16)}


def make_state(step: int, ema: bool = True, width: int = 4) -> TrainState:
    rng = np.random.default_rng(step)

    def fill(tree: object) -> object:
        return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype(x.dtype)), tree)

    params = {"fc": jnp.zeros((4, width)), "layers": ({"down": jnp.zeros((4, 8))},), "confidence": {"b": jnp.zeros(())}}
    average = fill(params) if ema else None
    return TrainState(fill(params), fill(OPTIMIZER.init(params)), average, jnp.int32(step))  # type: ignore[arg-type]


def assert_same(one: TrainState, two: TrainState) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def save(folder: Path, *steps: int, best: int | None = None, keep: int = 2) -> None:
    with Checkpoints(folder, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), FACTS, {"mark": step}, best)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


@pytest.mark.parametrize("ema", [True, False])
def test_everything_comes_back(tmp_path: Path, ema: bool) -> None:
    state, progress = make_state(5, ema), {"sums": {"total": [0.1 + 0.2, 3.0]}, "best": None}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest is None
        checkpoints.save(5, state, FACTS, progress)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 5
        restored = checkpoints.restore(make_state(0, ema), FACTS)
        assert_same(restored.state, state)
        assert restored.progress == progress


def test_a_save_is_of_the_moment_though_the_buffers_are_donated(tmp_path: Path) -> None:
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = TrainState({"w": jnp.zeros((1024, 1024))}, (), None, jnp.int32(0))
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3):
            state = advance(state)
            checkpoints.save(step, state, FACTS, {})
            for _ in range(3):
                state = advance(state)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        values = []
        for step in (3, 2, 1):
            found = checkpoints.restore(state, FACTS).state
            values.append((int(found.step), float(found.params["w"].min()), float(found.params["w"].max())))
            shutil.rmtree(tmp_path / str(step))
            checkpoints._manager.reload()
    assert values == [(9, 9.0, 9.0), (5, 5.0, 5.0), (1, 1.0, 1.0)]


def test_the_newest_are_kept_and_the_best(tmp_path: Path) -> None:
    save(tmp_path / "two", 1, 2, 3, 3)
    assert steps_in(tmp_path / "two") == [2, 3]
    save(tmp_path / "best", 1, 2, 3, 4, 5, best=2, keep=1)
    assert steps_in(tmp_path / "best") == [2, 5]
    save(tmp_path / "best", 6, best=6, keep=1)
    assert steps_in(tmp_path / "best") == [6]


def test_half_written_checkpoint_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 4)
    torn = tmp_path / "8.orbax-checkpoint-tmp-17"
    (torn / "state").mkdir(parents=True)
    (torn / "state" / "data").write_bytes(b"half")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 4
        assert_same(checkpoints.restore(make_state(0), FACTS).state, make_state(4))
        checkpoints.save(8, make_state(8), FACTS, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "8"]


@pytest.mark.parametrize("name", ["facts/metadata", "progress/metadata", "state/_METADATA", "state/manifest.ocdbt"])
@pytest.mark.parametrize("kind", ["truncated", "missing", "zeros"])
def test_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 3, 6)
    file = tmp_path / "6" / name
    data = file.read_bytes()
    file.unlink()
    if kind != "missing":
        file.write_bytes(bytes(len(data)) if kind == "zeros" else data[: len(data) // 2])
    with caplog.at_level(logging.WARNING, "dspark_jax"), Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(make_state(0), FACTS)
        assert_same(restored.state, make_state(3))
        assert restored.progress == {"mark": 3}
        assert f"{tmp_path / '6'}: damaged" in caplog.text and "going on from checkpoint 3" in caplog.text
        assert checkpoints.latest == 3
        checkpoints.save(6, make_state(6), FACTS, {})  # its place is free again
    assert steps_in(tmp_path) == [3, 6] and (tmp_path / "damaged-6").is_dir()
    with Checkpoints(tmp_path) as checkpoints:
        assert_same(checkpoints.restore(make_state(0), FACTS).state, make_state(6))


def test_nothing_is_lost_where_all_are_damaged(tmp_path: Path) -> None:
    save(tmp_path, 3, 6)
    for step in (3, 6):
        (tmp_path / str(step) / "facts" / "metadata").write_bytes(b"")
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=r"none of the checkpoints \[6, 3\]"):
        checkpoints.restore(make_state(0), FACTS)
    assert steps_in(tmp_path) == [3, 6]


def test_another_run_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            checkpoints.restore(make_state(0), FACTS)
    save(tmp_path, 2)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="lr is 0.0006 in the checkpoint, 0.1 in this run"):
            checkpoints.restore(make_state(0), FACTS | {"lr": 0.1})
        with pytest.raises(ValueError, match=r"buckets is \[8, 16\] in the checkpoint, \[8\] in this run"):
            checkpoints.restore(make_state(0), FACTS | {"buckets": (8,)})


def on_mesh(state: TrainState, shape: MeshShape, devices: int) -> TrainState:
    return put(state, shardings(state, make_mesh(shape, jax.devices()[:devices])))


def test_state_moves_between_meshes(tmp_path: Path) -> None:
    """Saved on one mesh, restored on others, in the place that the new run gives it."""
    shapes = [(MeshShape(fsdp=2, tensor=2), 8), (MeshShape(), 1), (MeshShape(fsdp=4), 4)]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, on_mesh(make_state(2), *shapes[0]), FACTS, {})
    for shape, devices in shapes:
        like = on_mesh(make_state(0), shape, devices)
        with Checkpoints(tmp_path) as checkpoints:
            state = checkpoints.restore(like, FACTS).state
        assert_same(state, make_state(2))
        for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
            assert leaf.sharding == wanted.sharding


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file may grow beyond `limit` bytes: writing fails in the file system, wherever it is done."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_that_takes_no_more_is_told_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    state = make_state(0, width=100_000)
    with pytest.raises(SaveError, match=r"could not be written \(.*too large.*the last whole one is 3"):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(3, state, FACTS, {})
            checkpoints.wait()
            with small_files(200_000):
                checkpoints.save(6, state, FACTS, {})
                checkpoints.wait()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 3
        assert_same(checkpoints.restore(state, FACTS).state, state)


def test_disk_that_is_full_at_once_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", no_space)
    with pytest.raises(SaveError, match="No space left on device.*there is none before it"):
        save(tmp_path, 6)
