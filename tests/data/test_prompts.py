"""Reading prompts: forms, ids, filters, sampling fields, data sets, and errors that name line and field."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data import prompts
from dspark_jax.data.prompts import iter_prompts, prompt_record, read_prompts, sampling_fields


def write(folder: Path, *lines: object, name: str = "ask.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def test_forms_of_a_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "one", "category": "ignored"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}], "id": "b"},
        {"turns": ["three", "later"], "id": 3},
        {
            "conversations": [
                {"from": "human", "value": "four"},
                {"from": "gpt", "value": "a"},
                {"from": "human", "value": "x"},
            ]
        },
    )
    got = read_prompts(path)
    assert [record.id for record in got] == ["ask:1", "b", "3", "ask:4"]
    assert [record.prompt_text for record in got] == ["one", "two", "three", "four"]
    assert got[0].messages == ({"role": "user", "content": "one"},)
    assert [message["role"] for message in got[1].messages] == ["system", "user"]
    assert got[2].messages == ({"role": "user", "content": "three"},)
    assert got[3].messages == ({"role": "user", "content": "four"},)


def test_conversation_keeps_its_messages_whole(tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    record = read_prompts(write(tmp_path, {"messages": [{"role": r, "content": c} for r, c in turns]}))[0]
    assert [(message["role"], message["content"]) for message in record.messages] == turns
    assert record.prompt_text == "c"


def test_sampling_fields_are_checked_and_carried(tmp_path: Path) -> None:
    fields = {"temperature": 0, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "seed": 5, "max_tokens": 9, "stop": "END"}
    record = read_prompts(write(tmp_path, {"prompt": "x", **fields, "priority": 3}))[0]
    assert record.sampling == {**fields, "stop": ("END",)}
    assert isinstance(record.sampling["temperature"], float)
    assert sampling_fields({"stop": ["a", "b"], "seed": None, "top_k": 0}) == {"top_k": 0, "stop": ("a", "b")}


def test_settings_of_other_programs_may_only_be_neutral(tmp_path: Path) -> None:
    """And what is no setting may be anything: it is the user's own."""
    neutral = {"n": 1, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "logprobs": False}
    own = {"tags": ["a"], "label": {"n": 2}, "penalty": 3, "source": "logprobs"}
    record = read_prompts(write(tmp_path, {"prompt": "x", "best_of": None, **neutral, **own}))[0]
    assert record.sampling == {}


@pytest.mark.parametrize("name", sorted(prompts._UNSUPPORTED))
def test_each_setting_of_other_programs_is_refused_by_name(tmp_path: Path, name: str) -> None:
    neutral, wrong = prompts._UNSUPPORTED[name], {bool: 0, int: 7, dict: {"5": 1.0}, list: [5]}
    for value in (neutral, None):
        assert len(read_prompts(write(tmp_path, {"prompt": "x", name: value}))) == 1
    for value in (wrong[type(neutral)], "x", not neutral):
        line = re.escape(f"ask.jsonl, line 1: {name} {value!r}: not supported, must be {neutral!r}, or left out")
        with pytest.raises(ValueError, match=line):
            read_prompts(write(tmp_path, {"prompt": "x", name: value}))


def test_line_filter_and_limit(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "1"}, {"prompt": "2"}, "", {"prompt": "4"}, {"prompt": "5"})
    texts = lambda **options: [record.prompt_text for record in read_prompts(path, **options)]  # noqa: E731
    assert texts() == ["1", "2", "4", "5"]
    assert texts(line_filter="odd") == ["1", "5"]
    assert texts(line_filter="even") == ["2", "4"]
    assert texts(limit=3) == ["1", "2", "4"]
    assert texts(line_filter="even", limit=1) == ["2"]
    assert read_prompts(path, line_filter="even")[1].id == "ask:4"


def test_filtered_lines_do_not_stop_the_reading(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "1"}, "{broken", {"prompt": "3"}, {"prompt": 4})
    assert len(read_prompts(path, line_filter="odd")) == 2
    assert len(read_prompts(path, limit=1)) == 1  # nothing behind the limit is looked at


def test_unusual_but_right_files(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "caf\xc3\xa9\xe2\x80\xa8x"}\r\n\r\n{"prompt": "\\ud83d\\ude00"}')
    assert [record.prompt_text for record in read_prompts(path)] == ["café\u2028x", "😀"]


@pytest.mark.parametrize(
    "line,words",
    [
        ("{broken", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["prompt"]', "list, must be a JSON object"),
        ({}, "no prompt, must have one of the fields messages, conversations, turns, prompt"),
        ({"question": "x"}, "no prompt"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": ""}, "prompt '': must not be empty"),
        ({"prompt": 3}, "prompt is int: must be a string"),
        ('{"prompt": "a\\ud800b"}', "prompt: holds half of a surrogate pair at character 1"),
        ({"prompt": "x", "repetition_penalty": 1.1}, "repetition_penalty 1.1: not supported, must be 1, or left out"),
        ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias .*: not supported, must be {}, or left out"),
        ({"prompt": "x", "logprobs": 0}, "logprobs 0: not supported, must be False, or left out"),
        ({"prompt": "x", "n": 2}, "n 2: not supported, must be 1, or left out"),
        ({"prompt": "x", "max_new_tokens": 9}, "max_new_tokens 9: not a field here, must be max_tokens"),
        ({"turns": []}, r"turns \[\]: must be a non-empty list"),
        ({"turns": "x"}, "turns x: must be a non-empty list"),
        ({"turns": ["x", 4]}, "must be a non-empty list of strings"),
        ({"turns": [""]}, r"turns\[0\] '': must not be empty"),
        ({"messages": []}, "must hold at least one message"),
        ({"messages": "x"}, "messages is str"),
        ({"messages": [{"role": "user", "content": ""}]}, r"messages\[0\].content '': must not be empty"),
        (
            {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
            "last role is 'assistant'",
        ),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user message"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "no user message"),
        ({"prompt": "x", "id": ""}, "id '': must be a non-empty string"),
        ({"prompt": "x", "id": 1.5}, "id 1.5"),
        ({"prompt": "x", "id": True}, "id True"),
        ({"prompt": "x", "id": "first"}, "id 'first': already used on line 1"),
        ({"prompt": "x", "temperature": -1}, "temperature -1: must be finite and at least 0"),
        ({"prompt": "x", "temperature": "hot"}, "temperature 'hot': must be a number"),
        ({"prompt": "x", "temperature": True}, "temperature True"),
        ('{"prompt": "x", "temperature": NaN}', "temperature nan"),
        ('{"prompt": "x", "temperature": Infinity}', "temperature inf"),
        ('{"prompt": "x", "temperature": 1%s}' % ("0" * 400), "must be finite"),
        ({"prompt": "x", "top_p": 0}, "top_p 0: must be above 0"),
        ({"prompt": "x", "top_p": 1.1}, "top_p 1.1"),
        ({"prompt": "x", "top_k": -1}, "top_k -1"),
        ({"prompt": "x", "top_k": 2.0}, "top_k 2.0: must be an integer"),
        ({"prompt": "x", "min_p": 1}, "min_p 1: must be at least 0 and below 1"),
        ({"prompt": "x", "seed": -4}, "seed -4"),
        ({"prompt": "x", "seed": 2**63}, "seed 9223372036854775808"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens 0: must be at least 1"),
        ({"prompt": "x", "stop": [""]}, r"stop \[''\]"),
        ({"prompt": "x", "stop": 5}, "stop 5"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: object, words: str) -> None:
    path = write(tmp_path, {"prompt": "fine", "id": "first"}, line)
    with pytest.raises(ValueError, match=f"ask.jsonl, line 2: .*{words}"):
        read_prompts(path)
    assert [record.id for record in read_prompts(path, skip_bad=True)] == ["first"]


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="latin.jsonl, line 1: not JSON.*UTF-8"):
        read_prompts(path)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "x"})
    with pytest.raises(ValueError, match="line_filter 'third'.*all, odd, even"):
        iter_prompts(path, line_filter="third")
    with pytest.raises(ValueError, match="limit 0"):
        iter_prompts(path, limit=0)
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        iter_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(FileNotFoundError):
        iter_prompts(tmp_path)
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(path, line_filter="even")
    with pytest.raises(ValueError, match="hf:NAME"):
        iter_prompts("hf:")


def test_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict]:
        asked.append((name, config, split, streaming))
        return [
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 7, "seed": "x"},
            {"messages": None, "conversations": None, "question": "q"},
            {"conversations": [{"from": "gpt", "value": "b"}]},
            {"conversations": [{"from": "human", "value": "c"}], "id": 7},
        ]

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="hf:org/set, line 3: conversations: no user message"):
        read_prompts("hf:org/set")
    got = read_prompts("hf:org/set@main:test", skip_bad=True)
    assert [(record.id, record.prompt_text, record.sampling) for record in got] == [
        ("set:1", "a", {}),
        ("set:2", "q", {}),
        ("set:4", "c", {}),
    ]
    assert asked == [("org/set", None, "train", True), ("org/set", "main", "test", True)]


@pytest.mark.filterwarnings("ignore")  # of the datasets library and what it loads
def test_data_set_in_a_local_folder(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "perfect"
    folder.mkdir()
    rows = [{"conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": "a"}]} for i in range(4)]
    write(folder, *rows, name="train.jsonl")
    got = read_prompts(f"hf:{folder}:train", line_filter="even")
    assert [(record.id, record.prompt_text) for record in got] == [("perfect:2", "q1"), ("perfect:4", "q3")]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["id", "prompt", "messages", "turns", "conversations", "temperature", "top_k", "stop", "seed"])


@given(st.dictionaries(names, json_values, max_size=5))
def test_any_object_is_read_or_refused_with_a_value_error(row: dict) -> None:
    try:
        record = prompt_record(row, "default")
    except ValueError as error:
        assert str(error)
        return
    assert record.id and record.prompt_text and record.messages[-1]["role"] in ("user", "tool")
