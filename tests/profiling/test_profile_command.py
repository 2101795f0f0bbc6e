"""`dspark profile` from models on disk to a stored curve, a table and a picture, and what it refuses in one line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax  # sets TPU_LIBRARY_PATH where libtpu is installed
import numpy as np
import pytest

from dspark_jax import cli
from dspark_jax.checkpoints.drafters import write_drafter
from dspark_jax.decoding.curve import Point, Prefill
from dspark_jax.drafters.interface import init_params
from dspark_jax.models.config import TransformerConfig
from dspark_jax.profiling import measure, profile_command, profile_report, provide
from dspark_jax.profiling.aot_report import Memory, ProgramReport, Times
from dspark_jax.profiling.curves import CurveKey, MeasuredPoint, Profile, load_curve, save_curve
from dspark_jax.profiling.estimate import Planned, round_seconds
from dspark_jax.profiling.profile_plot import plot
from dspark_jax.sharding import MeshShape
from dspark_jax.training.settings import DrafterSettings, drafter_config
from tests.serving.conftest import copy_model, write_target

FLAGS = ["--dtype", "float32", "--contexts", "256", "--repeats", "3", "--seconds", "0.001"]
KEY = CurveKey("cpu", "a processor", 2, 1, (1, 1, 1), "float32", "plain", "aaaa", "bbbb", 3, "0.10.2")


@pytest.fixture(scope="module")
def places(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The golden Qwen3 target with a tokenizer, and its drafter with blocks of one token: few buckets to compile."""
    target = write_target(golden, tmp_path_factory.mktemp("target"))
    drafter = copy_model(golden / "inference/dspark_qwen3_vanilla", tmp_path_factory.mktemp("drafter"))
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"block_size": 1}))
    return ["--target", str(target), "--drafter", str(drafter)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """Where curves go by default in a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/dspark_jax/profiles"


def fake_point(models: measure.Models, slots: int, context: int, timing: measure.Timing | None = None) -> MeasuredPoint:
    """In place of a measurement."""
    buckets = tuple(slots * n for n in range(1, models.block + 2))
    drafted = tuple(0.01 * n for n in range(1, models.block + 2))
    return MeasuredPoint(Point(slots, context, buckets, drafted, 0.005), (0.0,) * (len(buckets) + 1), 3)


@pytest.fixture
def quick(cache: Path, monkeypatch) -> Path:
    """No measurement takes time; gives the folder of curves."""
    monkeypatch.setattr(provide, "measure_point", fake_point)
    monkeypatch.setattr(provide, "measure_prefills", lambda models, lengths, timing: [Prefill(n, n) for n in lengths])
    return cache


def refuse(*arguments: object) -> None:
    raise AssertionError("measured again")


def test_a_run_from_models_to_a_curve(places: list[str], cache: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    words = ["profile", *places, *FLAGS, "--slots", "1", "--longest-prompt", "20"]
    outputs = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "curve.png")]
    assert cli.main([*words, *outputs]) == 0
    first = capsys.readouterr()
    assert "measuring rounds of 1 slots with caches of 256 tokens" in first.err
    (file,) = cache.iterdir()
    found, done = load_curve(file), json.loads((tmp_path / "out.json").read_text())
    assert done["file"] == str(file) and done["key"]["block_size"] == 1 == found.key.block_size
    assert (found.key.dtype, found.key.mode, found.slot_sizes) == ("float32", "plain", (1,))
    (point,) = found.points
    assert point.point.buckets == (1, 2) and [p.tokens for p in found.prefills] == [32]
    plain, *rounds = done["points"][0]["rounds"]
    assert (plain["rows"], plain["drafted"], plain["round_seconds"]) == (1, 0, point.point.plain)
    assert [row["rows"] for row in rounds] == [1, 2]
    assert [row["round_seconds"] for row in rounds] == list(point.point.drafted)
    assert done["prefills"] == [{"tokens": 32, "seconds": found.prefills[0].seconds}]
    assert done["settings"]["slots"] == [1] and done["settings"]["target"] == places[1]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(provide, "measure_point", refuse)
    monkeypatch.setattr(provide, "measure_prefills", refuse)
    assert cli.main(words) == 0  # the second time nothing is measured
    second = capsys.readouterr()
    assert second.out == first.out and "measuring" not in second.err and str(file) in second.err


def test_more_sizes_are_added_to_the_same_file(places: list[str], quick: Path) -> None:
    for slots in (["1", "4"], ["2"]):
        assert profile_command.main([*places, *FLAGS, "--slots", *slots, "--longest-prompt", "0"]) == 0
    (file,) = quick.iterdir()
    assert load_curve(file).slot_sizes == (1, 2, 4) and load_curve(file).prefills == ()
    assert profile_command.main([*places, *FLAGS, "--slots", "2", "--longest-prompt", "100"]) == 0
    assert [p.tokens for p in load_curve(file).prefills] == [32, 64, 128]
    slower = load_curve(file).points[0]
    slower = replace(slower, point=replace(slower.point, plain=9.0))
    save_curve(file, load_curve(file).with_points([slower]))
    assert profile_command.main([*places, *FLAGS, "--slots", "1"]) == 0
    assert load_curve(file).points[0] == slower
    assert profile_command.main([*places, *FLAGS, "--slots", "1", "--again"]) == 0
    assert load_curve(file).points[0].point.plain == 0.005 and load_curve(file).slot_sizes == (1, 2, 4)


def test_each_setting_that_changes_times_has_a_file_of_its_own(places: list[str], quick: Path, capsys) -> None:
    variants: list[list[str]] = [[], ["--sampling", "greedy"], ["--dtype", "bfloat16"], ["--drafter", "none"]]
    tables = []
    for number, variant in enumerate(variants, 1):
        assert profile_command.main([*places, *FLAGS, "--slots", "1", "--longest-prompt", "0", *variant]) == 0
        assert len(list(quick.iterdir())) == number
        tables.append(capsys.readouterr().out.splitlines())
    kinds = [[line.split()[:2] for line in table[2:]] for table in tables]
    assert kinds[0] == [["1", "plain"], ["1", "5.00"], ["2", "15.00"]] and kinds[3] == [["1", "plain"]]


def test_timings_are_as_long_and_as_many_as_asked_for(places: list[str], quick: Path, monkeypatch) -> None:
    asked: list[measure.Timing] = []

    def point(models: measure.Models, slots: int, context: int, timing: measure.Timing) -> MeasuredPoint:
        asked.append(timing)
        return fake_point(models, slots, context)

    monkeypatch.setattr(provide, "measure_point", point)
    words = [*places, *FLAGS[:4], "--slots", "1", "--repeats", "4", "--seconds", "0.002"]
    assert profile_command.main(words) == 0 and asked == [measure.Timing(4, 0.002)]


def test_a_file_of_ones_own_is_written_in_place_of_the_default(places: list[str], quick: Path, tmp_path: Path) -> None:
    words = [*places, *FLAGS, "--slots", "1", "--output", str(tmp_path / "own.json")]
    assert profile_command.main(words) == 0
    assert load_curve(tmp_path / "own.json").slot_sizes == (1,) and not quick.exists()


def test_a_topology_is_estimated_and_not_measured(places: list[str], quick: Path, tmp_path: Path, monkeypatch) -> None:
    """With the settings that name its programs."""
    plans: list[Planned] = []

    def estimate(path: Path, plan: Planned, slots, contexts, again: bool) -> Profile:
        plans.append(plan)
        return Profile(KEY, (fake_point(SimpleNamespace(block=1), *slots, *contexts),))

    monkeypatch.setattr(profile_command, "estimate_into", estimate)
    monkeypatch.setattr(provide, "measure_point", refuse)
    words = [*places, *FLAGS, "--slots", "2", "--sampling", "filtered", "--output", str(tmp_path / "own.json")]
    assert profile_command.main([*words, "--topology", "cpu:2", "--tensor", "2"]) == 0
    (plan,) = plans
    assert (plan.topology.name, len(plan.topology.devices)) == ("cpu:2", 2)
    assert (plan.mode, plan.dtype, plan.shape) == ("filtered", "float32", MeshShape(1, 1, 2))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs devices for a mesh")
def test_a_mesh_has_a_curve_of_its_own(places: list[str], quick: Path) -> None:
    for variant in ([], ["--tensor", "2"], ["--data", "2"]):
        assert profile_command.main([*places, *FLAGS, "--slots", "2", *variant]) == 0
    assert sorted(load_curve(file).key.mesh for file in quick.iterdir()) == [(1, 1, 1), (1, 1, 2), (2, 1, 1)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slots", "0"], "slots 0: must be numbers of at least 1"),
        (["--contexts", "300"], "contexts 300: caches have 384 tokens there, give that"),
        (["--contexts", "768"], "contexts 768: the models have 512 positions, at most 512"),
        (["--longest-prompt", "-1"], "longest_prompt -1: must be at least 0 tokens"),
        (["--repeats", "0"], "repeats 0: must be at least 1"),
        (["--seconds", "0"], "seconds 0.0: of a timing, must be positive"),
        (["--data", "0"], "data 0: must be at least 1"),
        (["--tensor", "4096"], "data 1 x tensor 4096: there are"),
        (["--tensor", "3"], "mesh.tensor 3: does not divide the target's num_kv_heads 2"),
        (["--target", "/no/such/model"], "/no/such/model"),
        (["--drafter", "/no/such/drafter"], "/no/such/drafter"),
        (["--output", "/no/such/folder/a.json"], "the folder /no/such/folder does not exist"),
        (["--output", "{folder}"], "is a folder, must be a file"),
        (["--json", "/no/such/folder/a.json"], "the folder /no/such/folder does not exist"),
        (["--plot", "/no/such/folder/a.png"], "the folder /no/such/folder does not exist"),
        (["--output", "{damaged}"], "damaged, or no curve of `dspark profile`"),
        (["--output", "{foreign}"], "device 'a processor' was profiled, it is"),
    ],
)
def test_wrong_input_is_told_in_one_line(places, quick: Path, tmp_path: Path, flags, message, capsys) -> None:
    damaged, foreign = tmp_path / "damaged.json", tmp_path / "foreign.json"
    damaged.write_text("{}")
    save_curve(foreign, Profile(KEY, (MeasuredPoint(Point(1, 256, (1, 2), (1.0, 2.0), 1.0), (0.0,) * 3, 1),)))
    before = foreign.read_bytes()
    named = {"folder": tmp_path, "damaged": damaged, "foreign": foreign}
    words = [*places, *FLAGS, "--slots", "1", *(flag.format(**named) for flag in flags)]
    assert profile_command.main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dspark profile: error: ") and message in last
    assert foreign.read_bytes() == before and damaged.read_text() == "{}" and not quick.exists()


def test_a_drafter_of_another_target_is_refused(golden: Path, places: list[str], quick: Path, capsys) -> None:
    words = [*places[:2], "--drafter", str(golden / "inference/dspark_gemma4_vanilla"), *FLAGS, "--slots", "1"]
    assert profile_command.main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("dspark profile: error: ")


# --- what is said about a curve ---


def point(drafted: tuple[float, ...], plain: float, spread: float = 0.01, repeats: int = 9) -> MeasuredPoint:
    """Blocks of three for two slots."""
    return MeasuredPoint(Point(2, 256, (2, 4, 8), drafted, plain), (spread,) * 4, repeats)


def test_a_round_is_its_draft_and_the_target() -> None:
    plain, *rounds = profile_report.point_rows(point((0.03, 0.04, 0.06), 0.02))
    assert (plain["rows"], plain["draft_seconds"], plain["target_seconds"]) == (2, 0, 0.02)
    assert [row["draft_seconds"] for row in rounds] == pytest.approx([0.01] * 3)
    assert [row["target_seconds"] for row in rounds] == pytest.approx([0.02, 0.03, 0.05])
    assert [row["rows_per_second"] for row in rounds] == pytest.approx([2 / 0.03, 4 / 0.04, 8 / 0.06])
    assert [row["rounds_per_second"] for row in rounds] == pytest.approx([1 / 0.03, 1 / 0.04, 1 / 0.06])


@pytest.mark.parametrize(
    ("measured", "notes"),
    [
        (point((0.03, 0.04, 0.06), 0.02), []),
        (point((0.03, 0.04, 0.0399), 0.02), []),  # a fall within the spread
        (point((0.03, 0.04, 0.036), 0.02), ["8 rows take 10.0 % less time than 4"]),
        (point((0.03, 0.04, 0.036), 0.02, 0.05), ["8 rows take 10.0 % less time than 4"]),
        (point((0.019, 0.04, 0.06), 0.02), ["a round with a draft took less time than one without"]),
        (point((0.03, 0.04, 0.036), 0.02, 0.2), ["repeats differ by 20 %"]),
    ],
)
def test_what_looks_odd_is_said_and_kept(measured: MeasuredPoint, notes: list[str]) -> None:
    said = profile_report.oddities(measured)
    assert len(said) == len(notes) and all(wanted in text for wanted, text in zip(notes, said, strict=True))
    profile = Profile(KEY, (measured,))
    text = profile_report.table(profile)
    assert all(f"note: {note}" in text for note in said) and profile.curve.costs(2, 256).plain == 0.02
    assert profile_report.as_json(profile)["points"][0]["notes"] == said


def test_a_table_has_the_numbers() -> None:
    profile = Profile(KEY, (point((0.03, 0.04, 0.06), 0.02), replace_context(512, 0)), (Prefill(32, 0.004),))
    lines = profile_report.table(profile).splitlines()
    assert lines[0] == "2 slots, caches of 256 tokens (medians of 9)"
    assert lines[1].split() == "rows target ms draft ms round ms rounds/s rows/s spread %".split()
    assert lines[2].split() == ["2", "plain", "20.00", "0.00", "20.00", "50.0", "100.0", "1.0"]
    assert lines[5].split() == ["8", "50.00", "10.00", "60.00", "16.7", "133.3", "1.0"]
    assert lines[7] == "2 slots, caches of 512 tokens (estimated)"
    assert lines[-1].split() == ["32", "4.00", "8000"]


def replace_context(context: int, repeats: int) -> MeasuredPoint:
    made = point((0.03, 0.04, 0.06), 0.02)
    return replace(made, point=replace(made.point, context=context), repeats=repeats)


def test_a_picture_shows_every_kind_of_point(tmp_path: Path) -> None:
    alone = MeasuredPoint(Point(1, 256, (1,), (0.01,), 0.01), (0.0, 0.0), 9)
    plot(tmp_path / "a.png", Profile(KEY, (alone, point((0.03, 0.04, 0.06), 0.02), replace_context(512, 9))))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# --- estimates for chips that are not here ---


def test_a_machine_without_estimates_is_refused(places: list[str], quick: Path, capsys) -> None:
    for flags, message in (
        (["--topology", "v9z:2x2"], "topology 'v9z:2x2': unknown"),
        (["--topology", "cpu:1"], "topology cpu:1: only TPU chips have estimates"),
        (["--topology", "cpu:1", "--drafter", "none"], "drafter 'none': --topology estimates rounds with and without"),
        (["--topology", "cpu:2"], "mesh data 1 x fsdp 1 x tensor 1: does not divide the 2 devices"),
    ):
        assert profile_command.main([*places, *FLAGS, "--slots", "2", *flags]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def report(times: Times, fits: bool = True) -> ProgramReport:
    """Of a program, with times as given."""
    return ProgramReport("2 rows", {}, 1, None, 10, times, Memory(1, 1, 0, 1, 1, 1) if fits else None)


def test_seconds_are_what_takes_longest() -> None:
    assert round_seconds(report(Times(1, 1, compiler=2.0, links=0.5, roofline=1.0))) == 2.5
    assert round_seconds(report(Times(1, 1, compiler=2.0, links=0.5, roofline=3.0))) == 3.0
    assert round_seconds(report(Times(1, 1, compiler=None, links=0.5, roofline=0.7))) == 0.7
    with pytest.raises(ValueError, match="does not fit"):
        round_seconds(report(Times(1, 1, 2.0, 0.5, 1.0), fits=False))
    with pytest.raises(ValueError, match="speed is not known"):
        round_seconds(report(Times(1, 1)))


def write_tiny(folder: Path) -> list[str]:
    """The config of a target of two layers, without weights, and a drafter of one; options that name them."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 256, "max_position_embeddings": 256}
    fields = {"model_type": "qwen3", "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True} | sizes
    (folder / "target").mkdir()
    (folder / "target/config.json").write_text(json.dumps(fields))
    shape = DrafterSettings(block_size=1, num_layers=1, target_layer_ids=(0,), mask_token_id=255, markov_rank=8)
    config = drafter_config(shape, TransformerConfig.from_hf(fields))
    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    write_drafter(
        folder / "drafter", config, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), include_embeddings=None
    )
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_an_estimate_for_a_tpu_topology(tmp_path: Path) -> None:
    """In a process of its own: libtpu stays loaded."""
    file = tmp_path / "curve.json"
    mesh = ["--topology", "v5e:2x2", "--data", "2", "--tensor", "2"]
    words = [*write_tiny(tmp_path), *mesh, "--slots", "2", "--contexts", "256", "--output", str(file)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    argv = [sys.executable, "-m", "dspark_jax.cli", "profile", *words]
    done = subprocess.run(argv, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = load_curve(file)
    assert found.key.estimated and (found.key.platform, found.key.mesh) == ("tpu", (2, 1, 2))
    assert found.key.dtype == "bfloat16" and found.key.devices == 4 and "v5" in found.key.device
    (measured,) = found.points
    assert measured.repeats == 0 and measured.point.buckets == (2, 4)
    assert 0 < measured.point.plain < min(measured.point.drafted) and max(measured.point.drafted) < 0.1
    assert "(estimated)" in done.stdout
