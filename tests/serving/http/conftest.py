"""A tiny model behind the application: through starlette's client, and live on a port of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.generate import Generator
from dspark_jax.serving.http.app import create_app
from dspark_jax.serving.http.server import Server, bind
from dspark_jax.serving.http.service import Service, Serving
from dspark_jax.serving.offline import Models, load_models
from dspark_jax.serving.settings import parse_settings

MODEL, CONTEXT, SLOTS, WAITING, MOST_LOGPROBS = "tiny", 256, 4, 8, 3
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="session")
def models(models_flags) -> Models:
    """The tiny target and its drafter."""
    return load_models(parse_settings(["--http", "127.0.0.1:0", *models_flags]))


def make_engine(models: Models, **options) -> Engine:
    """An engine for tests: one number of slots, short caches, two rounds between looks."""
    options = {"batch_size": SLOTS, "max_context": CONTEXT, "top_logprobs": MOST_LOGPROBS} | options
    generator = Generator(
        models.target, models.drafter, stop_ids=models.stop_ids, trace_rounds=2, switchable=True, **options
    )
    return Engine(generator, rounds=2)


@contextmanager
def serving(models: Models, engine: Engine | None = None, **options) -> Iterator[Service]:
    """A service whose engine runs."""
    engine = engine or make_engine(models)
    options = {"drafter": "golden", "max_logprobs": MOST_LOGPROBS, "max_waiting": WAITING} | options
    service = Service(engine.start(), models.target.tokenizer, Serving(MODEL, **options))
    try:
        yield service
    finally:
        service.close()
        engine.close(drain=False, timeout=120)


@pytest.fixture(scope="module")
def service(models) -> Iterator[Service]:
    """One for all tests of a module: requests leave nothing behind."""
    with serving(models) as one:
        yield one


@pytest.fixture
def client(service) -> Iterator[TestClient]:
    """Talks to the application without a socket."""
    with TestClient(create_app(service)) as one:
        yield one
        until(lambda: not service.at_work)


@pytest.fixture(scope="module")
def live(service) -> Iterator[str]:
    """The application on a free port; its URL."""
    with live_server(service) as url:
        yield url


@contextmanager
def live_server(service: Service, drain_seconds: float = 30.0) -> Iterator[str]:
    """A real server in a thread, ended at the end."""
    server = Server(service, drain_seconds)
    with bind("127.0.0.1", 0) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        until(lambda: server.started)
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join(60)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for what happens in another thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def gate(service, monkeypatch) -> threading.Event:
    """Holds the engine before each iteration until it is set."""
    opened, advance = threading.Event(), service.engine.batch.advance

    def held(rounds: int):
        opened.wait(120)
        return advance(rounds)

    monkeypatch.setattr(service.engine.batch, "advance", held)
    return opened


@pytest.fixture(scope="session")
def plain(models) -> Callable[[str, int], str]:
    """The text of plain greedy decoding after a prompt, computed apart from the server."""
    alone = Generator(models.target, None, stop_ids=models.stop_ids, max_context=CONTEXT)
    known: dict[tuple[str, int], str] = {}

    def text(prompt: str, tokens: int = 24) -> str:
        if (prompt, tokens) not in known:
            known[prompt, tokens] = models.target.tokenizer.decode(plain_ids(alone, models, prompt, tokens))
        return known[prompt, tokens]

    return text


def plain_ids(alone: Generator, models: Models, prompt: str, tokens: int) -> list[int]:
    """Token ids of plain greedy decoding, without a stop token."""
    from dspark_jax.decoding.requests import Request
    from dspark_jax.decoding.sampling import SamplingParams

    ids = tuple(models.target.tokenizer.encode(prompt))
    (done,) = alone.generate([Request("plain", ids, SamplingParams(max_tokens=tokens))])
    return [token for token in done.token_ids if token not in models.stop_ids]


def events(response) -> list[str]:
    """The data of a stream's server-sent events; checks their framing."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    text = response.text if hasattr(response, "text") else response
    assert text.endswith("data: [DONE]\n\n")
    parts = text.split("\n\n")[:-1]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part.removeprefix("data: ") for part in parts]
