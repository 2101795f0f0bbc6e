"""Between HTTP and the engine: who may ask now, and the answers of a request as they grow.

The engine calls its listeners in its own thread; they only hand their news over to the event loop. All else here runs
in the loop, so its counts need no locks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from dspark_jax.checkpoints.tokenizer import Tokenizer
from dspark_jax.decoding.batching import Event
from dspark_jax.decoding.engine import Answer, Engine, EngineClosed, EngineFull
from dspark_jax.decoding.requests import Request
from dspark_jax.serving.http.answer import AnswerText, Piece
from dspark_jax.serving.http.ask import Ask
from dspark_jax.serving.http.errors import ApiError, full, unavailable
from dspark_jax.serving.http.metrics import Metrics

logger = logging.getLogger(__name__)
_THREADS = 2  # that turn texts into tokens

Phase = Literal["starting", "ok", "draining", "failed"]
T = TypeVar("T")


@dataclass(frozen=True)
class Serving:
    """What is served, and its limits.

    Attributes:
        model: its name. drafter: the drafter's, or None. keys: that clients may send; empty: none is needed.
        max_logprobs: most likely tokens that a request may ask for. max_waiting: requests that may wait for a slot.
        max_body: bytes of a body at most.
    """

    model: str
    drafter: str | None = None
    keys: tuple[str, ...] = ()
    max_logprobs: int = 5
    max_waiting: int = 64
    max_body: int = 4 << 20


@dataclass
class Service:
    """An engine, and all that the routes share.

    Attributes:
        created: when it was made, seconds since 1970. at_work: the engine's requests that have not ended.
    """

    engine: Engine
    tokenizer: Tokenizer
    serving: Serving
    metrics: Metrics = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    at_work: set[Choice] = field(default_factory=set)
    _started: bool = False
    _draining: bool = False
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")

    @property
    def phase(self) -> Phase:
        """Whether requests are taken ("ok"), and why not."""
        if self._draining:
            return "draining"
        if self.engine.alive:
            self._started = True
            return "ok"
        return "failed" if self._started else "starting"

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together at most."""
        return self.engine.generator.context

    def check_open(self) -> None:
        """Raises ApiError 503 where no requests are taken."""
        phase = self.phase
        if phase != "ok":
            why = {"draining": "the server is shutting down", "starting": "the server is starting"}
            raise unavailable(f"{why.get(phase, 'the engine has failed')}: ask again later, or another one", phase)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs what takes long on large inputs, away from the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def submit(self, ask: Ask) -> Exchange:
        """Gives all requests of `ask` to the engine.

        Raises:
            ApiError: too many wait (429), more than can ever be at once or a token outside the vocabulary (400), or the
                server takes none (503).
        """
        self.check_open()
        wanted, places = len(ask.requests), self.engine.generator.batch_size + self.serving.max_waiting
        if wanted > places:
            raise ApiError(400, f"n: {wanted} choices over all prompts, must be at most {places} on this server")
        if len(self.at_work) + wanted > places:
            raise full(f"{len(self.at_work)} requests are at work or wait, at most {places} may: ask again later")
        exchange = Exchange(self, ask)
        try:
            for choice in exchange.choices:
                choice.start()
        except (EngineFull, EngineClosed, ValueError) as error:
            exchange.close()
            if isinstance(error, EngineFull):
                raise full(f"{error}: ask again later") from error
            if isinstance(error, EngineClosed):
                raise unavailable(f"{error}: ask again later, or another server", "closed") from error
            raise ApiError(400, str(error).partition(": ")[2] or str(error), param="prompt") from error
        return exchange

    def ended(self, choice: Choice) -> None:
        """The engine is done with a choice."""
        self.at_work.discard(choice)
        if not self.at_work:
            self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Takes no more requests and waits for those that are there; after `seconds` they are cancelled.

        Returns:
            whether all ended by themselves.
        """
        self._draining = True
        self._idle.clear()
        if not self.at_work or not self.engine.alive:
            return True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
            return True
        for choice in self.at_work:
            choice.cancel()
        return False

    def close(self) -> None:
        """Ends the threads; the engine is its owner's."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Choice:
    """One answer of a request.

    Attributes:
        index: among the request's. text: what has come of it. first, last: seconds from the start to its first and its
            newest token, None before.
    """

    def __init__(self, exchange: Exchange, index: int, request: Request) -> None:
        service, ask = exchange.service, exchange.ask
        self.index, self.request = index, request
        tokenizer, stop_ids = service.tokenizer, service.engine.generator.stop_ids or ()
        self.text = AnswerText(tokenizer, ask.stop, stop_ids, ask.stop_ids, ask.detailed)
        self.first: float | None = None
        self.last: float | None = None
        self._exchange, self._service = exchange, service
        self._answer: Answer | None = None
        self._began = time.perf_counter()

    def start(self) -> None:
        """Submits it."""
        loop = asyncio.get_running_loop()

        def listen(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._hear, event)

        self._answer = self._service.engine.submit(self.request, listen)
        self._service.at_work.add(self)

    def cancel(self) -> None:
        """Frees its slot, if it has not ended."""
        if self._answer is not None and self in self._service.at_work:
            self._answer.cancel()

    def _hear(self, event: Event) -> None:
        """In the event loop: counts, turns tokens into text, and passes it on, whether or not the client reads."""
        service = self._service
        if event.completion is not None or event.failed is not None:
            service.ended(self)
        service.metrics.rounds(event.rounds)
        if self.text.finish_reason is not None or self._exchange.closed:
            return
        self._count(len(event.tokens))
        if event.failed is not None:
            self._exchange.tell(self, event.failed)
            return
        try:
            self._exchange.tell(self, self.text.push(event))
        except Exception as error:  # else nobody would hear of it
            logger.exception("request %s broke off", self.request.id)
            self.text.finish_reason = "cancelled"
            self._exchange.tell(self, error)
        if self.text.finish_reason is not None:
            self.cancel()

    def _count(self, tokens: int) -> None:
        now, metrics = time.perf_counter() - self._began, self._service.metrics
        if not tokens:
            return
        if self.last is None:
            self.first = now
            metrics.first_token(now)
        else:
            metrics.more_tokens(tokens, now - self.last)
        self.last = now


class Exchange:
    """The choices of one HTTP request, and their news."""

    def __init__(self, service: Service, ask: Ask) -> None:
        self.service, self.ask = service, ask
        self.choices = [Choice(self, index, request) for index, request in enumerate(ask.requests)]
        self.closed = False
        self._news: asyncio.Queue[tuple[Choice, Piece | BaseException]] = asyncio.Queue()

    def tell(self, choice: Choice, news: Piece | BaseException) -> None:
        """What came for a choice; whoever reads slowly gets it together with what comes later."""
        self._news.put_nowait((choice, news))

    @property
    def completion_tokens(self) -> int:
        """Tokens generated for all choices."""
        return sum(choice.text.token_count for choice in self.choices)

    async def pieces(self) -> AsyncIterator[tuple[Choice, Piece]]:
        """What comes, until every choice has its end.

        Raises:
            ApiError: the engine failed, or the server ended, before an answer's end.
        """
        left = len(self.choices)
        while left:
            found: dict[Choice, Piece] = {}
            for choice, news in await self._wait():
                if isinstance(news, BaseException):
                    raise _broken(news)
                found[choice] = found.get(choice, Piece()) + news
            for choice, piece in found.items():
                if piece.end == "cancelled":
                    raise _broken(EngineClosed())
                left -= piece.end is not None
                yield choice, piece

    async def _wait(self) -> list[tuple[Choice, Piece | BaseException]]:
        """All news that are there, at least one."""
        first = await self._news.get()
        return [first, *(self._news.get_nowait() for _ in range(self._news.qsize()))]

    def close(self) -> None:
        """Frees the slots of what is not needed any more."""
        self.closed = True
        for choice in self.choices:
            choice.cancel()


def _broken(error: BaseException) -> ApiError:
    """What ended an answer before its time."""
    if isinstance(error, EngineClosed):
        return unavailable("the server ended before the answer did: ask again", "closed")
    return ApiError(500, "the engine failed before the answer's end", code="engine_failed")
