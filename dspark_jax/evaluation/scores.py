"""The figures of an evaluation, with 95 % intervals by resampling conversations.

A conversation's turns stay together. All systems are resampled alike, so that the interval of a difference between two
of them is a paired one. Letters: C conversations of a benchmark, D draws, K draft tokens of a block; an array of a
figure is `[1 + D, ...]`, the measured value first.

Over benchmarks (a domain, or all of them) figures are means of the benchmarks' own, but for tokens per second and the
acceptance by position, whose counts are added up: far positions are reached too seldom in a single benchmark.
"""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from dspark_jax.evaluation.benchmarks import ALL, DOMAINS, Benchmark
from dspark_jax.evaluation.outcomes import Outcome, add_up

logger = logging.getLogger(__name__)
DRAWS = 2000
_QUANTILES = (0.025, 0.975)
_SUMS = ("answers", "tokens", "committed", "rounds", "accepted", "verified", "wall")

Clock = Literal["own", "shared", "none"]  # an answer's wall seconds: its own, also of its batch, or not to be had
_Answers = dict[str, dict[str, dict[str, list[Outcome]]]]  # by system, benchmark and conversation


class Estimate(NamedTuple):
    """A figure and its 95 % interval. None: it cannot be had (no round, or fewer than two conversations)."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Score:
    """What one system did in one benchmark, or in several.

    Attributes:
        answers, tokens, rounds: totals. stopped: share of the answers that ended by themselves.
        accepted_length: committed tokens per round, bonus token included.
        verified: draft tokens per round that the target looked at. acceptance_rate: accepted by verified ones.
        reached: rounds that decided on each position with all before it accepted. positions: share that accepted it.
        seconds: wall seconds; 0 where an answer was not timed. tokens_per_second, speedup: by them, None without; the
            latter against plain decoding's on the same conversations, of several benchmarks the mean.
    """

    answers: int
    tokens: int
    rounds: int
    stopped: float
    accepted_length: Estimate
    verified: Estimate
    acceptance_rate: Estimate
    reached: tuple[int, ...]
    positions: tuple[Estimate, ...]
    seconds: float
    tokens_per_second: float | None
    speedup: Estimate


@dataclass(frozen=True)
class Column:
    """A benchmark, or a domain's mean, as tables show it; `members`: names of the benchmarks in it."""

    name: str
    title: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Scores:
    """All figures of a run.

    Attributes:
        systems: names, in the order of the tables. benchmarks, domains: columns; the last domain is all benchmarks.
        by_benchmark, by_domain: system to column name to its score.
        differences: (one, other) to domain, accepted length of one less that of the other.
        dropped: turns that some systems answered and others not, for want of room: they count for none.
    """

    systems: tuple[str, ...]
    benchmarks: tuple[Column, ...]
    domains: tuple[Column, ...]
    by_benchmark: Mapping[str, Mapping[str, Score]]
    by_domain: Mapping[str, Mapping[str, Score]]
    differences: Mapping[tuple[str, str], Mapping[str, Estimate]]
    dropped: int = 0

    def as_json(self) -> dict[str, Any]:
        """JSON values."""

        def plain(value: Any) -> Any:
            if isinstance(value, Estimate):
                return value._asdict()
            if isinstance(value, Mapping):
                return {name: plain(entry) for name, entry in value.items()}
            return [plain(entry) for entry in value] if isinstance(value, tuple) else value

        def scores(table: Mapping[str, Mapping[str, Score]]) -> dict[str, Any]:
            return {system: {name: plain(vars(score)) for name, score in row.items()} for system, row in table.items()}

        return {
            "systems": list(self.systems),
            "benchmarks": [plain(vars(column)) for column in self.benchmarks],
            "domains": [plain(vars(column)) for column in self.domains],
            "by_benchmark": scores(self.by_benchmark),
            "by_domain": scores(self.by_domain),
            "differences": [
                {"one": one, "other": other, "accepted_length": plain(row)}
                for (one, other), row in self.differences.items()
            ],
            "dropped": self.dropped,
        }


# --- one system, one benchmark ---


@dataclass(frozen=True)
class _Totals:
    """Totals of a system in a benchmark: `sums` of _SUMS `[1 + D, 7]`, `reached` and `accepted` by position
    `[1 + D, K]`, answers that `stopped`, and how many `conversations`."""

    sums: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray
    stopped: int
    conversations: int

    def of(self, name: str) -> np.ndarray:
        return self.sums[:, _SUMS.index(name)]

    def ratio(self, one: str, other: str) -> np.ndarray:
        return _divided(self.of(one), self.of(other))


def _divided(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """`one / other`, NaN where the other is 0."""
    return np.divide(one, other, out=np.full(np.broadcast(one, other).shape, np.nan), where=other != 0)


def _weights(benchmark: str, conversations: int, seed: int) -> np.ndarray:
    """How often each conversation counts, `[1 + D, C]`: once, then as drawn with replacement."""
    random = np.random.default_rng([seed, zlib.crc32(benchmark.encode())])
    drawn = random.multinomial(conversations, np.full(conversations, 1 / conversations), size=DRAWS)
    return np.concatenate([np.ones((1, conversations)), drawn])


def _totals(answers: Mapping[str, Sequence[Outcome]], block: int, weights: np.ndarray) -> _Totals:
    """Totals of conversations, whose outcomes are `answers`."""
    sums = [add_up(outcomes, block) for outcomes in answers.values()]
    counts = np.array([[getattr(one, name) for name in _SUMS] for one in sums], float)
    if any(outcome.wall is None for outcomes in answers.values() for outcome in outcomes):
        counts[:, _SUMS.index("wall")] = 0
    reached, accepted = (np.array([getattr(one, name) for one in sums], float) for name in _BY_POSITION)
    stopped = sum(outcome.finish_reason == "stop" for outcomes in answers.values() for outcome in outcomes)
    return _Totals(weights @ counts, weights @ reached, weights @ accepted, stopped, len(sums))


_BY_POSITION = ("reached_at", "accepted_at")


def _estimate(values: np.ndarray, certain: bool) -> Estimate:
    """The estimate of a figure `[1 + D]`. `certain`: whether conversations suffice for an interval."""
    if np.isnan(values[0]):
        return Estimate(None)
    drawn = values[1:][~np.isnan(values[1:])]
    if not certain or not len(drawn):
        return Estimate(float(values[0]))
    low, high = np.quantile(drawn, _QUANTILES)
    return Estimate(float(values[0]), float(low), float(high))


def _mean(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over benchmarks, of those where the figure exists."""
    stacked = np.stack(parts)
    there = ~np.isnan(stacked)
    return _divided(np.where(there, stacked, 0).sum(axis=0), there.sum(axis=0))


def _score(parts: Sequence[_Totals], plain: Sequence[_Totals] | None) -> Score:
    """The score of a system in some benchmarks. `plain`: those of plain decoding."""

    def total(name: str) -> float:
        return float(sum(part.of(name)[0] for part in parts))

    def mean(one: str, other: str) -> Estimate:
        return _estimate(_mean([part.ratio(one, other) for part in parts]), certain)

    certain = all(part.conversations > 1 for part in parts)
    reached, accepted = (sum(getattr(part, name) for part in parts) for name in ("reached", "accepted"))
    by_position = _divided(np.asarray(accepted), np.asarray(reached))
    speedup = Estimate(None)
    if plain is not None:
        speeds = ([part.ratio("tokens", "wall") for part in of] for of in (parts, plain))
        ratios = [_divided(mine, other) for mine, other in zip(*speeds, strict=True)]
        if not any(np.isnan(ratio[0]) for ratio in ratios):
            speedup = _estimate(_mean(ratios), certain)
    seconds = total("wall") if all(part.of("wall")[0] for part in parts) else 0.0
    return Score(
        answers=int(total("answers")),
        tokens=int(total("tokens")),
        rounds=int(total("rounds")),
        stopped=sum(part.stopped for part in parts) / max(total("answers"), 1),
        accepted_length=mean("committed", "rounds"),
        verified=mean("verified", "rounds"),
        acceptance_rate=mean("accepted", "verified"),
        reached=tuple(int(count) for count in np.asarray(reached)[0]),
        positions=tuple(_estimate(column, certain) for column in by_position.T),
        seconds=seconds,
        tokens_per_second=total("tokens") / seconds if seconds else None,
        speedup=speedup,
    )


# --- all ---


def score(
    outcomes: Iterable[Outcome],
    benchmarks: Sequence[Benchmark],
    systems: Sequence[str],
    *,
    baseline: str | None = None,
    seed: int = 0,
    clock: Clock = "own",
) -> Scores:
    """Figures of `systems` in `benchmarks`, by the turns that all of them answered; other systems are passed over.

    Args:
        baseline: the system that speed-ups are against, where it is among the systems. seed: of the resampling.
        clock: what the wall seconds of an answer are (`Protocol.clock`).

    Raises:
        ValueError: a system that has not answered a conversation.
    """
    answers = _by_conversation(_with_own_time(outcomes, clock), benchmarks, systems)
    dropped = _keep_common(answers)
    if dropped:
        logger.warning("%d turns that not every system had room to answer count for none", dropped)
    totals: dict[str, dict[str, _Totals]] = {system: {} for system in systems}
    blocks = {system: _block(answers[system]) for system in systems}
    for benchmark in benchmarks:
        weights = _weights(benchmark.name, len(benchmark.conversations), seed)
        for system in systems:
            totals[system][benchmark.name] = _totals(answers[system][benchmark.name], blocks[system], weights)
    columns, domains = _columns(benchmarks)

    def scored(system: str, column: Column) -> Score:
        plain = [totals[baseline][name] for name in column.members] if baseline in totals else None
        return _score([totals[system][name] for name in column.members], plain)

    return Scores(
        tuple(systems),
        columns,
        domains,
        {system: {column.name: scored(system, column) for column in columns} for system in systems},
        {system: {column.name: scored(system, column) for column in domains} for system in systems},
        _differences(totals, domains, [system for system in systems if system != baseline]),
        dropped,
    )


def _with_own_time(outcomes: Iterable[Outcome], clock: Clock) -> Iterable[Outcome]:
    """Answers with wall seconds of their own.

    In a batch the time since the answer before it was spent on all that were at work: a system's time in a benchmark
    is shared out by rounds, a prefill counting as one.
    """
    if clock == "own":
        return outcomes
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        if one.answered:
            groups[one.system, one.benchmark].append(one)
    found: list[Outcome] = []
    for group in groups.values():
        walls = [one.wall for one in group if one.wall is not None]
        timed = clock == "shared" and len(walls) == len(group)
        each = sum(walls) / sum(one.rounds + 1 for one in group)
        found += [replace(one, wall=each * (one.rounds + 1) if timed else None) for one in group]
    return found


def _by_conversation(outcomes: Iterable[Outcome], benchmarks: Sequence[Benchmark], systems: Sequence[str]) -> _Answers:
    """System to benchmark to conversation to its answers, in the order of the turns."""
    found: _Answers = {
        system: {one.name: {c.id: [] for c in one.conversations} for one in benchmarks} for system in systems
    }
    for outcome in sorted(outcomes, key=lambda outcome: outcome.turn):
        place = found.get(outcome.system, {}).get(outcome.benchmark, {})
        if outcome.answered and outcome.conversation in place:
            place[outcome.conversation].append(outcome)
    for system, of_system in found.items():
        for benchmark, conversations in of_system.items():
            lost = [name for name, turns in conversations.items() if not turns]
            if lost:
                raise ValueError(
                    f"system {system!r}: has not answered {len(lost)} of {len(conversations)} conversations of "
                    f"{benchmark}, as {lost[0]!r}; all systems must answer the same ones"
                )
    return found


def _keep_common(answers: _Answers) -> int:
    """Leaves the turns that all systems answered; returns how many others there were."""
    turns = [
        {(name, conversation, one.turn) for name, of in by.items() for conversation, row in of.items() for one in row}
        for by in answers.values()
    ]
    common = set.intersection(*turns)
    for by in answers.values():
        for name, of in by.items():
            for conversation, row in of.items():
                of[conversation] = [one for one in row if (name, conversation, one.turn) in common]
    return len(set.union(*turns) - common)


def _block(answers: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> int:
    """K: the most draft tokens that were verified in a round."""
    rounds = (o.verified for conversations in answers.values() for turns in conversations.values() for o in turns)
    return max((max(verified, default=0) for verified in rounds), default=0)


def _columns(benchmarks: Sequence[Benchmark]) -> tuple[tuple[Column, ...], tuple[Column, ...]]:
    """Columns of the benchmarks, and of their domains with all of them at the end."""
    columns = tuple(Column(one.name, one.title, (one.name,)) for one in benchmarks)
    there = {one.domain for one in benchmarks}
    order = [domain for domain in DOMAINS if domain in there] + sorted(there.difference(DOMAINS))
    members = {domain: tuple(one.name for one in benchmarks if one.domain == domain) for domain in order}
    members[ALL] = tuple(one.name for one in benchmarks)
    return columns, tuple(Column(name, name, found) for name, found in members.items())


def _differences(
    totals: Mapping[str, Mapping[str, _Totals]], domains: Sequence[Column], systems: Sequence[str]
) -> dict[tuple[str, str], dict[str, Estimate]]:
    """Paired differences of the accepted length between all pairs."""

    def length(system: str, column: Column) -> np.ndarray:
        return _mean([totals[system][name].ratio("committed", "rounds") for name in column.members])

    pairs = [(one, other) for i, one in enumerate(systems) for other in systems[i + 1 :]]
    found: dict[tuple[str, str], dict[str, Estimate]] = {}
    for one, other in pairs:
        found[one, other] = {}
        for column in domains:
            certain = all(totals[one][name].conversations > 1 for name in column.members)
            found[one, other][column.name] = _estimate(length(one, column) - length(other, column), certain)
    return found
