"""A server with the endpoints of `dspark serve` and scripted answers, so that the page is tested without a model.

The first word of the last user message names the script. Bytes of the streams are cut where it hurts: inside lines,
inside characters and between the two halves of a line end.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

PAGE = Path(__file__).resolve().parents[3] / "dspark_jax" / "serving" / "http" / "page.html"
CSP = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; form-action 'none'"
)
BLOCK, CONTEXT = 5, 4096
MODEL = {
    "id": "tiny-target",
    "object": "model",
    "dspark": {"drafter": "tiny-drafter", "schedule": "confidence", "block_size": BLOCK, "context": CONTEXT},
}

Json = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """One round as the contract's `dspark.rounds` has it; `tokens`: pairs of text and origin."""

    tokens: tuple[tuple[str, str], ...]
    drafts: tuple[str, ...] = ()
    confidence: tuple[float, ...] = ()
    verified: int = 0
    accepted: int = 0

    def as_json(self) -> Json:
        tokens = [{"text": text, "origin": origin} for text, origin in self.tokens]
        rest = {"drafts": list(self.drafts), "confidence": list(self.confidence)}
        return {"tokens": tokens, **rest, "verified": self.verified, "accepted": self.accepted}


def split(text: str) -> list[str]:
    """Words with the space before them, line breaks, and each emoji as two tokens: '' and then all of it."""
    pieces = re.findall(r"\n+| ?[^\s]+| +", text)
    return [part for piece in pieces for part in (("", piece) if max(piece) > "\uffff" else (piece,))]


def drafted(text: str) -> tuple[Round, ...]:
    """Rounds that bring a text: a prefill's token, then blocks of which 5, 2, 0, 3, 5, ... drafts are right."""
    tokens = split(text)
    rounds = [Round(((tokens[0], "plain"),))]
    at, turn = 1, 0
    while at < len(tokens):
        right, verified = ((5, 5), (2, 4), (0, 3), (3, 3))[turn % 4]
        right, turn = min(right, len(tokens) - at), turn + 1
        end = "bonus" if right == verified else "corrected"
        drafts = [*tokens[at : at + right], *[f" wrong{i}" for i in range(BLOCK - right)]]
        made = [(token, "draft" if i < right else end) for i, token in enumerate(tokens[at : at + right + 1])]
        confidence = tuple(round(0.97 - 0.04 * i if i < right else 0.5 - 0.09 * i, 3) for i in range(BLOCK))
        rounds.append(Round(tuple(made), tuple(drafts), confidence, verified, right))
        at += len(made)
    return tuple(rounds)


def plain(text: str) -> tuple[Round, ...]:
    """The same text without drafts: a round for each token."""
    return tuple(Round(((token, "plain"),)) for token in split(text))


def summary(rounds: Sequence[Round]) -> Json:
    """The contract's summary, with a made-up clock."""
    decoding = rounds[1:]
    verified = sum(r.verified for r in decoding)
    return {
        "rounds": len(decoding),
        "accepted_length": sum(len(r.tokens) for r in decoding) / max(len(decoding), 1),
        "verify_budget": 1 + verified / max(len(decoding), 1),
        "tokens_per_second": 123.45 if verified else 45.6,
        "first_token_seconds": 0.087,
        "drafted": sum(len(r.drafts) for r in decoding),
        "verified": verified,
        "accepted": sum(r.accepted for r in decoding),
    }


@dataclass(frozen=True)
class Script:
    """An answer and how it comes.

    Attributes:
        pause: seconds between rounds. cut: bytes a write, 0 for one write a round. line_end: of the stream's lines.
        fault: "error": an error event after three rounds; "close": the stream ends there.
    """

    text: str
    pause: float = 0.0
    cut: int = 0
    line_end: str = "\n"
    fault: str = ""


HELLO = (
    "Grüße aus Zürich! 你好，世界。 Ein Smiley 🙂 und eine Familie 👩‍👩‍👧, dazu ∑ und é.\n\n"
    "Second paragraph with enough words to need a few more rounds."
)
HTML = "<b>bold</b> <img src=x onerror=alert(1)> <script>document.title='owned'</script> &amp; </div> done."
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards quietly mix potions in jugs".split()
LONG = "\n\n".join(" ".join(WORDS[(i + j * 7) % len(WORDS)] for j in range(60)) + "." for i in range(100))
SCRIPTS = {
    "hello": Script(HELLO, cut=5, line_end="\r\n"),
    "html": Script(HTML, cut=3),
    "long": Script(LONG),
    "slow": Script(LONG, pause=0.03),
    "broken": Script(HELLO, fault="error"),
    "closed": Script(HELLO, fault="close"),
}
REFUSALS: dict[str, tuple[int, Json | str, dict[str, str]]] = {
    "refused": (400, {"error": {"message": "max_tokens is 9, must be below 5", "type": "invalid_request_error"}}, {}),
    "busy": (429, {"error": {"message": "The queue is full.", "type": "rate_limit_error"}}, {"Retry-After": "3"}),
    "failed": (500, "Internal Server Error", {}),
}


@dataclass
class Fake:
    """What the server was told and asked. `key`: the API key that it wants, None for none."""

    healthy: bool = True
    key: str | None = None
    active: int = 0
    disconnects: int = 0
    requests: list[Json] = field(default_factory=list)

    def reset(self) -> None:
        """Back to how it began."""
        vars(self).update(vars(Fake()))

    async def page(self, _: Request) -> Response:
        html = PAGE.read_text(encoding="utf-8")
        policy = CSP.format(**{kind: digest(html, kind) for kind in ("script", "style")})
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    async def health(self, _: Request) -> Response:
        status = "ok" if self.healthy else "draining"
        return JSONResponse({"status": status, "active": self.active, "waiting": 0}, 200 if self.healthy else 503)

    async def models(self, request: Request) -> Response:
        return self.refusal(request) or JSONResponse({"object": "list", "data": [MODEL]})

    async def chat(self, request: Request) -> Response:
        if refusal := self.refusal(request):
            return refusal
        body = await request.json()
        self.requests.append(body)
        words = body["messages"][-1]["content"].split()
        name = words[0].lower() if words else ""
        if name in REFUSALS:
            status, content, headers = REFUSALS[name]
            kind = PlainTextResponse if isinstance(content, str) else JSONResponse
            return kind(content, status, headers)
        script = SCRIPTS.get(name, SCRIPTS["hello"])
        return StreamingResponse(self.stream(request, script, body), media_type="text/event-stream")

    def refusal(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "The API key is missing or wrong.", "code": "invalid_api_key"}}, 401)

    async def stream(self, request: Request, script: Script, body: Json) -> AsyncIterator[bytes]:
        """The answer's events as bytes, cut as the script says; notices when the reader has gone."""
        self.active += 1
        whole = False
        try:
            for event in events(script, body.get("speculative", True), body.get("max_tokens", CONTEXT)):
                data = event.replace("\n", script.line_end).encode()
                for at in range(0, len(data), script.cut or len(data)):
                    yield data[at : at + (script.cut or len(data))]
                if script.pause:
                    await asyncio.sleep(script.pause)
                if script.pause and await request.is_disconnected():
                    return
            whole = True
        finally:
            self.active -= 1
            self.disconnects += not whole


def events(script: Script, speculative: bool, max_tokens: int) -> Iterator[str]:
    """Server-sent events of an answer: a chunk for each round, the last one with the summary, and [DONE]."""
    rounds = (drafted if speculative else plain)(script.text)
    yield ": a comment\n\n"
    yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    tokens = 0
    for i, made in enumerate(rounds):
        if i == 3 and script.fault:
            if script.fault == "error":
                yield event({"error": {"message": "The engine failed: out of memory", "type": "server_error"}})
            return
        tokens += len(made.tokens)
        if tokens > max_tokens:
            rounds = rounds[:i]
            break
        content = "".join(text for text, _ in made.tokens)
        choice = {"index": 0, "delta": {"content": content}, "finish_reason": None}
        yield event({"choices": [choice], "dspark": {"rounds": [made.as_json()]}})
    reason = "length" if tokens > max_tokens else "stop"
    last = {"index": 0, "delta": {}, "finish_reason": reason}
    yield event({"choices": [last], "dspark": {"summary": summary(rounds)}})
    yield "data: [DONE]\n\n"


def digest(html: str, kind: str) -> str:
    """The policy's source that allows the page's one script or style, and no other."""
    text = html.split(f"<{kind}>")[1].split(f"</{kind}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def event(chunk: Json) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


def application(fake: Fake) -> Starlette:
    return Starlette(
        routes=[
            Route("/", fake.page),
            Route("/health", fake.health),
            Route("/v1/models", fake.models),
            Route("/v1/chat/completions", fake.chat, methods=["POST"]),
        ]
    )


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Serves on a free port of this machine from a thread; gives the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)
