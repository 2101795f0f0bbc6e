"""Offline generation with tiny models: the output lines, resume, stop strings, and refusals."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest

from dspark_jax.decoding.generate import Completion, Request
from dspark_jax.serving.main import main
from dspark_jax.serving.offline import Job, answer, in_order, load_models, make_generator, request_seed
from dspark_jax.serving.settings import parse_settings
from dspark_jax.serving.stream import TextStream

FIELDS = [
    "id", "prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "rounds", "drafted",
    "verified", "accepted", "accepted_length", "seconds",
]  # fmt: skip
PROMPTS = [
    {"prompt": "one"},
    {"id": "x", "messages": [{"role": "user", "content": "two"}], "max_tokens": 5},
    {"turns": ["three", "ignored"], "temperature": 1.0},
    {"prompt": "four"},
    {"prompt": "five"},
]


@pytest.fixture
def files(tmp_path):
    """(prompts, output, report) paths; the prompts are written."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return prompts, tmp_path / "out.jsonl", tmp_path / "report.json"


def serve(files, flags, *more):
    """Exit code of an offline run of short answers, two at a time."""
    prompts, output, report = files
    words = ["--prompts", str(prompts), "--output", str(output), "--json", str(report), "--batch-size", "2"]
    return main([*words, "--max-tokens", "12", *flags, *more])


def lines(path):
    """Output lines by id."""
    return {record["id"]: record for record in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def without_seconds(records):
    """Records by id, less their wall time."""
    return {name: {key: value for key, value in record.items() if key != "seconds"} for name, record in records.items()}


def test_output_lines_report_and_comparison(files, models_flags, capsys):
    assert serve(files, models_flags, "--compare") == 0
    records = lines(files[1])
    assert set(records) == {"p:1", "x", "p:3", "p:4", "p:5"}
    for record in records.values():
        assert list(record) == FIELDS
        assert record["completion_tokens"] == len(record["token_ids"]) <= 12
        assert record["completion_tokens"] - 1 <= record["rounds"] + record["accepted"]
        assert record["accepted"] <= record["verified"] <= record["drafted"] == 7 * record["rounds"]
    assert records["x"]["completion_tokens"] <= 5
    assert [records[name]["prompt"] for name in ("p:1", "x", "p:3")] == ["one", "two", "three"]
    report = json.loads(files[2].read_text())
    assert report["comparison"]["equal_texts"] is True
    assert [p["id"] for p in report["comparison"]["prompts"] if p["equal"] is None] == ["p:3"]
    assert report["comparison"]["speedup"] > 0 and len(report["prompts"]) == 5
    assert "texts equal to plain decoding" in capsys.readouterr().err


def test_a_stopped_run_goes_on_to_the_same_output(files, models_flags, capsys):
    assert serve(files, models_flags) == 0
    whole = files[1].read_bytes().splitlines(keepends=True)
    expected = without_seconds(lines(files[1]))
    files[1].write_bytes(b"".join(whole[:2]) + whole[2][:20])  # killed in the middle of the third line
    assert serve(files, models_flags) == 0
    assert "2 of 5 prompts are there already, 3 to do" in capsys.readouterr().err
    assert without_seconds(lines(files[1])) == expected  # the sampled one too
    assert json.loads(files[2].read_text())["skipped"] == 2
    assert serve(files, models_flags, "--compare") == 0  # nothing left
    assert json.loads(files[2].read_text())["totals"]["prompts"] == 0
    assert without_seconds(lines(files[1])) == expected


def test_filter_then_limit_and_plain_decoding(files, models_flags):
    assert serve(files, models_flags, "--line-filter", "odd", "--limit", "2", "--drafter", "none") == 0
    records = lines(files[1])
    assert set(records) == {"p:1", "p:3"}
    for record in records.values():
        assert (record["drafted"], record["accepted"]) == (0, 0)
        assert record["rounds"] == record["completion_tokens"] - 1


def test_lookup_needs_no_drafter_and_changes_no_text(files, target_folder):
    flags = ["--target", str(target_folder), "--dtype", "float32", "--drafter", "ngram", "--ngram-shortest", "1"]
    assert serve(files, flags, "--compare", "--ngram-tokens", "4", "--line-filter", "even") == 0
    records = lines(files[1])
    assert set(records) == {"x", "p:4"}
    assert all(record["verified"] <= record["drafted"] <= 4 * record["rounds"] for record in records.values())
    assert json.loads(files[2].read_text())["comparison"]["equal_texts"] is True


def test_settings_reach_the_engine(models_flags):
    words = "--prompts README.md --output x.jsonl --schedule threshold --threshold 0.9 --batch-size 3".split()
    settings = parse_settings([*words, *models_flags])
    models = load_models(settings)
    engine = make_generator(models, settings)
    assert (engine.schedule, engine.threshold, engine.batch_size) == ("threshold", 0.9, 3)
    assert engine.drafter is models.drafter
    plain = make_generator(models, settings, plain=True, every_round=True)
    assert (plain.schedule, plain.drafter, plain.stream_rounds, plain.stop_ids) == ("fixed", None, 1, models.stop_ids)
    assert models.target.params["embed"].dtype == jnp.float32 and models.stop_ids == (257,)


@pytest.mark.parametrize("drafter", ["dspark", "none"])
def test_stop_strings_cut_text_tokens_and_counts(files, models_flags, drafter, tokenizer):
    assert serve(files, models_flags) == 0
    full = lines(files[1])["p:1"]
    stop = tokenizer.decode(full["token_ids"][:6])[-2:]
    assert "\ufffd" not in stop
    files[1].unlink()
    assert serve(files, models_flags, "--drafter", drafter, "--stop", "never", "--stop", stop) == 0
    cut = lines(files[1])["p:1"]
    assert cut["finish_reason"] == "stop" and stop not in cut["text"]
    assert full["text"].startswith(cut["text"] + stop)
    assert cut["token_ids"] == full["token_ids"][: cut["completion_tokens"]]
    assert cut["completion_tokens"] <= 6 and cut["completion_tokens"] - 1 <= cut["rounds"] + cut["accepted"]


def test_counts_of_an_answer_that_is_cut(tokenizer):
    ids = tokenizer.encode("abcdefgh")
    job = Job(Request("a", (1, 2)), "p", ("ef",))
    # 1 from prefill, then rounds of 3 and 4 tokens, of which 2 and 3 were accepted drafts
    completion = Completion("a", ids, "length", 2, 2, 14, 14, 5, 0.5)
    stream = TextStream(tokenizer, job.stop)
    stream.push(ids)
    record = answer(job, completion, stream)
    assert (record["text"], record["finish_reason"], record["completion_tokens"]) == ("abcd", "stop", 6)
    assert (record["accepted"], record["accepted_length"]) == (4, 2.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\nnot json\n', "line 2: not JSON"),
        ('{"prompt": ""}\n', "line 1: prompt '': must not be empty"),
        ('{"prompt": "a", "temperature": -1}\n', "line 1: temperature -1: must be"),
        ('{"prompt": "a", "id": "p", "min_p": 1}\n', "line 1: min_p 1: must be at least 0 and below 1"),
        (json.dumps({"prompt": "a" * 600}) + "\n", "tokens, the target's context has 512"),
        ("\n", "holds no prompts"),
    ],
)
def test_bad_lines_are_refused_before_anything_is_written(text, message, files, models_flags, capsys):
    files[0].write_text(text)
    assert serve(files, models_flags) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not files[1].exists()


def test_shards_share_a_file(files, models_flags, capsys):
    """Together they answer every prompt once, with the texts of a single run."""
    assert serve(files, models_flags) == 0
    whole = without_seconds(lines(files[1]))
    parts = {}
    for number in (1, 2, 3):
        part = files[1].with_name(f"part{number}.jsonl")
        assert serve((files[0], part, files[2]), models_flags, "--shard", f"{number}/3") == 0
        mine = without_seconds(lines(part))
        assert not set(mine) & set(parts)
        parts |= mine
    assert parts == whole
    part = files[1].with_name("part.jsonl")
    assert serve((files[0], part, files[2]), models_flags, "--shard", "1/2", "--line-filter", "odd") == 0
    assert set(lines(part)) == {"p:1", "p:5"}
    capsys.readouterr()
    assert serve((files[0], part, files[2]), models_flags, "--shard", "6/6") == 2
    assert "holds no prompts (line_filter 'all', shard 6/6)" in capsys.readouterr().err


def test_answers_in_the_order_of_the_prompts(files, models_flags):
    """The short one ends before its neighbour and waits; also where half of them are there already."""
    assert serve(files, models_flags, "--order", "input", "--batch-size", "3") == 0
    names = [json.loads(line)["id"] for line in files[1].read_text().splitlines()]
    assert names == ["p:1", "x", "p:3", "p:4", "p:5"]
    expected = without_seconds(lines(files[1]))
    kept = files[1].read_text().splitlines(keepends=True)[1:3]
    files[1].write_text("".join(kept))
    assert serve(files, models_flags, "--order", "input", "--batch-size", "3") == 0
    names = [json.loads(line)["id"] for line in files[1].read_text().splitlines()]
    assert names == ["x", "p:3", "p:1", "p:4", "p:5"]
    assert without_seconds(lines(files[1])) == expected


def test_records_that_come_too_early_are_held():
    records = [{"id": name} for name in "cabed"]
    seen = []
    for record in in_order((seen.append(r["id"]) or r for r in records), "abcde"):
        assert record["id"] in seen
        seen.append(record["id"].upper())
    assert "".join(seen) == "caAbBCedDE"


def test_an_output_file_of_other_prompts_is_refused(files, models_flags, capsys):
    files[1].write_text(json.dumps({"id": "p:4", "prompt": "another"}) + "\n")
    before = files[1].read_bytes()
    assert serve(files, models_flags) == 2
    assert "id 'p:4' is there for another prompt, not for 'four'" in capsys.readouterr().err
    assert files[1].read_bytes() == before


def test_models_that_do_not_go_together_are_refused(files, golden, models_flags, capsys):
    assert serve(files, [*models_flags[:2], "--draft", str(golden / "nothing")]) == 2
    assert serve(files, ["--target", str(golden / "targets/llama_tied"), *models_flags[2:]]) == 2
    assert "do not belong together" in capsys.readouterr().err
    assert not files[1].exists()


def test_request_seeds_differ_by_prompt_and_run():
    seeds = {request_seed(seed, name) for seed in (0, 1) for name in ("a", "b")}
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(3, "a") == request_seed(3, "a")


def test_budgets_measure_their_curve_once_and_refuse_a_foreign_one(files, models_flags, tmp_path, monkeypatch, capsys):
    """The first run measures this machine and stores the curve, the second finds it; greedy texts are those of plain
    decoding."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    greedy = [prompt for prompt in PROMPTS if not prompt.get("temperature")]
    files[0].write_text("".join(json.dumps(prompt) + "\n" for prompt in greedy))
    assert serve(files, models_flags, "--drafter", "none") == 0
    whole = {name: record["token_ids"] for name, record in lines(files[1]).items()}
    assert len(whole) == len(greedy)
    for schedule, measures in (("causal", True), ("async", False)):
        files[1].unlink()
        capsys.readouterr()
        assert serve(files, models_flags, "--schedule", schedule) == 0
        assert ("measuring rounds of 2 slots" in capsys.readouterr().err) == measures
        assert {name: record["token_ids"] for name, record in lines(files[1]).items()} == whole
    (stored,) = (tmp_path / "cache").rglob("*.json")
    foreign = tmp_path / "foreign.json"
    content = json.loads(stored.read_text())
    content["key"]["device"] = "another machine"
    foreign.write_text(json.dumps(content))
    assert serve(files, models_flags, "--schedule", "causal", "--profile", str(foreign)) == 2
    message = capsys.readouterr().err
    assert "another machine" in message and "profile again" in message
