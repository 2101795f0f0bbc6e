"""The application: routes, errors, and what requests go through."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from dspark_jax.serving.http.ask import Ask, make_ask
from dspark_jax.serving.http.errors import ApiError, error_body, on_http_error, on_invalid, too_long
from dspark_jax.serving.http.metrics import CONTENT_TYPE
from dspark_jax.serving.http.middleware import Keyed, Limited, Observed
from dspark_jax.serving.http.page import PAGE, content_policy
from dspark_jax.serving.http.replies import ChatReply, CompletionReply, new_id
from dspark_jax.serving.http.schema import Body, ChatBody, CompletionBody
from dspark_jax.serving.http.sending import Answering
from dspark_jax.serving.http.service import Service
from dspark_jax.serving.http.tokens import TokenNames
from dspark_jax.serving.stream import prompt_ids

try:
    VERSION = version("dspark_jax")
except PackageNotFoundError:  # run from its folder
    VERSION = "0"
_ERRORS = {
    400: "The body is wrong, or does not fit the context",
    401: "API key absent or wrong",
    404: "Unknown model",
    413: "The body is too large",
    429: "Too many requests wait",
    500: "Internal error",
    503: "Starting, shutting down, or failed",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_SHRINKS = 4  # characters that a tokenizer may compose into one before it looks for tokens
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class Routes:
    """What the paths do."""

    def __init__(self, service: Service, page: Path = PAGE) -> None:
        self._service, self._page = service, page
        self._names = TokenNames(service.tokenizer.spelling)
        parts = service.serving.model, service.serving.drafter, service.engine.generator.schedule, VERSION
        self._fingerprint = "dspark-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]

    # --- completions ---

    async def chat(self, body: ChatBody) -> Response:
        """The next message of a chat."""
        service = self._service
        self._check(body, body.top)
        messages = [message.as_turn() for message in body.messages]
        self._check_length(sum(len(message.content) for message in body.messages), "messages")
        try:
            ids = await service.in_thread(partial(prompt_ids, service.tokenizer, messages))
        except ValueError as error:
            raise ApiError(400, _named("messages", error), param="messages") from error
        name = new_id("chatcmpl")
        ask = self._ask(body, name, [ids], body.limit, body.top, "messages")
        reply = ChatReply(name, service.serving.model, self._fingerprint, self._names, **_told(body, body.top))
        return Answering(service.submit(ask), reply, bool(body.stream))

    async def completion(self, body: CompletionBody) -> Response:
        """What follows one prompt or several."""
        service, tokenizer = self._service, self._service.tokenizer
        self._check(body, body.logprobs)

        self._check_length(max(map(len, body.prompt)), "prompt")

        def encode() -> list[list[int]]:
            return [
                [*tokenizer.prefix_ids, *tokenizer.encode(one)] if isinstance(one, str) else one for one in body.prompt
            ]

        prompts = await service.in_thread(encode)
        name, limit = new_id("cmpl"), 16 if body.max_tokens is None else body.max_tokens
        ask = self._ask(body, name, prompts, limit, body.logprobs, "prompt")
        echo: list[str] = []
        if body.echo:
            texts = [one if isinstance(one, str) else tokenizer.decode(one, skip_special=False) for one in body.prompt]
            echo = [text for text in texts for _ in range(body.n or 1)]
        reply = CompletionReply(
            name, service.serving.model, self._fingerprint, self._names, echo=echo, **_told(body, body.logprobs)
        )
        return Answering(service.submit(ask), reply, bool(body.stream))

    def _check(self, body: Body, logprobs: int | None) -> None:
        """Refuses what needs no tokens to be refused."""
        self._service.check_open()
        if body.model is not None:
            self._check_model(body.model)
        most = self._service.serving.max_logprobs
        if logprobs is not None and logprobs > most:
            name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
            message = f"{name} {logprobs}: must be at most {most} on this server (its option --max-logprobs)"
            raise ApiError(400, message, param=name)

    def _check_length(self, characters: int, param: str) -> None:
        """Refuses what is far too long, without the seconds that it takes to count its tokens."""
        most = _SHRINKS * self._service.context * self._names.longest
        if characters > most:
            message = f"the prompt has {characters} characters, the context {self._service.context} tokens"
            raise too_long(f"{message}: must be shorter", param)

    def _check_model(self, model: str) -> None:
        served = self._service.serving.model
        if model != served:
            raise ApiError(
                404, f"model {model[:100]!r}: unknown, must be {served!r}", param="model", code="model_not_found"
            )

    def _ask(
        self, body: Body, name: str, prompts: list[Any], limit: int | None, logprobs: int | None, param: str
    ) -> Ask:
        try:
            return make_ask(body, name, prompts, limit, logprobs, self._service.context)
        except ApiError as error:
            error.param = error.param or param
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
        return JSONResponse(content, 503, {"Retry-After": "1"})

    async def metrics(self) -> Response:
        """Counts and latencies for Prometheus."""
        return Response(self._service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def page(self) -> Response:
        """A page to chat with the model."""
        if not self._page.is_file():
            raise ApiError(404, "path '/': this installation has no page; the API is at /v1/, see /openapi.json")
        html = self._page.read_text(encoding="utf-8")
        headers = {"Content-Security-Policy": content_policy(html), **_HEADERS}
        return Response(html.replace("\r\n", "\n"), media_type="text/html", headers=headers)


def _told(body: Body, logprobs: int | None) -> dict[str, bool]:
    """What a reply tells besides text."""
    return {"logprobs": logprobs is not None, "trace": bool(body.trace), "include_usage": body.include_usage}


def _named(field: str, error: ValueError) -> str:
    text = str(error)
    return text if text.startswith(f"{field}:") else f"{field}: {text}"


def create_app(service: Service, page: Path = PAGE) -> FastAPI:
    """The application that serves `service`; the engine is started and closed by others.

    Args:
        page: the file of `/`.
    """
    routes = Routes(service, page)
    app = FastAPI(
        title="dspark_jax",
        version=VERSION,
        description="OpenAI-compatible completions by speculative decoding.",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
        for status, text in _ERRORS.items()
    }
    stream = {"description": "The answer, or its stream", "content": {"application/json": {}, "text/event-stream": {}}}
    completions: dict[str, Any] = {"responses": {200: stream, **errors}, "methods": ["POST"], "response_model": None}

    def get(path: str, does: Callable[..., Any], statuses: tuple[int, ...], **options: Any) -> None:
        responses: Any = {status: errors[status] for status in statuses}
        app.add_api_route(path, does, methods=["GET"], responses=responses, response_model=None, **options)

    app.add_api_route("/v1/chat/completions", routes.chat, **completions)
    app.add_api_route("/v1/completions", routes.completion, **completions)
    get("/v1/models", routes.models, (401,))
    get("/v1/models/{model:path}", routes.model, (401, 404))
    get("/health", routes.health, (503,))
    get("/metrics", routes.metrics, (), response_class=PlainTextResponse)
    get("/", routes.page, (404,), include_in_schema=False)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, on_http_error)  # type: ignore[arg-type]
    app.add_middleware(Limited, most=service.serving.max_body)
    app.add_middleware(Keyed, keys=service.serving.keys)
    app.add_middleware(Observed, metrics=service.metrics)  # the last one added is the outermost
    app.openapi = partial(_openapi, app, bool(service.serving.keys))  # type: ignore[method-assign]
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _openapi(app: FastAPI, keyed: bool) -> dict[str, Any]:
    """The description of the API, with the statuses that there are (FastAPI's own 422 is 400 here)."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = found.get("components", {}).get("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        if keyed:
            found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            found["security"] = [{"key": []}]
        app.openapi_schema = json.loads(json.dumps(found))
    return app.openapi_schema
