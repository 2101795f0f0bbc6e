"""Drafters and outcomes of studies: what names them, that each is made once, and that a killed study goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from dspark_jax import config
from dspark_jax.evaluation.answering import PLAIN, Protocol, System
from dspark_jax.evaluation.benchmarks import read_benchmarks
from dspark_jax.evaluation.studies import STUDIES, Variant
from dspark_jax.evaluation.study_report import TIMINGS
from dspark_jax.evaluation.study_run import DONE, INDIFFERENT, RESOLVED, Lab
from dspark_jax.sharding import MeshShape
from dspark_jax.training import trainer
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import TrainSettings
from tests.evaluation.tiny_study import PAIR, base_settings, write_study
from tests.training.tiny_run import ROOT, write_records

NONE = PAIR.variants[1].changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a study, with its hidden states once something was trained."""
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def lab(folder: Path) -> Lab:
    return Lab(base_settings(folder), folder / "out")


OTHERS: dict[str, Any] = {
    "states": "online", "batch_size": 2, "micro_batches": 2, "pack": True, "buckets": (16, 32), "num_anchors": 5,
    "max_length": 30, "min_loss_tokens": 20, "eval_samples": 3, "lr": 0.1, "warmup": 0.5, "weight_decay": 0.1,
    "max_grad_norm": 0.5, "ema": 0.5, "compute_dtype": "bfloat16", "seed": 1, "remat": True, "regather": True,
    "steps": 5, "cache_kind": "int8", "mesh": MeshShape(1, 2, 1), "loss": LossConfig(ce=0.2),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_makes_other_weights_makes_another_drafter(name: str, lab: Lab) -> None:
    other = Lab(replace(lab.base, **{name: OTHERS[name]}), lab.output)
    assert other.name({}) != lab.name({})
    assert other.name({}) == other.name({})


def test_every_field_of_a_training_run_is_accounted_for() -> None:
    named = {field.name for field in fields(TrainSettings)}
    more = {"drafter", "epochs", "initial"}  # tested below, or refused
    assert set(INDIFFERENT) | set(OTHERS) | more == named and not set(INDIFFERENT) & set(OTHERS)
    assert set(RESOLVED) < named and not set(RESOLVED) & set(INDIFFERENT)


def test_places_of_files_and_what_happens_on_the_way_make_no_other_drafter(lab: Lab, tmp_path: Path) -> None:
    """Records of the same content elsewhere are the same data; other records are not."""
    write_records(tmp_path / "moved.jsonl")
    write_records(tmp_path / "others.jsonl", seed=1)
    moved = replace(
        lab.base,
        records=(str(tmp_path / "moved.jsonl"),),
        cache=str(tmp_path / "cache"),
        output="elsewhere",
        checkpoint_every=2,
        log_every=3,
        eval_tokens=7,
    )
    assert Lab(moved, tmp_path).name({}) == lab.name({})
    others = replace(moved, records=(str(tmp_path / "others.jsonl"),))
    assert Lab(others, tmp_path).name({}) != lab.name({})


def test_epochs_count_where_there_are_no_steps(lab: Lab) -> None:
    one, two, three = (
        Lab(replace(lab.base, steps=steps, epochs=epochs), lab.output)
        for steps, epochs in ((0, 1), (0, 2), (2 * (12 // 4), 5))
    )
    assert one.updates(one.base) == 3 and two.name({}) != one.name({})
    assert two.name({}) == three.name({})  # two epochs are six updates


def test_another_target_makes_another_drafter(lab: Lab, golden: Path) -> None:
    assert Lab(replace(lab.base, target=str(golden / "targets/llama_tied")), lab.output).name({}) != lab.name({})


def test_studies_share_drafters_and_hidden_states(lab: Lab) -> None:
    """The vanilla head of one study is the DSpark drafter of another; MTP reads the final states of the same cache."""
    by_study = {name: {v.name: v.changes for v in study.variants} for name, study in STUDIES.items()}
    assert lab.name(by_study["head"]["vanilla"]) == lab.name(by_study["main"]["dspark"])
    assert lab.name(by_study["head"]["rnn"]) != lab.name(by_study["main"]["dspark"])
    caches = {name: lab.settings(changes).cache for name, changes in by_study["main"].items()}
    assert {caches[name] for name in ("dspark", "dflash", "eagle3", "mtp")} == {lab.base.cache}
    filling = Lab(replace(lab.base, states="fill"), lab.output)
    assert filling.settings(by_study["main"]["mtp"]).cache == f"{lab.base.cache}-final"
    assert lab.settings(by_study["cache"]["int8"]).cache == f"{lab.base.cache}-int8"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter": replace(base_settings(Path()).drafter, kind="mtp")}, "drafter.kind 'mtp': studies start from"),
        ({"drafter": replace(base_settings(Path()).drafter, markov_kind="rnn")}, "drafter.markov_kind 'rnn'"),
        ({"drafter": replace(base_settings(Path()).drafter, confidence=False)}, "drafter.confidence False"),
        ({"drafter": replace(base_settings(Path()).drafter, mask_token_id=300)}, "mask_token_id 300"),
        ({"distributed": True, "devices": 0}, "distributed True: studies run in one process"),
        ({"initial": "somewhere"}, "initial 'somewhere': variants have other shapes"),
        ({"records": ()}, "records name no file"),
        ({"records": ("nowhere.jsonl",)}, "nowhere.jsonl"),
        ({"target": "nowhere"}, "nowhere"),
        ({"eval_samples": 14}, "none is left to train on"),
    ],
)
def test_a_config_that_studies_cannot_change_is_refused(fields: dict[str, Any], message: str, lab: Lab) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Lab(replace(lab.base, **fields), lab.output).check()


def test_a_variant_that_the_target_does_not_have_says_why(lab: Lab) -> None:
    assert lab.lacks(Variant("8192", {"drafter.draft_vocab_size": 8192})).startswith("draft_vocab_size 8192: must lie")
    assert lab.lacks(Variant("plain", {"drafter.draft_vocab_size": 8192})) == "" == lab.lacks(Variant("all"))


def test_many_answers_and_few_timed_requests_may_have_other_dtypes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "auto_dtype", lambda rows: f"for {rows} rows")
    one = Lab(replace(lab.base, compute_dtype="auto"), lab.output, rows=32)
    assert one.dtype == "for 32 rows" and one.clocked.dtype == "for 1 rows"
    assert Lab(replace(lab.base, compute_dtype="bfloat16"), lab.output, rows=32).clocked.dtype == "bfloat16"


# --- made once ---


@pytest.fixture(scope="module")
def trained(lab: Lab) -> Any:
    return lab.trained(NONE)


def test_a_drafter_is_trained_once(lab: Lab, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained.folder.parent
    assert folder == lab.output / "drafters" / lab.name(NONE) and not (folder / "checkpoints").exists()
    facts = json.loads((folder / DONE).read_text())
    assert facts["updates"] == 4 and facts["seconds_per_update"] > 0 and facts["states"] == "float32"
    assert facts["held_out"]["held_out_tau_probabilistic"] >= 1
    assert facts["bytes_per_token"] > 4 * 3 * 64  # two layers and the final state, in float32
    monkeypatch.setattr(trainer, "train", _not_again)
    assert lab.trained(NONE) == trained
    assert lab.drafter(trained).config.markov_kind == "none"


def _not_again(settings: TrainSettings) -> None:
    raise AssertionError("trained again")


def test_a_signal_stops_the_study_and_keeps_what_was_trained(
    lab: Lab, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer returns early when it is asked to stop: that is no finished drafter."""
    train, stopped = trainer.train, Lab(replace(lab.base, seed=5, eval_samples=0), tmp_path)

    def half(settings: TrainSettings) -> Any:
        return train(replace(settings, steps=2))

    monkeypatch.setattr(trainer, "train", half)
    with pytest.raises(KeyboardInterrupt, match="stopped at update 2 of 4"):
        stopped.trained({})
    assert not list(tmp_path.rglob(DONE))


def test_answers_are_given_once_and_shared_by_prompts(
    lab: Lab, trained: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More conversations are added to those that are there; others are passed over."""
    protocol = Protocol(1.0, max_tokens=9, batch_size=4, method="forced")
    system = lab.system(PAIR.variants[1])
    few, many = (read_benchmarks([str(folder / "prompts")], lines="even", limit=limit) for limit in (1, 0))
    first = lab.answered(system, few, protocol)
    assert {one.system for one in first} == {trained.name} and len(first) == 1 + 2  # a conversation of two turns
    whole = lab.answered(system, many, protocol)
    assert len(whole) == 2 + 4 and {one.id for one in first} < {one.id for one in whole}
    again = Lab(lab.base, lab.output)
    monkeypatch.setattr("dspark_jax.evaluation.study_run.Answerer", _NoAnswerer)
    assert again.answered(system, many, protocol) == whole and again.answered(system, few, protocol) == first
    plain = again.answered(System(PLAIN, None), many, protocol)
    assert [one.token_ids for one in plain] == [one.token_ids for one in whole]
    with pytest.raises(AssertionError, match="answered again"):
        again.answered(system, many, replace(protocol, max_tokens=8))


def test_a_turn_without_room_is_left_out_and_not_asked_again(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mt-bench.jsonl").write_text(json.dumps({"turns": ["a", "b" * 600, "c"]}) + "\n")
    benchmarks = read_benchmarks([str(tmp_path / "mt-bench.jsonl")])
    protocol = Protocol(0.0, max_tokens=9, batch_size=4, method="forced", seed=3)
    systems = [lab.system(Variant(name)) for name in (PLAIN, "ngram")]
    found = [lab.answered(system, benchmarks, protocol) for system in systems]
    assert [[one.turn for one in answers] for answers in found] == [[0], [0]]
    monkeypatch.setattr("dspark_jax.evaluation.study_run.Answerer", _NoAnswerer)
    assert [lab.answered(system, benchmarks, protocol) for system in systems] == found


def test_outcomes_with_a_clock_are_of_a_device(lab: Lab) -> None:
    forced, decoded = (lab._about(System(PLAIN, None), [], Protocol(method=method)) for method in ("forced", "decode"))
    assert decoded.pop("device")["platform"] == "cpu"
    assert "device" not in forced and forced.keys() == decoded.keys()


class _NoAnswerer:
    def __init__(self, *arguments: Any, **more: Any) -> None:
        raise AssertionError("answered again")


def test_confidences_come_with_a_threshold_of_zero(lab: Lab, folder: Path) -> None:
    """It verifies whole blocks, as without a threshold: the same rounds."""
    benchmarks = read_benchmarks([str(folder / "prompts")], lines="even")
    protocol = Protocol(0.0, max_tokens=9, batch_size=4, method="forced")
    variant = PAIR.variants[1]
    plain = lab.answered(lab.system(variant), benchmarks, protocol)
    confident = lab.answered(lab.system(variant, 0.0), benchmarks, protocol)
    assert [one.accepted for one in plain] == [one.accepted for one in confident]
    assert [one.verified for one in plain] == [one.verified for one in confident]
    assert all(len(row) == 4 for one in confident for row in one.confidence)
    assert all(one.rounds == len(one.confidence) for one in confident)


# --- killed ---


class Job:
    """A study as a process of its own; killed at the end of a `with` block."""

    def __init__(self, folder: Path, output: str) -> None:
        self.output = folder / output
        self._log = folder / f"{output}.log"
        command = [sys.executable, "-m", "tests.evaluation.tiny_study", str(folder), "--study", "pair"]
        command += ["--output", str(self.output), "--temperatures", "1"]
        flags = "--xla_backend_optimization_level=0"  # compiles fast
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, stderr=log, stdout=subprocess.DEVNULL
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def finish(self) -> None:
        assert self.process.wait(1500) == 0, self.log[-3000:]

    def kill_when(self, there: Callable[[], bool]) -> None:
        while not there():
            assert self.process.poll() is None, self.log[-3000:]
            time.sleep(0.005)
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """A folder with a study that was killed at several places, and one that was not; what the former said."""
    folder = write_study(tmp_path_factory.mktemp("killed"), steps=60, checkpoint_every=10, log_every=5, eval_samples=0)
    with Job(folder, "whole") as job:
        job.finish()
    output = folder / "killed"

    def files(pattern: str) -> list[Path]:
        return list(output.glob(pattern))

    moments: list[Callable[[], bool]] = [
        lambda: any("tmp" not in p.name for p in files("drafters/*/checkpoints/*")),  # in the first training
        lambda: len(files(f"drafters/*/{DONE}")) == 1,
        lambda: any(p.stat().st_size for p in files("outcomes/*/*/outcomes.jsonl")),
        lambda: bool(files("outcomes/*/dspark*/outcomes.about.json")),
    ]
    for there in moments:
        with Job(folder, "killed") as job:
            job.kill_when(there)
    with Job(folder, "killed") as job:
        job.finish()
        said = job.log
    yield folder, said.splitlines()


def test_a_killed_study_goes_on_and_ends_as_one_that_was_not(killed: tuple[Path, list[str]]) -> None:
    folder, said = killed
    reports = [(folder / output / "pair" / "report.md").read_text() for output in ("whole", "killed")]
    assert reports[0].split(TIMINGS)[0] == reports[1].split(TIMINGS)[0] and "| vanilla" in reports[0]
    weights = [
        {
            path.relative_to(folder / output): path.read_bytes()
            for path in (folder / output).rglob("drafter/*.safetensors")
        }
        for output in ("whole", "killed")
    ]
    assert weights[0] == weights[1] and len(weights[0]) == 2


def test_nothing_is_trained_or_answered_twice(killed: tuple[Path, list[str]]) -> None:
    folder, said = killed
    started = [line.split()[-1] for line in said if line.startswith("training ")]
    assert started == [started[0]] * started.count(started[0]) + [started[-1]] * started.count(started[-1])
    assert any("resumed at update" in line for line in said)
    for output in ("whole", "killed"):
        for file in (folder / output / "outcomes").rglob("outcomes.jsonl"):
            ids = [json.loads(line)["id"] for line in file.read_text().splitlines()]
            assert len(set(ids)) == len(ids) == 6
    steps = [
        [json.loads(line)["step"] for line in path.read_text().splitlines() if "seconds" in json.loads(line)]
        for path in (folder / "killed" / "drafters").glob("*/metrics.jsonl")
    ]
    assert steps == [list(range(5, 65, 5))] * 2
