"""Who sends requests, and when: so many clients, an open stream of strangers, or a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["closed", "open", "file"]


@dataclass(frozen=True)
class Load:
    """What an engine has to serve.

    Attributes:
        kind: `closed`, so many clients, each of which asks again as soon as it has its answer; `open`, Poisson arrivals
            at so many requests a second; `file`, offline generation: all requests are there at once, so many slots work
            them off, and the host looks only when one of them has ended.
        value: clients, requests per second, or slots.
        requests: answers that are measured. warm_up: answers before that (of a file: 0).

    Raises:
        ValueError: no positive numbers, or a part of a client.
    """

    kind: Kind
    value: float
    requests: int
    warm_up: int = 0

    def __post_init__(self) -> None:
        whole = self.kind != "open"
        if not 0 < self.value < float("inf") or whole and (self.value < 1 or self.value != int(self.value)):
            least = "a whole number of at least 1" if whole else "a positive number of requests per second"
            raise ValueError(f"load {self.value:g}: must be {least}")
        if self.requests < 1 or self.warm_up < 0:
            raise ValueError(f"{self.requests} requests after {self.warm_up} for warm-up: must be at least 1 and 0")
        if self.kind == "file" and self.warm_up:
            raise ValueError(f"warm_up {self.warm_up}: a file is measured whole, must be 0")


class Waiting(NamedTuple):
    """A request in the queue: the number of the recorded one that it repeats, and the second at which it came."""

    request: int
    came: float


class Source:
    """The requests of a load, drawn from Q recorded ones in shuffled passes, each once a pass.

    Attributes:
        waiting: the queue, first come first. next_arrival: second of the next one, of an open load.
    """

    def __init__(self, load: Load, recorded: int, draws: np.random.Generator) -> None:
        self.load, self.recorded, self.draws = load, recorded, draws
        self.waiting: list[Waiting] = []
        self._order: list[int] = []
        self.next_arrival = self._gap() if load.kind == "open" else float("inf")
        if load.kind != "open":
            self._ask(load.requests if load.kind == "file" else int(load.value), 0.0)

    def _gap(self) -> float:
        return float(self.draws.exponential(1 / self.load.value))

    def _ask(self, count: int, second: float) -> None:
        for _ in range(count):
            if not self._order:
                self._order = self.draws.permutation(self.recorded).tolist()
            self.waiting.append(Waiting(self._order.pop(), second))

    def look(self, second: float) -> None:
        """Takes in what has come by now."""
        while self.next_arrival <= second:
            self._ask(1, self.next_arrival)
            self.next_arrival += self._gap()

    def answered(self, count: int, second: float) -> None:
        """`count` answers have been handed out."""
        if self.load.kind == "closed":
            self._ask(count, second)

    def take(self, places: list[int]) -> list[Waiting]:
        """Removes the waiting requests at `places` of the queue."""
        taken = [self.waiting[i] for i in places]
        self.waiting = [w for i, w in enumerate(self.waiting) if i not in places]
        return taken
