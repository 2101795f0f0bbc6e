"""A discrete-event model of the serving engine: what it takes to serve a load, from a throughput curve and replays.

The clock moves by the curve's seconds, in the order of events of `decoding.batching`. An iteration sets the number of
slots, admits waiting requests and takes in their prompts, no more than a chunk while others decode. Then up to `rounds`
rounds run without the host, fewer where a slot has ended while requests wait or where the caches are full. Then the
host looks, hands answers out and frees their slots.

A token counts as given out when it is computed; a host that looks every `rounds` rounds hands it on a little later.
`mtp1` drafts one token a round, and replays the first position of the records: of a DSpark drafter's records that is
an optimistic stand-in for a single-token drafter; records of an MTP drafter (blocks of one) are the real thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from dspark_jax.decoding.batching import GROUP, PATIENCE, capacity_for, chunks_of, padded_length
from dspark_jax.decoding.curve import Curve
from dspark_jax.decoding.schedule import BUDGETED, buckets_for
from dspark_jax.evaluation import schedules
from dspark_jax.evaluation.loads import Load, Source, Waiting
from dspark_jax.evaluation.replay import Moment, Replay
from dspark_jax.evaluation.schedules import Buckets, Past
from dspark_jax.evaluation.tally import Phase, Result, Tally

System = Literal["plain", "mtp1", "fixed", "threshold", "causal", "async"]
SYSTEMS: tuple[System, ...] = get_args(System)
LADDER = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class EngineSettings:
    """The engine that is modelled.

    Attributes:
        slots: slot counts R that it has programs for, ascending. rounds: most rounds between two looks of the host.
        prefill_chunk: tokens of prompts that are taken in at once while others decode; longer prompts come in pieces.
        host_seconds: of each look. resize_seconds: of each change of R or of the caches' capacity.
        threshold: of the schedule of that name, a confidence.
        mtp_draft_share: seconds of a single-token drafter's draft, as a share of the curve's draft; None: 1 / gamma.

    Raises:
        ValueError: names the field, its value and what would be right.
    """

    slots: tuple[int, ...] = LADDER
    rounds: int = 4
    prefill_chunk: int = 512
    host_seconds: float = 0.0
    resize_seconds: float = 0.0
    threshold: float = 0.5
    mtp_draft_share: float | None = None

    def __post_init__(self) -> None:
        if not self.slots or self.slots[0] < 1 or not all(a < b for a, b in pairwise(self.slots)):
            raise ValueError(f"slots {list(self.slots)}: must be slot counts of at least 1, ascending")
        if self.rounds < 1:
            raise ValueError(f"rounds {self.rounds}: must be at least 1")
        if self.prefill_chunk != padded_length(max(self.prefill_chunk, 1)):
            raise ValueError(f"prefill_chunk {self.prefill_chunk}: must be a power of two from 32 tokens on")
        for name in ("host_seconds", "resize_seconds", "mtp_draft_share"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} {value}: must be a finite number of at least 0")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold}: a probability, must lie in [0, 1]")

    def sizes(self, load: Load) -> tuple[int, ...]:
        """Numbers of slots that a load makes use of, ascending: those of a file, or the ladder up to what holds it."""
        if load.kind == "file":
            return (int(load.value),)
        enough = [size for size in self.slots if size >= load.value] if load.kind == "closed" else []
        return tuple(size for size in self.slots if not enough or size <= enough[0])


@dataclass(frozen=True)
class RoundCosts:
    """Rounds of R slots: their buckets, and the part of a drafted round's seconds that drafts."""

    buckets: Buckets
    draft: float


def round_costs(
    system: System, curve: Curve, slots: int, context: int, block: int, settings: EngineSettings
) -> RoundCosts:
    """What rounds of a system cost with R `slots` and caches of `context` tokens, blocks of K = `block` tokens.

    The budgeted schedules have fine buckets and `threshold` doublings, as the engine; the others verify in one bucket.
    """
    draft = curve.costs(slots, context).draft
    if system in BUDGETED:
        seconds = curve.costs(slots, context, buckets_for(slots, block, fine=True))
        return RoundCosts(schedules.make_buckets(slots, block, seconds), draft)
    drafts = 1 if system == "mtp1" else block
    sizes = buckets_for(slots, block) if system == "threshold" else (slots * (drafts + 1),)
    seconds = curve.costs(slots, context, sizes)
    drafted = seconds.drafted
    if system == "mtp1":
        share = 1 / block if settings.mtp_draft_share is None else settings.mtp_draft_share
        drafted, draft = np.maximum(drafted - draft, seconds.plain) + share * draft, share * draft
    return RoundCosts(Buckets(np.asarray(sizes), np.full(len(sizes), drafts), drafted, seconds.plain), draft)


def check_curve(curve: Curve, block: int, settings: EngineSettings, load: Load) -> None:
    """Refuses a curve that a load needs more of, before anything runs.

    Raises:
        ValueError: a number of slots that was not measured, or buckets that do not end with whole blocks.
    """
    for slots in settings.sizes(load):
        full = curve.costs(slots, capacity_for(1)).buckets[-1]
        if full != slots * (block + 1):
            raise ValueError(
                f"curve: {slots} slots were measured up to {full} rows; the records' blocks of {block} tokens need "
                f"{slots * (block + 1)}, so profile with the drafter that made the records"
            )


def simulate(
    system: System,
    load: Load,
    replay: Replay,
    curve: Curve,
    settings: EngineSettings,
    *,
    seed: int = 0,
    replicas: int = 1,
) -> Result:
    """Serves a load with one system.

    Args:
        load: of one replica. seed: of the order of requests and of the arrivals; equal for all systems by preference.
        replicas: engines that serve as much each; the rates of the result are of all of them.

    Raises:
        ValueError: an unknown system, or a curve that lacks what the load needs.
    """
    if system not in SYSTEMS:
        raise ValueError(f"system {system!r}: must be one of {', '.join(SYSTEMS)}")
    check_curve(curve, replay.block, settings, load)
    engine = _Engine(system, load, replay, curve, settings, seed)
    while engine.tally.answers < load.requests:
        engine.iteration()
    what = {"system": system, "kind": load.kind, "load": load.value * (1 if load.kind == "file" else replicas)}
    return engine.tally.result(engine.clock, replicas, **what)


@dataclass
class _Long:
    """A prompt that is taken in piece by piece: padded tokens of the pieces to come, and the caches that hold all."""

    waiting: Waiting
    pieces: list[int]
    capacity: int


class _Engine:
    """One engine at work: R slots now, S at most."""

    def __init__(
        self, system: System, load: Load, replay: Replay, curve: Curve, settings: EngineSettings, seed: int
    ) -> None:
        self.system, self.load, self.replay, self.curve, self.settings = system, load, replay, curve, settings
        order, outcomes = np.random.SeedSequence(seed).spawn(2)
        self.source = Source(load, replay.requests, np.random.default_rng(order))
        self.draws = np.random.default_rng(outcomes)
        self.sizes = settings.sizes(load)
        self.most = self.sizes[-1]
        self.rounds = 1 << 30 if load.kind == "file" else settings.rounds
        self.width = 1 if system == "plain" else 2 if system == "mtp1" else replay.block + 1  # rows of a request
        self.past = Past(self.most, replay.block)
        self.costs = cache(lambda slots, context: round_costs(system, curve, slots, context, replay.block, settings))
        self.clock, self.answered = 0.0, 0
        self.slots, self.context, self.roomy = 0, 0, 0
        self.long: _Long | None = None
        self.tally = Tally()
        self.request = np.zeros(self.most, np.int64)
        self.length = np.zeros(self.most, np.int64)  # tokens generated
        self.active = np.zeros(self.most, bool)
        self.held = np.zeros(self.most, bool)  # not yet handed out
        self.came, self.first, self.last = (np.zeros(self.most) for _ in range(3))
        if not load.warm_up:
            self.tally.start(self.clock)

    def spend(self, phase: Phase, seconds: float) -> None:
        self.clock += seconds
        self.tally.spend(phase, seconds)

    # --- an iteration ---

    def iteration(self) -> None:
        """Admits, decodes, looks."""
        self.source.look(self.clock)
        if not (self.source.waiting or self.long or self.held.any()):
            self.spend("idle", self.source.next_arrival - self.clock)
            self.source.look(self.clock)
        self.set_slots()
        self.take_in()
        if self.held.any():
            self.fit()
            self.decode()
        self.look()

    def set_slots(self) -> None:
        """As many slots as the requests need; their number grows and shrinks step by step."""
        need = min(int(self.held.sum()) + len(self.source.waiting) + bool(self.long), self.most)
        wanted = next(size for size in self.sizes if size >= need)
        if not self.slots:
            self.slots = wanted
        self.roomy = self.roomy + 1 if wanted < self.slots else 0
        if wanted > self.slots or self.roomy >= PATIENCE:
            steps = abs(self.sizes.index(wanted) - self.sizes.index(self.slots))
            self.spend("resize", steps * self.settings.resize_seconds)
            self.slots, self.roomy = wanted, 0

    def fit(self, prompt: int = 0) -> None:
        """Caches with room for the next round of all requests and for `prompt` padded tokens; they shrink by halves."""
        ends = self.starts(np.flatnonzero(self.held)) + self.width
        wanted = capacity_for(max(prompt, int(ends.max(initial=1))))
        if wanted > self.context or wanted <= self.context // 2:
            self.spend("resize", self.settings.resize_seconds if self.context else 0.0)
            self.context = wanted

    def take_in(self) -> None:
        """Admits waiting requests into free slots, a group of equal padding at a time."""
        left = float(self.settings.prefill_chunk) if self.held.any() else float("inf")
        while left > 0 and (self.long or (self.source.waiting and self.held.sum() < self.slots)):
            if self.long is None and self.prompt(self.source.waiting[0]) > self.settings.prefill_chunk:
                self.long = self.in_pieces(self.source.take([0])[0])
            left -= self.next_piece(self.long) if self.long else self.next_group()

    def prompt(self, waiting: Waiting) -> int:
        return int(self.replay.prompt[waiting.request])

    def in_pieces(self, waiting: Waiting) -> _Long:
        return _Long(waiting, *chunks_of(self.prompt(waiting), self.settings.prefill_chunk))

    def next_piece(self, long: _Long) -> int:
        """Takes in a piece of a long prompt, after the last one the request has its slot; returns padded tokens."""
        size = long.pieces.pop(0)
        self.spend("prefill", self.curve.prefill_seconds(size))
        if not long.pieces:
            self.long = None
            self.seat([long.waiting], long.capacity)
        return size

    def next_group(self) -> int:
        """Takes in the first of the queue and others of its padded length; returns padded tokens."""
        window = self.source.waiting[: self.slots - int(self.held.sum())]
        size = padded_length(self.prompt(window[0]))
        alike = [i for i, w in enumerate(window) if padded_length(self.prompt(w)) == size]
        group = self.source.take(alike[: GROUP if len(alike) >= GROUP else 1])
        self.spend("prefill", len(group) * self.curve.prefill_seconds(size))
        self.seat(group, size)
        return size * len(group)

    def seat(self, group: list[Waiting], capacity: int) -> None:
        """Puts requests whose prompts are in into free slots; their first tokens are there."""
        for slot, (request, came) in zip(np.flatnonzero(~self.held).tolist(), group, strict=False):
            self.tally.prefilled()
            self.request[slot], self.length[slot], self.came[slot] = request, 1, came
            self.first[slot] = self.last[slot] = self.clock
            self.held[slot] = True
            self.active[slot] = self.replay.tokens[request] > 1
            self.past.forget(slot)
        self.fit(capacity)

    def starts(self, slots: np.ndarray) -> np.ndarray:
        """Positions of the anchors of `slots`."""
        return self.replay.prompt[self.request[slots]] + self.length[slots] - 1

    def decode(self) -> None:
        """Rounds without the host."""
        before = self.active.sum()
        for _ in range(self.rounds):
            slots = np.flatnonzero(self.active)
            ended = len(slots) < before and bool(self.source.waiting or self.long)
            if not len(slots) or ended or self.starts(slots).max() > self.context - self.width:
                return
            self.round(slots)

    def look(self) -> None:
        """The host looks: whole answers go out, their slots are free."""
        self.spend("host", self.settings.host_seconds)
        done = np.flatnonzero(self.held & ~self.active)
        for slot in done:
            tokens = int(self.replay.tokens[self.request[slot]])
            self.tally.answer(tokens, self.came[slot], self.first[slot], self.last[slot])
        self.held[done] = False
        self.answered += len(done)
        self.source.answered(len(done), self.clock)
        if not self.tally.measuring and self.answered >= self.load.warm_up:
            self.tally.start(self.clock)

    # --- a round ---

    def round(self, slots: np.ndarray) -> None:
        """One round of the active `slots [n]`."""
        request, length = self.request[slots], self.length[slots]
        now = self.replay.moment(request, length)
        room = np.minimum(self.replay.limit[request] - length - 1, self.width - 1)
        costs = self.costs(self.slots, self.context)
        lengths = self.verified(slots, now, room, costs.buckets)
        drafted = lengths is not None
        if lengths is None:
            lengths, rows = np.zeros(len(slots), np.int64), self.slots
            self.spend("verify", costs.buckets.plain)
        else:
            bucket = schedules.smallest_bucket(lengths, costs.buckets)
            rows = int(costs.buckets.rows[bucket])
            self.spend("draft", costs.draft)
            self.spend("verify", float(costs.buckets.drafted[bucket]) - costs.draft)
        answer = self.replay.tokens[request]
        accepted = self.replay.accept(now, lengths, self.draws)
        counts = np.minimum(accepted + 1, answer - length)
        if drafted and self.system in BUDGETED:
            self.past.count_kept(self.survival(now), lengths, np.minimum(counts, accepted))
        self.tally.round(counts, self.clock - self.last[slots], int(lengths.sum()) + len(slots), rows, drafted)
        self.length[slots] += counts
        self.last[slots] = self.clock
        self.active[slots] = length + counts < answer

    def survival(self, now: Moment) -> np.ndarray:
        """Survival of the next K tokens by the confidences, `[n, K]`."""
        return np.cumprod(self.replay.confidences(now), axis=1)

    def verified(self, slots: np.ndarray, now: Moment, room: np.ndarray, buckets: Buckets) -> np.ndarray | None:
        """Draft tokens to verify of each active request, int64 `[n]`; None where the round has no draft."""
        if self.system == "plain":
            return None
        if self.system in ("fixed", "mtp1"):
            return room
        if self.system == "threshold":
            leading = np.cumprod(self.replay.confidences(now) >= self.settings.threshold, axis=1).sum(axis=1)
            return np.minimum(leading, room)
        causal = self.system == "causal"
        before = self.past.forecast(slots, self.system)
        gains = schedules.bucket_gains(schedules.rank(before, room), len(slots), buckets)
        if not schedules.drafting_pays(gains, len(slots), buckets, self.past.idle):
            self.past.remember(slots, None)
            return None
        survival = self.past.corrected(self.survival(now))
        choose = schedules.causal_lengths if causal else schedules.async_lengths
        lengths = choose(survival, room, gains, buckets)
        self.past.remember(slots, survival)
        return lengths
