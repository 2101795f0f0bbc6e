"""POST /v1/chat/completions: every field, whole and streamed, log-probabilities and the trace of rounds."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from dspark_jax.serving.http.schema import ChatMessage
from tests.serving.http.conftest import CHAT, CONTEXT, MODEL, events, until

USER = [{"role": "user", "content": "hello"}]
RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def body(**fields):
    """A greedy request for 24 tokens."""
    return {"model": MODEL, "messages": USER, "temperature": 0, "max_completion_tokens": 24} | fields


def ask(client, **fields):
    """The answer's body."""
    response = client.post(CHAT, json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


def stream(client, **fields):
    """The chunks of a streamed answer."""
    *chunks, done = events(client.post(CHAT, json=body(stream=True, **fields)))
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def text_of(chunks, index=0):
    """The content of a choice."""
    return "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_a_greedy_answer_is_that_of_plain_decoding(client, plain, tokenizer):
    answer = ask(client)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": plain(RENDERED), "refusal": None}
    assert choice["index"] == 0 and choice["logprobs"] is None and choice["finish_reason"] in ("length", "stop")
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(RENDERED))
    assert "dspark" not in answer


def test_a_stream_has_the_role_first_and_the_reason_last(client, plain):
    first, *chunks = stream(client)
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert text_of(chunks) == plain(RENDERED)
    assert chunks[-1]["choices"][0]["delta"] == {} and chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_messages_of_all_kinds(client, plain):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    turns = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None},
        {"role": "user", "content": ""},
    ]
    rendered = (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhel\nlo<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ask(client, messages=turns)["choices"][0]["message"]["content"] == plain(rendered)


def test_a_template_gets_names():
    assert ChatMessage(role="user", content="a", name="me").as_turn() == {"role": "user", "content": "a", "name": "me"}
    assert ChatMessage(role="user", content="a").as_turn() == {"role": "user", "content": "a"}


def test_an_answer_may_fill_the_context(client):
    answer = ask(client, max_completion_tokens=None, temperature=0)
    usage = answer["usage"]
    if answer["choices"][0]["finish_reason"] == "length":
        assert usage["total_tokens"] == CONTEXT
    assert ask(client, max_completion_tokens=None, max_tokens=5)["usage"]["completion_tokens"] <= 5
    assert ask(client, max_tokens=24)["usage"]["completion_tokens"] <= 24


def test_several_choices(client, plain):
    both = ask(client, n=2)["choices"]
    assert [c["message"]["content"] for c in both] == [plain(RENDERED)] * 2
    sampled = ask(client, n=3, temperature=1.0, seed=5)
    assert len({c["message"]["content"] for c in sampled["choices"]}) == 3
    chunks = stream(client, n=3, temperature=1.0, seed=5, stream_options={"include_usage": True})
    assert [text_of(chunks, i) for i in range(3)] == [c["message"]["content"] for c in sampled["choices"]]
    assert chunks[-1]["usage"] == sampled["usage"]


def test_logprobs_have_bytes_that_join_to_the_text(client, plain):
    (choice,) = ask(client, logprobs=True, top_logprobs=3)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) > 4
    assert b"".join(bytes(one["bytes"] or ()) for one in content).decode(errors="replace") == plain(RENDERED)
    for one in content:
        values = [entry["logprob"] for entry in one["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert one["logprob"] == values[0] <= 0 and one["token"] == one["top_logprobs"][0]["token"]  # greedy
    streamed = [
        entry
        for chunk in stream(client, logprobs=True, top_logprobs=3)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    (bare,) = ask(client, logprobs=True)["choices"]
    assert [one["logprob"] for one in bare["logprobs"]["content"]] == [one["logprob"] for one in content]
    assert all(one["top_logprobs"] == [] for one in bare["logprobs"]["content"])


def test_logprobs_do_not_depend_on_speculation(client):
    answers = (ask(client, logprobs=True, speculative=how) for how in (True, False))
    one, other = (answer["choices"][0]["logprobs"]["content"] for answer in answers)
    assert [e["token"] for e in one] == [e["token"] for e in other]
    assert [e["logprob"] for e in one] == pytest.approx([e["logprob"] for e in other], abs=1e-3)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}, {"speculative": False}])
def test_the_trace_joins_to_the_text_and_adds_up(client, fields):
    answer = ask(client, trace=True, **fields)
    rounds, summary = answer["dspark"]["rounds"], answer["dspark"]["summary"]
    text = answer["choices"][0]["message"]["content"]
    assert "".join(token["text"] for one in rounds for token in one["tokens"]) == text
    assert summary["rounds"] == len(rounds) - 1
    for name in ("verified", "accepted"):
        assert summary[name] == sum(one[name] for one in rounds)
    assert summary["drafted"] == sum(len(one["drafts"]) for one in rounds)
    tokens = answer["usage"]["completion_tokens"]
    assert summary["accepted_length"] == pytest.approx((tokens - 1) / summary["rounds"], abs=1e-3)
    assert summary["verify_budget"] == pytest.approx(summary["verified"] / summary["rounds"] + 1, abs=1e-3)
    assert summary["tokens_per_second"] > 0 and summary["first_token_seconds"] > 0
    for one in rounds:
        assert 0 <= one["accepted"] <= one["verified"] <= max(len(one["drafts"]), 0)
        assert len(one["confidence"]) in (0, len(one["drafts"])) and all(0 <= c <= 1 for c in one["confidence"])
        origins = [token["origin"] for token in one["tokens"]]
        assert set(origins) <= {"draft", "corrected", "bonus", "plain"}
        assert [o for o in origins if o == "draft"] == ["draft"] * min(one["accepted"], len(origins))


def test_a_streamed_trace_tells_each_chunks_text(client):
    whole = ask(client, trace=True)
    chunks = stream(client, trace=True)
    rounds = []
    for chunk in chunks[1:-1]:
        mine = chunk["dspark"]["rounds"]
        text = "".join(token["text"] for one in mine for token in one["tokens"])
        assert text == chunk["choices"][0]["delta"]["content"]
        rounds += mine
    assert rounds == whole["dspark"]["rounds"]
    summary = chunks[-1]["dspark"]["summary"]
    same = ("rounds", "accepted_length", "verify_budget", "drafted", "verified", "accepted")
    assert {name: summary[name] for name in same} == {name: whole["dspark"]["summary"][name] for name in same}


def test_neutral_values_are_accepted(client, plain):
    neutral = {
        "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": [], "function_call": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "audio": None, "prediction": None, "store": False,
        "reasoning_effort": "none", "verbosity": "medium", "web_search_options": None, "metadata": {},
        "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "y", "user": "z", "logprobs": False,
        "top_logprobs": None, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": None, "stream_options": None,
    }  # fmt: skip
    assert ask(client, **neutral)["choices"][0]["message"]["content"] == plain(RENDERED)


def test_a_template_that_refuses_is_a_400(client, service, monkeypatch):
    monkeypatch.setattr(service.tokenizer, "chat_template", None)
    turns = [{"role": "system", "content": "s"}, *USER]
    response = client.post(CHAT, json=body(messages=turns))
    assert response.status_code == 400
    assert "no chat template, must be one user message and not 2" in response.json()["error"]["message"]


def test_plain_and_speculative_requests_share_the_engine(client, service, gate, plain):
    """Together in its slots: each has its own trace, and both the same text."""
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, client, trace=True, speculative=how) for how in (False, True)]
        until(lambda: len(service.at_work) == 2)
        gate.set()
        alone, drafted = (one.result() for one in asked)
    assert {answer["choices"][0]["message"]["content"] for answer in (alone, drafted)} == {plain(RENDERED)}
    assert all(not one["drafts"] and not one["verified"] for one in alone["dspark"]["rounds"])
    assert any(one["drafts"] for one in drafted["dspark"]["rounds"])
    assert alone["dspark"]["summary"]["drafted"] == 0 < drafted["dspark"]["summary"]["drafted"]
