"""POST /v1/completions: every field, whole and streamed, against plain decoding."""

from __future__ import annotations

import json

import pytest

from dspark_jax.serving.http.tokens import TokenNames
from tests.serving.http.conftest import COMPLETIONS, MODEL, events


def ask(client, prompt="one", **fields):
    """The answer's body; greedy, 24 tokens."""
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 24} | fields
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client, prompt="one", **fields):
    """The chunks of a streamed answer."""
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 24, "stream": True} | fields
    *chunks, done = events(client.post(COMPLETIONS, json=body))
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def text_of(chunks, index=0):
    """The text of a choice."""
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_a_greedy_answer_is_that_of_plain_decoding(client, plain, tokenizer):
    answer = ask(client)
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": plain("one"), "logprobs": None, "finish_reason": choice["finish_reason"]}
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == MODEL
    assert answer["system_fingerprint"].startswith("dspark-") and answer["created"] > 1_700_000_000
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(tokenizer.encode("one"))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (choice["finish_reason"] == "length") == (usage["completion_tokens"] == 24)


def test_a_stream_joins_to_the_whole_answer(client, plain):
    chunks = stream(client)
    assert text_of(chunks) == plain("one")
    assert len(chunks) > 2
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons[-1] in ("length", "stop") and set(reasons[:-1]) == {None}
    assert all("usage" not in c and "dspark" not in c for c in chunks)


def test_usage_comes_last_where_it_is_asked_for(client):
    whole = ask(client)
    chunks = stream(client, stream_options={"include_usage": True, "include_obfuscation": True})
    assert all(chunk["usage"] is None and "obfuscation" not in chunk for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]


def test_prompts_of_all_kinds(client, plain, tokenizer):
    assert ask(client, tokenizer.encode("one"))["choices"][0]["text"] == plain("one")
    many = ask(client, ["one", "two", "three"])
    assert [c["text"] for c in many["choices"]] == [plain("one"), plain("two"), plain("three")]
    assert [c["index"] for c in many["choices"]] == [0, 1, 2]
    assert many["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(p)) for p in ("one", "two", "three"))
    ids = ask(client, [tokenizer.encode("one"), tokenizer.encode("two")])
    assert [c["text"] for c in ids["choices"]] == [plain("one"), plain("two")]
    chunks = stream(client, ["one", "two"])
    assert [text_of(chunks, i) for i in (0, 1)] == [plain("one"), plain("two")]


def test_echo_puts_the_prompt_first(client, plain, tokenizer):
    assert ask(client, "one", echo=True)["choices"][0]["text"] == "one" + plain("one")
    assert ask(client, tokenizer.encode("one"), echo=True)["choices"][0]["text"] == "one" + plain("one")
    assert text_of(stream(client, ["one", "two"], echo=True), 1) == "two" + plain("two")


def test_sixteen_tokens_by_default(client):
    assert ask(client, max_tokens=None)["usage"]["completion_tokens"] <= 16


def test_plain_decoding_gives_the_same(client, plain):
    answer = ask(client, speculative=False, trace=True)
    assert answer["choices"][0]["text"] == plain("one")
    rounds = answer["dspark"]["rounds"]
    assert {token["origin"] for one in rounds for token in one["tokens"]} == {"plain"}
    assert all(one["drafts"] == [] and one["verified"] == 0 for one in rounds)
    assert answer["dspark"]["summary"]["accepted_length"] == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings(client, plain, streamed):
    whole = plain("one")
    pairs = ((i, whole[i : i + 2]) for i in range(4, len(whole) - 2))
    at, stop = next((i, pair) for i, pair in pairs if whole.find(pair) == i and "\ufffd" not in pair)
    fields = {"stop": ["never there", stop]}
    if streamed:
        chunks = stream(client, stream_options={"include_usage": True}, **fields)
        text, reason, count = text_of(chunks), chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        answer = ask(client, **fields)
        text, reason, count = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"], answer["usage"]
    assert (text, reason) == (whole[:at], "stop")
    assert count["completion_tokens"] < 24


def test_stop_tokens(client, plain, tokenizer):
    names = ask(client, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    third = next(i for i in range(300) if TokenNames(tokenizer.spelling).name(i) == names[3])
    cut = ask(client, stop_token_ids=[third])
    first = names.index(names[3])
    assert cut["choices"][0]["finish_reason"] == "stop" and cut["usage"]["completion_tokens"] == first + 1


def test_logprobs_are_columns_of_equal_length(client, plain):
    (choice,) = ask(client, logprobs=2)["choices"]
    columns = choice["logprobs"]
    count = len(columns["tokens"])
    assert {len(column) for column in columns.values()} == {count} and count > 4
    for token, value, top in zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True):
        assert 2 <= len(top) <= 3 and top[token] == value <= 0
        assert value == max(top.values())  # greedy
    assert columns["text_offset"] == sorted(columns["text_offset"])
    parts = []
    for chunk in stream(client, logprobs=2):
        if chunk["choices"][0]["logprobs"]:
            parts += chunk["choices"][0]["logprobs"]["tokens"]
    assert parts == columns["tokens"]


def test_seeds(client):
    """The same seed, the same answers, whatever else runs; others differ."""
    sampled = {"temperature": 1.0, "n": 3, "seed": 7}
    one, other = (ask(client, **sampled)["choices"] for _ in range(2))
    assert one == other and len({choice["text"] for choice in one}) == 3
    assert ask(client, **sampled | {"n": 1})["choices"][0]["text"] == one[0]["text"]
    assert ask(client, **sampled | {"seed": 8})["choices"][0]["text"] != one[0]["text"]
    two = ask(client, ["two", "one"], **sampled)["choices"]
    assert [choice["text"] for choice in two[3:]] == [choice["text"] for choice in one]
    unseeded = {ask(client, temperature=1.0)["choices"][0]["text"] for _ in range(3)}
    assert len(unseeded) == 3


def test_sampling_fields_reach_the_engine(client, plain):
    """Each of them, at its narrowest, leaves the most likely token alone."""
    for fields in ({"top_k": 1}, {"top_p": 1e-9}, {"top_p": 1e-50}, {"min_p": 0.999999}):
        assert ask(client, temperature=2, **fields)["choices"][0]["text"] == plain("one"), fields
    assert ask(client, temperature=2, seed=3)["choices"][0]["text"] != plain("one")


def test_neutral_values_are_accepted(client, plain):
    neutral = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "best_of": 1,
        "suffix": None, "user": "somebody", "n": 1, "stop": None, "top_k": -1, "top_p": 1, "min_p": 0, "seed": None,
        "stop_token_ids": None, "stream": False, "echo": False, "trace": False, "speculative": None,
    }  # fmt: skip
    assert ask(client, **neutral)["choices"][0]["text"] == plain("one")


def test_the_model_may_be_left_out(client, plain):
    response = client.post(COMPLETIONS, json={"prompt": "one", "temperature": 0, "max_tokens": 24})
    assert response.json()["choices"][0]["text"] == plain("one")
