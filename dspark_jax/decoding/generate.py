"""Offline generation: requests of any length through a batch of slots, with the round loop on the device.

`Generator` holds the models and the settings of decoding; `decoding.batching` runs the batch, and `decoding.engine`
serves requests that come at any time with the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.decoding.batching import Batch, capacity_for, padded_length
from dspark_jax.decoding.budget import Costs, make_costs
from dspark_jax.decoding.curve import Curve
from dspark_jax.decoding.placement import places
from dspark_jax.decoding.requests import Completion, Request, mode_of
from dspark_jax.decoding.sampling import Mode
from dspark_jax.decoding.schedule import SCHEDULES, Schedule, buckets_for, check_confidence
from dspark_jax.decoding.state import Program
from dspark_jax.decoding.trace import RoundTrace, TraceShape
from dspark_jax.drafters.interface import bind
from dspark_jax.models.transformer import head_weight
from dspark_jax.sharding import check_mesh, put

__all__ = ["Completion", "Generator", "Request", "capacity_for", "padded_length"]
_AHEAD = 4  # requests that wait for each slot, so that prompts of one length are found to go together
OnTokens = Callable[[str, list[int]], bool | None]
OnRounds = Callable[[str, tuple[RoundTrace, ...]], None]


@dataclass
class Generator:
    """Generates with a target and, optionally, a drafter.

    Args:
        target: `checkpoints.load.Target`, or anything with `.config` and `.params` (and `.tokenizer`, if `stop_ids` is
            not given). drafter: `Drafter`, or None for plain decoding.
        batch_size: R, requests decoded together. schedule, threshold: see `decoding.schedule`.
        seed: of requests that bring none. stop_ids: tokens that end a request; the tokenizer's by default.
        stream_rounds: steps between two looks of the host, when somebody listens.
        buckets: row counts to compile; by default R, doubling, up to R * (gamma + 1), with some between where the
            schedule has a budget.
        slot_sizes: numbers of slots to compile for, ascending, up to `batch_size`; by default that alone.
        prefill_chunk: longer prompts are taken in by pieces of so many tokens, a power of two from 32 on.
        max_context: tokens of prompt and answer together at most, within the target's own limit; 0: that alone.
        curve: the throughput curve that budgets are chosen by; without one, `causal` and `async` verify whole blocks.
        mesh: devices that the models' parameters are spread over (`load_target(mesh=...)`); one device without.
        trace_rounds: rounds that are recorded (`decoding.trace`), and so rounds between two looks of the host at most;
            0: none are. top_logprobs: log-probabilities of a position at most, with a trace; None: requests cannot ask
            for any, which rounds are faster without.
        switchable: rounds do without a draft where no request is `speculative`, or has room for one within its limits.

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
    slot_sizes: tuple[int, ...] = ()
    prefill_chunk: int = 512
    max_context: int = 0
    curve: Curve | None = None
    mesh: Mesh | None = None
    trace_rounds: int = 0
    top_logprobs: int | None = 0
    switchable: bool = False
    draft_params: dict = field(init=False, repr=False)
    _costs: dict[tuple[int, int], Costs] = field(init=False, repr=False, default_factory=dict)
    _drafts: dict[tuple[int, int], float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size {self.batch_size}: must be at least 1")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r}: must be one of {', '.join(SCHEDULES)}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold}: a probability, must lie in [0, 1]")
        if self.prefill_chunk != padded_length(max(self.prefill_chunk, 1)):
            raise ValueError(f"prefill_chunk {self.prefill_chunk}: must be a power of two from 32 tokens on")
        if self.max_context < 0 or self.max_context == 1:
            raise ValueError(f"max_context {self.max_context}: must be at least 2 tokens (0: the target's own limit)")
        if self.trace_rounds < 0:
            raise ValueError(f"trace_rounds {self.trace_rounds}: must be 0 (no records) or a number of rounds")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= self.target.config.num_tokens:
            raise ValueError(f"top_logprobs {self.top_logprobs}: must lie in 0..{self.target.config.num_tokens}")
        self.draft_params = {}
        if self.drafter is not None:
            self.drafter.config.check_target(self.target.config)
            check_confidence(self.drafter.config, self.schedule)
            params = self.target.params
            with self.in_mesh():
                self.draft_params = bind(self.drafter.params, params["embed"], head_weight(params))
        if self.stop_ids is None:
            self.stop_ids = tuple(self.target.tokenizer.eos_ids)
        if self.mesh is not None:
            drafter = self.drafter.config if self.drafter is not None else None
            check_mesh(self.mesh, self.target.config, drafter if hasattr(drafter, "hidden_size") else None)
        self._check_sizes()

    def _check_sizes(self) -> None:
        self.slot_sizes = tuple(self.slot_sizes) or (self.batch_size,)
        if list(self.slot_sizes) != sorted(set(self.slot_sizes)) or self.slot_sizes[-1] != self.batch_size:
            raise ValueError(f"slot_sizes {self.slot_sizes}: must rise up to batch_size {self.batch_size}")
        if self.slot_sizes[0] < 1:
            raise ValueError(f"slot_sizes {self.slot_sizes}: must be at least 1")
        if self.buckets:
            full = self.batch_size * (self.block_size + 1)
            if len(self.slot_sizes) > 1:
                raise ValueError(f"buckets {self.buckets}: are for one number of slots, leave out slot_sizes")
            if min(self.buckets) < self.batch_size or self.buckets[-1] < full:
                raise ValueError(f"buckets {self.buckets}: must hold {self.batch_size} to {full} rows")
        if self.budgeted and self.curve is not None:
            for size in self.slot_sizes:
                self.curve.costs(size, capacity_for(1))

    @property
    def block_size(self) -> int:
        """K, draft tokens of a round; 0 without a drafter."""
        return self.drafter.config.block_size if self.drafter is not None else 0

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together at most."""
        own = self.target.config.max_positions
        return min(own, self.max_context) if self.max_context else own

    @property
    def budgeted(self) -> bool:
        """Whether rows are shared out by a budget."""
        return self.program().budgeted

    def program(self, mode: Mode = "greedy") -> Program:
        """The static description of the program that serves `mode`."""
        dtype = jnp.float32 if jax.default_backend() == "cpu" else self.target.params["embed"].dtype
        drafter = self.drafter.config if self.drafter is not None else None
        trace = TraceShape(self.trace_rounds, self.top_logprobs) if self.trace_rounds else None
        stops = tuple(self.stop_ids or ())
        return Program(self.target.config, drafter, self.schedule, mode, stops, dtype, trace, self.switchable)

    @property
    def most_rounds(self) -> int:
        """Rounds between two looks of the host at most."""
        return self.trace_rounds or 1 << 30

    def entry_program(self) -> Program:
        """The program by which requests come in: the same under every schedule, whatever they sample with."""
        return replace(self.program(), schedule="fixed")

    def buckets_of(self, slots: int) -> tuple[int, ...]:
        """Row counts that programs for `slots` slots are compiled with, ascending."""
        return self.buckets or buckets_for(slots, self.block_size, fine=self.budgeted)

    def costs(self, slots: int, context: int) -> Costs | None:
        """The throughput curve for `slots` slots with caches of `context` tokens; None for schedules without budget."""
        if not self.budgeted:
            return None
        if (slots, context) not in self._costs:
            sizes = self.buckets_of(slots)
            seconds = self.curve.costs(slots, context, sizes) if self.curve else None
            self._costs[slots, context] = make_costs(seconds, len(sizes))
        return self._costs[slots, context]

    def draft_seconds(self, slots: int, context: int) -> float:
        """Seconds that a draft takes by the curve; 0 without one."""
        if self.curve is None or self.drafter is None:
            return 0.0
        if (slots, context) not in self._drafts:
            self._drafts[slots, context] = self.curve.costs(slots, context).draft
        return self._drafts[slots, context]

    def in_mesh(self) -> AbstractContextManager[Any]:
        """The context that programs are traced and run in."""
        return jax.set_mesh(self.mesh) if self.mesh is not None else nullcontext()

    def on_mesh(self, tree: Any, requests: int) -> Any:
        """Arrays of `requests` requests, spread over the mesh."""
        return tree if self.mesh is None else put(tree, places(tree, requests, self.mesh))

    def check(self, request: Request) -> None:
        """Refuses a request that cannot run.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, a prompt that leaves no room in the context, or
                more log-probabilities than are recorded.
        """
        config, count = self.target.config, len(request.prompt_ids)
        if count == 0:
            raise ValueError(f"request {request.id!r}: the prompt is empty; it must have at least one token")
        bad = [t for t in request.prompt_ids if not 0 <= t < config.vocab_size]
        if bad:
            raise ValueError(
                f"request {request.id!r}: token {bad[0]} is outside the vocabulary 0..{config.vocab_size - 1}"
            )
        if count >= self.context:
            whose = "target" if self.context == config.max_positions else "engine"
            raise ValueError(
                f"request {request.id!r}: the prompt has {count} tokens, the {whose}'s context has "
                f"{self.context}; at most {self.context - 1} leave room for one token"
            )

        asked, most = request.logprobs, self.top_logprobs if self.trace_rounds else None
        if asked is not None and (most is None or not 0 <= asked <= most):
            right = "this generator records none" if most is None else f"must lie in 0..{most}"
            raise ValueError(f"request {request.id!r}: logprobs {asked}: {right}")

    def limit(self, request: Request) -> int:
        """Tokens that this request may generate: its own limit, within the context."""
        return min(request.sampling.max_tokens, self.context - len(request.prompt_ids))

    def generate(self, requests: Iterable[Request], on_tokens: OnTokens | None = None) -> Iterator[Completion]:
        """Runs requests, giving completions as they end.

        Args:
            on_tokens: called with a request's id and its newly committed tokens; returning True ends that request.

        Raises:
            ValueError: a request that cannot run, before anything does.
        """
        todo = list(requests)
        for request in todo:
            self.check(request)
        return self.stream(todo, mode_of(todo), on_tokens)

    def stream(
        self,
        requests: Iterable[Request],
        mode: Mode,
        on_tokens: OnTokens | None = None,
        on_rounds: OnRounds | None = None,
    ) -> Iterator[Completion]:
        """`generate` for any number of requests: they are taken as slots get free, some ahead.

        Args:
            mode: the sampling program that serves all of them (`requests.mode_of`).
            on_rounds: called with a request's id and what its newest rounds did, the prefill first (with a trace).

        Raises:
            ValueError: a request that cannot run, when its turn comes.
        """
        batch, names, coming = Batch(self, mode), dict[int, str](), iter(requests)
        rounds = self.stream_rounds if on_tokens else 1 << 30
        while True:
            for request in islice(coming, max(_AHEAD * self.batch_size - len(batch.queue), 0)):
                self.check(request)
                names[batch.add(request)] = request.id
            if not batch.busy:
                return
            with self.in_mesh():
                events = batch.advance(rounds)
            for event in events:
                if on_rounds and event.rounds:
                    on_rounds(names[event.ticket], event.rounds)
                if on_tokens and event.tokens and on_tokens(names[event.ticket], event.tokens):
                    batch.cancel(event.ticket, "stop")
                if event.completion:
                    del names[event.ticket]
            yield from (event.completion for event in events if event.completion)

    def warm_up(self, requests: Iterable[Request]) -> None:
        """Compiles what generating for `requests` will need; generates nothing."""
        todo = list(requests)
        ends = [len(r.prompt_ids) + self.limit(r) + self.block_size + 1 for r in todo]
        mode = mode_of(todo)
        with self.in_mesh():
            Batch(self, mode).warm_up(max(ends, default=1), [len(r.prompt_ids) for r in todo], [mode])
