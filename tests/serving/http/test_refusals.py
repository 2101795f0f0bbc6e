"""Bad input: always 4xx, an error body as OpenAI's, a message that says what would be right; and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dspark_jax.serving.http.schema import ChatBody, ChatMessage, CompletionBody
from tests.serving.http.conftest import CHAT, COMPLETIONS, CONTEXT, MODEL

USER = [{"role": "user", "content": "hi"}]
HALF = "\ud83d"

# fields of either body; what the message must hold
BOTH = [
    ({"temperature": -0.1}, "temperature -0.1: must be greater than or equal to 0"),
    ({"temperature": 2.5}, "temperature 2.5: must be less than or equal to 2"),
    ({"temperature": "hot"}, "temperature 'hot': must be a valid number"),
    ({"temperature": True}, "temperature True: must be a valid number"),
    ({"top_p": 0}, "top_p 0: must be greater than 0"),
    ({"top_p": 1.1}, "top_p 1.1: must be less than or equal to 1"),
    ({"top_k": -2}, "top_k -2: must be greater than or equal to -1"),
    ({"top_k": 1.5}, "top_k 1.5: must be a valid integer"),
    ({"min_p": 1}, "min_p 1: must be less than 1"),
    ({"max_tokens": 0}, "max_tokens 0: must be greater than or equal to 1"),
    ({"max_tokens": "5"}, "max_tokens '5': must be a valid integer"),
    ({"max_tokens": 2**40}, "must be less than or equal to 2147483647"),
    ({"max_tokens": CONTEXT}, f"max_tokens {CONTEXT}: the prompt has"),
    ({"seed": -1}, "seed -1: must be greater than or equal to 0"),
    ({"seed": 2**63}, "seed 9223372036854775808"),
    ({"stop": [f"s{i}" for i in range(100)]}, "stop: has 100 strings, must have at most 4"),
    ({"stop": ""}, "stop '': must be a non-empty string or a list of them"),
    ({"stop": ["a", 1]}, "must be a non-empty string or a list of them"),
    ({"stop": "x" * 600}, "stop: a string has 600 characters, must have at most 512"),
    ({"stop": HALF}, "half of a surrogate pair"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] -1: must be greater than or equal to 0"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids: must have at most 64 items"),
    ({"n": 0}, "n 0: must be greater than or equal to 1"),
    ({"n": 129}, "n 129: must be less than or equal to 128"),
    ({"n": 13}, "13 choices over all prompts, must be at most 12"),
    ({"stream": "yes"}, "stream 'yes': must be a valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options: only goes with stream true"),
    ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what: unknown field, must be left out"),
    ({"frequency_penalty": 0.5}, "frequency_penalty 0.5: not supported, must be 0, or left out"),
    ({"presence_penalty": False}, "presence_penalty False: not supported"),
    ({"repetition_penalty": 1.1}, "repetition_penalty 1.1: not supported, must be 1"),
    ({"logit_bias": {"5": 1}}, "logit_bias {'5': 1}: not supported, must be {}"),
    ({"trace": True, "n": 2}, "trace: must be left out with 2 choices"),
    ({"tempreature": 1}, "tempreature: unknown field, must be left out"),
    ({"user": 5}, "user 5: must be a valid string"),
]
OF_CHAT = [
    ({"messages": []}, "messages []: must have at least 1 item"),
    ({"messages": "hi"}, "messages 'hi': must be a valid list"),
    ({"messages": ["hi"]}, "messages[0] 'hi': must be"),
    ({"messages": [{"content": "a"}]}, "messages[0].role: missing, must be given"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: missing, must be given"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role 'tool': must be 'system', 'developer', "),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content None: must be a string or a"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content []: must be a string or a non-empty list"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "a part of type 'image_url': must be",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "a text part: must be"),
    ({"messages": [{"role": "user", "content": HALF}]}, "half of a surrogate pair at character 0"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "tool_calls [{}]: not supported"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, f"the context {CONTEXT}: must have at most {CONTEXT - 1}"),
    ({"top_logprobs": 2}, "top_logprobs: only goes with logprobs true"),
    ({"logprobs": True, "top_logprobs": 4}, "top_logprobs 4: must be at most 3 on this server"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs 21: must be less than or equal to 20"),
    ({"logprobs": 1}, "logprobs 1: must be a valid boolean"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens: must be left out, or equal to max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "not supported, must be [], or left out"),
    ({"tool_choice": "required"}, "tool_choice 'required': not supported, must be 'none' or 'auto', or left out"),
    ({"response_format": {"type": "json_object"}}, "not supported, must be {'type': 'text'}, or left out"),
    ({"reasoning_effort": "high"}, "reasoning_effort 'high': not supported"),
    ({"prompt": "a"}, "prompt: unknown field, must be left out"),
]
OF_COMPLETIONS = [
    ({"prompt": None}, "prompt None: must be a string, a list of strings"),
    ({"prompt": []}, "and not empty"),
    ({"prompt": ""}, "the prompt is empty: must have at least one token"),
    ({"prompt": [[]]}, "must be a string, a list of strings, a list of token ids"),
    ({"prompt": ["a", 1]}, "must be a string, a list of strings, a list of token ids"),
    ({"prompt": [1, -1]}, "a list of token ids (0 or more)"),
    ({"prompt": [1, True]}, "must be a string"),
    ({"prompt": [100000]}, "token 100000 is outside the vocabulary 0.."),
    ({"prompt": ["a"] * 129}, "prompt: has 129 prompts, must have at most 128"),
    ({"prompt": ["a", HALF]}, "half of a surrogate pair"),
    ({"prompt": "a" * 600}, f"the prompt has 600 tokens, the context {CONTEXT}: must have at most {CONTEXT - 1}"),
    ({"prompt": ["a", "a" * 600]}, "the prompt has 600 tokens"),
    ({"logprobs": True}, "logprobs True: must be a valid integer"),
    ({"logprobs": 4}, "logprobs 4: must be at most 3 on this server"),
    ({"echo": True, "logprobs": 1}, "echo: not supported with logprobs"),
    ({"best_of": 2}, "best_of: not supported, must equal n (1)"),
    ({"suffix": "end"}, "suffix 'end': not supported"),
    ({"messages": USER}, "messages: unknown field"),
]


def refused(client, path, body, status=400):
    """The error of a bad request."""
    response = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    (name,) = response.json()
    error = response.json()[name]
    assert name == "error" and set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("fields", "message"), BOTH)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_of_both(client, path, fields, message):
    own = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    error = refused(client, path, {"model": MODEL, **own, **fields})
    assert message in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("fields", "message"), OF_CHAT)
def test_fields_of_chats(client, fields, message):
    error = refused(client, CHAT, {"model": MODEL, "messages": USER, "max_tokens": 4} | fields)
    assert message in error["message"]


@pytest.mark.parametrize(("fields", "message"), OF_COMPLETIONS)
def test_fields_of_completions(client, fields, message):
    error = refused(client, COMPLETIONS, {"model": MODEL, "prompt": "hi", "max_tokens": 4} | fields)
    assert message in error["message"]


NEUTRAL = [  # fields that take one value only, or none
    (kind, name)
    for kind in (ChatBody, CompletionBody, ChatMessage)
    for name, field in kind.model_fields.items()
    if field.annotation is Any
]


@pytest.mark.parametrize(("kind", "name"), NEUTRAL)
def test_a_neutral_field_takes_no_other_value(client, kind, name):
    path, body = (COMPLETIONS, {"prompt": "hi"}) if kind is CompletionBody else (CHAT, {"messages": USER})
    if kind is ChatMessage:
        body = {"messages": [USER[0] | {name: "other"}]}
    else:
        body = body | {name: "other"}
    assert f"{name} 'other': not supported, must be " in refused(client, path, body)["message"]


def test_errors_name_the_field(client):
    assert refused(client, CHAT, {"messages": USER, "top_p": 0})["param"] == "top_p"
    assert refused(client, CHAT, {"messages": [{"role": "user"}]})["param"] == "messages[0].content"
    long = refused(client, CHAT, {"messages": [{"role": "user", "content": "a" * 600}]})
    assert (long["param"], long["code"]) == ("messages", "context_length_exceeded")
    assert refused(client, COMPLETIONS, {"prompt": "a" * 600})["param"] == "prompt"
    assert refused(client, COMPLETIONS, {"prompt": [100000]})["param"] == "prompt"
    assert refused(client, COMPLETIONS, {"prompt": "a", "max_tokens": CONTEXT})["param"] == "max_tokens"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_model_is_a_404(client, path):
    own = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    error = refused(client, path, {"model": "gpt-x", **own}, status=404)
    assert error["message"] == f"model 'gpt-x': unknown, must be '{MODEL}'"
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is empty or no object"),
        (b"{", "the body is no JSON (Expecting property name"),
        (b"not json", "the body is no JSON"),
        (b"[1]", "the body is empty or no object"),
        (b'"text"', "the body is empty or no object"),
        (b"null", "the body is empty or no object"),
        (b"\xff\xfe{}", "the body is no JSON"),
        (b"\xff{}", "the body cannot be read: must be one JSON object in UTF-8"),
        (b"[" * 100000, "the body"),
        (b'{"temperature": NaN, "prompt": "a"}', "temperature nan: must be a finite number"),
        (b'{"temperature": 1e999, "prompt": "a"}', "temperature inf: must be"),
        (b'{"max_tokens": ' + b"9" * 5000 + b', "prompt": "a"}', "the body"),
        (b'{"\\ud83d": 1, "prompt": "a"}', "unknown field"),
    ],
)
def test_bodies_that_are_no_objects(client, content, message):
    response = client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_the_content_type_must_be_json(client):
    response = client.post(CHAT, content=b'{"messages": []}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "Content-Type 'text/plain': must be application/json"


def test_the_server_goes_on(client, plain):
    for content in (b"{", b"", b"\x00\xff"):
        client.post(CHAT, content=content)
    answer = client.post(COMPLETIONS, json={"prompt": "one", "temperature": 0, "max_tokens": 24}).json()
    assert answer["choices"][0]["text"] == plain("one")


def test_what_is_far_too_long_is_refused_unread(client, service, monkeypatch):
    monkeypatch.setattr(service.tokenizer, "encode", None)
    text = "a" * (4 * CONTEXT * service.tokenizer.spelling.longest + 1)
    chat, prompts = {"messages": [{"role": "user", "content": text}]}, {"prompt": ["b", text]}
    for path, own in ((CHAT, chat), (COMPLETIONS, prompts)):
        error = refused(client, path, own)
        assert f"the prompt has {len(text)} characters, the context {CONTEXT} tokens" in error["message"]
        assert error["code"] == "context_length_exceeded"
