"""Sending an answer: whole, or as server-sent events; a client that goes away ends the work for it.

A client that reads slowly holds up only its own stream: `send` waits for it, and meanwhile the news gather, which are
no more than the answer. The next chunk has them all.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark_jax.serving.http.errors import ApiError
from dspark_jax.serving.http.middleware import info_of
from dspark_jax.serving.http.replies import Reply
from dspark_jax.serving.http.service import Exchange

logger = logging.getLogger(__name__)
CLIENT_GONE = 499  # the status, in logs and metrics, of what nobody waits for any more
_DONE = b"data: [DONE]\n\n"


def as_json(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def as_event(value: Any) -> bytes:
    """One server-sent event; JSON has no line breaks that would cut it."""
    return b"data: " + as_json(value) + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Does `work` as long as the client is there; returns whether it was done."""
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            await doing  # raises what it raised
            return True
        return False
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


class Answering(Response):
    """The response to a request whose exchange has begun: the whole answer, or its stream."""

    def __init__(self, exchange: Exchange, reply: Reply, stream: bool) -> None:
        kind = "text/event-stream" if stream else "application/json"
        super().__init__(status_code=200, media_type=kind)
        self._exchange, self._reply, self._stream = exchange, reply, stream
        self._last_sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it; the exchange is closed afterwards, whatever happens."""
        info = info_of(scope)
        info.prompt_tokens = self._exchange.ask.prompt_tokens
        work = self._send_stream(send) if self._stream else self._send_whole(scope, receive, send)
        try:
            if not await while_there(work, receive) and not self._last_sent:
                info.status = CLIENT_GONE
        finally:
            self._exchange.close()
            info.completion_tokens = self._exchange.completion_tokens

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for _ in self._exchange.pieces():
                pass
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        body = as_json(self._reply.whole(self._exchange))
        self._last_sent = True
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        self._last_sent = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        """The stream's events; an error after the beginning is one of them, and then the last but [DONE]."""
        exchange, reply = self._exchange, self._reply
        try:
            for chunk in map(reply.opening, exchange.choices):
                if chunk is not None:
                    yield as_event(chunk)
            async for choice, piece in exchange.pieces():
                events = b"".join(map(as_event, reply.chunks(choice, piece)))
                if events:
                    yield events
            last = reply.usage_chunk(exchange)
            if last is not None:
                yield as_event(last)
        except ApiError as error:
            yield as_event(error.body())
        except Exception:
            logger.exception("a stream broke off")
            yield as_event(ApiError(500, "internal error: the stream breaks off here", code="internal").body())
        yield _DONE
