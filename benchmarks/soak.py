"""Many clients at once against a live server, for long: right answers, none lost or mixed up, and flat memory.

    python benchmarks/soak.py --minutes 60 --json soak.json
    python benchmarks/soak.py --minutes 5 --clients 16 --server "--target DIR --draft DIR --dtype float32"

Each client asks again and again, at random: greedy answers, whole and streamed, which must be those of plain decoding;
seeded ones, which must repeat; streams that it leaves in the middle or reads slowly; bodies that are wrong; prompts
that the context does not hold, and some that just fit. The server runs in a process of its own, whose memory is looked
at.
"""

from __future__ import annotations

import http.client
import json
import random
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tyro

ROOT = Path(__file__).resolve().parents[1]
TOPICS = ("rain", "bridges", "bread", "the moon", "bees", "maps", "rivers", "clocks", "salt", "glass", "tea", "wind")
TEMPLATES = ("Explain {} to a child.", "List three facts about {}.", "Write one sentence about {}, then its opposite.")
BROKEN = (
    *(b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": 5}'),
    *(b'{"prompt": "a", "temperature": -1}', b'{"prompt": "a", "n": 0}'),
)
NEAR_TIE = 0.02  # nats between the two most likely tokens, below which rounding may choose either
ENOUGH = 30  # failures that are kept for the report


@dataclass(frozen=True)
class Options:
    """Soak the server.

    Attributes:
        minutes: of load. clients: at once. server: further options of serve.py. max_tokens: of an answer.
        settle: share of the time after which memory must be flat. growth: of memory that is allowed then, a share.
        seed: of the clients' choices. json: file for the results.
    """

    minutes: float = 30.0
    clients: int = 64
    server: str = ""
    max_tokens: int = 24
    settle: float = 0.4
    growth: float = 0.03
    seed: int = 0
    json: Path | None = None


@dataclass
class Tally:
    """What happened, over all clients."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    ties: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, outcome: str, seconds: float) -> None:
        with self.lock:
            self.counts[f"{kind}: {outcome}"] += 1
            self.seconds.setdefault(kind, []).append(seconds)

    def fail(self, message: str) -> None:
        with self.lock:
            self.counts["FAILED"] += 1
            if len(self.failures) < ENOUGH:
                self.failures.append(message)
                print("FAILED", message, flush=True)


class Wrong(Exception):
    """An answer that is not what it must be."""


@dataclass
class Soak:
    """The server's address and the answers that are expected of it."""

    host: str
    port: int
    model: str
    context: int
    options: Options
    tally: Tally = field(default_factory=Tally)
    expected: dict[str, str] = field(default_factory=dict)
    margins: dict[str, list[tuple[str, float]]] = field(default_factory=dict)  # token and distance to the second
    seeded: dict[tuple[str, int], str] = field(default_factory=dict)
    ends: float = 0.0

    # --- one request ---

    def body(self, prompt: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        own = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": self.options.max_tokens}
        return own | fields

    def post(self, body: bytes, path: str = "/v1/chat/completions") -> tuple[http.client.HTTPConnection, Any, str]:
        """A connection, its response, and the request's id."""
        connection, name = http.client.HTTPConnection(self.host, self.port, timeout=900), uuid.uuid4().hex
        connection.request("POST", path, body, {"Content-Type": "application/json", "X-Request-Id": name})
        response = connection.getresponse()
        if response.headers["X-Request-Id"] != name:
            raise Wrong(f"request id {name} came back as {response.headers['X-Request-Id']}")
        return connection, response, name

    def ask(self, body: dict[str, Any] | bytes, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
        """A whole answer."""
        connection, response, _ = self.post(body if isinstance(body, bytes) else json.dumps(body).encode(), path)
        try:
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def stream(self, body: dict[str, Any], pause: float = 0.0, leave_after: int = 0) -> tuple[int, str]:
        """The text of a stream; `pause` seconds between chunks, and gone after `leave_after` of them (0: never)."""
        connection, response, _ = self.post(json.dumps(body | {"stream": True}).encode())
        try:
            if response.status != 200:
                return response.status, response.read().decode()
            text, chunks, done = "", 0, False
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]\n":
                    done = True
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise Wrong(f"a stream ended with {chunk}")
                text += "".join(c["delta"].get("content", "") for c in chunk["choices"])
                chunks += 1
                if leave_after and chunks >= leave_after:
                    return 200, text
                time.sleep(pause)
            if not done:
                raise Wrong("a stream ended without [DONE]")
            return 200, text
        finally:
            connection.close()

    # --- what is expected ---

    def learn(self, prompts: list[str]) -> None:
        """Plain decoding's answers, one at a time, with the distance to the second most likely token."""
        for prompt in prompts:
            status, answer = self.ask(self.body(prompt, speculative=False, logprobs=True, top_logprobs=2))
            if status != 200:
                raise SystemExit(f"the server refused a plain request: {answer}")
            choice = answer["choices"][0]
            self.expected[prompt] = choice["message"]["content"]
            self.margins[prompt] = [
                (one["token"], one["top_logprobs"][0]["logprob"] - one["top_logprobs"][1]["logprob"])
                for one in choice["logprobs"]["content"]
            ]

    def compare(self, prompt: str, text: str) -> str:
        """ "right", or "near tie" where the first difference is where plain decoding was undecided."""
        expected = self.expected[prompt]
        if text == expected:
            return "right"
        pairs = enumerate(zip(text, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(expected)))
        begins = 0
        for token, margin in self.margins[prompt]:
            begins += len(token)
            if begins > at:
                if margin < NEAR_TIE:
                    self.tally.ties[prompt] += 1
                    return "near tie"
                break
        raise Wrong(f"{prompt!r}: {text!r} is not {expected!r}")

    # --- kinds of requests ---

    def greedy(self, rng: random.Random) -> str:
        prompt = rng.choice(list(self.expected))
        status, answer = self.ask(self.body(prompt))
        return self.refused(status) or self.compare(prompt, answer["choices"][0]["message"]["content"])

    def streamed(self, rng: random.Random, pause: float = 0.0) -> str:
        prompt = rng.choice(list(self.expected))
        status, text = self.stream(self.body(prompt), pause)
        return self.refused(status) or self.compare(prompt, text)

    def slow(self, rng: random.Random) -> str:
        return self.streamed(rng, rng.uniform(0.1, 1.0))

    def seeded_one(self, rng: random.Random) -> str:
        prompt, seed = rng.choice(list(self.expected)), rng.randrange(4)
        status, answer = self.ask(self.body(prompt, temperature=1.0, seed=seed, max_tokens=12))
        if self.refused(status):
            return self.refused(status)
        text = answer["choices"][0]["message"]["content"]
        with self.tally.lock:
            known = self.seeded.setdefault((prompt, seed), text)
        return "right" if text == known else "rounding changed a draw"

    def leaves(self, rng: random.Random) -> str:
        prompt = rng.choice(list(self.expected))
        body = self.body(prompt, max_tokens=200)
        if rng.random() < 0.3:  # without having read anything
            connection = http.client.HTTPConnection(self.host, self.port, timeout=900)
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            time.sleep(rng.uniform(0, 2))
            connection.close()
            return "gone"
        status, text = self.stream(body, leave_after=rng.randint(1, 6))
        if status == 200 and not self.expected[prompt].startswith(text[: len(self.expected[prompt])]):
            self.compare(prompt, text[: len(self.expected[prompt])])
        return self.refused(status) or "gone"

    def broken(self, rng: random.Random) -> str:
        status, answer = self.ask(rng.choice(BROKEN), "/v1/completions")
        if status != 400 or not answer["error"]["message"]:
            raise Wrong(f"a broken body got {status} {answer}")
        return "400"

    def too_long(self, rng: random.Random) -> str:
        status, answer = self.ask(self.body("word " * (self.context + rng.randrange(self.context))))
        if status != 400 or answer["error"]["code"] != "context_length_exceeded":
            raise Wrong(f"a prompt beyond the context got {status} {answer}")
        return "400"

    def nearly_too_long(self, rng: random.Random) -> str:
        ids = [rng.randrange(100, 200) for _ in range(self.context - 8 - rng.randrange(200))]
        body = {"model": self.model, "prompt": ids, "max_tokens": 4, "temperature": 0}
        status, answer = self.ask(body, "/v1/completions")
        if self.refused(status):
            return self.refused(status)
        if answer["usage"]["prompt_tokens"] != len(ids):
            raise Wrong(f"{len(ids)} prompt tokens were counted as {answer['usage']}")
        return "right"

    def refused(self, status: int) -> str:
        """ "429" where the queue was full; anything else but 200 is wrong."""
        if status not in (200, 429):
            raise Wrong(f"status {status}")
        return "429" if status == 429 else ""

    def client(self, number: int) -> None:
        """Asks until the time is over."""
        rng = random.Random(self.options.seed * 1000 + number)
        kinds: dict[str, tuple[float, Callable[[random.Random], str]]] = {
            "greedy": (35, self.greedy),
            "streamed": (25, self.streamed),
            "seeded": (10, self.seeded_one),
            "leaves": (10, self.leaves),
            "slow": (5, self.slow),
            "broken": (8, self.broken),
            "too long": (3, self.too_long),
            "nearly too long": (1, self.nearly_too_long),
        }
        weights = [weight for weight, _ in kinds.values()]
        while time.monotonic() < self.ends:
            (kind,) = rng.choices(list(kinds), weights)
            began = time.monotonic()
            try:
                self.tally.add(kind, kinds[kind][1](rng), time.monotonic() - began)
            except Wrong as error:
                self.tally.fail(f"{kind}: {error}")
            except Exception as error:
                self.tally.fail(f"{kind}: {type(error).__name__} {error}")


@dataclass
class Memory:
    """Looks at the server's memory every few seconds."""

    process: psutil.Process
    samples: list[tuple[float, float]] = field(default_factory=list)  # seconds, MB

    def watch(self, ends: float) -> None:
        began = time.monotonic()
        while time.monotonic() < ends:
            self.samples.append((round(time.monotonic() - began, 1), self.process.memory_info().rss / 1e6))
            time.sleep(5)

    def growth(self, settle: float) -> float:
        """Share by which memory grew, from what it was when it had settled to the end: medians of a fifth each."""
        kept = [mb for seconds, mb in self.samples if seconds >= settle * self.samples[-1][0]]
        part = max(len(kept) // 5, 1)
        return statistics.median(kept[-part:]) / statistics.median(kept[:part]) - 1


def get(soak_host: str, port: int, path: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection(soak_host, port, timeout=60)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def run(options: Options, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The load, then the verdict."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready: "):
        raise SystemExit("the server did not start")
    host, port = line.split()[1].removeprefix("http://").rsplit(":", 1)
    about = get(host, int(port), "/v1/models")["data"][0]
    soak = Soak(host, int(port), about["id"], about["dspark"]["context"], options)
    soak.learn([template.format(topic) for template in TEMPLATES for topic in TOPICS])
    print(f"{len(soak.expected)} plain answers; {options.clients} clients for {options.minutes:g} min", flush=True)
    soak.ends = time.monotonic() + 60 * options.minutes
    memory = Memory(psutil.Process(process.pid))
    threads = [threading.Thread(target=soak.client, args=(i,)) for i in range(options.clients)]
    threads.append(threading.Thread(target=memory.watch, args=(soak.ends,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60 * options.minutes + 900)
    hung = sum(thread.is_alive() for thread in threads)
    end = time.monotonic() + 60
    while (health := get(host, int(port), "/health")) and (health["active"] or health["waiting"]):
        if time.monotonic() > end:
            break
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    code = process.wait(120)
    growth = memory.growth(options.settle)
    verdict = {
        "failures": soak.tally.counts["FAILED"] == 0 and not hung,
        "slots are free": health["active"] == health["waiting"] == 0,
        "memory is flat": growth <= options.growth,
        "exit code 0": code == 0,
    }
    return {
        "options": asdict(options) | {"json": None},
        "passed": all(verdict.values()),
        "verdict": verdict,
        "counts": dict(sorted(soak.tally.counts.items())),
        "seconds": {kind: quantiles(values) for kind, values in sorted(soak.tally.seconds.items())},
        "near ties": dict(soak.tally.ties),
        "failures": soak.tally.failures,
        "hung": hung,
        "memory growth": round(growth, 5),
        "memory": [(seconds, round(mb, 1)) for seconds, mb in memory.samples],
    }


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    shares = (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    return {name: round(ordered[int(share * (len(ordered) - 1))], 3) for name, share in shares}


def show(result: dict[str, Any]) -> str:
    """The table for people."""
    lines = ["", "| what | count | p50 s | p95 s | max s |", "| --- | --- | --- | --- | --- |"]
    for what, count in result["counts"].items():
        seconds = result["seconds"].get(what.partition(":")[0], {})
        times = " | ".join(f"{seconds.get(name, 0):.2f}" for name in ("p50", "p95", "max"))
        lines.append(f"| {what} | {count} | {times} |")
    memory = [mb for _, mb in result["memory"]]
    lines.append(f"\nmemory {memory[0]:.0f} MB at the start, {memory[-1]:.0f} MB at the end")
    lines.append(f"it grew by {result['memory growth']:.2%} since it settled")
    lines += [f"{'ok ' if good else 'NO '} {what}" for what, good in result["verdict"].items()]
    return "\n".join(lines)


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    words = [sys.executable, "serve.py", "--http", "127.0.0.1:0", *shlex.split(options.server)]
    log = (options.json or Path("soak")).with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True)
        with process:
            try:
                result = run(options, process)
            finally:
                process.kill()
    print(show(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
