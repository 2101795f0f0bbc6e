"""Throughput through HTTP against the engine's own: the same prompts, the same engine, in turns.

    python benchmarks/serve_http.py --clients 16 --json http.json

A closed loop on both sides: N requests are at work all the time, each that ends is replaced at once. The HTTP clients
are threads of another process, which stream. What counts are all tokens over all the time of a turn.
"""

from __future__ import annotations

import http.client
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

PROMPTS = "Explain step by step how {} works, and name {} examples of it."
SUBJECTS = ("a bicycle", "a lock", "photosynthesis", "a compiler", "an auction", "a tide", "a vaccine", "a violin")


@dataclass(frozen=True)
class Options:
    """Compare HTTP with the engine alone.

    Attributes:
        clients: requests at work at once. requests: of a turn. turns: of each side. max_tokens: of an answer.
        rounds: rounds between two looks of the host. stream: whether the clients stream.
        target, draft, dtype, schedule: as serve.py's. json: file for the results.
        child: for this program's own use.
    """

    clients: int = 16
    requests: int = 48
    turns: int = 3
    max_tokens: int = 64
    rounds: int = 2
    stream: bool = True
    target: str | None = None
    draft: str | None = None
    dtype: str = "auto"
    schedule: str = "fixed"
    json: Path | None = None
    child: str | None = None


# --- the clients' process: no JAX here ---


def ask(host: str, port: int, body: dict[str, Any]) -> int:
    """Tokens of one answer."""
    connection = http.client.HTTPConnection(host, port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        if not body["stream"]:
            return json.loads(response.read())["usage"]["completion_tokens"]
        data = [line for line in response if line.startswith(b"data: {")]
        return json.loads(data[-1][6:])["usage"]["completion_tokens"]
    finally:
        connection.close()


def clients(url: str, prompts: list[list[int]], options: Options) -> dict[str, float]:
    """All requests through HTTP, so many at once; tokens and seconds."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    todo, lock, tokens = iter(prompts), threading.Lock(), []

    def work() -> None:
        while True:
            with lock:
                prompt = next(todo, None)
            if prompt is None:
                return
            body = {"prompt": prompt, "temperature": 0, "max_tokens": options.max_tokens, "stream": options.stream}
            if options.stream:
                body["stream_options"] = {"include_usage": True}
            tokens.append(ask(host, int(port), body))

    threads = [threading.Thread(target=work) for _ in range(options.clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"tokens": sum(tokens), "seconds": time.perf_counter() - began}


# --- the engine's process ---


def direct(engine: Any, prompts: list[list[int]], options: Options) -> dict[str, float]:
    """The same without HTTP."""
    from dspark_jax.decoding.requests import Request
    from dspark_jax.decoding.sampling import SamplingParams

    numbered: Iterator[tuple[int, list[int]]] = iter(enumerate(prompts))
    lock, done, tokens = threading.Lock(), threading.Event(), []

    def submit() -> None:
        with lock:
            number, prompt = next(numbered, (0, None))
        if prompt is not None:
            sampling = SamplingParams(max_tokens=options.max_tokens)
            engine.submit(Request(str(number), tuple(prompt), sampling), hear)

    def hear(event: Any) -> None:
        if event.completion is not None:
            tokens.append(len(event.completion.token_ids))
            submit()
            if len(tokens) == len(prompts):
                done.set()

    began = time.perf_counter()
    for _ in range(options.clients):
        submit()
    done.wait()
    return {"tokens": sum(tokens), "seconds": time.perf_counter() - began}


def through_http(url: str, prompts: list[list[int]], options: Options) -> dict[str, float]:
    """The clients' process; its own time, without its start."""
    words = [sys.executable, __file__, "--child", url, "--clients", str(options.clients)]
    words += ["--max-tokens", str(options.max_tokens)] + ([] if options.stream else ["--no-stream"])
    done = subprocess.run(words, input=json.dumps(prompts), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure(options: Options) -> dict[str, Any]:
    """Both sides in turns."""
    import uvicorn

    from dspark_jax.checkpoints.tokenizer import prompt_ids
    from dspark_jax.decoding.engine import Engine
    from dspark_jax.serving.http.app import create_app
    from dspark_jax.serving.http.server import bind
    from dspark_jax.serving.http.service import Service, Serving
    from dspark_jax.serving.offline import load_models, make_serving_generator
    from dspark_jax.serving.settings import parse_settings

    words = ["--http", "127.0.0.1:0", "--batch-size", str(options.clients), "--rounds", str(options.rounds)]
    words += ["--max-context", "256", "--dtype", options.dtype, "--schedule", options.schedule]
    words += ["--target", options.target] if options.target else []
    words += ["--draft", options.draft] if options.draft else []
    settings = parse_settings(words)
    models = load_models(settings)
    engine = Engine(make_serving_generator(models, settings), options.rounds)
    tokenizer = models.target.tokenizer
    texts = [PROMPTS.format(subject, count) for count, subject in itertools.product(range(2, 50), SUBJECTS)]
    prompts = [list(prompt_ids(tokenizer, [{"role": "user", "content": text}])) for text in texts[: options.requests]]
    longest = max(map(len, prompts))
    engine.warm_up(longest + options.max_tokens, longest, ("greedy",))
    service = Service(engine.start(), tokenizer, Serving("model"))
    config = uvicorn.Config(create_app(service), log_config=None, access_log=False, lifespan="off", ws="none")
    server, runs = uvicorn.Server(config), {"engine": [], "http": []}  # type: ignore[var-annotated]
    with bind("127.0.0.1", 0) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        direct(engine, prompts[: options.clients], options)  # what is left to warm up
        through_http(url, prompts[: options.clients], options)
        for turn in range(options.turns):
            for side in ("engine", "http")[:: 1 if turn % 2 == 0 else -1]:
                one = direct(engine, prompts, options) if side == "engine" else through_http(url, prompts, options)
                runs[side].append(one | {"tokens_per_second": one["tokens"] / one["seconds"]})
                print(f"{side}: {runs[side][-1]['tokens_per_second']:.1f} tokens/s", flush=True)
        server.should_exit = True
        thread.join()
    engine.close()
    service.close()
    speeds = {side: [run["tokens_per_second"] for run in each] for side, each in runs.items()}
    ratios = [http / own for http, own in zip(speeds["http"], speeds["engine"], strict=True)]
    return {
        "options": asdict(options) | {"json": None},
        "tokens_per_second": {side: statistics.median(each) for side, each in speeds.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "runs": runs,
    }


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.child is not None:
        print(json.dumps(clients(options.child, json.load(sys.stdin), options)))
        return
    found = measure(options)
    speed = found["tokens_per_second"]
    print(f"engine {speed['engine']:.1f} tokens/s, HTTP {speed['http']:.1f}, ratio {found['ratio']:.3f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
