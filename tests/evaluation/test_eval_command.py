"""`dspark eval` from prompts to a report: every option, going on after a stop, and all that it refuses in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dspark_jax import cli
from dspark_jax.checkpoints import load
from dspark_jax.decoding.generate import Generator
from dspark_jax.evaluation import eval_command
from dspark_jax.evaluation.eval_command import EvalSettings
from dspark_jax.evaluation.store import OutcomeStore
from tests.serving.conftest import TEMPLATE, copy_model, write_target, write_tokenizer

TALKS = {
    "gsm8k": [["tulips are red and"], ["a b"], ["the answer is"], ["c"]],
    "mt-bench": [["hello", "again"], ["x" * 60, "why"], ["so", "it", "goes"], ["what", "now"]],
    "notes": [["plain words"], ["more of them"]],
}
TIMES = ("seconds", "tokens_per_second", "speedup")
Files = dict[str, Any]


@pytest.fixture(scope="module")
def files(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Targets, drafters and prompts by short names."""
    folder = tmp_path_factory.mktemp("files")
    prompts = folder / "prompts"
    prompts.mkdir()
    for stem, talks in TALKS.items():
        (prompts / f"{stem}.jsonl").write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in talks))
    (folder / "bad.jsonl").write_text('{"turns": ["fine"]}\n{"prompt": "x"}\n')
    (folder / "long.jsonl").write_text(json.dumps({"turns": ["b" * 600]}) + "\n")
    others = {}
    for name in ("qwen3_tied", "llama_tied"):
        others[name] = copy_model(golden / "targets" / name, folder / name)
        write_tokenizer(others[name], TEMPLATE)
    target = folder / "target"
    target.mkdir()
    kinds = {"dspark": "dspark_qwen3_vanilla", "dflash": "dflash_qwen3", "other": "dspark_gemma4_vanilla"}
    drafters = {name: golden / "inference" / kind for name, kind in kinds.items()}
    others["target"] = write_target(golden, target)
    others["retold"] = copy_model(others["target"], folder / "retold")
    write_tokenizer(others["retold"], TEMPLATE.replace("{", "{{ '!' }}{", 1))
    return {"prompts": prompts, "folder": folder} | others | drafters


BASE: dict[str, str] = {
    "target": "{target}",
    "prompts": "{prompts}/gsm8k.jsonl {prompts}/notes.jsonl",
    "drafters": "dspark={dspark}",
    "dtype": "float32",
    "max-tokens": "6",
    "batch-size": "2",
    "limit": "2",
}


def command(files: Files, out: Path, **changes: str | None) -> int:
    """Runs the command with BASE's options, changed: `a_b="x y"` is --a-b x y, None leaves an option out."""
    options = BASE | {"output": str(out)} | {name.replace("_", "-"): value for name, value in changes.items()}
    words = []
    for name, value in options.items():
        if value is not None:
            words += [f"--{name}", *value.format(**files).split()]
    return cli.main(["eval", *words])


def read(output: Path) -> dict[str, Any]:
    """The report, its outcomes with it."""
    lines = (output / "outcomes.jsonl").read_text().splitlines()
    return json.loads((output / "report.json").read_text()) | {"outcomes": [json.loads(line) for line in lines]}


@pytest.fixture(scope="module")
def base(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with BASE's options."""
    output = tmp_path_factory.mktemp("base") / "made/for/it"
    assert command(files, output) == 0
    return output


def untimed(report: dict[str, Any]) -> dict[str, Any]:
    """The scores of a report without what a clock says."""

    def less(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: less(entry) for name, entry in value.items() if name not in TIMES}
        return [less(entry) for entry in value] if isinstance(value, list) else value

    return {name: less(report[name]) for name in ("systems", "by_benchmark", "by_domain", "differences")}


def texts(report: dict[str, Any]) -> dict[str, list[int]]:
    """What was answered, by the ids of the answers."""
    return {outcome["id"]: outcome["token_ids"] for outcome in report["outcomes"]}


def test_a_run_leaves_all_files(base: Path) -> None:
    names = {path.name for path in base.iterdir()}
    written = {"report.md", "report.json", "accepted.png", "position.png", "tensorboard"}
    assert names == written | {"outcomes.jsonl", "outcomes.about.json"}
    report = read(base)
    assert report["systems"] == ["plain", "dspark"]
    assert {o["id"] for o in report["outcomes"]} == {
        f"{system}/{name}/{number}/0" for system in ("plain", "dspark") for name in ("gsm8k", "notes")
        for number in (1, 2)
    }  # fmt: skip
    text = (base / "report.md").read_text()
    assert "| drafter |" in text and "temperature 1, answers of at most 6 tokens, seed 0" in text
    assert "GSM8K 2, notes 2" in text and "dspark: " in text
    speedup = report["by_benchmark"]["dspark"]["gsm8k"]["speedup"]["value"]
    of = {s: report["by_benchmark"][s]["gsm8k"]["tokens_per_second"] for s in ("plain", "dspark")}
    assert speedup == pytest.approx(of["dspark"] / of["plain"])
    assert report["versions"]["jax"] and report["device"]["platform"] == "cpu"


def test_the_table_is_printed(files: Files, base: Path, capsys: pytest.CaptureFixture) -> None:
    """Again, from the answers that are there."""
    assert command(files, base) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("| drafter |") and " notes |" in printed.out and "tokens/s" in printed.out
    assert f"{base}: 8 of 8 answers are there already" in printed.err


def test_all_turns_are_in_the_report(files: Files, tmp_path: Path) -> None:
    assert command(files, tmp_path, prompts="{prompts}/mt-bench.jsonl", limit="3", drafters="ngram") == 0
    report = read(tmp_path)
    assert report["by_benchmark"]["ngram"]["mt-bench"]["answers"] == 7
    assert [o["turn"] for o in report["outcomes"] if o["system"] == "ngram"] == [0, 0, 0, 1, 1, 1, 2]


# --- every field changes something ---


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Generator]:
    """The engines that have run."""
    seen: list[Generator] = []
    stream = Generator.stream

    def spy(self, requests, mode, on_tokens=None, on_rounds=None):
        seen.append(self)
        return stream(self, requests, mode, on_tokens, on_rounds)

    monkeypatch.setattr(Generator, "stream", spy)
    return seen


def conversations(report: dict[str, Any]) -> set[str]:
    return {f"{o['benchmark']}/{o['conversation']}" for o in report["outcomes"]}


def lengths(report: dict[str, Any]) -> int:
    return max(len(o["token_ids"]) for o in report["outcomes"])


def verified(report: dict[str, Any]) -> float:
    return report["by_domain"]["dspark"]["all"]["verified"]["value"]


def speedup(report: dict[str, Any]) -> float | None:
    return report["by_domain"]["dspark"]["all"]["speedup"]["value"]


def clockless(report: dict[str, Any]) -> set[str]:
    return {o["system"] for o in report["outcomes"] if o["wall"] is None}


def greedy(report: dict[str, Any]) -> bool:
    """Whether the drafter's answers are those of plain decoding."""
    mine = texts(report)
    return all(mine[name] == mine["plain" + name.removeprefix("dspark")] for name in mine if "dspark/" in name)


SMALL: dict[str, str | None] = {"prompts": "{prompts}/gsm8k.jsonl", "limit": "1", "no-plain": ""}

# field: options, what is looked at (of the report and the engines), and what it must be
CHANGES: dict[str, tuple[dict[str, str | None], Callable[[dict[str, Any], list[Generator]], Any], Any]] = {
    "prompts": ({"prompts": "{prompts}"}, lambda r, e: [b["name"] for b in r["benchmarks"]], list(TALKS)),
    "lines": ({"lines": "even"}, lambda r, e: conversations(r), {"gsm8k/2", "gsm8k/4", "notes/2"}),
    "limit": ({"limit": "1"}, lambda r, e: conversations(r), {"gsm8k/1", "notes/1"}),
    "domains": ({"domains": "notes=law"}, lambda r, e: [d["name"] for d in r["domains"]], ["math", "law", "all"]),
    "max_prompt_tokens": (
        {"max-prompt-tokens": "31"}, lambda r, e: conversations(r), {"gsm8k/2", "gsm8k/4", "notes/1", "notes/2"}
    ),
    "drafters": ({"drafters": "a={dspark} ngram plain"}, lambda r, e: r["systems"], ["plain", "a", "ngram"]),
    "compare": (
        {"compare": "", "drafters": None, "target": None}, lambda r, e: r["systems"], ["plain", "dspark", "x", "ngram"]
    ),
    "plain": ({"no-plain": ""}, lambda r, e: [r["systems"], speedup(r)], [["dspark"], None]),
    "target": ({"target": "{qwen3_tied}"}, lambda r, e: Path(r["target"]).name, "qwen3_tied"),
    "dtype": ({"dtype": "bfloat16"}, lambda r, e: str(e[0].target.params["embed"].dtype), "bfloat16"),
    "temperature": ({"temperature": "0"}, lambda r, e: greedy(r), True),
    "top_p": ({"top-p": "1e-6"}, lambda r, e: greedy(r), True),
    "top_k": ({"top-k": "1"}, lambda r, e: greedy(r), True),
    "min_p": ({"min-p": "0.999"}, lambda r, e: greedy(r), True),
    "max_tokens": ({"max-tokens": "4"}, lambda r, e: lengths(r), 4),
    "batch_size": ({"batch-size": "3"}, lambda r, e: {one.batch_size for one in e}, {3}),
    "seed": ({"seed": "1"}, lambda r, e: len(r["outcomes"]), 8),
    "method": ({"method": "forced"}, lambda r, e: clockless(r), {"plain", "dspark"}),
    "schedule": ({"schedule": "threshold"}, lambda r, e: e[-1].schedule, "threshold"),
    "threshold": ({"schedule": "threshold", "threshold": "0"}, lambda r, e: e[-1].threshold, 0.0),
    "data": (SMALL | {"data": "2"}, lambda r, e: [one.mesh.shape["data"] for one in e], [2]),
    "tensor": (SMALL | {"tensor": "2"}, lambda r, e: [one.mesh.shape["tensor"] for one in e], [2]),
    "output": ({}, lambda r, e: len(r["outcomes"]), 8),
    "json": ({"json": "{folder}/out.json"}, lambda r, e: len(r["outcomes"]), 8),
}  # fmt: skip


def test_every_field_is_changed() -> None:
    assert set(CHANGES) == {field.name for field in fields(EvalSettings)}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_field_changes_what_it_says(
    name: str,
    files: Files,
    base: Path,
    tmp_path: Path,
    engines: list[Generator],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if name in ("data", "tensor"):
        request.getfixturevalue("uncached")
    shipped = tmp_path / "assets"
    for place in ("dspark-tiny", "x-tiny"):
        shutil.copytree(files["dspark"], shipped / place)
    monkeypatch.setattr(load, "_EMBEDDED_DRAFTER", shipped / "dspark-tiny")
    monkeypatch.setattr(load, "embedded_target_path", lambda: str(files["target"]))
    options, look, wanted = CHANGES[name]
    assert command(files, tmp_path / "out", **options) == 0
    report = read(tmp_path / "out")
    assert look(report, engines) == wanted
    if name in ("seed", "temperature", "top_p", "top_k", "min_p", "target"):
        assert texts(report) != texts(read(base))
    elif name in ("data", "tensor"):
        assert texts(report).items() <= texts(read(base)).items()
    elif name in ("batch_size", "output", "json"):
        assert texts(report) == texts(read(base)) and untimed(report) == untimed(read(base))
    elif name in ("schedule", "threshold"):  # at 0 blocks are whole again
        assert (verified(report) < verified(read(base))) == (name == "schedule")
    if name == "json":
        found = json.loads((files["folder"] / "out.json").read_text())
        assert found | {"outcomes": report["outcomes"]} == report


# --- going on ---


class Stopped(KeyboardInterrupt):
    """As ^C."""


@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_stopped_run_goes_on_and_reports_the_same(
    files: Files, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Nothing is answered twice, a half-written line is dropped, and the figures are those of a whole run."""
    prompts = {"prompts": "{prompts}/gsm8k.jsonl {prompts}/mt-bench.jsonl"}
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert command(files, whole, **prompts) == 0
    keep, kept = OutcomeStore.keep, []

    def fragile(self: OutcomeStore, outcome: Any) -> None:
        if len(kept) == after:
            raise Stopped
        kept.append(outcome.id)
        keep(self, outcome)

    with monkeypatch.context() as patch:
        patch.setattr(OutcomeStore, "keep", fragile)
        assert command(files, part, **prompts) == 130
    assert "stopped; the same command goes on where it was" in capsys.readouterr().err
    assert not (part / "report.md").exists()
    with (part / "outcomes.jsonl").open("a") as file:
        file.write('{"id": "dspark/gsm8k/1/0", "tok')
    again: list[str] = []
    monkeypatch.setattr(OutcomeStore, "keep", lambda self, o: (again.append(o.id), keep(self, o)))
    assert command(files, part, **prompts) == 0
    assert not set(kept) & set(again) and len(kept) + len(again) == len(set(kept + again)) == 12
    first, second = read(whole), read(part)
    assert untimed(first) == untimed(second) and texts(first) == texts(second)
    stopped = {0: set(), 3: {("dspark", "gsm8k")}, 9: {("dspark", "mt-bench")}}[after]  # in the midst of whose answers
    assert {(o["system"], o["benchmark"]) for o in second["outcomes"] if o["wall"] is None} == stopped
    speeds = {(s, n): f["tokens_per_second"] for s, row in second["by_benchmark"].items() for n, f in row.items()}
    assert {place for place, speed in speeds.items() if speed is None} == stopped
    assert ("were not timed" in (part / "report.md").read_text()) == bool(stopped)


def test_clocks_of_answers_that_were_followed_say_nothing(files: Files, tmp_path: Path) -> None:
    """Outcomes of older runs have them."""
    options: dict[str, str | None] = {"method": "forced", "drafters": "ngram", "limit": "1"}
    assert command(files, tmp_path, **options) == 0
    first = read(tmp_path)
    for outcome in first["outcomes"]:
        outcome["wall"] = 1.0 if outcome["system"] == "plain" else None
    (tmp_path / "outcomes.jsonl").write_text("".join(json.dumps(outcome) + "\n" for outcome in first["outcomes"]))
    assert command(files, tmp_path, **options) == 0
    assert read(tmp_path) == first and first["by_domain"]["plain"]["all"]["tokens_per_second"] is None


def test_a_turn_without_room_is_not_asked_again(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "mt-bench.jsonl").write_text(json.dumps({"turns": ["a", "b" * 600, "c"]}) + "\n")
    options: dict[str, str | None] = {"prompts": str(tmp_path / "mt-bench.jsonl"), "drafters": "ngram", "limit": None}
    assert command(files, tmp_path / "out", **options) == 0
    first = read(tmp_path / "out")
    assert first["by_benchmark"]["ngram"]["mt-bench"]["answers"] == 1 and len(first["outcomes"]) == 2 * 3
    monkeypatch.setattr(Generator, "warm_up", lambda self, requests: pytest.fail("nothing is left to do"))
    capsys.readouterr()
    assert command(files, tmp_path / "out", **options) == 0
    assert read(tmp_path / "out") == first and "6 of 6 answers are there already" in capsys.readouterr().err


def test_more_prompts_and_drafters_go_into_the_same_folder(files: Files, base: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(base, output)
    before = (output / "outcomes.jsonl").read_bytes()
    assert command(files, output, limit="0", drafters="dspark={dspark} ngram") == 0
    assert (output / "outcomes.jsonl").read_bytes().startswith(before)
    report = read(output)
    assert report["systems"] == ["plain", "dspark", "ngram"] and len(report["outcomes"]) == 3 * 6
    assert command(files, output) == 0  # and fewer again
    assert untimed(read(output)) == untimed(read(base))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "0.5"}, "protocol.temperature was 1.0 and is 0.5 now"),
        ({"max_tokens": "5"}, "protocol.max_tokens was 6 and is 5 now"),
        ({"drafters": "dspark={dflash}"}, "systems.dspark.fingerprint was "),
        ({"schedule": "threshold"}, "systems.dspark.schedule was 'fixed' and is 'threshold' now"),
        ({"target": "{qwen3_tied}"}, "target.fingerprint was "),
        ({"target": "{retold}"}, "target.chat was "),
        ({"prompts": "{folder}/gsm8k.jsonl"}, "prompts.gsm8k.1 was "),
    ],
)
def test_answers_made_otherwise_are_not_used(
    files: Files, base: Path, options: dict[str, str], message: str, capsys: pytest.CaptureFixture
) -> None:
    (files["folder"] / "gsm8k.jsonl").write_text('{"turns": ["another question"]}\n')
    before = {path.name: path.read_bytes() for path in base.iterdir() if path.is_file()}
    assert command(files, base, **options) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"dspark eval: error: output {base}: its outcomes were made otherwise: ") and message in last
    assert {path.name: path.read_bytes() for path in base.iterdir() if path.is_file()} == before


# --- refusals ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": None}, "give --prompts: JSONL files with turns, a folder of such, or names of benchmarks"),
        ({"prompts": "/no/such.jsonl"}, "prompts /no/such.jsonl: no such file or folder"),
        ({"prompts": "gsm9k"}, "prompts 'gsm9k': unknown benchmark"),
        ({"prompts": "{folder}/bad.jsonl"}, "bad.jsonl, line 2: turns is missing: must be a non-empty list"),
        ({"prompts": "{prompts} {prompts}/gsm8k.jsonl"}, "benchmark 'gsm8k': comes twice"),
        ({"prompts": "{folder}/long.jsonl"}, "the target's context has 512; at most 511 leave room for one token"),
        ({"prompts": "{folder}/long.jsonl"}, "--max-prompt-tokens leaves long prompts out"),
        ({"prompts": "{folder}/long.jsonl", "max_prompt_tokens": "99"}, "holds no prompts (all lines, within the len"),
        ({"domains": "gsm8k"}, "domains 'gsm8k': must be NAME=DOMAIN"),
        ({"limit": "-1"}, "limit -1: must be at least 0"),
        ({"max_prompt_tokens": "-1"}, "max_prompt_tokens -1: must be at least 0"),
        ({"batch_size": "0"}, "batch_size 0: must be at least 1"),
        ({"batch_size": "3", "data": "2"}, "batch_size 3: must be a multiple of data 2"),
        ({"data": "0"}, "data 0: must be at least 1"),
        ({"tensor": "64"}, "data x tensor 64: there are 8 devices here"),
        ({"tensor": "2", "method": "forced"}, "method 'forced': runs on one device"),
        ({"max_tokens": "0"}, "max_tokens 0: must be at least 1"),
        ({"temperature": "-1"}, "temperature -1.0: must be finite and at least 0"),
        ({"temperature": "nan"}, "temperature nan: must be finite"),
        ({"top_p": "0"}, "top_p 0.0: must be above 0 and at most 1"),
        ({"top_k": "-1"}, "top_k -1: must be 0"),
        ({"min_p": "1"}, "min_p 1.0: must be at least 0 and below 1"),
        ({"seed": "-1"}, "seed -1: must be from 0"),
        ({"threshold": "1.5"}, "threshold 1.5: a probability, must lie in [0, 1]"),
        ({"drafters": "a={dspark} a=ngram"}, "drafters 'a=ngram': the name 'a' is used twice"),
        ({"drafters": "ngram ngram"}, "the name 'ngram' is used twice"),
        ({"drafters": "plain={dspark}"}, "the name 'plain' is taken by decoding without a drafter"),
        ({"drafters": "a/b={dspark}"}, "must be NAME=PATH, PATH or ngram"),
        ({"drafters": "a="}, "must be NAME=PATH, PATH or ngram"),
        ({"drafters": "a=/no/such/drafter"}, "/no/such/drafter"),
        ({"drafters": "a={other}"}, "drafter a: is of another target"),
        ({"drafters": "{dspark}", "target": "{llama_tied}"}, "drafter dspark_qwen3_vanilla: is of another target"),
        ({"drafters": None, "target": "{llama_tied}"}, "(it is the embedded target's: name others with --drafters)"),
        (
            {"drafters": "a={dflash}", "schedule": "threshold"},
            "drafter a: has no confidence head, --schedule threshold",
        ),
        ({"drafters": "ngram", "schedule": "threshold"}, "drafter ngram: has no confidence head"),
        ({"target": "/no/such/target"}, "/no/such/target"),
        ({"compare": ""}, "compare: takes the drafters that ship, leave out --drafters and --target"),
        ({"no_plain": "", "method": "forced"}, "method 'forced': follows the answers of plain decoding"),
        ({"no_plain": "", "drafters": "plain"}, "drafters 'plain': contradicts --no-plain"),
        ({"json": "/no/such/folder/a.json"}, "json /no/such/folder/a.json: must be a file in a folder that exists"),
        ({"output": "{folder}/bad.jsonl"}, "is a file, must be a folder"),
    ],
)
def test_wrong_input_is_told_in_one_line(
    files: Files, tmp_path: Path, options: dict[str, str | None], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert command(files, tmp_path / "out", **options) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("dspark eval: error: ") and message in error[-1]
    assert not (tmp_path / "out/report.md").exists()


def test_a_target_that_can_be_asked_one_turn_is_asked_none_of_several(
    files: Files, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    bare = copy_model(golden / "targets/qwen3_untied", tmp_path / "bare")
    write_tokenizer(bare, None)
    assert (
        command(files, tmp_path / "out", target=str(bare), prompts="{prompts}/gsm8k.jsonl {prompts}/mt-bench.jsonl")
        == 2
    )
    error = capsys.readouterr().err.splitlines()[-1]
    assert "benchmark mt-bench, conversation 1, turn 2: messages: the tokenizer has no chat template" in error
    assert not (tmp_path / "out").exists()
    assert command(files, tmp_path / "out", target=str(bare)) == 0


def test_help_names_every_option(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["eval", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for field in fields(EvalSettings):
        assert f"--{'no-' if field.name == 'plain' else ''}{field.name.replace('_', '-')}" in text


def test_the_drafters_that_ship_are_named_by_their_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mtp-m", "dspark-m", "dflash-m", "dspark-other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "eagle3-m").mkdir()  # nothing in it
    monkeypatch.setattr(load, "_EMBEDDED_DRAFTER", tmp_path / "dspark-m")
    assert list(eval_command.shipped_drafters()) == ["dspark", "dflash", "mtp"]
    monkeypatch.undo()
    assert next(iter(eval_command.shipped_drafters())) == "dspark"
