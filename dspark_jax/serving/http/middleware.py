"""What every request goes through: its id, the log line, metrics, the key, and the limit of its body.

Plain ASGI, so streams and their backpressure pass untouched.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_jax.serving.http.errors import error_response
from dspark_jax.serving.http.metrics import Metrics

logger = logging.getLogger(__name__)
_INFO = "dspark.info"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PATHS = ("/", "/health", "/metrics", "/openapi.json", "/v1/models", "/v1/chat/completions", "/v1/completions")
PROTECTED = "/v1/"  # paths that need a key, where there are keys


@dataclass
class Info:
    """What the log tells of a request."""

    request_id: str
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    started: bool = False


def info_of(scope: Scope) -> Info:
    """What `Observed` has put into a request's scope."""
    info = scope[_INFO]
    assert isinstance(info, Info)
    return info


def request_id(given: str | None) -> str:
    """The client's id, if it is one that logs and headers can hold; otherwise a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def label(path: str) -> str:
    """A path as metrics name it: a few known ones, whatever clients ask for."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{model}"
    return path if path in _PATHS else "other"


class Observed:
    """Outermost: X-Request-Id, one line of log, metrics, and status 500 for what nobody has caught."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        info = scope[_INFO] = Info(request_id(Headers(scope=scope).get("x-request-id")))

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status, info.started = message["status"], True
                MutableHeaders(scope=message)["X-Request-Id"] = info.request_id
            await send(message)

        try:
            await self._app(scope, receive, observe)
        except asyncio.CancelledError:
            info.status = info.status or 503
            raise
        except Exception:
            logger.exception("%s %s failed, request id %s", scope["method"], label(scope["path"]), info.request_id)
            if info.started:
                raise  # the connection is cut off
            message = f"internal error: please report it with the request id {info.request_id}"
            await error_response(500, message, code="internal")(scope, receive, observe)
        finally:
            self._tell(scope, info, time.perf_counter() - began)

    def _tell(self, scope: Scope, info: Info, seconds: float) -> None:
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._metrics.answered(method, label(scope["path"]), info.status, seconds)
        logger.info(
            "%s %s %d %.1f ms, %d + %d tokens, %s",
            method,
            repr(scope["path"])[1:-1][:200],
            info.status,
            1000 * seconds,
            info.prompt_tokens,
            info.completion_tokens,
            info.request_id,
        )


class Keyed:
    """Status 401 for requests below /v1/ without one of the keys; compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        protected = scope["type"] == "http" and scope["path"].startswith(PROTECTED)
        if protected and self._keys and not self._allowed(Headers(scope=scope).get("authorization", "")):
            message = "API key absent or wrong: send the header `Authorization: Bearer KEY`"
            headers = {"WWW-Authenticate": "Bearer"}
            await error_response(401, message, code="invalid_api_key", headers=headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all of them, always
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    """Of one length for all keys."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


class Limited:
    """Status 413 for bodies of more than `most` bytes, before they are read where their length is told."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "")
        if told.isdecimal() and int(told) > self._most:
            await error_response(413, self._message(told), code="body_too_large")(scope, receive, send)
            return
        received = 0

        async def count() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                raise HTTPException(413, self._message(f"more than {self._most}"))
            return message

        await self._app(scope, count, send)

    def _message(self, size: str) -> str:
        return f"the body has {size[:40]} bytes: must have at most {self._most}"
