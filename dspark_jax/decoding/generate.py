"""Offline generation: requests of any length through R slots, with the round loop on the device.

The host only admits prompts, reads what was committed, and refills slots that ended. Shapes come from small sets
(prompt buckets, cache capacities, row buckets), so after warm-up nothing is compiled again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.sampling import Mode, Sampling, SamplingParams
from dspark_jax.decoding.schedule import Schedule, buckets_for
from dspark_jax.decoding.state import DecodeState, NewRequests, Program, admit, init_state, prefill, with_capacity
from dspark_jax.decoding.step import run_rounds
from dspark_jax.drafters.interface import bind
from dspark_jax.models.transformer import head_weight

_SHORTEST = 32  # prompts are padded to powers of two from here on, tokens
_GROUP = 8  # prompts of one padded length that are prefilled together, where so many wait
_SMALLEST = 256  # caches begin with this capacity and grow, by a half or a third each time
_MODES: tuple[Mode, ...] = ("greedy", "plain", "filtered")

_prefill = jax.jit(prefill, static_argnames=("program",))
_admit = jax.jit(admit, static_argnames=("program",), donate_argnames=("state",))
_run_rounds = jax.jit(run_rounds, static_argnames=("program", "buckets"), donate_argnames=("state",))


@dataclass(frozen=True)
class Request:
    """One prompt, tokenised, with its sampling settings."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()


@dataclass
class Completion:
    """What came out of one request.

    Attributes:
        token_ids: generated tokens, the stop token included. finish_reason: "stop" or "length".
        rounds: steps after the prefill. drafted, verified, accepted: draft tokens proposed, looked at by the target,
            and committed. seconds: wall time from admission to the end, prefill included.
    """

    id: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    rounds: int
    drafted: int
    verified: int
    accepted: int
    seconds: float

    @property
    def accepted_length(self) -> float:
        """Committed tokens per round, bonus token included; the token from prefill belongs to no round."""
        return (len(self.token_ids) - 1) / self.rounds if self.rounds else 0.0


@dataclass
class _Slot:
    """A request at work in a slot."""

    request: Request
    began: float
    length: int = 1  # tokens generated, when the host last looked
    sent: int = 0
    cancelled: bool = False


@dataclass
class _Counts:
    """A host copy of the small arrays of a state."""

    tokens: np.ndarray
    length: np.ndarray
    active: np.ndarray
    stopped: np.ndarray
    counters: Any


def capacity_for(tokens: int) -> int:
    """The cache capacity that a program is compiled for: 256, 384, 512, 768, 1024, 1536 ... tokens."""
    size = _SMALLEST
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def padded_length(tokens: int) -> int:
    """The prompt length that a program is compiled for: the next power of two, at least 32 tokens."""
    return max(_SHORTEST, 1 << (tokens - 1).bit_length())


@dataclass
class Generator:
    """Generates with a target and, optionally, a drafter.

    Args:
        target: `checkpoints.load.Target`, or anything with `.config` and `.params` (and `.tokenizer`, if `stop_ids` is
            not given). drafter: `Drafter`, or None for plain decoding.
        batch_size: R, requests decoded together. schedule, threshold: see `decoding.schedule`.
        seed: of requests that bring none. stop_ids: tokens that end a request; the tokenizer's by default.
        stream_rounds: steps between two looks of the host, when somebody listens.
        buckets: row counts to compile; by default R, doubling, up to R * (gamma + 1).

    Raises:
        ValueError: target and drafter do not belong together, or a bad setting.
    """

    target: Any
    drafter: Any = None
    batch_size: int = 1
    schedule: Schedule = "fixed"
    threshold: float = 0.5
    seed: int = 0
    stop_ids: tuple[int, ...] | None = None
    stream_rounds: int = 4
    buckets: tuple[int, ...] | None = None
    _draft_params: dict = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size {self.batch_size}: must be at least 1")
        if self.schedule not in ("fixed", "threshold"):
            raise ValueError(f"schedule {self.schedule!r}: must be fixed or threshold")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold}: a probability, must lie in [0, 1]")
        self._draft_params = {}
        if self.drafter is not None:
            self.drafter.config.check_target(self.target.config)
            if self.schedule == "threshold" and not self.drafter.config.confidence:
                raise ValueError("schedule threshold: this drafter has no confidence head; use fixed")
            params = self.target.params
            self._draft_params = bind(self.drafter.params, params["embed"], head_weight(params))
        if self.stop_ids is None:
            self.stop_ids = tuple(self.target.tokenizer.eos_ids)
        block = self.drafter.config.block_size if self.drafter is not None else 0
        self.buckets = tuple(self.buckets or buckets_for(self.batch_size, block))
        if min(self.buckets) < self.batch_size or self.buckets[-1] < self.batch_size * (block + 1):
            full = self.batch_size * (block + 1)
            raise ValueError(f"buckets {self.buckets}: must hold {self.batch_size} to {full} rows")

    def program(self, mode: Mode) -> Program:
        """The static description of the program that serves `mode`."""
        dtype = jnp.float32 if jax.default_backend() == "cpu" else self.target.params["embed"].dtype
        drafter = self.drafter.config if self.drafter is not None else None
        return Program(self.target.config, drafter, self.schedule, mode, tuple(self.stop_ids or ()), dtype)

    def check(self, request: Request) -> None:
        """Refuses a request that cannot run.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or a prompt that leaves no room in the context.
        """
        config, count = self.target.config, len(request.prompt_ids)
        if count == 0:
            raise ValueError(f"request {request.id!r}: the prompt is empty; it must have at least one token")
        bad = [t for t in request.prompt_ids if not 0 <= t < config.vocab_size]
        if bad:
            raise ValueError(
                f"request {request.id!r}: token {bad[0]} is outside the vocabulary 0..{config.vocab_size - 1}"
            )
        if count >= config.max_positions:
            raise ValueError(
                f"request {request.id!r}: the prompt has {count} tokens, the target's context has "
                f"{config.max_positions}; at most {config.max_positions - 1} leave room for one token"
            )

    def generate(
        self, requests: Iterable[Request], on_tokens: Callable[[str, list[int]], bool | None] | None = None
    ) -> Iterator[Completion]:
        """Runs requests, giving completions as they end.

        Args:
            requests: read in windows; longest prompts are not waited for.
            on_tokens: called with a request's id and its newly committed tokens; returning True ends that request.
        """
        return self._run(requests, on_tokens).completions()

    def warm_up(self, requests: Iterable[Request]) -> None:
        """Compiles what generating for `requests` will need; generates nothing."""
        self._run(requests, None).warm_up()

    def _run(self, requests: Iterable[Request], on_tokens: Callable[[str, list[int]], bool | None] | None) -> _Run:
        todo = list(requests)
        for request in todo:
            self.check(request)
        mode = _MODES[max((_MODES.index(r.sampling.mode) for r in todo), default=0)]
        return _Run(self, self.program(mode), todo, on_tokens)


@dataclass
class _Run:
    """One call of `Generator.generate`: the queue, the slots and the device state."""

    generator: Generator
    program: Program
    queue: list[Request]
    on_tokens: Callable[[str, list[int]], bool | None] | None
    slots: dict[int, _Slot] = field(default_factory=dict)
    numbered: int = 0  # requests admitted

    def completions(self) -> Iterator[Completion]:
        g = self.generator
        state = self.empty_state()
        while self.queue or self.slots:
            state = self.fit(self.refill(state))
            rounds = g.stream_rounds if self.on_tokens else 1 << 30
            state = self.rounds(state, rounds)
            counts = self.look(state)
            for slot, work in self.slots.items():
                work.length = int(counts.length[slot])
            state = self.stream(state, counts)
            yield from self.retire(counts)

    def empty_state(self) -> DecodeState:
        """Empty slots with room for the longest answer of the queue; caches come when requests do."""
        g, longest = self.generator, max((self.limit(r) for r in self.queue), default=1)
        return init_state(self.program, g.batch_size, 0, -(-longest // 64) * 64, g.threshold)

    def rounds(self, state: DecodeState, most: int) -> DecodeState:
        """Up to `most` steps on the device; fewer where a slot could be refilled or the caches are too small."""
        g = self.generator
        return _run_rounds(
            g.target.params,
            g._draft_params,
            state,
            jnp.int32(most),
            jnp.bool_(bool(self.queue)),
            program=self.program,
            buckets=g.buckets,
        )

    def warm_up(self) -> None:
        """Compiles every program that the queue can need: for each prompt length, group and cache capacity."""
        g = self.generator
        state = self.empty_state()
        groups = []
        for size in sorted({self.padded(r) for r in self.queue}):
            alike = [r for r in self.queue if self.padded(r) == size]
            for count in (1, _GROUP) if len(alike) >= _GROUP <= g.batch_size else (1,):
                new = self.new_requests(alike[:count], [g.batch_size] * count, size)  # nobody's slots
                groups.append((size, new, _prefill(g.target.params, g._draft_params, new, program=self.program)))
        ends = (len(r.prompt_ids) + self.limit(r) + self.program.slots for r in self.queue)
        most = max(*ends, *(size for size, _, _ in groups), 1)
        capacities = [capacity_for(1)]
        while capacities[-1] < most:
            capacities.append(capacity_for(capacities[-1] + 1))
        for i, capacity in enumerate(capacities):
            for smaller in (0, *capacities[:i]):  # changes of size, both ways
                state = with_capacity(with_capacity(state, smaller, self.program), capacity, self.program)
            for size, new, ready in groups:
                if size <= capacity:
                    state = _admit(state, new, ready, program=self.program)
            state = self.rounds(state, 0)
        jax.block_until_ready(state)

    def limit(self, request: Request) -> int:
        """Tokens that this request may generate: its own limit, within the target's context."""
        return min(request.sampling.max_tokens, self.generator.target.config.max_positions - len(request.prompt_ids))

    def fit(self, state: DecodeState, prompt: int = 0) -> DecodeState:
        """Caches with room for the next step of every slot at work, and for padded prompts of `prompt` tokens.

        Attention reads the whole of a cache, so caches grow with the texts. Each change copies them, so they shrink to
        half or less only.
        """
        ends = (len(w.request.prompt_ids) + w.length - 1 + self.program.slots for w in self.slots.values())
        wanted = capacity_for(max(prompt, *ends, 1))
        now = state.target_cache[0].keys.shape[1]
        return state if wanted == now or now // 2 < wanted < now else with_capacity(state, wanted, self.program)

    def padded(self, request: Request) -> int:
        return padded_length(len(request.prompt_ids))

    def refill(self, state: DecodeState) -> DecodeState:
        """Admits queued requests into free slots, a group of equal padding at a time."""
        g = self.generator
        free = [i for i in range(g.batch_size) if i not in self.slots]
        while free and self.queue:
            size = self.padded(self.queue[0])
            alike = [i for i, r in enumerate(self.queue[: len(free)]) if self.padded(r) == size]
            alike = alike[: _GROUP if len(alike) >= _GROUP else 1]
            group = [self.queue[i] for i in alike]
            self.queue = [r for i, r in enumerate(self.queue) if i not in alike]
            slots = [free.pop(0) for _ in group]
            now = time.perf_counter()
            new = self.new_requests(group, slots, size)
            ready = _prefill(g.target.params, g._draft_params, new, program=self.program)
            self.slots |= {slot: _Slot(request, now) for slot, request in zip(slots, group, strict=True)}
            state = _admit(self.fit(state, size), new, ready, program=self.program)
        return state

    def new_requests(self, group: list[Request], slots: list[int], size: int) -> NewRequests:
        ids = np.zeros((len(group), size), np.int32)
        for row, request in enumerate(group):
            ids[row, : len(request.prompt_ids)] = request.prompt_ids
        settings = [r.sampling for r in group]
        keys = np.stack([self.key(s) for s in settings])
        as_floats = lambda name: jnp.asarray([getattr(s, name) for s in settings], jnp.float32)  # noqa: E731
        as_ints = lambda values: jnp.asarray(list(values), jnp.int32)  # noqa: E731
        sampling = Sampling(
            as_floats("temperature"),
            as_floats("top_p"),
            as_ints(s.top_k for s in settings),
            as_floats("min_p"),
            jnp.asarray(keys),
        )
        lengths = as_ints(len(r.prompt_ids) for r in group)
        return NewRequests(jnp.asarray(ids), lengths, as_ints(slots), as_ints(map(self.limit, group)), sampling)

    def key(self, settings: SamplingParams) -> np.ndarray:
        """Raw key data: the request's own seed, or the generator's with the request's number (so that they differ)."""
        self.numbered += 1
        if settings.seed is not None:
            words = (settings.seed & 0xFFFFFFFF, (settings.seed >> 32) & 0x7FFFFFFF)
        else:
            words = (self.generator.seed & 0xFFFFFFFF, 0x80000000 | self.numbered)
        return np.asarray(words, np.uint32)

    @staticmethod
    def look(state: DecodeState) -> _Counts:
        return _Counts(*jax.device_get((state.tokens, state.length, state.active, state.stopped, state.counters)))

    def stream(self, state: DecodeState, counts: _Counts) -> DecodeState:
        """Hands new tokens to the listener, and ends the requests that it has enough of."""
        if not self.on_tokens:
            return state
        wanted = np.ones(self.generator.batch_size, bool)
        for slot, work in self.slots.items():
            new = counts.tokens[slot, work.sent : counts.length[slot]].tolist()
            work.sent += len(new)
            if new and self.on_tokens(work.request.id, new):
                work.cancelled = True
                wanted[slot] = False
        if wanted.all():
            return state
        counts.active = counts.active & wanted
        return state._replace(active=state.active & jnp.asarray(wanted))

    def retire(self, counts: _Counts) -> Iterator[Completion]:
        now = time.perf_counter()
        for slot in [s for s in sorted(self.slots) if not counts.active[s]]:
            work = self.slots.pop(slot)
            reason = "stop" if counts.stopped[slot] or work.cancelled else "length"
            rounds, drafted, verified, accepted = (int(c[slot]) for c in counts.counters)
            tokens = counts.tokens[slot, : counts.length[slot]].tolist()
            prompt_tokens, seconds = len(work.request.prompt_ids), now - work.began
            yield Completion(
                work.request.id, tokens, reason, prompt_tokens, rounds, drafted, verified, accepted, seconds
            )
