"""Conversations of benchmarks: files, folders, stand-ins for the hub, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from dspark_jax.evaluation.benchmarks import KNOWN, Conversation, read_benchmarks

STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def write(file: Path, *lines: Any) -> Path:
    """A JSONL file; a line that is a string is taken as it is."""
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def numbered(file: Path, count: int) -> Path:
    """A file of single-turn conversations that say their line number."""
    return write(file, *({"turns": [f"line {i}"]} for i in range(1, count + 1)))


@pytest.mark.parametrize(
    ("stem", "name", "title", "domain"),
    [
        ("gsm8k", "gsm8k", "GSM8K", "math"),
        ("MATH-500", "math500", "MATH500", "math"),
        ("aime_2025", "aime25", "AIME25", "math"),
        ("mbpp", "mbpp", "MBPP", "code"),
        ("HumanEval", "humaneval", "HumanEval", "code"),
        ("lcb", "livecodebench", "LiveCodeBench", "code"),
        ("mt_bench", "mt-bench", "MT-Bench", "chat"),
        ("alpaca", "alpaca", "Alpaca", "chat"),
        ("arena-hard", "arena-hard-v2", "Arena-Hard", "chat"),
        ("arena-hard-v2", "arena-hard-v2", "Arena-Hard", "chat"),
        ("My notes", "My notes", "My notes", "other"),
    ],
)
def test_a_file_is_known_by_its_stem(tmp_path: Path, stem: str, name: str, title: str, domain: str) -> None:
    (found,) = read_benchmarks([str(numbered(tmp_path / f"{stem}.jsonl", 1))])
    assert (found.name, found.title, found.domain) == (name, title, domain)
    assert found.conversations == (Conversation(name, "1", ("line 1",)),)


def test_all_turns_are_taken(tmp_path: Path) -> None:
    file = write(tmp_path / "mt-bench.jsonl", {"turns": ["first", "second"], "category": "x"}, "", {"turns": ["only"]})
    (found,) = read_benchmarks([str(file)])
    assert [(c.id, c.turns) for c in found.conversations] == [("1", ("first", "second")), ("3", ("only",))]


@pytest.mark.parametrize(
    ("lines", "limit", "ids"),
    [("all", 0, "1 2 3 4 5"), ("odd", 0, "1 3 5"), ("even", 0, "2 4"), ("all", 2, "1 2"), ("even", 1, "2")],
)
def test_lines_and_limit(tmp_path: Path, lines: str, limit: int, ids: str) -> None:
    (found,) = read_benchmarks([str(numbered(tmp_path / "a.jsonl", 5))], lines=lines, limit=limit)
    assert [c.id for c in found.conversations] == ids.split()


def test_the_limit_counts_what_fits(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *({"turns": ["x" * size]} for size in (9, 1, 9, 2, 3)))
    for limit, wanted in ((2, ["x", "xx"]), (0, ["x", "xx", "xxx"])):
        (found,) = read_benchmarks([str(file)], limit=limit, fits=lambda one: len(one.turns[0]) < 5)
        assert [c.turns[0] for c in found.conversations] == wanted


def test_own_ids_are_kept(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"id": "HumanEval/0", "turns": ["x"]}, {"id": 7, "turns": ["y"]})
    assert [c.id for c in read_benchmarks([str(file)])[0].conversations] == ["HumanEval/0", "7"]


def test_a_folder_is_in_the_order_of_the_paper(tmp_path: Path) -> None:
    for stem in ("zebra", "mbpp", "ants", "gsm8k", "alpaca"):
        numbered(tmp_path / f"{stem}.jsonl", 1)
    (tmp_path / "notes.txt").write_text("no benchmark")
    assert [b.name for b in read_benchmarks([str(tmp_path)])] == ["gsm8k", "mbpp", "alpaca", "ants", "zebra"]


def test_domains_are_given_by_name(tmp_path: Path) -> None:
    files = [str(numbered(tmp_path / f"{stem}.jsonl", 1)) for stem in ("notes", "gsm8k", "mtbench")]
    found = read_benchmarks(files, domains=["notes=law", "GSM8K=chat"])
    assert [(b.name, b.domain) for b in found] == [("notes", "law"), ("gsm8k", "chat"), ("mt-bench", "chat")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "x"}, "turns is missing: must be a non-empty list of non-empty strings"),
        ({"turns": []}, "turns []: must be a non-empty list"),
        ({"turns": "x"}, 'turns "x": must be a non-empty list'),
        ({"turns": ["x", ""]}, "turns[1] '': must not be empty"),
        ({"turns": ["x", 3]}, "turns[1] is int: must be a string"),
        ({"turns": {"a": 1}}, "must be a non-empty list"),
        ({"turns": ["\ud800"]}, "turns[0]: holds half of a surrogate pair"),
        ({"turns": ["x"], "id": ""}, "id '': must be a non-empty string or an integer"),
        ({"turns": ["x"], "id": True}, "id True: must be"),
        ({"turns": ["x"], "id": 1}, "id '1': already used on line 1"),
        ("[1]", "list, must be a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    file = write(tmp_path / "gsm8k.jsonl", {"turns": ["fine"]}, line)
    with pytest.raises(ValueError) as error:
        read_benchmarks([str(file)])
    assert str(error.value).startswith(f"{file}, line 2: ") and message in str(error.value)
    assert len(read_benchmarks([str(file)], limit=1)) == 1  # not read


def test_wrong_sources_are_refused(tmp_path: Path) -> None:
    file, empty = numbered(tmp_path / "gsm8k.jsonl", 1), tmp_path / "empty"
    empty.mkdir()
    again = numbered(empty / "GSM-8K.jsonl", 1)
    (tmp_path / "none").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    cases: list[tuple[list[str], dict[str, Any], str]] = [
        ([str(file), str(again)], {}, f"benchmark 'gsm8k': comes twice, from {file} and {again}"),
        ([str(file), str(file)], {}, "comes twice"),
        (["gsm9k"], {}, "prompts 'gsm9k': unknown benchmark, must be a JSONL file, a folder, hf:NAME or one of gsm8k"),
        ([str(tmp_path / "none")], {}, "holds no *.jsonl files"),
        ([str(tmp_path / "blank.jsonl")], {}, "holds no prompts (all lines), must have at least one"),
        ([str(file)], {"lines": "even"}, "holds no prompts (even lines)"),
        ([str(file)], {"fits": lambda one: False}, "holds no prompts (all lines, within the length allowed)"),
        ([str(file)], {"lines": "every"}, "lines 'every': must be one of all, odd, even"),
        ([str(file)], {"limit": -1}, "limit -1: must be at least 0"),
        ([str(file)], {"domains": ["gsm8k"]}, "domains 'gsm8k': must be NAME=DOMAIN"),
        ([str(file)], {"domains": ["gsm8k=a b"]}, "must be NAME=DOMAIN"),
        ([str(file)], {"domains": ["gsm8k=all"]}, "'all' is the mean of all"),
        ([str(file)], {"domains": ["mbpp=math"]}, "no such benchmark here, must be one of gsm8k"),
        ([str(file)], {"domains": ["gsm8k=chat", "gsm8k=code"]}, "gsm8k has 'chat' already"),
        (["hf:"], {}, "must be hf:NAME"),
        (["hf:lmarena-ai/arena-hard-auto:train"], {}, "leave out @CONFIG and :SPLIT"),
    ]
    for sources, how, message in cases:
        with pytest.raises(ValueError) as error:
            read_benchmarks(sources, **how)
        assert message in str(error.value)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read_benchmarks([str(tmp_path / "gone.jsonl")])


# --- the hub, by stand-ins ---

ROWS: dict[str, tuple[list[dict[str, Any]], list[tuple[str, ...]]]] = {
    "gsm8k": ([{"question": "1+1?", "answer": "2"}], [("1+1?" + STEPS,)]),
    "math500": ([{"problem": "x=1", "unique_id": "a"}], [("x=1" + STEPS,)]),
    "aime25": ([{"problem": "n?", "problem_idx": 1, "answer": 2}], [("n?" + STEPS,)]),
    "mbpp": ([{"prompt": "Write f.", "task_id": 3}], [("Write f.",)]),
    "humaneval": (
        [{"prompt": "def f():\n", "task_id": "HumanEval/0"}],
        [
            (
                "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
                "def f():\n\n```",
            )
        ],
    ),
    "livecodebench": (
        [{"question_content": "Q1", "starter_code": ""}, {"question_content": "Q2", "starter_code": "class S:"}],
        [
            (
                "You are an expert Python programmer. You will be given a question (problem specification) and will "
                "generate a correct Python program that matches the specification and passes all tests. You will NOT "
                "return anything except for the program\n\n### Question:\nQ1\n\n### Format: Write your code in the "
                "following format:\n```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with "
                "backticks)",
            ),
            (
                "You are an expert Python programmer. You will be given a question (problem specification) and will "
                "generate a correct Python program that matches the specification and passes all tests. You will NOT "
                "return anything except for the program\n\n### Question:\nQ2\n\n### Format: Use the following code "
                "structure:\n```python\nclass S:\n```\n\n### Answer: (use the provided format with backticks)",
            ),
        ],
    ),
    "mt-bench": ([{"prompt": ["a", "b"], "reference": []}], [("a", "b")]),
    "alpaca": (
        [{"instruction": "Sum up.", "input": "A text."}, {"instruction": "Say hi.", "input": ""}],
        [("Sum up.\n\nInput:\nA text.",), ("Say hi.",)],
    ),
    "arena-hard-v2": ([{"uid": "u", "prompt": "Hard?"}], [("Hard?",)]),
}
CALLS = {
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test"),
    "aime25": ("MathArena/aime_2025", None, "train"),
    "mbpp": ("google-research-datasets/mbpp", "sanitized", "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "alpaca": ("tatsu-lab/alpaca", None, "train"),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the hub: `rows` is what it holds, `calls` what was asked for."""
    state: dict[str, Any] = {"rows": [], "calls": []}

    def load(name: str, config: str | None = None, **how: Any) -> list[dict[str, Any]]:
        assert how.pop("streaming")
        state["calls"].append((name, config, how))
        return state["rows"]

    monkeypatch.setattr(datasets, "load_dataset", load)
    return state


@pytest.mark.parametrize("name", [known.name for known in KNOWN])
def test_the_hub_gives_every_benchmark(hub: dict[str, Any], name: str) -> None:
    hub["rows"], wanted = ROWS[name]
    (found,) = read_benchmarks([name])
    assert [c.turns for c in found.conversations] == wanted
    assert [c.id for c in found.conversations] == [str(i + 1) for i in range(len(wanted))]
    ((repository, config, how),) = hub["calls"]
    if name in CALLS:
        assert (repository, config, how) == (*CALLS[name][:2], {"split": CALLS[name][2]})
    else:
        assert repository == "json" and config is None and how["split"] == "test"
        files = how["data_files"]["test"]
        assert len(files) == {"livecodebench": 6, "arena-hard-v2": 1}[name]
        assert all(file.startswith("hf://datasets/") and file.endswith(".jsonl") for file in files)


def test_hub_names_are_taken_too(hub: dict[str, Any]) -> None:
    hub["rows"] = [{"question": "1?"}, {"question": "2?"}]
    (known,) = read_benchmarks(["hf:openai/gsm8k@socratic:train"], lines="even")
    assert known.name == "gsm8k" and known.conversations[0].turns == ("2?" + STEPS,)
    (own,) = read_benchmarks(["hf:someone/questions"])
    assert (own.name, own.domain, own.conversations[0].turns) == ("questions", "other", ("1?",))
    asked = [(name, config, how["split"]) for name, config, how in hub["calls"]]
    assert asked == [("openai/gsm8k", "socratic", "train"), ("someone/questions", None, "test")]
    hub["rows"] = [{"turns": ["a", "b"], "id": "same"}, {"turns": ["c"], "id": "same"}]
    (turns,) = read_benchmarks(["hf:someone/chats@x:dev"])
    assert [(c.id, c.turns) for c in turns.conversations] == [("1", ("a", "b")), ("2", ("c",))]


def test_hub_rows_without_their_columns_are_named(hub: dict[str, Any]) -> None:
    hub["rows"] = [{"text": "x"}]
    with pytest.raises(ValueError, match="gsm8k, line 1: column 'question': is missing, the row has text"):
        read_benchmarks(["gsm8k"])
    with pytest.raises(ValueError, match="hf:a/b, line 1: columns text: must have one of turns, prompt, question"):
        read_benchmarks(["hf:a/b"])
