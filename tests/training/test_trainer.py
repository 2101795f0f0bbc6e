"""Training runs on a tiny target: killed and resumed, stopped, exported, and refused at the door."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.checkpoints.load import load_drafter
from dspark_jax.data.records import TrainingSample
from dspark_jax.sharding import MeshShape
from dspark_jax.training import prepare, trainer
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
    assert sorted(path.name for path in (folder / "whole" / "checkpoints").iterdir() if path.is_dir()) == ["6", "7"]
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


def test_resume_on_another_number_of_devices(folder: Path, whole: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM), patch)
        trainer.train(tiny_settings(folder, "moved"))
    trainer.train(tiny_settings(folder, "moved", devices=2))
    pairs = list(zip(metrics_of(folder, "moved"), metrics_of(folder, "whole"), strict=True))[:7]
    for moved, still in pairs:
        for name in ("lr", "epoch", "sampled_anchors", "block_supervised_tokens"):
            assert moved[name] == still[name]
        assert moved["total"] == pytest.approx(still["total"], rel=1e-3)


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


def test_finished_run_has_nothing_to_do(folder: Path, whole: TrainState) -> None:
    rows = metrics_of(folder, "whole")
    assert_same(jax.device_get(trainer.train(tiny_settings(folder, "whole"))), whole)
    assert metrics_of(folder, "whole") == rows


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


def test_loss_that_is_not_finite_stops_the_run_and_is_not_saved(
    folder: Path, whole: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = trainer.Log.add
    broken = (np.float32("nan"), np.float32(1))
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Log, "add", lambda self, *a: add(self, a[0] | {"total": broken}, a[1]))
        with pytest.raises(FloatingPointError, match="update 3: the loss is nan"):
            trainer.train(tiny_settings(folder, "diverged", log_every=5))
    assert [path for path in (folder / "diverged" / "checkpoints").iterdir() if path.is_dir()] == []


def sample(name: str, ids: list[int], prompt: int) -> TrainingSample:
    mask = np.ones(len(ids), np.uint8)
    mask[:prompt] = 0
    return TrainingSample(name, np.asarray(ids, np.int32), mask)


def test_draft_vocabulary_is_the_most_frequent_answers() -> None:
    shape = replace(SHAPE, draft_vocab_size=5)
    target = prepare.read_target_config(TARGETS / "llama_tied")
    config = drafter_config(shape, target)
    samples = [sample("a", [9, 9, 9, 9, 50, 50, 50, 7, 7], 4), sample("b", [9, 120, 120, 8], 1)]
    d2t = prepare.draft_vocabulary(samples, config)
    assert d2t.dtype == np.int32
    assert (d2t + np.arange(5)).tolist() == [0, 7, 8, 50, 120]  # 0 fills the place that is left
    assert (prepare.draft_vocabulary(samples, config, always=[299]) + np.arange(5)).tolist() == [7, 8, 50, 120, 299]


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
