"""Runs fed in every way there is: a cache that fills while it trains, packed rows, batches of several lengths."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.data.hidden_cache import CachedSample
from dspark_jax.data.records import TrainingSample
from dspark_jax.training import prepare, trainer
from dspark_jax.training.settings import TrainSettings
from tests.training.test_trainer import assert_same, at_step, steps_of
from tests.training.tiny_run import metrics_of, tiny_settings

MODES: dict[str, dict[str, Any]] = {
    "fill": {"states": "fill", "cache_kind": "int8"},
    "packed": {"states": "online", "pack": True, "batch_size": 2, "max_length": 64},
    "buckets": {"states": "cache", "buckets": (24, 28)},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_feed_a_run_survives_a_crash_and_a_stop(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the first checkpoint, and asked to stop in the second epoch: the curve and the end are the same."""

    def settings(output: str) -> TrainSettings:
        cache = str(tmp_path / f"cache-{output}")
        return tiny_settings(tmp_path, output, cache=cache, eval_samples=0, log_every=2, **MODES[mode])

    def fail() -> None:
        raise RuntimeError("power cut")

    whole = jax.device_get(trainer.train(settings("whole")))
    with monkeypatch.context() as patch:
        at_step(2, fail, patch)
        with pytest.raises(RuntimeError, match="power cut"):
            trainer.train(settings("hit"))
    with monkeypatch.context() as patch:
        at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM), patch)
        trainer.train(settings("hit"))
    assert steps_of(tmp_path, "hit")[-1] == 5
    assert_same(jax.device_get(trainer.train(settings("hit"))), whole)
    assert metrics_of(tmp_path, "hit") == metrics_of(tmp_path, "whole")


def test_filling_a_cache_trains_as_online_does_and_leaves_it_complete(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"lr": 1e-3, "eval_tokens": 2}
    for states in ("online", "fill"):
        trainer.train(tiny_settings(tmp_path, states, states=states, **fields))
    for fill, online in zip(metrics_of(tmp_path, "fill"), metrics_of(tmp_path, "online"), strict=True):
        assert fill == pytest.approx(online, rel=1e-5)
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    run = prepare.prepare(tiny_settings(tmp_path, "later", states="cache", **fields))
    samples = [*run.feed.pipeline.samples, *run.held_out]
    assert len(samples) == 14
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == stamps
    again = prepare.prepare(tiny_settings(tmp_path, "built", cache=str(tmp_path / "built"), **fields))
    for pair in read_both(again, run, samples):
        for one, two in zip(*pair, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def read_both(one: prepare.Run, two: prepare.Run, samples: Sequence[TrainingSample]) -> Iterator[list[CachedSample]]:
    """What the caches of two runs hold of each sample."""
    caches = [run.feed.pipeline._cache for run in (one, two)]
    for sample in samples:
        yield [cache.read(cache.number(sample.id)) for cache in caches if cache is not None]


def test_a_filled_cache_has_the_normalizer_of_what_it_stores(tmp_path: Path) -> None:
    """As one that is built has it, where states are rounded to be stored."""
    fields: dict[str, Any] = {"cache_kind": "bfloat16", "eval_samples": 0, "steps": 3, "checkpoint_every": 0}
    trainer.train(tiny_settings(tmp_path, "fill", states="fill", **fields))
    filled = prepare.prepare(tiny_settings(tmp_path, "later", states="cache", **fields))
    built = prepare.prepare(tiny_settings(tmp_path, "built", cache=str(tmp_path / "built"), **fields))
    shares = []
    for one, two in read_both(built, filled, filled.feed.pipeline.samples):
        same = (one.final == two.final).all(axis=1)  # not those few that two programs round differently
        np.testing.assert_allclose(one.normalizer[same], two.normalizer[same], rtol=0, atol=2e-5)
        shares.append(same.mean())
    assert np.mean(shares) > 0.8


@pytest.mark.parametrize("held_out", [0, 2])
def test_a_filled_cache_lets_go_of_the_target_where_nothing_decodes(tmp_path: Path, held_out: int) -> None:
    run = prepare.prepare(tiny_settings(tmp_path, states="fill", eval_samples=held_out, steps=4))
    filling = run.feed._filling
    assert filling is not None and run.feed.pipeline.total_steps(1) == 3
    weight = weakref.ref(filling.frozen["target"]["layers"][0]["down"])
    del filling
    for _ in run.feed.batches(0):
        pass
    gc.collect()
    assert (weight() is not None) == bool(run.target.params) == (held_out > 0)
    run.exporter.close()
