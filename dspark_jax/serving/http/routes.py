"""What the paths do: bodies to asks, asks to replies, and what the server tells of itself."""

from __future__ import annotations

import hashlib
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response

from dspark_jax.checkpoints.tokenizer import prompt_ids
from dspark_jax.serving.http.ask import Ask, make_ask
from dspark_jax.serving.http.errors import RETRY, ApiError, error_body, too_long
from dspark_jax.serving.http.metrics import CONTENT_TYPE
from dspark_jax.serving.http.page import PAGE, content_policy
from dspark_jax.serving.http.replies import ChatReply, CompletionReply, new_id
from dspark_jax.serving.http.schema import Body, ChatBody, CompletionBody
from dspark_jax.serving.http.sending import Answering
from dspark_jax.serving.http.service import Service
from dspark_jax.serving.http.tokens import TokenNames

COMPLETION_TOKENS = 16  # of a completion that does not say, as at OpenAI
_SHRINKS = 4  # characters that a tokenizer may compose into one before it looks for tokens
_PAGE_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

try:
    VERSION = version("dspark_jax")
except PackageNotFoundError:  # run from its folder
    VERSION = "0"


class Routes:
    """The functions behind the paths.

    Args:
        page: the file of `/`.
    """

    def __init__(self, service: Service, page: Path = PAGE) -> None:
        self._service, self._page = service, page
        self._names = TokenNames(service.tokenizer.spelling)
        parts = service.serving.model, service.serving.drafter, service.engine.generator.schedule, VERSION
        self._fingerprint = "dspark-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]

    # --- completions ---

    async def chat(self, body: ChatBody) -> Response:
        """The next message of a chat."""
        service = self._service
        self._check(body, body.top, "top_logprobs")
        self._check_length(sum(len(message.content) for message in body.messages), "messages")
        messages = [message.as_turn() for message in body.messages]
        try:
            ids = await service.in_thread(partial(prompt_ids, service.tokenizer, messages))
        except ValueError as error:
            raise ApiError(400, f"messages: {str(error).removeprefix('messages: ')}", param="messages") from error
        ask = self._ask(body, new_id("chatcmpl"), [ids], body.limit, body.top, "messages")
        reply = ChatReply(ask.name, *self._server, **_told(body, body.top))
        return Answering(service.submit(ask), reply, bool(body.stream))

    async def completion(self, body: CompletionBody) -> Response:
        """What follows one prompt or several."""
        service, tokenizer = self._service, self._service.tokenizer
        self._check(body, body.logprobs, "logprobs")
        self._check_length(max(map(len, body.prompt)), "prompt")

        def ids_of(prompt: str | list[int]) -> list[int]:
            return [*tokenizer.prefix_ids, *tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt

        prompts = await service.in_thread(lambda: list(map(ids_of, body.prompt)))
        ask = self._ask(body, new_id("cmpl"), prompts, body.max_tokens or COMPLETION_TOKENS, body.logprobs, "prompt")
        echo: list[str] = []
        if body.echo:
            texts = [one if isinstance(one, str) else tokenizer.decode(one, skip_special=False) for one in body.prompt]
            echo = [text for text in texts for _ in range(body.n or 1)]
        reply = CompletionReply(ask.name, *self._server, echo=echo, **_told(body, body.logprobs))
        return Answering(service.submit(ask), reply, bool(body.stream))

    @property
    def _server(self) -> tuple[str, str, TokenNames]:
        """What all replies have of the server."""
        return self._service.serving.model, self._fingerprint, self._names

    def _check(self, body: Body, logprobs: int | None, field: str) -> None:
        """Refuses what needs no tokens to be refused."""
        self._service.check_open()
        if body.model is not None:
            self._check_model(body.model)
        most = self._service.serving.max_logprobs
        if logprobs is not None and logprobs > most:
            message = f"{field} {logprobs}: must be at most {most} on this server (its option --max-logprobs)"
            raise ApiError(400, message, param=field)

    def _check_length(self, characters: int, field: str) -> None:
        """Refuses what is far too long, without the seconds that it takes to count its tokens."""
        context = self._service.context
        if characters > _SHRINKS * context * self._names.longest:
            message = f"the prompt has {characters} characters, the context {context} tokens: must be shorter"
            raise too_long(message, field)

    def _check_model(self, model: str) -> None:
        served = self._service.serving.model
        if model != served:
            message = f"model {model[:100]!r}: unknown, must be {served!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _ask(
        self, body: Body, name: str, prompts: list[Any], limit: int | None, logprobs: int | None, field: str
    ) -> Ask:
        try:
            return make_ask(body, name, prompts, limit, logprobs, self._service.context)
        except ApiError as error:
            error.param = error.param or field
            raise

    # --- the server ---

    async def models(self) -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, model: str) -> dict[str, Any]:
        """The same, by its name."""
        self._check_model(model)
        return self._model()

    def _model(self) -> dict[str, Any]:
        service, generator = self._service, self._service.engine.generator
        about = {
            "drafter": service.serving.drafter,
            "schedule": generator.schedule,
            "block_size": generator.block_size,
            "context": service.context,
        }
        return {
            "id": service.serving.model,
            "object": "model",
            "created": service.created,
            "owned_by": "dspark_jax",
            "dspark": about,
        }

    async def health(self) -> Response:
        """Whether requests are taken (200), or not (503)."""
        phase = self._service.phase
        active, waiting = self._service.engine.load
        content = {"status": phase, "active": active, "waiting": waiting}
        if phase == "ok":
            return JSONResponse(content)
        content |= error_body(503, f"the server takes no requests: {phase}", code=phase)
        return JSONResponse(content, 503, RETRY)

    async def metrics(self) -> Response:
        """Counts and latencies for Prometheus."""
        return Response(self._service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def page(self) -> Response:
        """A page to chat with the model."""
        if not self._page.is_file():
            raise ApiError(404, "path '/': this installation has no page; the API is at /v1/, see /openapi.json")
        html = self._page.read_text(encoding="utf-8")
        headers = {"Content-Security-Policy": content_policy(html), **_PAGE_HEADERS}
        return Response(html, media_type="text/html", headers=headers)


def _told(body: Body, logprobs: int | None) -> dict[str, Any]:
    """What a reply tells besides text."""
    return {"logprobs": logprobs is not None, "trace": bool(body.trace), "include_usage": body.include_usage}
