"""A real server on a port: raw sockets that go away or read slowly, and the official client of OpenAI."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import openai
import pytest

from tests.serving.http.conftest import COMPLETIONS, MODEL, SLOTS, live_server, serving, until

ASK = {"prompt": "one", "temperature": 0, "max_tokens": 24}
LONG = {"prompt": "two", "temperature": 1, "seed": 1, "max_tokens": 200}


@contextmanager
def connection(url: str, body: dict, **headers: str):
    """A socket that has sent a request."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    headers = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(content))} | headers
    lines = [f"POST {COMPLETIONS} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    with socket.create_connection((host, int(port)), timeout=60) as plug:
        plug.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        yield plug


def read_all(plug: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    while part := plug.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def cancelled(service) -> int:
    return service.engine.batch.statistics.cancelled


# --- sockets ---


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_away_frees_its_slot(service, live, gate, streamed):
    before = cancelled(service)
    with connection(live, LONG | {"stream": streamed}):
        until(lambda: service.at_work)
    until(lambda: all(choice._exchange.closed for choice in service.at_work))
    gate.set()
    until(lambda: not service.at_work)
    assert cancelled(service) == before + 1
    assert service.engine.load == (0, 0)


def test_a_client_that_goes_away_in_mid_stream(service, live, monkeypatch):
    """Also all of several choices. The engine goes round by round, each once the client has seen nothing of those
    before: so there is text, and all choices are far from their ends, however long a compilation took."""
    before, steps, advance = cancelled(service), threading.Semaphore(0), service.engine.batch.advance
    begun: list[int] = []

    def held(rounds: int):
        begun.append(rounds)
        steps.acquire(timeout=120)
        return advance(1)

    monkeypatch.setattr(service.engine.batch, "advance", held)
    seen, let = b"", 0
    with connection(live, LONG | {"stream": True, "n": 3}) as plug:
        plug.settimeout(0.05)
        while b'"text"' not in seen:
            if len(begun) > let:
                steps.release()
                let += 1
            with suppress(TimeoutError):
                seen += plug.recv(1 << 16)
    assert let < 20
    until(lambda: all(choice._exchange.closed for choice in service.at_work))
    steps.release(1000)
    until(lambda: not service.at_work)
    assert cancelled(service) == before + 3 and service.engine.load == (0, 0)


def test_events_are_framed_as_the_standard_says(live):
    with connection(live, ASK | {"stream": True}, Connection="close") as plug:
        raw = read_all(plug)
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"content-type: text/event-stream; charset=utf-8" in head.lower()
    assert b"cache-control: no-cache" in head.lower() and b"x-request-id: req-" in head.lower()
    data = b""
    while body:  # chunked
        size, _, body = body.partition(b"\r\n")
        data, body = data + body[: int(size, 16)], body[int(size, 16) + 2 :]
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == "" and blocks[-1] == "data: [DONE]"
    for block in blocks[:-1]:
        assert block.startswith("data: {") and json.loads(block[6:])["object"] == "text_completion"


def test_a_reader_that_stops_holds_up_nobody(service, live, plain):
    """It takes all slots but reads nothing; the others are answered, and its slots are free when its tokens are."""
    body = LONG | {"stream": True, "trace": False, "n": SLOTS, "temperature": 0}
    with connection(live, body) as plug:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with ThreadPoolExecutor(2) as pool, openai.OpenAI(base_url=f"{live}/v1", api_key="x", max_retries=0) as client:
            texts = list(pool.map(lambda _: client.completions.create(model=MODEL, **ASK).choices[0].text, range(4)))
        assert texts == [plain("one")] * 4
        until(lambda: not service.at_work)


def test_a_stop_string_frees_the_slot_of_a_reader_that_stops(service, live, gate, plain):
    before = cancelled(service)
    stop = next(sign for sign in plain("one") if sign != "\ufffd")
    with connection(live, ASK | {"max_tokens": 200, "stream": True, "stop": stop}):
        until(lambda: service.at_work)
        gate.set()
        until(lambda: not service.at_work)
        assert cancelled(service) == before + 1


def test_a_body_that_ends_early_disturbs_nobody(live):
    host, port = live.removeprefix("http://").split(":")
    early = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    for sent in (early, b"\x16\x03\x01 nonsense\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=60) as plug:
            plug.sendall(sent)
    with connection(live, ASK, Connection="close") as plug:
        assert read_all(plug).startswith(b"HTTP/1.1 200")


# --- the official client ---


@pytest.fixture
def official(live):
    """OpenAI's client, without retries."""
    with openai.OpenAI(base_url=f"{live}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_official_completions(official, plain):
    options = {"model": MODEL, "prompt": "one", "temperature": 0, "max_tokens": 24}
    whole = official.completions.create(**options)
    assert whole.choices[0].text == plain("one") and whole.usage.completion_tokens <= 24
    assert whole.system_fingerprint.startswith("dspark-")
    chunks = list(official.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain("one")
    assert chunks[-1].usage == whole.usage
    columns = official.completions.create(**options, logprobs=2).choices[0].logprobs
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.top_logprobs) == len(columns.text_offset)


def test_official_chats(official):
    options = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 20}
    whole = official.chat.completions.create(**options, seed=4, n=2, logprobs=True, top_logprobs=2)
    again = official.chat.completions.create(**options, seed=4, n=2, logprobs=True, top_logprobs=2)
    assert [c.message.content for c in whole.choices] == [c.message.content for c in again.choices]
    assert whole.choices[0].message.content != whole.choices[1].message.content
    content = whole.choices[0].logprobs.content
    assert len(content) >= 1 and len(content[0].top_logprobs) == 2 and content[0].logprob <= 0
    text = whole.choices[0].message.content
    with official.chat.completions.create(**options, seed=4, n=1, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    sign = next(sign for sign in text if sign != "\ufffd")
    cut = official.chat.completions.create(**options, seed=4, stop=[sign])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (text[: text.index(sign)], "stop")


def test_official_extensions(official):
    options = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    answer = official.chat.completions.create(**options, extra_body={"trace": True, "speculative": False, "top_k": 3})
    assert answer.dspark["summary"]["rounds"] >= 1
    assert official.models.list().data[0].id == MODEL
    assert official.models.retrieve(MODEL).dspark["block_size"] == 7


def test_official_errors(official, service):
    with pytest.raises(openai.BadRequestError) as wrong:
        official.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert wrong.value.param == "temperature" and "must be greater than or equal to 0" in str(wrong.value)
    assert wrong.value.type == "invalid_request_error" and wrong.value.request_id.startswith("req-")
    with pytest.raises(openai.NotFoundError) as unknown:
        official.completions.create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        official.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a" * 999}])
    assert long.value.code == "context_length_exceeded"


def test_official_client_with_keys(models):
    with serving(models, keys=("good",)) as service, live_server(service) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="bad", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="good", max_retries=0) as client:
            assert client.models.list().data[0].id == MODEL


def test_an_engine_that_fails_ends_streams_with_an_error(models, monkeypatch):
    with serving(models) as service, live_server(service) as url:
        advance, calls = service.engine.batch.advance, []

        def fails_later(rounds):
            calls.append(1)
            if len(calls) > 3:
                raise MemoryError("no room")
            return advance(rounds)

        monkeypatch.setattr(service.engine.batch, "advance", fails_later)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="the engine failed before the answer's end"):
                list(client.completions.create(model=MODEL, prompt="a", max_tokens=200, stream=True, seed=1))
            with pytest.raises(openai.InternalServerError):
                client.completions.create(model=MODEL, prompt="a")
