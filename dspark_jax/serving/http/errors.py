"""Errors as OpenAI's API has them: {"error": {"message", "type", "param", "code"}} with a status of HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_LONGEST_VALUE = 60  # characters of a wrong value that a message repeats
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_RULES = {
    "Input should be": "must be",
    "List should have": "must have",
    "String should have": "must have",
    "Field required": "missing, must be given",
    "Extra inputs are not permitted": "unknown field, must be left out",
}
RETRY = {"Retry-After": "1"}  # seconds, where requests are not taken now


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP. message: what is wrong and what would be right. param: the field. code: a word for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """The body of the answer, and what a stream that breaks off ends with."""
        return error_body(self.status, str(self), self.param, self.code)

    def response(self) -> Response:
        """The whole answer."""
        return error_response(self.status, str(self), self.param, self.code, self.headers)


def full(message: str) -> ApiError:
    """Too many requests wait."""
    return ApiError(429, message, code="queue_full", headers=RETRY)


def unavailable(message: str, code: str) -> ApiError:
    """The server takes no requests now."""
    return ApiError(503, message, code=code, headers=RETRY)


def too_long(message: str, param: str | None = None) -> ApiError:
    """A prompt, or prompt and answer together, that the context does not hold."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The object that OpenAI's clients read."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer with that object; ASCII, since a message may repeat what is no text."""
    content = json.dumps(error_body(status, message, param, code))
    return Response(content, status, dict(headers or {}), media_type="application/json")


# --- what the framework raises ---


def on_http_error(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods, and bodies that cannot be read."""
    path = request.url.path
    messages = {
        400: "the body cannot be read: must be one JSON object in UTF-8",
        404: f"path {path[:100]!r}: nothing is here; see /openapi.json for what is",
        405: f"method {request.method} of {path[:100]!r}: must be {(error.headers or {}).get('Allow', 'another one')}",
    }
    code = {413: "body_too_large"}.get(error.status_code)
    message = messages.get(error.status_code, str(error.detail))
    return error_response(error.status_code, message, code=code, headers=error.headers)


def on_invalid(request: Request, error: RequestValidationError) -> Response:
    """Bodies that are no JSON, or not what their schema says."""
    message, param = describe(error.errors(), request.headers.get("content-type", ""))
    return error_response(400, message, param)


def describe(errors: Sequence[Any], content_type: str) -> tuple[str, str | None]:
    """(message, field) of the first thing that is wrong with a body."""
    first = errors[0]
    kind, place = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return f"the body is no JSON ({reason} at character {place[0]}): must be one JSON object", None
    if kind == "value_error":
        message = str(first["ctx"]["error"])
        name = field_name(place) if place else message.partition(":")[0]
        return f"{name}{shown(first)}: {message}" if place else message, name
    if kind == "string_unicode" and not place:
        return "a field name that UTF-8 cannot write: unknown field, must be left out", None
    if not place:
        if isinstance(first.get("input"), bytes):
            return f"Content-Type {content_type[:_LONGEST_VALUE]!r}: must be application/json", None
        return 'the body is empty or no object: must be one JSON object, such as {"model": ...}', None
    name = field_name(place)
    rule = first["msg"]
    for theirs, ours in _RULES.items():
        rule = rule.replace(theirs, ours)
    return f"{name}{shown(first)}: {rule}", name


def field_name(place: Sequence[str | int]) -> str:
    """`messages[0].content` for ("messages", 0, "content")."""
    name = ""
    for step in place:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else str(step)[:_LONGEST_VALUE]
    return name


def shown(error: Mapping[str, Any]) -> str:
    """The wrong value, where it is short and given at all."""
    value = error.get("input")
    if error["type"] in ("missing", "extra_forbidden") or isinstance(value, (dict, list)) and len(value) > 3:
        return ""
    text = repr(value)
    return f" {text}" if len(text) <= _LONGEST_VALUE else ""
