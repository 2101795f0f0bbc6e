"""Measures the throughput curve: seconds of a round in every bucket, with and without its draft, and of prefills.

The very program that decodes is timed, on a made-up state: all slots active, caches filled to about the middle, limits
out of reach. Its buckets are forced in turn, forwards and then backwards, so that a machine whose speed drifts slows
all of them alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.admission import NewRequests
from dspark_jax.decoding.batching import capacity_for, padded_length, run_many, run_prefill
from dspark_jax.decoding.budget import PLAIN, make_costs
from dspark_jax.decoding.curve import Point, Prefill
from dspark_jax.decoding.generate import Generator
from dspark_jax.decoding.placement import placed
from dspark_jax.decoding.sampling import Mode, Sampling, raw_key
from dspark_jax.decoding.schedule import Schedule, buckets_for
from dspark_jax.decoding.state import DecodeState, Program, init_state
from dspark_jax.profiling.curves import CurveKey, MeasuredPoint, key_of

SLOTS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 512)
_SPAN = 128  # positions that a call moves on by, at most
_LEAST_ROUNDS = 4  # of a call: an engine takes some between two looks, and a call has its own cost
# temperature, top-p, top-k of the requests of each sampling program
_SAMPLING: dict[Mode, tuple[float, float, int]] = {
    "greedy": (0.0, 1.0, 0),
    "plain": (1.0, 1.0, 0),
    "filtered": (0.7, 0.8, 20),
}


@dataclass(frozen=True)
class Timing:
    """How long and how often is measured.

    Attributes:
        repeats: timings of each bucket; a curve holds their medians. seconds: that a timing lasts at least, about.
    """

    repeats: int = 9
    seconds: float = 0.05

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats {self.repeats}: must be at least 1")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds {self.seconds}: of a timing, must be positive")


@dataclass(frozen=True)
class Models:
    """What is profiled.

    Attributes:
        target: `checkpoints.load.Target`, or anything with `.config` and `.params` (and `.tokenizer`, if `stop_ids` is
            not given). drafter: `Drafter`, or None for plain decoding only. mode: the sampling program.
        mesh: devices that the parameters lie on; None: the default device. stop_ids: as `Generator`'s.
    """

    target: Any
    drafter: Any = None
    mode: Mode = "plain"
    mesh: jax.sharding.Mesh | None = None
    stop_ids: tuple[int, ...] | None = None

    @property
    def key(self) -> CurveKey:
        """What the curve will be one of."""
        config = self.drafter.config if self.drafter is not None else None
        return key_of(self.target.config, config, self.target.params["embed"].dtype, self.mode, self.mesh)

    @property
    def block(self) -> int:
        """gamma, drafts of a round; 0 without a drafter."""
        return self.drafter.config.block_size if self.drafter is not None else 0

    @property
    def positions(self) -> int:
        """Positions that target and drafter were made for, in tokens."""
        configs = [m.config for m in (self.target, self.drafter) if m is not None]
        return int(min(config.max_positions for config in configs))

    def generator(self, slots: int) -> Generator:
        """A generator of R `slots`, for its parameters and programs."""
        budgets = self.drafter is None or self.drafter.config.confidence
        schedule: Schedule = "causal" if budgets else "fixed"  # a generator has budgets only for confidences
        return Generator(self.target, self.drafter, slots, schedule, stop_ids=self.stop_ids, mesh=self.mesh)

    def check(self, slots: Sequence[int], contexts: Sequence[int]) -> None:
        """Refuses sizes that no program has.

        Raises:
            ValueError: no slots; a context that is no cache capacity, or larger than the models can use.
        """
        for size in slots:
            if size < 1:
                raise ValueError(f"slots {size}: must be at least 1")
        most = capacity_for(self.positions)
        for context in contexts:
            right = capacity_for(max(context, 1))
            if context != right:
                raise ValueError(f"contexts {context}: caches have {right} tokens there, give that")
            if context > most:
                raise ValueError(f"contexts {context}: the models have {self.positions} positions, at most {most}")


# --- rounds ---


class Taken(NamedTuple):
    """What timed calls did: `seconds`, and numbers of `rounds`, of those with a draft (`drafted`), and by bucket."""

    seconds: float
    rounds: int
    drafted: int
    by_bucket: tuple[int, ...]


def span(context: int, positions: int, width: int) -> tuple[int, int]:
    """Where a call begins, and its rounds at most: in the middle of the cache, of at most a half of it.

    Args:
        context: T, tokens. positions: that the models were made for. width: most tokens that a round commits.
    """
    room = min(context, positions) - width  # where the last round may begin
    most = max(min(room // 2, _SPAN) // width, 1)
    return max((room - most * width) // 2, 0), most


@partial(jax.jit, donate_argnames=("state",))
def _put_back(state: DecodeState, start: Any) -> DecodeState:
    """All slots active again, at position `start`, with one token generated."""
    ints = lambda value: jnp.full_like(state.start, value)  # noqa: E731
    back = state._replace(
        anchor=ints(1),
        start=ints(start),
        length=ints(1),
        limit=ints(state.tokens.shape[1]),
        active=jnp.ones_like(state.active),
        stopped=jnp.zeros_like(state.stopped),
    )
    return placed(back, state.anchor.shape[0])


@dataclass
class Rounds:
    """Runs rounds of R slots with caches of T tokens in a forced bucket.

    Attributes:
        buckets: row counts. most: rounds of one call at most.
    """

    models: Models
    slots: int
    context: int
    buckets: tuple[int, ...] = field(init=False)
    most: int = field(init=False)
    _generator: Generator = field(init=False, repr=False)
    _program: Program = field(init=False, repr=False)
    _start: int = field(init=False, repr=False)
    _state: DecodeState = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = self.models.generator(self.slots)
        self._program = replace(self._generator.program(self.models.mode), schedule="causal")
        self.buckets = buckets_for(self.slots, self.models.block, fine=self.models.drafter is not None)
        self._start, self.most = span(self.context, self.models.positions, self._program.slots)
        with self._generator.in_mesh():
            self._state = jax.jit(self._empty)()

    def _empty(self) -> DecodeState:
        state = init_state(self._program, self.slots, self.context)
        sampling = jax.tree.map(jnp.asarray, _sampling(self.models.mode, self.slots))
        return placed(state._replace(sampling=sampling), self.slots)

    @property
    def forces(self) -> tuple[int, ...]:
        """What can be timed: every bucket with its draft, and `PLAIN`; that alone without a drafter."""
        return (*range(len(self.buckets)), PLAIN) if self.models.drafter is not None else (PLAIN,)

    @property
    def state(self) -> DecodeState:
        """As the last call left it."""
        return self._state

    def run(self, force: int, rounds: int, calls: int = 1) -> Taken:
        """Times `calls` calls of up to `rounds` rounds, each from the middle of the caches on.

        Rounds are fewer where all slots met a stop token before.
        """
        g, all_totals = self._generator, []
        with g.in_mesh():
            costs = make_costs(None, len(self.buckets), force)
            start, count, never = (np.asarray(x) for x in (np.int32(self._start), np.int32(rounds), False))
            jax.block_until_ready((self._state, costs))
            began = time.perf_counter()
            for _ in range(calls):
                state = _put_back(self._state, start)
                self._state, totals = run_many(
                    g.target.params, g.draft_params, state, count, never, costs,
                    program=self._program, buckets=self.buckets,
                )  # fmt: skip
                all_totals.append(totals)
            jax.block_until_ready(self._state)
            seconds = time.perf_counter() - began
        rounds, drafted, by_bucket = (
            np.sum([getattr(totals, name) for totals in all_totals], axis=0)
            for name in ("rounds", "drafted", "by_bucket")
        )
        return Taken(seconds, int(rounds), int(drafted), tuple(by_bucket.tolist()))


def _sampling(mode: Mode, requests: int) -> Any:
    """The settings of `requests` requests without seeds of their own, for a sampling program; host arrays."""
    temperature, top_p, top_k = _SAMPLING[mode]
    floats = lambda value: np.full(requests, value, np.float32)  # noqa: E731
    keys = np.asarray([raw_key(number, own=False) for number in range(requests)], np.uint32)
    arrays: Any = floats(temperature), floats(top_p), np.full(requests, top_k, np.int32), floats(0), keys
    return Sampling(*arrays)


def measure_point(models: Models, slots: int, context: int, timing: Timing | None = None) -> MeasuredPoint:
    """Times a round of R `slots` with caches of `context` tokens in every bucket.

    Args:
        timing: how long and how often; `Timing()` by default.

    Raises:
        ValueError: as `Models.check`.
    """
    timing = timing or Timing()
    models.check((slots,), (context,))
    bench = Rounds(models, slots, context)
    once = {}
    for force in bench.forces:
        bench.run(force, 1)  # the first one compiles
        once[force] = bench.run(force, 1).seconds
    rounds = min(max(math.ceil(timing.seconds / min(once.values())), _LEAST_ROUNDS), bench.most)
    calls = {}
    for force in bench.forces:
        calls[force] = max(math.ceil(timing.seconds / bench.run(force, rounds).seconds), 1)
    samples: dict[int, list[float]] = {force: [] for force in bench.forces}
    for repeat in range(timing.repeats):
        for force in bench.forces[:: 1 if repeat % 2 == 0 else -1]:
            taken = bench.run(force, rounds, calls[force])
            samples[force].append(taken.seconds / taken.rounds)
    medians = {force: float(np.median(seconds)) for force, seconds in samples.items()}
    spread = {force: _spread(seconds) for force, seconds in samples.items()}
    drafted = bench.forces[:-1] or (PLAIN,)  # without a drafter a round costs what a plain one does
    point = Point(slots, context, bench.buckets, tuple(medians[f] for f in drafted), medians[PLAIN])
    return MeasuredPoint(point, tuple(spread[f] for f in (*drafted, PLAIN)), timing.repeats)


def _spread(seconds: Sequence[float]) -> float:
    """Interquartile range by the median."""
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return float((high - low) / middle)


# --- prefills ---


def prompt_lengths(longest: int, positions: int) -> tuple[int, ...]:
    """Padded lengths of prompts of up to `longest` tokens that leave room for a token in a context of `positions`."""
    longest = min(longest, positions - 1)
    lengths = [padded_length(1)]
    while lengths[-1] < longest:
        lengths.append(padded_length(lengths[-1] + 1))
    return tuple(lengths)


def measure_prefills(models: Models, lengths: Sequence[int], timing: Timing | None = None) -> tuple[Prefill, ...]:
    """Times the prefill of one prompt of each padded length, target and drafter together.

    Args:
        lengths: as `prompt_lengths`. timing: how long and how often.
    """
    timing = timing or Timing()
    generator = models.generator(1)
    cases = {length: _prefill_case(models, generator, length) for length in lengths}
    calls = {}
    for length, case in cases.items():
        case(1)
        calls[length] = max(math.ceil(timing.seconds / case(1)), 1)
    samples: dict[int, list[float]] = {length: [] for length in lengths}
    for repeat in range(timing.repeats):
        for length in lengths[:: 1 if repeat % 2 == 0 else -1]:
            samples[length].append(cases[length](calls[length]) / calls[length])
    return tuple(Prefill(length, float(np.median(samples[length]))) for length in lengths)


def _prefill_case(models: Models, generator: Generator, length: int) -> Callable[[int], float]:
    """Takes a number of calls, and gives the seconds that they took."""
    program = generator.entry_program()
    ids = np.arange(length, dtype=np.int32)[None] % models.target.config.num_tokens
    ints = lambda value: np.full((1,), value, np.int32)  # noqa: E731
    arrays: Any = ids, ints(min(length, models.positions - 1)), ints(0), ints(2), _sampling(models.mode, 1)
    new = NewRequests(*arrays)

    def run(calls: int) -> float:
        with generator.in_mesh():
            began = time.perf_counter()
            for _ in range(calls):
                done = run_prefill(generator.target.params, generator.draft_params, new, program=program)
            jax.block_until_ready(done)
            return time.perf_counter() - began

    return run
