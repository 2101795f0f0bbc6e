"""The application: paths, errors, what requests go through, and its description."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dspark_jax.serving.http.errors import ApiError, on_http_error, on_invalid
from dspark_jax.serving.http.middleware import Keyed, Limited, Observed
from dspark_jax.serving.http.page import PAGE
from dspark_jax.serving.http.routes import VERSION, Routes
from dspark_jax.serving.http.service import Service

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
        app.openapi_schema = found
    return app.openapi_schema
