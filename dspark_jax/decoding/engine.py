"""Serving requests that come at any time: one thread runs the batch; callers submit, read tokens as they come, cancel.

engine = Engine(Generator(target, drafter, batch_size=64, slot_sizes=(1, 2, 4, 8, 16, 32, 64), ...))
with engine:
    answer = engine.submit(Request("a", ids, SamplingParams(max_tokens=100)))
    for token in answer: ...
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark_jax.decoding.batching import Batch, Event
from dspark_jax.decoding.generate import Generator
from dspark_jax.decoding.requests import Completion, Request
from dspark_jax.decoding.sampling import Mode

logger = logging.getLogger(__name__)
Listener = Callable[[Event], None]


class EngineClosed(RuntimeError):
    """The engine takes no requests (any more), or ended before this one did."""


class EngineFull(RuntimeError):
    """As many requests wait as may."""


@dataclass
class Answer:
    """A submitted request: iterate over it for its tokens (once), ask for its `result`, or `cancel` it.

    All methods may be called from any thread.
    """

    request: Request
    _engine: Engine = field(repr=False)
    _listener: Listener | None = field(default=None, repr=False)
    _ticket: int | None = field(default=None, repr=False)  # the batch's, once it has the request
    _pieces: queue.SimpleQueue[list[int] | None] = field(default_factory=queue.SimpleQueue, repr=False)
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)
    _completion: Completion | None = field(default=None, repr=False)
    _error: BaseException | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[int]:
        for piece in self.pieces():
            yield from piece

    def pieces(self) -> Iterator[list[int]]:
        """Tokens as they are committed, some at a time; ends with the request.

        Raises:
            EngineClosed: the engine ended before the request.
        """
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._pieces.put(None)  # whoever asks again ends too
        self._raise()

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end.

        Raises:
            TimeoutError: not within `timeout` seconds. EngineClosed: the engine ended before the request.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"request {self.request.id!r}: not ended after {timeout} s")
        self._raise()
        assert self._completion is not None  # set with `_ended`
        return self._completion

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Ends the request within one iteration, with finish reason "cancelled" and the tokens that were committed.

        One that has ended stays as it is.
        """
        self._engine._order(self, "cancel")

    def _raise(self) -> None:
        if self._error is not None:
            raise EngineClosed(f"request {self.request.id!r}: the engine ended before it") from self._error

    def _take(self, event: Event) -> None:
        if event.tokens:
            self._pieces.put(event.tokens)
        if event.completion is not None:
            self._completion = event.completion
            self._finish()
        if self._listener:
            self._listener(event)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._finish()
        if self._listener:
            self._listener(Event(self._ticket or 0, [], failed=error))

    def _finish(self) -> None:
        self._ended.set()
        self._pieces.put(None)


@dataclass
class Engine:
    """Runs a `Generator`'s batch in a thread of its own.

    Args:
        generator: models and settings; the engine alone may use it while it runs.
        rounds: decoding rounds between two looks of the host: tokens come in pieces of so many rounds.
        max_waiting: requests that may wait for a slot; None: any number.
    """

    generator: Generator
    rounds: int = 4
    max_waiting: int | None = None
    batch: Batch = field(init=False)

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds {self.rounds}: must be at least 1")
        self.batch = Batch(self.generator)
        self._orders: list[tuple[str, Answer]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = ""  # "drain": finish what is there; "stop": end it
        self._error: BaseException | None = None
        self._answers: dict[int, Answer] = {}  # by ticket

    # --- callers ---

    def start(self) -> Engine:
        """Starts the thread; once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        return self

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self.close(drain=kind is None)

    def submit(self, request: Request, listener: Listener | None = None) -> Answer:
        """Queues a request; requests get slots in the order in which they were submitted.

        Args:
            listener: called in the engine's thread with new tokens (`Event`) and, at the end, the completion. It must
                be quick and not raise. Where the engine ends before the request, the last event says why (`failed`).

        Raises:
            ValueError: a request that can never run (see `Generator.check`). EngineFull: too many wait.
            EngineClosed: the engine was closed, or has failed.
        """
        self.generator.check(request)
        answer = Answer(request, self, listener)
        with self._changed:
            if self._error is not None:
                raise EngineClosed("the engine has failed") from self._error
            if self._closing:
                raise EngineClosed("the engine is closed")
            if self.max_waiting is not None and self._waiting >= self.max_waiting:
                raise EngineFull(f"{self._waiting} requests wait already, at most {self.max_waiting} may")
            self._order(answer, "submit")
        return answer

    def warm_up(
        self, longest: int, longest_prompt: int, modes: Sequence[Mode] = ("greedy", "plain", "filtered")
    ) -> None:
        """Compiles, ahead of the first request, all programs for texts of `longest` tokens (prompt and answer) and
        prompts of up to `longest_prompt`; to be called before `start`.

        Args:
            modes: sampling programs: greedy, temperature alone, and filtered (top-k, top-p, min-p).
        """
        if self._thread is not None:
            raise RuntimeError("warm_up: the engine runs already, call it before start")
        end = min(longest + self.generator.block_size + 1, self.generator.context + self.generator.block_size + 1)
        prompts = range(1, min(longest_prompt, longest) + 1)
        with self.generator.in_mesh():
            self.batch.warm_up(end, prompts, modes)

    @property
    def _waiting(self) -> int:
        """Requests that have no slot yet."""
        with self._changed:
            return len(self.batch.queue) + sum(what == "submit" for what, _ in self._orders)

    @property
    def load(self) -> tuple[int, int]:
        """Requests in slots, and requests that wait."""
        return self.batch.active, self._waiting

    @property
    def alive(self) -> bool:
        """Whether the engine runs and takes requests."""
        return self._thread is not None and self._thread.is_alive() and not self._closing and self._error is None

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Takes no more requests and ends: `drain` finishes those that are there, otherwise they are cancelled.

        Raises:
            TimeoutError: the thread did not end within `timeout` seconds.
        """
        with self._changed:
            self._closing = "drain" if drain and self._closing != "stop" else "stop"
            self._changed.notify()
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine did not end within {timeout} s")

    # --- the thread ---

    def _order(self, answer: Answer, what: str) -> None:
        with self._changed:
            self._orders.append((what, answer))
            self._changed.notify()

    def _run(self) -> None:
        try:
            with self.generator.in_mesh():
                while self._wait_for_work():
                    for event in self.batch.advance(self.rounds):
                        self._deliver(event)
        except BaseException as error:
            self._error = error
            logger.exception("the engine has failed: its requests end, and it takes no more")
        finally:
            self._abandon()

    def _wait_for_work(self) -> bool:
        """Takes the callers' orders, waiting for some while nothing is to be done; False: the engine ends."""
        while True:
            with self._changed:
                if not self._orders and not self.batch.busy and not self._closing:
                    self.batch.idles()
                    self._changed.wait()
                for what, answer in self._orders:
                    self._obey(what, answer)
                self._orders = []
            if self._closing == "stop":
                for ticket in list(self._answers):
                    self.batch.cancel(ticket)
            if self.batch.busy:
                return True
            if self._closing and not self._orders:
                return False

    def _obey(self, what: str, answer: Answer) -> None:
        if what == "submit":
            answer._ticket = self.batch.add(answer.request)
            self._answers[answer._ticket] = answer
        elif answer._ticket is not None:
            self.batch.cancel(answer._ticket)

    def _deliver(self, event: Event) -> None:
        answer = self._answers[event.ticket]
        if event.completion is not None:
            del self._answers[event.ticket]
        answer._take(event)

    def _abandon(self) -> None:
        """Tells those whose requests will not end any more."""
        error = self._error or EngineClosed("closed")
        with self._changed:
            left = [*self._answers.values(), *(answer for what, answer in self._orders if what == "submit")]
            self._orders, self._closing = [], self._closing or "stop"
        for answer in left:
            answer._fail(error)
