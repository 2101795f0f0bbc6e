"""`dspark simulate` from files to a table, a report and pictures, and what it refuses in one line."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from dspark_jax.calibration.collect import fingerprint, save_records
from dspark_jax.checkpoints.drafters import read_drafter
from dspark_jax.decoding.curve import Curve
from dspark_jax.evaluation import simulate_command as command
from dspark_jax.profiling.curves import CurveKey, MeasuredPoint, Profile, save_curve
from tests.evaluation.tiny import curve, records

KEY = CurveKey("cpu", "by hand", 2, 1, (1, 1, 1), "float32", "plain", "t", "d", 3, "0", True)
RUNS = [[3, 0, 1], [2, 2], [0, 1, 0, 3], [3, 3]]


def write_curve(path: Path, made: Curve) -> Path:
    points = tuple(MeasuredPoint(p, (0.0,) * (len(p.buckets) + 1), 0) for p in made.points)
    save_curve(path, Profile(KEY, points, made.prefills))
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A curve of 1 to 4 slots, records of blocks of three, and the report of a calibration."""
    made = curve((1, 2, 4), 3, draft=0.1, row=0.05)
    save_records(tmp_path / "rounds.npz", records(RUNS, block=3, confidence=0.6))
    report = {"temperatures": [1.0, 2.0, 1.0], "biases": [0.0, 0.5, 0.0]}
    (tmp_path / "calibration.json").write_text(json.dumps(report))
    return {
        "curve": write_curve(tmp_path / "curve.json", made),
        "records": tmp_path / "rounds.npz",
        "calibration": tmp_path / "calibration.json",
    }


def words(files: dict[str, Path], *more: str) -> list[str]:
    given = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    return [*given, "--requests-per-load", "12", *more]


def test_a_sweep_gives_a_table_a_report_and_pictures(files, tmp_path, capsys):
    out = ["--json", str(tmp_path / "out.json"), "--plots", str(tmp_path / "plots")]
    assert command.main(words(files, "--loads", "1", "4", "--systems", "plain", "fixed", "async", *out)) == 0
    done = json.loads((tmp_path / "out.json").read_text())
    assert [(r["system"], r["load"]) for r in done["results"]] == [
        (s, n) for s in ("plain", "fixed", "async") for n in (1, 4)
    ]
    assert done["calibration"] == {"temperatures": [1.0, 2.0, 1.0], "biases": [0.0, 0.5, 0.0]}
    assert done["recorded"] == {"requests": 4, "rounds": 11, "block_size": 3} and done["curve"]["device"] == "by hand"
    assert {r["requests"] >= 12 for r in done["results"]} == {True}
    assert all((tmp_path / "plots" / f"{n}.png").read_bytes().startswith(b"\x89PNG") for n in ("throughput", "budget"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[0].split()[:2] == ["system", "load"]
    first = done["results"][0]
    assert lines[1].split()[:3] == ["plain", "1", f"{first['tokens_per_second']:.1f}"]


def results(files, tmp_path, *more):
    assert command.main(words(files, "--systems", "fixed", "--json", str(tmp_path / "out.json"), *more)) == 0
    return json.loads((tmp_path / "out.json").read_text())["results"]


def test_a_device_of_half_the_speed_gives_half_the_tokens(files, tmp_path):
    one = results(files, tmp_path, "--loads", "2")[0]
    half = results(files, tmp_path, "--loads", "2", "--scale-seconds", "2")[0]
    assert half["tokens_per_second"] == pytest.approx(one["tokens_per_second"] / 2)
    assert half["time_to_first_token"]["p90"] == pytest.approx(2 * one["time_to_first_token"]["p90"])


def test_replicas_share_a_load(files, tmp_path):
    one = results(files, tmp_path, "--loads", "2")[0]
    two = results(files, tmp_path, "--loads", "4", "--replicas", "2")[0]
    assert two["tokens_per_second"] == pytest.approx(2 * one["tokens_per_second"]) and two["load"] == 4
    rate = results(files, tmp_path, "--rates", "0.2", "--replicas", "2", "--slots", "1", "2", "4")[0]
    assert rate["kind"] == "open" and rate["load"] == pytest.approx(0.2)


def test_a_file_is_measured_whole(files, tmp_path):
    found = results(files, tmp_path, "--loads", "2", "--arrivals", "file")[0]
    per_pass = sum(sum(run) + len(run) + 1 for run in RUNS)
    assert found["requests"] == 12
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(3 * per_pass)


# --- every option changes something ---

OPTIONS: dict[str, tuple[list[str], list[str]]] = {  # option: words of both runs, and of the second one
    "systems": ([], ["--systems", "plain", "fixed"]),
    "loads": ([], ["--loads", "4"]),
    "rates": ([], ["--rates", "0.2", "--slots", "1", "2", "4"]),
    "arrivals": (["--loads", "2"], ["--arrivals", "file"]),
    "requests_per_load": (["--loads", "2"], ["--requests-per-load", "20"]),
    "warm_up": (["--loads", "2"], ["--warm-up", "1"]),
    "max_tokens": (["--loads", "2"], ["--max-tokens", "4"]),
    "slots": (["--loads", "2"], ["--slots", "4"]),
    "rounds": (["--loads", "2", "--host-seconds", "0.1"], ["--rounds", "1"]),
    "prefill_chunk": (["--loads", "2", "--long"], ["--prefill-chunk", "64"]),
    "host_seconds": (["--loads", "2"], ["--host-seconds", "0.1"]),
    "resize_seconds": (["--rates", "0.2", "--slots", "1", "2", "4"], ["--resize-seconds", "3"]),
    "threshold": (["--loads", "2", "--systems", "threshold"], ["--threshold", "0.9"]),
    "mtp_draft_share": (["--loads", "2", "--systems", "mtp1"], ["--mtp-draft-share", "0.9"]),
    "scale_seconds": (["--loads", "2"], ["--scale-seconds", "2"]),
    "replicas": (["--loads", "4"], ["--replicas", "2"]),
    "seed": (["--rates", "0.2", "--slots", "1", "2", "4"], ["--seed", "1"]),
    "curve": (["--loads", "2"], ["--curve", "{folder}/slow.json"]),
    "records": (["--loads", "2"], ["--records", "{folder}/others.npz"]),
    "calibration": (["--loads", "2", "--systems", "threshold"], ["--calibration", "{folder}/cold.json"]),
    "drafter": ([], []), "json": ([], []), "plots": ([], []),
}  # fmt: skip
ELSEWHERE = ("drafter", "json", "plots")  # have tests of their own


def test_every_option_is_there():
    assert set(OPTIONS) == {field.name for field in fields(command.SimulateSettings)}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ELSEWHERE])
def test_an_option_changes_the_results(name, files, tmp_path):
    write_curve(tmp_path / "slow.json", curve((1, 2, 4), 3, draft=0.5, row=0.05))
    save_records(tmp_path / "others.npz", records([[3, 3, 3]] * 4, block=3, confidence=0.6))
    (tmp_path / "cold.json").write_text('{"temperatures": [0.1, 0.1, 0.1], "biases": [-9.0, -9.0, -9.0]}')
    both, more = OPTIONS[name]
    if "--long" in both:
        both = both[:-1]
        save_records(files["records"], records(RUNS, block=3, confidence=0.6, prompt=200))
    both = both if both or name in ("loads", "rates") else ["--loads", "2"]  # which those two take the place of
    base = both or ["--loads", "2"]
    first = results(files, tmp_path, *base)
    assert results(files, tmp_path, *base) == first
    assert results(files, tmp_path, *both, *(word.format(folder=tmp_path) for word in more)) != first


def test_the_drafter_s_own_calibration_is_applied(files, tmp_path, golden):
    """Records with its fingerprint are taken; others are refused."""
    folder = golden / "inference/dspark_qwen3_vanilla"
    config, params = read_drafter(folder, jnp.float32)
    made = records([[3, 0, 1]], block=config.block_size)
    save_records(files["records"], replace(made, about=made.about | {"fingerprint": fingerprint(params)}))
    write_curve(files["curve"], curve((1,), config.block_size))
    named = {name: files[name] for name in ("curve", "records")} | {"drafter": folder}
    assert command.main(words(named, "--loads", "1", "--json", str(tmp_path / "out.json"))) == 0
    done = json.loads((tmp_path / "out.json").read_text())
    assert done["calibration"]["temperatures"] == list(config.confidence_temperatures)


def refused(given, capsys, message):
    assert command.main(given) == 2
    *logged, last = capsys.readouterr().err.splitlines()
    assert last.startswith("dspark simulate: error: ") and message in last
    assert not any("Traceback" in line for line in logged)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--loads", "0"], "loads 0: must be a multiple of replicas, 1, and at least that"),
        (["--loads", "3", "--replicas", "2"], "loads 3: must be a multiple of replicas, 2"),
        (["--loads", "8"], "slots 8: not in the curve, which has (1, 2, 4)"),
        (["--loads", "0", "--arrivals", "file"], "load 0: must be a whole number"),
        (["--rates", "-1"], "load -1: must be a positive number"),
        (["--rates", "1", "--loads", "1"], "rates: are an open load"),
        (["--rates", "1", "--arrivals", "file"], "rates: are an open load"),
        (["--requests-per-load", "0"], "requests_per_load 0: must be at least 1"),
        (["--replicas", "0"], "replicas 0: must be at least 1"),
        (["--scale-seconds", "0"], "scale_seconds 0.0: must be a positive"),
        (["--warm-up", "-0.5"], "warm_up -0.5"),
        (["--max-tokens", "-1"], "max_tokens -1"),
        (["--rounds", "0"], "rounds 0"),
        (["--slots", "4", "2"], "slots [4, 2]"),
        (["--drafter", "somewhere"], "drafter, calibration: both"),
        (["--json", "nowhere/out.json"], "json nowhere/out.json"),
    ],
)
def test_bad_settings_are_refused_in_one_line(files, more, message, capsys):
    given = words(files, *more)
    refused(given if "--loads" in more or "--rates" in more else [*given, "--loads", "1"], capsys, message)


def test_an_unknown_system_is_refused_with_the_known_ones(files, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(words(files, "--systems", "eagle"))
    assert ended.value.code == 2 and "async" in capsys.readouterr().err
    with pytest.raises(ValueError, match="systems 'eagle': must be of plain, mtp1"):
        command.SimulateSettings(files["curve"], (files["records"],), systems=("eagle",)).check()


def test_files_that_do_not_fit_are_refused(files, tmp_path, capsys):
    given = words(files, "--loads", "1")
    refused([*given, "--curve", str(tmp_path / "none.json")], capsys, "none.json")
    refused([*given, "--records", str(tmp_path / "none.npz")], capsys, "no such file")
    refused([*given, "--calibration", str(files["curve"])], capsys, "has no temperatures")
    files["calibration"].write_text('{"temperatures": [1.0, 1.0]}')
    refused(given, capsys, "calibration with 2 temperatures: records of blocks of 3 need 3")
    files["calibration"].write_text('{"temperatures": "1"}')
    refused(given, capsys, "temperatures '1' must be a list of numbers")
    others = {name: files[name] for name in ("curve", "records")}
    refused(words(others, "--loads", "1"), capsys, "made with another drafter")
    twice = [str(files["records"])] * 2
    refused([*given, "--records", *twice], capsys, "request 'r0': is in the records twice")
    save_records(files["records"], records([[], []], block=3))
    files["calibration"].write_text('{"temperatures": [1.0, 1.0, 1.0]}')
    refused(given, capsys, "records without rounds")


def test_a_curve_of_other_blocks_is_refused(files, capsys):
    write_curve(files["curve"], curve((1,), 2))
    refused(words(files, "--loads", "1"), capsys, "the records' blocks of 3 tokens need 4")
