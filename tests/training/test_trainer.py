"""Training runs on a tiny target: killed and resumed, stopped, exported, and refused at the door."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dspark_jax.checkpoints.deepspec import copy_with_calibration
from dspark_jax.checkpoints.load import load_drafter
from dspark_jax.config import write_json
from dspark_jax.data.hidden_cache import DiskFullError, HiddenCache
from dspark_jax.data.records import TrainingSample
from dspark_jax.drafters.config import CALIBRATION
from dspark_jax.sharding import MeshShape
from dspark_jax.training import evaluate, export, prepare, trainer, vocabulary
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import TrainSettings, drafter_config
from dspark_jax.training.step import TrainState
from tests.training.tiny_run import ROOT, SHAPE, TARGETS, metrics_of, tiny_settings, write_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records and hidden states that all runs share."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> TrainState:
    """The last state of a run that nothing interrupts."""
    return jax.device_get(trainer.train(tiny_settings(folder, "whole")))


def steps_of(folder: Path, output: str) -> list[int]:
    """Updates of the checkpoints that are there."""
    return sorted(int(path.name) for path in (folder / output / "checkpoints").iterdir() if path.name.isdecimal())


def assert_same(one: TrainState, two: TrainState) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_continues(folder: Path, output: str, whole: TrainState) -> None:
    """Start a run again: its end, its log and its drafter are those of the uninterrupted one, to the bit."""
    assert_same(jax.device_get(trainer.train(tiny_settings(folder, output))), whole)
    assert metrics_of(folder, output) == metrics_of(folder, "whole")
    files = [folder / name / "drafter" / "model.safetensors" for name in (output, "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def at_step(number: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `action` when the metrics of update `number` are taken in."""
    add, seen = trainer.Log.add, [0]

    def hook(self: trainer.Log, metrics: object, counts: object) -> None:
        add(self, metrics, counts)
        seen[0] += 1
        if seen[0] == number:
            action()

    monkeypatch.setattr(trainer.Log, "add", hook)


def test_run_leaves_what_it_promises(folder: Path, whole: TrainState) -> None:
    rows = metrics_of(folder, "whole")
    assert [row["step"] for row in rows] == [*range(1, 8), 7]
    assert {"total", "ce_loss", "grad_norm", "lr", "tau_probabilistic", "epoch"} <= set(rows[0])
    assert [row["epoch"] for row in rows[:7]] == [0, 0, 0, 1, 1, 1, 2]
    assert rows[6]["ce_loss"] < rows[0]["ce_loss"]
    assert rows[7]["eval_tokens"] == 2 * 8  # two held-out prompts; the first token comes from the prompt's pass
    assert 1 <= rows[7]["accepted_length"] <= 5
    assert rows[7]["held_out_tau_probabilistic"] > 1 and rows[7]["held_out_sampled_anchors"] > 0
    assert steps_of(folder, "whole") == [6, 7]
    assert list((folder / "whole" / "tensorboard").glob("events.*"))


def test_drafter_is_the_average_of_the_weights(folder: Path, whole: TrainState) -> None:
    drafter = load_drafter(folder / "whole" / "drafter")
    assert drafter.config.draft_vocab_size == 64 and drafter.config.block_size == 4
    assert "embed" not in drafter.params and "head" not in drafter.params
    np.testing.assert_allclose(drafter.params["fc"], whole.ema["fc"], rtol=1e-2)  # stored as bfloat16
    distance = [np.abs(drafter.params["fc"] - tree["fc"]).max() for tree in (whole.ema, whole.params)]
    assert distance[0] < distance[1]


def test_error_between_steps_then_resume(folder: Path, whole: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        at_step(5, fail, patch)
        with pytest.raises(RuntimeError, match="power cut"):
            trainer.train(tiny_settings(folder, "failed"))
    log = folder / "failed" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 5, "tot')  # and a line is half written
    assert_continues(folder, "failed", whole)


def test_sigterm_saves_and_leaves_with_zero(
    folder: Path, whole: TrainState, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        at_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM), patch)
        patch.setattr(trainer, "parse", lambda argv: tiny_settings(folder, "stopped"))
        assert trainer.main([]) == 0
    assert "saved at update 2 of 7, start again to go on" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
    assert (folder / "stopped" / "checkpoints" / "2").is_dir()
    assert_continues(folder, "stopped", whole)


def test_a_stop_between_two_log_lines_leaves_no_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of a line's window that is open when the run stops come back with the checkpoint."""
    fields: dict[str, Any] = {"log_every": 5, "eval_samples": 0, "checkpoint_every": 0}
    trainer.train(tiny_settings(folder, "sparse", **fields))
    with monkeypatch.context() as patch:
        at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT), patch)
        trainer.train(tiny_settings(folder, "sparse-stopped", **fields))
    assert steps_of(folder, "sparse-stopped") == [3]
    trainer.train(tiny_settings(folder, "sparse-stopped", **fields))
    assert [row["step"] for row in metrics_of(folder, "sparse")] == [5, 7]
    assert metrics_of(folder, "sparse-stopped") == metrics_of(folder, "sparse")


def test_log_tells_tokens_padding_and_time(folder: Path, whole: TrainState) -> None:
    run = prepare.prepare(tiny_settings(folder, "whole"))
    lengths = [len(sample.input_ids) for sample in run.feed.pipeline.samples]
    answers = [int(sample.loss_mask.sum()) for sample in run.feed.pipeline.samples]
    for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()[:7]:
        row = json.loads(line)
        batch = run.feed.pipeline.indices(row["step"] - 1)
        assert row["tokens"] == sum(lengths[i] for i in batch)
        assert row["supervised_tokens"] == sum(answers[i] for i in batch)
        assert row["padding_share"] == pytest.approx(1 - row["tokens"] / (4 * 32))
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert 0 <= row["wait_share"] <= 1


def test_json_tells_of_what_a_call_did(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the updates of a stopped run, then of the rest; what is not finite is null, the drafter is there by then."""
    file = folder / "told.json"
    settings = replace(tiny_settings(folder, "told"), json=file)
    write, drafter, there = export.write_drafter, folder / "told" / "drafter" / "config.json", []

    def slowly(*args: Any, **options: Any) -> None:
        time.sleep(0.5)
        write(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(export, "write_drafter", slowly)
        patch.setattr(trainer, "write_json", lambda *args: there.append(drafter.is_file()) or write_json(*args))
        at_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM), patch)
        trainer.train(settings)
    assert there == [True]
    first = json.loads(file.read_text())
    assert first["updates"] == {"total": 7, "first": 0, "last": 2, "finished": False} and first["best"] is None
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "decoded", lambda *args: {"accepted_length": float("inf")})
        trainer.train(settings)
    rest = json.loads(file.read_text())
    assert rest["updates"] == {"total": 7, "first": 2, "last": 7, "finished": True}
    assert rest["metrics"]["accepted_length"] is None and rest["metrics"]["held_out_ce_loss"] > 0
    tokens = [row["tokens"] for row in metrics_of(folder, "told") if "tokens" in row]
    assert (first["tokens"], rest["tokens"]) == (sum(tokens[:2]), sum(tokens[2:]))


def test_a_file_for_json_is_looked_at_before_anything_is_trained(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none/told.json: must be a file in a folder that exists"):
        trainer.train(replace(tiny_settings(folder, "unmade"), json=folder / "none" / "told.json"))
    assert not (folder / "unmade").exists()


def test_best_drafter_is_kept_with_its_figure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"eval_every": 2, "checkpoint_every": 1, "keep_checkpoints": 1, "log_every": 1}
    calls = iter([1.5, 2.5, 2.0, 2.5])
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "decoded", lambda *args: {"accepted_length": next(calls)})
        at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM), patch)
        trainer.train(tiny_settings(folder, "best", **fields))
        assert steps_of(folder, "best") == [4, 5]
        trainer.train(tiny_settings(folder, "best", **fields))
    assert steps_of(folder, "best") == [4, 7]  # the best one, and the newest
    config = json.loads((folder / "best" / "best" / "config.json").read_text())
    assert config["evaluation"] == {"name": "accepted_length", "value": 2.5, "step": 4}
    assert load_drafter(folder / "best" / "best").config == load_drafter(folder / "best" / "drafter").config
    sizes = [load_drafter(folder / "best" / name).params["fc"] for name in ("best", "drafter")]
    assert np.abs(sizes[0] - sizes[1]).max() > 0


def test_held_out_losses_decide_where_nothing_decodes() -> None:
    first = evaluate.better(None, {"held_out_tau_probabilistic": 1.5}, 3)
    assert first == evaluate.Best("held_out_tau_probabilistic", 1.5, 3)
    assert evaluate.better(first, {"held_out_tau_probabilistic": 1.5}, 6) is None
    assert evaluate.better(first, {"held_out_tau_probabilistic": 1.6}, 6) is not None
    assert evaluate.better(first, {"accepted_length": 1.2, "held_out_tau_probabilistic": 1.4}, 6) == evaluate.Best(
        "accepted_length", 1.2, 6
    )
    assert evaluate.better(first, {}, 6) is None


@pytest.mark.parametrize("name", evaluate.SCORES)
def test_a_score_that_is_not_finite_is_never_the_best(name: str) -> None:
    for best in (None, evaluate.Best(name, 3.0, 3), evaluate.Best("another", 3.0, 3)):
        for value in (float("nan"), float("inf"), float("-inf")):
            assert evaluate.better(best, {name: value}, 6) is None
    spoilt = evaluate.Best(name, float("nan"), 3)  # as earlier versions may have saved it
    assert evaluate.better(spoilt, {name: 1.0}, 6) == evaluate.Best(name, 1.0, 6)


def test_held_out_losses_count_samples_alike(folder: Path, whole: TrainState) -> None:
    """Whatever the batches that they come in: here 4 and 1."""
    run = prepare.prepare(tiny_settings(folder, "weighted", eval_samples=5))
    parts = [pipeline.samples for pipeline in run.losses._pipelines]
    assert [len(part) for part in parts] == [4, 1]
    totals = []
    for pipeline in run.losses._pipelines:
        alone = copy.copy(run.losses)
        alone._pipelines = [pipeline]
        totals.append(alone.losses(whole.params, run.feed.frozen))
    found = run.losses.losses(whole.params, run.feed.frozen)
    assert found["held_out_total"] == pytest.approx((4 * totals[0]["held_out_total"] + totals[1]["held_out_total"]) / 5)
    anchors = [part["held_out_sampled_anchors"] for part in totals]
    assert found["held_out_sampled_anchors"] == pytest.approx(np.mean(anchors))


def test_a_device_too_small_to_decode_leaves_the_held_out_losses(
    folder: Path, whole: TrainState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    run = prepare.prepare(tiny_settings(folder, "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "accepted_length", full)
        assert evaluate.decoded(run.target, run.config, whole.best, run.d2t, run.held_out, 2, ()) == {}
    assert "cannot hold target and drafter" in caplog.text


def test_resume_on_another_mesh(folder: Path, whole: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM), patch)
        trainer.train(tiny_settings(folder, "moved"))
    mesh = MeshShape(data=1, fsdp=2, tensor=2)
    trainer.train(tiny_settings(folder, "moved", devices=4, mesh=mesh, micro_batches=2, remat=True))
    pairs = list(zip(metrics_of(folder, "moved"), metrics_of(folder, "whole"), strict=True))[:7]
    for moved, still in pairs:
        for name in ("lr", "epoch", "sampled_anchors", "block_supervised_tokens", "tokens"):
            assert moved[name] == still[name]
        assert moved["total"] == pytest.approx(still["total"], rel=1e-3)  # of a high learning rate


def test_a_run_starts_from_an_existing_drafter(folder: Path, whole: TrainState) -> None:
    """Its weights and its draft vocabulary, whatever the seed; a drafter of another shape is refused by field."""
    drafter = folder / "whole" / "drafter"
    settings = tiny_settings(folder, "further", initial=str(drafter), seed=5)
    run = prepare.prepare(settings)
    weights = dict(load_drafter(drafter).params)
    np.testing.assert_array_equal(run.d2t, weights.pop("d2t"))
    assert_same(jax.device_get(run.fresh().params), weights)
    wrong = replace(settings, drafter=replace(settings.drafter, block_size=5))
    with pytest.raises(ValueError, match=r"initial .*block_size \d \(this run has 5\)"):
        prepare.prepare(wrong)


def test_the_calibration_of_an_initial_drafter_is_left_behind(folder: Path, whole: TrainState, tmp_path: Path) -> None:
    """It is no part of the shape, and weights that change make it stale: neither this run's drafter has it."""
    block = load_drafter(folder / "whole" / "drafter").config.block_size
    copy_with_calibration(folder / "whole" / "drafter", tmp_path / "initial", (2.0,) * block, (-0.5,) * block)
    settings = tiny_settings(folder, "recalibrated", initial=str(tmp_path / "initial"), steps=1, epochs=1)
    run = prepare.prepare(settings)
    assert run.config == load_drafter(folder / "whole" / "drafter").config
    weights = dict(load_drafter(tmp_path / "initial").params)
    weights.pop("d2t")
    assert_same(jax.device_get(run.fresh().params), weights)
    trainer.train(settings)
    exported = folder / "recalibrated" / "drafter"
    assert load_drafter(exported).config == run.config
    assert not set(CALIBRATION) & set(json.loads((exported / "config.json").read_text()))


def test_finished_run_has_nothing_to_do_but_lost_exports(folder: Path, whole: TrainState) -> None:
    """It may have been killed behind its last checkpoint, before the drafters were written."""
    rows = metrics_of(folder, "whole")
    files = [folder / "whole" / name / "model.safetensors" for name in ("drafter", "best")]
    before = [file.read_bytes() for file in files]
    for file in files:
        shutil.rmtree(file.parent)
    assert_same(jax.device_get(trainer.train(tiny_settings(folder, "whole"))), whole)
    assert metrics_of(folder, "whole") == rows
    assert [file.read_bytes() for file in files] == before


def test_a_resumed_run_must_be_the_same(folder: Path, whole: TrainState) -> None:
    for fields, name in (
        ({"lr": 1e-3}, "lr"),
        ({"steps": 9}, "updates"),
        ({"loss": LossConfig(ce=0.5)}, "loss"),
        ({"drafter": replace(SHAPE, markov_rank=4)}, "drafter"),
        ({"eval_samples": 1}, "data"),
        ({"seed": 1}, "seed"),
    ):
        with pytest.raises(ValueError, match=f"{name} is .* in the checkpoint"):
            trainer.train(tiny_settings(folder, "whole", **fields))
    with pytest.raises(ValueError, match="resume is off"):
        trainer.train(tiny_settings(folder, "whole", resume=False))


@pytest.mark.parametrize(("name", "what"), [("total", "the loss"), ("grad_norm", "the gradient's norm")])
def test_loss_or_gradient_that_is_not_finite_stops_the_run_and_is_not_saved(
    folder: Path, whole: TrainState, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, output = trainer.Log.add, f"diverged-{name}"
    broken = (np.float32("nan"), np.float32(1))
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Log, "add", lambda self, *a: add(self, a[0] | {name: broken}, a[1]))
        with pytest.raises(FloatingPointError, match=f"update 3: {what} is nan"):
            trainer.train(tiny_settings(folder, output, log_every=5))
    assert [path for path in (folder / output / "checkpoints").iterdir() if path.is_dir()] == []


def sample(name: str, ids: list[int], prompt: int) -> TrainingSample:
    mask = np.ones(len(ids), np.uint8)
    mask[:prompt] = 0
    return TrainingSample(name, np.asarray(ids, np.int32), mask)


def test_draft_vocabulary_is_the_most_frequent_answers() -> None:
    shape = replace(SHAPE, draft_vocab_size=5)
    target = prepare.read_target_config(TARGETS / "llama_tied")
    config = drafter_config(shape, target)
    samples = [sample("a", [9, 9, 9, 9, 50, 50, 50, 7, 7], 4), sample("b", [9, 120, 120, 8], 1)]
    d2t = vocabulary.draft_vocabulary(samples, config)
    assert d2t.dtype == np.int32
    assert (d2t + np.arange(5)).tolist() == [0, 7, 8, 50, 120]  # 0 fills the place that is left
    assert (vocabulary.draft_vocabulary(samples, config, always=[299]) + np.arange(5)).tolist() == [7, 8, 50, 120, 299]
    among = np.asarray([3, 8, 9, 50, 200, 250])
    assert (vocabulary.draft_vocabulary(samples, config, [120], among) + np.arange(5)).tolist() == [3, 8, 9, 50, 200]


def test_draft_vocabulary_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = prepare.read_target_config(TARGETS / "llama_tied")
    samples = [sample("a", [9, 9, 9, 9, 50, 50, 50, 7, 7], 4), sample("b", [9, 120, 120, 8], 1)]
    configs = [drafter_config(replace(SHAPE, draft_vocab_size=size), target) for size in (5, 6)]
    file = tmp_path / "out" / "known.npz"
    first = vocabulary.find_vocabulary(file, samples, configs[0], [3])
    np.testing.assert_array_equal(first, vocabulary.draft_vocabulary(samples, configs[0], [3]))
    count, calls = vocabulary.draft_vocabulary, []
    monkeypatch.setattr(vocabulary, "draft_vocabulary", lambda *args: calls.append(args) or count(*args))
    np.testing.assert_array_equal(vocabulary.find_vocabulary(file, samples, configs[0], [3]), first)
    assert not calls
    for case in ((samples[:1], configs[0], [3]), (samples, configs[1], [3]), (samples, configs[0], [4])):
        np.testing.assert_array_equal(vocabulary.find_vocabulary(file, *case), count(*case))
    assert len(calls) == 3
    among = np.asarray([3, 8, 50, 120, 200])
    found = vocabulary.find_vocabulary(file, samples, configs[0], [3], among)
    assert len(calls) == 3 and (found + np.arange(5)).tolist() == among.tolist()
    more = np.append(among, 201)
    np.testing.assert_array_equal(
        vocabulary.find_vocabulary(file, samples, configs[0], [3], more), count(samples, configs[0], [3], more)
    )
    vocabulary.find_vocabulary(file, samples, configs[0], [3], np.append(among, 202))
    assert len(calls) == 5
    file.write_bytes(file.read_bytes()[:50])  # cut off
    np.testing.assert_array_equal(vocabulary.find_vocabulary(file, samples, configs[0], [3]), first)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"records": ()}, "records: names no file"),
        ({"records": ("/no/such.jsonl",)}, "/no/such.jsonl: not found"),
        ({"min_loss_tokens": 31}, "0 samples.*none is left to train on"),
        ({"eval_samples": 14}, "eval_samples 14 are held out: none is left"),
        ({"target": "/no/such/model"}, "/no/such/model"),
        ({"initial": "/no/such/drafter"}, "/no/such/drafter"),
        ({"drafter": replace(SHAPE, target_layer_ids=(0, 9))}, r"target_layer_ids \[0, 9\]: layer 9 does not exist"),
        ({"drafter": replace(SHAPE, target_layer_ids=())}, "target_layer_ids is missing or empty"),
        ({"drafter": replace(SHAPE, mask_token_id=300)}, "mask_token_id 300"),
        ({"drafter": replace(SHAPE, draft_vocab_size=301)}, "draft_vocab_size 301"),
        ({"drafter": replace(SHAPE, markov_rank=0)}, "markov_rank 0"),
        ({"drafter": replace(SHAPE, markov_rank=0, markov_kind="none")}, "confidence_head_with_markov"),
        ({"devices": 0, "mesh": MeshShape(fsdp=3)}, "mesh .*fsdp 3.*does not divide the 8 devices"),
        ({"devices": 0, "mesh": MeshShape(tensor=8)}, "mesh.tensor 8: does not divide the target's num_kv_heads"),
        ({"devices": 8}, "batch_size 4: must be a multiple of data 8"),
        ({"devices": 2, "micro_batches": 4}, "batch_size 4: must be a multiple of .*micro_batches 4 = 8"),
    ],
)
def test_wrong_settings_are_told_in_one_line(
    tmp_path: Path,
    fields: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = tiny_settings(tmp_path, **fields)
    monkeypatch.setattr(trainer, "parse", lambda argv: settings)
    assert trainer.main([]) == 2
    assert caplog.records[-1].levelname == "ERROR"
    assert re.search(message, caplog.records[-1].getMessage())
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": str(TARGETS / "qwen3_untied")}, "holds states of target .*llama_tied.*give another cache folder"),
        ({"drafter": replace(SHAPE, target_layer_ids=(0, 1))}, r"layer_ids is \[0, 2\] in the cache, \[0, 1\] in this"),
        ({"cache_kind": "int8"}, "dtype is float32 in the cache, int8 in this run"),
    ],
)
@pytest.mark.parametrize("states", ["cache", "fill"])
def test_cache_of_other_states_is_refused_and_left_alone(
    folder: Path, whole: TrainState, states: str, fields: dict[str, Any], message: str
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "cache").iterdir()}
    with pytest.raises(ValueError, match=message):
        prepare.prepare(tiny_settings(folder, "other", states=states, **fields))
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "cache").iterdir()} == before


def test_full_disk_ends_the_run_in_one_line_and_a_later_one_goes_on(
    folder: Path, whole: TrainState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer, "parse", lambda argv: tiny_settings(folder, "full"))
    with monkeypatch.context() as patch:
        at_step(4, lambda: patch.setattr(ocp.AsyncCheckpointer, "save", no_space), patch)
        assert trainer.main([]) == 1
    assert re.search(
        r"could not be written \(.*No space left.*the last whole one is 3", caplog.records[-1].getMessage()
    )
    assert steps_of(folder, "full") == [3]
    assert_continues(folder, "full", whole)


def test_full_disk_while_a_cache_is_filled_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*args: Any, **kwargs: Any) -> None:
        raise DiskFullError(tmp_path / "cache", 1000)

    fields: dict[str, Any] = {"states": "fill", "checkpoint_every": 1, "eval_samples": 0}
    monkeypatch.setattr(trainer, "parse", lambda argv: tiny_settings(tmp_path, **fields))
    with monkeypatch.context() as patch:
        at_step(1, lambda: patch.setattr(HiddenCache, "append", no_space), patch)
        assert trainer.main([]) == 1
    assert re.search("cache: the disk is full", caplog.records[-1].getMessage())
    assert trainer.main([]) == 0
    assert [row["step"] for row in metrics_of(tmp_path, "out")] == list(range(1, 8))


def test_tokens_of_another_target_are_refused(tmp_path: Path) -> None:
    file = write_records(tmp_path / "records.jsonl", 5)
    file.write_text(file.read_text().replace('"prompt_ids": [', '"prompt_ids": [300, ', 1))
    with pytest.raises(ValueError, match="token 300.*0..299: the records belong to another target"):
        trainer.train(tiny_settings(tmp_path))


def test_fields_out_of_range_are_refused() -> None:
    for name, value in (
        ("batch_size", 0),
        ("num_anchors", 0),
        ("max_length", 1),
        ("lr", 0.0),
        ("warmup", 1.5),
        ("ema", 1.0),
        ("compute_dtype", "float16"),
        ("log_every", 0),
        ("epochs", 0),
        ("micro_batches", 0),
        ("micro_batches", 3),
        ("buckets", (64, 32)),
        ("buckets", (64, 1024)),
        ("states", "disk"),
        ("cache_kind", "int4"),
        ("keep_checkpoints", 0),
    ):
        with pytest.raises(ValueError, match=name):
            TrainSettings(**{name: value})


def test_command_line_overrides_a_config(tmp_path: Path) -> None:
    config = ROOT / "configs" / "dspark_smollm2_135m.py"
    base = trainer.read_config(config)
    argv = ["--config", str(config), "--drafter.block-size", "5", "--loss.ce", "0.3", "--records", "a", "b"]
    argv += ["--states", "fill", "--mesh.fsdp", "4", "--buckets", "64", "128"]
    changed = trainer.parse(argv)
    assert changed == replace(
        base,
        drafter=replace(base.drafter, block_size=5),
        loss=replace(base.loss, ce=0.3),
        records=("a", "b"),
        states="fill",
        mesh=MeshShape(fsdp=4),
        buckets=(64, 128),
    )
    assert trainer.parse(["--config", str(config)]) == base
    empty = tmp_path / "empty.py"
    empty.write_text("config = 3\n")
    for file, message in ((tmp_path / "none.py", "no such file"), (empty, "found int")):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            trainer.read_config(file)


def test_every_config_file_loads() -> None:
    files = sorted((ROOT / "configs").glob("*.py"))
    assert files
    for file in files:
        assert trainer.read_config(file).records
