"""Checkpoints: everything comes back, the newest are kept, and another run's are refused."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training.checkpoint import Checkpoints
from dspark_jax.training.optimizer import make_optimizer
from dspark_jax.training.step import TrainState

OPTIMIZER = make_optimizer(1e-3)
FACTS = {"seed": 3, "lr": 6e-4, "data": "2 samples"}


def make_state(step: int, ema: bool = True, width: int = 3) -> TrainState:
    rng = np.random.default_rng(step)

    def fill(tree: object) -> object:
        return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype(x.dtype)), tree)

    params = {"fc": jnp.zeros((2, width)), "layers": ({"q": jnp.zeros(4)},), "confidence": {"b": jnp.zeros(())}}
    average = fill(params) if ema else None
    return TrainState(fill(params), fill(OPTIMIZER.init(params)), average, jnp.int32(step))  # type: ignore[arg-type]


def assert_same(one: TrainState, two: TrainState) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ema", [True, False])
def test_everything_comes_back(tmp_path: Path, ema: bool) -> None:
    state = make_state(5, ema)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest is None
        checkpoints.save(state, FACTS)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 5
        assert_same(checkpoints.restore(make_state(0, ema), FACTS), state)


def test_two_newest_are_kept(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3, 3):
            checkpoints.save(make_state(step), FACTS)
        assert checkpoints.latest == 3
    assert sorted(folder.name for folder in tmp_path.iterdir() if folder.is_dir()) == ["2", "3"]


def test_half_written_checkpoint_is_ignored(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(4), FACTS)
    torn = tmp_path / "8.orbax-checkpoint-tmp-17"
    (torn / "state").mkdir(parents=True)
    (torn / "state" / "data").write_bytes(b"half")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 4
        assert_same(checkpoints.restore(make_state(0), FACTS), make_state(4))
        checkpoints.save(make_state(8), FACTS)
        assert checkpoints.latest == 8


def test_another_run_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            checkpoints.restore(make_state(0), FACTS)
        checkpoints.save(make_state(2), FACTS)
        with pytest.raises(ValueError, match="lr is 0.0006 in the checkpoint, 0.1 in this run"):
            checkpoints.restore(make_state(0), FACTS | {"lr": 0.1})


def test_state_goes_to_the_devices_that_ask(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(2), FACTS)
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        state = checkpoints.restore(jax.device_put(make_state(0), everywhere), FACTS)
        assert_same(state, make_state(2))
        assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(state))
