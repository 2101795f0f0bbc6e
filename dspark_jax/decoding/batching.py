"""Continuous batching: requests of any length and sampling settings come and go in slots of one device state.

An iteration (`Batch.advance`) admits, takes in prompts, decodes some rounds, looks, and retires. Slots and caches grow
and shrink with what is used, in steps from small sets, so after warm-up nothing is compiled again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.admission import Chunk, NewRequests, Prefilled, admit, prefill, prefill_chunk
from dspark_jax.decoding.placement import placed
from dspark_jax.decoding.requests import Completion, Request, mode_of
from dspark_jax.decoding.resize import with_capacity, with_slots
from dspark_jax.decoding.rounds import Totals, run_rounds
from dspark_jax.decoding.sampling import Mode, raw_key, sampling_of
from dspark_jax.decoding.state import DecodeState, Program, init_caches, init_state
from dspark_jax.decoding.statistics import Statistics
from dspark_jax.decoding.trace import RoundTrace, first_trace, round_traces

if TYPE_CHECKING:
    from dspark_jax.decoding.generate import Generator

_SHORTEST = 32  # prompts are padded to powers of two from here on, tokens
GROUP = 8  # prompts of one padded length that are prefilled together, where so many wait
_SMALLEST = 256  # caches begin with this capacity and grow, by a half or a third each time
PATIENCE = 16  # iterations in which fewer slots would have done, before their number shrinks


def _prefill_in_place(target_params, draft_params, new, *, program):  # type: ignore[no-untyped-def]
    return placed(prefill(target_params, draft_params, new, program=program), new.ids.shape[0])


def _chunk_in_place(target_params, draft_params, caches, chunk, sampling, *, program):  # type: ignore[no-untyped-def]
    done = prefill_chunk(target_params, draft_params, caches, chunk, sampling, program=program)
    return placed(done, chunk.ids.shape[0])


def _admit_in_place(state, new, ready, *, program):  # type: ignore[no-untyped-def]
    return placed(admit(state, new, ready, program=program), state.anchor.shape[0])


def _rounds_in_place(target_params, draft_params, state, rounds, until_free, costs, *, program, buckets):  # type: ignore[no-untyped-def]
    requests = state.anchor.shape[0]
    state, totals = run_rounds(
        target_params, draft_params, state, rounds, until_free, costs, program=program, buckets=buckets
    )
    return placed(state, requests), totals


run_prefill = jax.jit(_prefill_in_place, static_argnames=("program",))
run_chunk = jax.jit(_chunk_in_place, static_argnames=("program",), donate_argnames=("caches",))
run_admit = jax.jit(_admit_in_place, static_argnames=("program",), donate_argnames=("state",))
run_many = jax.jit(_rounds_in_place, static_argnames=("program", "buckets"), donate_argnames=("state",))


def _host(values: Any, dtype: Any = np.int32) -> Any:
    """An array of the host, for programs that take device arrays as well."""
    return np.asarray(list(values) if isinstance(values, Iterable) else values, dtype)


def _padded(pieces: Sequence[Sequence[int]], size: int) -> Any:
    """Right-padded tokens, int32 `[P, size]`."""
    ids = np.zeros((len(pieces), size), np.int32)
    for row, piece in zip(ids, pieces, strict=True):
        row[: len(piece)] = piece
    return ids


_and = jax.jit(jnp.logical_and)  # one program, whatever the operands are


def capacity_for(tokens: int) -> int:
    """The cache capacity that a program is compiled for: 256, 384, 512, 768, 1024, 1536 ... tokens."""
    size = _SMALLEST
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def padded_length(tokens: int) -> int:
    """The prompt length that a program is compiled for: the next power of two, at least 32 tokens."""
    return max(_SHORTEST, 1 << (tokens - 1).bit_length())


def chunks_of(tokens: int, chunk: int) -> tuple[list[int], int]:
    """Pieces by which a prompt is taken in, of at most `chunk`: their padded lengths, and a capacity that holds all."""
    sizes = [chunk] * ((tokens - 1) // chunk)
    sizes.append(min(padded_length(tokens - chunk * len(sizes)), chunk))
    return sizes, capacity_for(sum(sizes))


@dataclass(frozen=True)
class Event:
    """What an iteration brought for one request: new `tokens`, the `completion` where it ended, and the `rounds` (and
    prefill) that brought them, where the generator traces. `failed`: the engine ended before the request."""

    ticket: int
    tokens: list[int]
    completion: Completion | None = None
    rounds: tuple[RoundTrace, ...] = ()
    failed: BaseException | None = None


@dataclass
class Work:
    """A request that waits or is at work in a slot."""

    request: Request
    ticket: int
    came: float  # time.perf_counter when it was added
    began: float = 0.0
    length: int = 1  # tokens generated, when the host last looked
    sent: int = 0
    rounds: int = 0  # when the host last looked
    cancelled: str = ""  # the finish reason of one that was ended from outside


@dataclass
class _Long:
    """A prompt that is taken in chunk by chunk, for `slot`."""

    work: Work
    slot: int
    caches: Any
    done: int = 0


class _Counts(NamedTuple):
    """The small arrays of a state, on the device or on the host."""

    tokens: Any
    length: Any
    active: Any
    stopped: Any
    counters: Any
    trace: Any


def _small(state: DecodeState) -> _Counts:
    return _Counts(state.tokens, state.length, state.active, state.stopped, state.counters, state.trace)


@dataclass
class Batch:
    """Requests, queued and in slots, and the device state; one thread at a time may use it.

    Args:
        generator: models and settings. least_mode: sampling program to run at least, so that requests that are greedy
            share the program of those that come later.
    """

    generator: Generator
    least_mode: Mode = "greedy"
    queue: deque[Work] = field(default_factory=deque)
    slots: dict[int, Work] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=Statistics)
    _state: DecodeState | None = None
    _long: _Long | None = None
    _numbered: int = 0
    _roomy: int = 0  # iterations in which fewer slots would have done
    _free_since: float | None = None  # when the device ran dry

    # --- requests ---

    def add(self, request: Request) -> int:
        """Queues a request (`Generator.check` has seen it); returns its ticket, which counts up from 1."""
        self._numbered += 1
        self.queue.append(Work(request, self._numbered, time.perf_counter()))
        self.statistics.submitted += 1
        return self._numbered

    def cancel(self, ticket: int, reason: str = "cancelled") -> None:
        """Ends a request at the next iteration; one that has ended already stays as it is."""
        long = [self._long.work] if self._long else []
        for work in (*self.queue, *long, *self.slots.values()):
            if work.ticket == ticket:
                work.cancelled = reason

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.queue or self.slots or self._long)

    @property
    def active(self) -> int:
        """Requests in slots."""
        return len(self.slots)

    def advance(self, rounds: int) -> list[Event]:
        """One iteration, of up to `rounds` rounds; what it brought, in the order of slots."""
        events = self._drop_cancelled()
        self._set_slots()
        events += self._take_in()
        if self.slots:
            mode = mode_of((w.request for w in self.slots.values()), self.least_mode)
            self._fit()
            totals = self._decode(min(rounds, self.generator.most_rounds), self.generator.program(mode))
            events += self._collect(totals)
        return events

    # --- sizes ---

    @property
    def state(self) -> DecodeState:
        """The device state; there is one as soon as a request is at work."""
        assert self._state is not None  # made by `_set_slots`
        return self._state

    def empty_state(self, slots: int) -> DecodeState:
        """Empty slots; caches come when requests do."""
        g = self.generator
        return g.on_mesh(init_state(g.program(), slots, 0, g.threshold), slots)

    @property
    def size(self) -> int:
        """R, slots that there are now."""
        return self._state.anchor.shape[0] if self._state is not None else 0

    def _set_slots(self) -> None:
        """As many slots as the requests need, out of the sizes that programs are compiled for."""
        sizes = self.generator.slot_sizes
        need = min(len(self.slots) + len(self.queue) + bool(self._long), sizes[-1])
        wanted = next(size for size in sizes if size >= need)
        if self._state is None:
            self._state = self.empty_state(wanted)
        self._roomy = self._roomy + 1 if wanted < self.size else 0
        if wanted > self.size or self._roomy >= PATIENCE:
            steps = [s for s in sizes if min(wanted, self.size) <= s <= max(wanted, self.size) and s != self.size]
            for size in steps if wanted > self.size else reversed(steps):
                self._to_slots(size)
            self._roomy = 0

    def _to_slots(self, size: int) -> None:
        """Moves the requests into `size` slots, in their order."""
        kept = [slot for slot in range(self.size) if slot in self.slots or (self._long and self._long.slot == slot)]
        others = [slot for slot in range(self.size) if slot not in kept]
        order = (kept + others + list(range(self.size, size)))[:size]
        self._state = with_slots(self.state, np.asarray(order, np.int32))
        self.slots = {order.index(slot): work for slot, work in sorted(self.slots.items())}
        if self._long:
            self._long.slot = order.index(self._long.slot)
        self.statistics.resizes += 1

    def _fit(self, prompt: int = 0) -> None:
        """Caches with room for the next round of every slot at work, and for padded prompts of `prompt` tokens.

        Attention reads the whole of a cache, so caches grow with the texts. Each change copies them, so they shrink to
        half or less only.
        """
        program = self.generator.program()
        ends = (len(w.request.prompt_ids) + w.length - 1 + program.slots for w in self.slots.values())
        wanted = capacity_for(max(prompt, *ends, 1))
        now = self.state.capacity
        if wanted != now and not now // 2 < wanted < now:
            self._state = with_capacity(self.state, wanted, program)
            self.statistics.resizes += bool(now)

    # --- prompts ---

    def _take_in(self) -> list[Event]:
        """Admits queued requests into free slots in their order, a group of equal padding at a time.

        While others decode, no more than a chunk's tokens are taken in at once.
        """
        events: list[Event] = []
        left = self.generator.prefill_chunk if self.slots else 1 << 60
        while left > 0 and (self._long or (self.queue and len(self.slots) < self.size)):
            if self._long is None and len(self.queue[0].request.prompt_ids) > self.generator.prefill_chunk:
                work = self.queue.popleft()
                free = next(i for i in range(self.size) if i not in self.slots)
                work.began = time.perf_counter()
                capacity = self._plan(len(work.request.prompt_ids))[1]
                caches = init_caches(self.generator.entry_program(), 1, capacity)
                self._long = _Long(work, free, self.generator.on_mesh(caches, 1))
            if self._long:
                tokens, new = self._next_chunk(self._long)
            else:
                tokens, new = self._next_group()
            left -= tokens
            events += new
        return events

    def _next_group(self) -> tuple[int, list[Event]]:
        """Prefills the first of the queue, with others of its padded length that get a slot now; padded tokens too."""
        g = self.generator
        free = [i for i in range(self.size) if i not in self.slots]
        size = padded_length(len(self.queue[0].request.prompt_ids))
        window = list(self.queue)[: len(free)]
        alike = [w for w in window if padded_length(len(w.request.prompt_ids)) == size]
        group = alike[: GROUP if len(alike) >= GROUP else 1]
        taken = {w.ticket for w in group}
        self.queue = deque(w for w in self.queue if w.ticket not in taken)
        new = self.new_requests(group, free[: len(group)], size)
        began = time.perf_counter()
        self._starts(began)
        ready = run_prefill(g.target.params, g.draft_params, new, program=g.entry_program())
        for work in group:
            work.began = began
        return size * len(group), self._seat(group, new, ready, size, began)

    def _plan(self, tokens: int) -> tuple[list[int], int]:
        return chunks_of(tokens, self.generator.prefill_chunk)

    def _next_chunk(self, long: _Long) -> tuple[int, list[Event]]:
        """The next piece of a long prompt; after the last one it gets its slot."""
        g, ids = self.generator, long.work.request.prompt_ids
        sizes, capacity = self._plan(len(ids))
        size = sizes[long.done // g.prefill_chunk]
        piece = ids[long.done : long.done + size]
        end = long.done + len(piece)
        after = ids[end] if end < len(ids) else -1
        chunk = Chunk(_padded([piece], size), _host([len(piece)]), _host([long.done]), _host([after]))
        new = self.new_requests([long.work], [long.slot], size, lengths=[len(ids)])
        program = g.entry_program()
        began = time.perf_counter()
        self._starts(began)
        ready = run_chunk(g.target.params, g.draft_params, long.caches, chunk, new.sampling, program=program)
        long.caches, long.done = (ready.target_cache, ready.draft_cache), end
        if end < len(ids):
            jax.block_until_ready(ready.first)
            self._waits(began, "prefill")
            return size, []
        self._long = None
        return size, self._seat([long.work], new, ready, capacity, began)

    def _seat(self, group: list[Work], new: NewRequests, ready: Prefilled, capacity: int, began: float) -> list[Event]:
        """Puts prefilled requests into their slots; their first tokens."""
        slots = np.asarray(new.slots).tolist()
        self.slots |= dict(zip(slots, group, strict=True))
        first = np.asarray(ready.first)
        self._fit(capacity)
        self._state = run_admit(self.state, new, ready, program=self.generator.entry_program())
        self._waits(began, "prefill")
        self.statistics.prompt_tokens += sum(len(w.request.prompt_ids) for w in group)
        scores = jax.device_get(ready.scores)
        events = []
        for i, (work, token) in enumerate(zip(group, first.tolist(), strict=True)):
            work.sent = 1
            traced = (first_trace(scores, i, token, work.request.logprobs),) if self.generator.trace_rounds else ()
            events.append(Event(work.ticket, [token], rounds=traced))
            self.statistics.first_token(time.perf_counter() - work.came)
        return events

    def new_requests(
        self, group: list[Work], slots: list[int], size: int, lengths: list[int] | None = None
    ) -> NewRequests:
        """Device arrays of a group; `lengths`: of the whole prompts, where `size` is that of a chunk."""
        ids = _padded([w.request.prompt_ids[:size] for w in group], size)
        sampling = sampling_of([w.request.sampling for w in group], map(self._key, group))
        counts = _host(lengths or (len(w.request.prompt_ids) for w in group))
        limits = _host(self.generator.limit(w.request) for w in group)
        speculative = _host((w.request.speculative for w in group), bool)
        wants = _host((w.request.logprobs is not None for w in group), bool)
        return NewRequests(ids, counts, _host(slots), limits, sampling, speculative, wants)

    def _key(self, work: Work) -> tuple[int, int]:
        """Raw key data: of the request's own seed, its stream, or the generator's seed with the ticket."""
        request = work.request
        if request.sampling.seed is not None:
            return raw_key(request.sampling.seed, own=True)
        if request.stream is not None:
            return raw_key(request.stream, own=False)
        return raw_key(self.generator.seed & 0xFFFFFFFF | work.ticket << 32, own=False)

    # --- rounds ---

    def _decode(self, rounds: int, program: Program) -> Totals:
        """Up to `rounds` rounds on the device; fewer where a slot could be refilled or the caches are too small."""
        self._starts(time.perf_counter())
        self._state, totals = self._rounds(self.state, rounds, bool(self.queue or self._long), program)
        return totals

    def _rounds(self, state: DecodeState, rounds: int, waiting: bool, program: Program) -> tuple[DecodeState, Totals]:
        g, size = self.generator, state.anchor.shape[0]
        costs = g.costs(size, state.capacity)
        most, until_free = _host(rounds), _host(waiting, bool)
        return run_many(
            g.target.params, g.draft_params, state, most, until_free, costs, program=program, buckets=g.buckets_of(size)
        )

    def _collect(self, totals: Totals) -> list[Event]:
        """Waits for the rounds, and hands out what they brought."""
        began, state = time.perf_counter(), self.state
        counts, did = jax.device_get((_small(state), totals))
        self._waits(began, "rounds")
        active, self.slots = self.slots, {}
        events = []
        for slot, work in sorted(active.items()):
            work.length = int(counts.length[slot])
            tokens = counts.tokens[slot, work.sent : work.length].tolist()
            work.sent = work.length
            traced = self._traced(slot, work, counts, tokens)
            if counts.active[slot]:
                self.slots[slot] = work
                if tokens:
                    events.append(Event(work.ticket, tokens, rounds=traced))
            else:
                events.append(Event(work.ticket, tokens, self._completion(slot, work, counts), traced))
        brought = sum(len(event.tokens) for event in events)
        drafts = self.generator.draft_seconds(self.size, state.capacity)
        self.statistics.add_rounds(did, self.generator.buckets_of(self.size), brought, drafts)
        return events

    def _traced(self, slot: int, work: Work, counts: _Counts, tokens: list[int]) -> tuple[RoundTrace, ...]:
        """What the rounds since the last look did for a request."""
        g = self.generator
        if not g.trace_rounds:
            return ()
        before, work.rounds = work.rounds, int(counts.counters.rounds[slot])
        confident = g.drafter is not None and g.drafter.config.confidence
        return round_traces(counts.trace, slot, before, work.rounds, tokens, work.request.logprobs, confident)

    def _completion(self, slot: int, work: Work, counts: _Counts) -> Completion:
        rounds, drafted, verified, accepted = (int(c[slot]) for c in counts.counters)
        reason = work.cancelled or ("stop" if counts.stopped[slot] else "length")
        tokens = counts.tokens[slot, : work.length].tolist()
        seconds = time.perf_counter() - work.began
        done = Completion(
            work.request.id, tokens, reason, len(work.request.prompt_ids), rounds, drafted, verified, accepted, seconds
        )
        self.statistics.ended(done)
        return done

    def _drop_cancelled(self) -> list[Event]:
        """Ends the requests that were cancelled, wherever they are."""
        events = []
        for work in [w for w in self.queue if w.cancelled] + ([self._long.work] if self._long else []):
            if not work.cancelled:
                continue
            done = Completion(work.request.id, [], work.cancelled, len(work.request.prompt_ids), 0, 0, 0, 0, 0.0)
            self.statistics.ended(done)
            events.append(Event(work.ticket, [], done))
        self.queue = deque(w for w in self.queue if not w.cancelled)
        if self._long and self._long.work.cancelled:
            self._long = None
        ended = [slot for slot, work in self.slots.items() if work.cancelled]
        if not ended:
            return events
        state = self.state
        counts = jax.device_get(_small(state))
        keeps = np.ones(self.size, bool)
        keeps[ended] = False
        self._state = state._replace(active=_and(state.active, keeps))
        for slot in ended:
            work = self.slots.pop(slot)
            events.append(Event(work.ticket, [], self._completion(slot, work, counts)))
        return events

    # --- time ---

    def _starts(self, now: float) -> None:
        """The device gets work: if it had none, the host took the time since."""
        if self._free_since is not None:
            self.statistics.host_seconds += now - self._free_since
            self._free_since = None

    def _waits(self, began: float, what: str) -> None:
        """The device has done `what` ("prefill" or "rounds") and has nothing to do now."""
        now = time.perf_counter()
        self.statistics.spend(what, now - began)
        self._free_since = now

    def idles(self) -> None:
        """Nothing is there to do: time from here on is nobody's."""
        self._free_since = None

    # --- warm-up ---

    def warm_up(self, longest: int, prompts: Iterable[int], modes: Sequence[Mode]) -> None:
        """Compiles what a run will need, for every number of slots; generates nothing.

        Args:
            longest: tokens of the longest text, prompt and answer. prompts: lengths of prompts.
            modes: sampling programs of the rounds.
        """
        g = self.generator
        plans = {(min(sizes), capacity): sum(sizes) for sizes, capacity in map(self._plan, prompts)}
        ready = [entry for tokens in plans.values() for entry in self._warm_prompt(tokens)]
        capacities = [capacity_for(1)]
        most = max(longest, *(capacity for _, _, capacity in ready), 1)
        while capacities[-1] < most:
            capacities.append(capacity_for(capacities[-1] + 1))
        for number, size in enumerate(g.slot_sizes):
            state = self.empty_state(size)
            for i, capacity in enumerate(capacities):
                for smaller in (0, *capacities[:i]):  # changes of size, both ways
                    state = with_capacity(with_capacity(state, smaller, g.program()), capacity, g.program())
                for new, prefilled, needs in ready:
                    if needs <= capacity and len(new.slots) <= size:
                        nobody = _host([size] * len(new.slots))
                        state = run_admit(state, new._replace(slots=nobody), prefilled, program=g.entry_program())
                for mode in modes:
                    state = self._rounds(state, 0, False, g.program(mode))[0]
                if number:
                    fewer, more = (np.arange(n, dtype=np.int32) for n in g.slot_sizes[number - 1 : number + 1])
                    state = with_slots(with_slots(state, fewer), more)
            jax.block_until_ready(state)

    def _warm_prompt(self, tokens: int) -> list[tuple[NewRequests, Prefilled, int]]:
        """Takes in prompts of `tokens` tokens; with the cache capacities that they need."""
        g, made, program = self.generator, [], self.generator.entry_program()
        works = [Work(Request("", (0,) * tokens), 0, 0.0)] * GROUP
        if tokens > g.prefill_chunk:
            sizes, capacity = self._plan(tokens)
            caches = g.on_mesh(init_caches(program, 1, capacity), 1)
            new = self.new_requests(works[:1], [0], sizes[0], lengths=[tokens])
            for size in set(sizes):
                piece = [_host([value]) for value in (size, 0, -1)]
                chunk = Chunk(_host([[0] * size]), *piece)
                ready = run_chunk(g.target.params, g.draft_params, caches, chunk, new.sampling, program=program)
                caches = ready.target_cache, ready.draft_cache
            return [(new, ready, capacity)]
        for count in (1, GROUP) if g.batch_size >= GROUP else (1,):
            new = self.new_requests(works[:count], [0] * count, tokens)
            made.append((new, run_prefill(g.target.params, g.draft_params, new, program=program), tokens))
        return made
