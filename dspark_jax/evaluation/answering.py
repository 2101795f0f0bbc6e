"""Answers conversations with one system, all turns, and keeps an `Outcome` of each answer as it comes.

Method `decode`: the engine answers benchmark by benchmark and turn by turn: first the first turns of all conversations,
then the second ones behind the system's own answers, and so on. Only so is there a wall-clock; and in batches only of
turns that one run answered, as the time of an answer is also that of the others in its batch.
Method `forced`: plain decoding answers, all benchmarks together, and the rounds of every drafter are found along those
answers (`evaluation.forced`): the same rounds at temperature 0, the same distribution of them above, without a target
pass per round.

Random numbers of an answer depend on (seed, benchmark, conversation, turn) only, not on the system or the batch.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jax.sharding import Mesh

from dspark_jax.checkpoints.load import Drafter, Target
from dspark_jax.checkpoints.tokenizer import Tokenizer, prompt_ids
from dspark_jax.decoding.batching import capacity_for, chunks_of
from dspark_jax.decoding.generate import Completion, Generator, Request
from dspark_jax.decoding.requests import mode_of
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.schedule import Schedule
from dspark_jax.decoding.trace import RoundTrace
from dspark_jax.evaluation.benchmarks import Conversation
from dspark_jax.evaluation.forced import forced_rounds
from dspark_jax.evaluation.outcomes import NO_ROOM, Outcome, outcome_id
from dspark_jax.evaluation.reading import Reader, Text
from dspark_jax.evaluation.scores import Clock
from dspark_jax.serving.offline import request_seed
from dspark_jax.serving.stream import TextStream

logger = logging.getLogger(__name__)

PLAIN = "plain"  # the system that decodes without a drafter
_TRACED = 64  # rounds between two looks of the host at most

Keep = Callable[[Outcome], object]
Method = Literal["decode", "forced"]


@dataclass(frozen=True)
class System:
    """What answers. name: unique in a run. drafter: None is plain decoding. schedule, threshold: as `Generator`'s."""

    name: str
    drafter: Drafter | None
    schedule: Schedule = "fixed"
    threshold: float = 0.5


@dataclass(frozen=True)
class Protocol:
    """How conversations are answered.

    Attributes:
        temperature, top_p, top_k, min_p: of sampling. max_tokens: of an answer at most.
        batch_size: requests decoded together. seed: of the run. method: see the module.
        confidences: with method `forced`: record those of whole blocks under the schedule `fixed` too, at the price of
            the target's head on all of their slots.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    batch_size: int = 8
    seed: int = 0
    method: Method = "decode"
    confidences: bool = False

    @property
    def clock(self) -> Clock:
        """What the wall seconds of an answer are."""
        if self.method == "forced":
            return "none"
        return "own" if self.batch_size == 1 else "shared"

    def sampling(self, max_tokens: int = 0) -> SamplingParams:
        """Sampling settings of an answer; `max_tokens`: where the context leaves less room.

        Raises:
            ValueError: a value that cannot be.
        """
        most = min(self.max_tokens, max_tokens or self.max_tokens)
        return SamplingParams(self.temperature, self.top_p, self.top_k, self.min_p, None, most)


class Asked(NamedTuple):
    """A turn with its chat history as a prompt. id: of the outcome. stream: of its random numbers. fits: into the
    context; where an earlier turn does not, there is no prompt."""

    id: str
    conversation: Conversation
    turn: int
    prompt_ids: tuple[int, ...] = ()
    stream: int = 0
    fits: bool = True


def ask(
    tokenizer: Tokenizer, protocol: Protocol, system: str, one: Conversation, turn: int = 0, said: Sequence[str] = ()
) -> Asked:
    """The prompt of a turn behind the answers `said` to the turns before it.

    Raises:
        ValueError: the chat template refuses it, or there is none and the turn is not the first.
    """
    messages = []
    for i in range(turn + 1):
        messages.append({"role": "user", "content": one.turns[i]})
        if i < turn:
            messages.append({"role": "assistant", "content": said[i]})
    name = f"{one.benchmark}/{one.id}/{turn}"
    try:
        ids = prompt_ids(tokenizer, messages)
    except ValueError as error:
        raise ValueError(f"benchmark {one.benchmark}, conversation {one.id}, turn {turn + 1}: {error}") from error
    return Asked(outcome_id(system, one.benchmark, one.id, turn), one, turn, ids, request_seed(protocol.seed, name))


def check_turns(tokenizer: Tokenizer, protocol: Protocol, one: Conversation) -> None:
    """Refuses a conversation whose later turns cannot be asked, whatever is answered to those before.

    Raises:
        ValueError: as `ask`.
    """
    last = len(one.turns) - 1
    ask(tokenizer, protocol, PLAIN, one, last, ["-"] * last)


def expected_ids(system: str, conversations: Iterable[Conversation]) -> set[str]:
    """Ids of the outcomes of a system that has answered all turns."""
    return {outcome_id(system, one.benchmark, one.id, turn) for one in conversations for turn in range(len(one.turns))}


def reader_for(systems: Iterable[System], protocol: Protocol) -> Reader | None:
    """What drafters share that are forced along the same answers; None where they decode."""
    if protocol.method != "forced":
        return None
    drafters = (one.drafter for one in systems if one.drafter is not None)
    return Reader(layer for drafter in drafters for layer in drafter.config.target_layer_ids)


def answer_text(target: Target, token_ids: Iterable[int]) -> str:
    """The text of an answer, without its stop token."""
    stream = TextStream(target.tokenizer, (), tuple(target.tokenizer.eos_ids))
    return stream.push(list(token_ids)) + stream.finish()


@dataclass
class Answerer:
    """One system, whose engine is kept between calls.

    Args:
        mesh: devices that the parameters are spread over; one device without.
        reader: what the target says of texts, shared by the drafters that are forced along them.

    Raises:
        ValueError: target and drafter do not belong together, or the schedule needs confidences that there are none of.
    """

    target: Target
    system: System
    protocol: Protocol
    mesh: Mesh | None = None
    reader: Reader | None = None
    _generator: Generator = field(init=False, repr=False)
    _warm: dict[Any, Request] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._generator = Generator(
            self.target,
            self.system.drafter,
            batch_size=self.protocol.batch_size,
            schedule=self.system.schedule,
            threshold=self.system.threshold,
            mesh=self.mesh,
            trace_rounds=_TRACED,
            top_logprobs=None,
        )

    def answer(self, prompts: Sequence[Conversation], keep: Keep, done: Mapping[str, Outcome]) -> None:
        """Answers the turns that `done` has no outcome of.

        Args:
            keep: gets each outcome as it comes. done: outcomes by id, also of other systems; with method `forced`
                those of plain decoding (the system PLAIN) must be among them.

        Raises:
            ValueError: a first turn that does not fit into the context; forced rounds without plain answers.
        """
        if self._forced:
            self._force(prompts, keep, done)
            return
        mine = dict(done)

        def keep_mine(outcome: Outcome) -> None:
            keep(outcome)
            mine[outcome.id] = outcome

        names = dict.fromkeys(one.benchmark for one in prompts)
        groups = [[one for one in prompts if one.benchmark == name] for name in names]
        if self.protocol.method == "forced":  # nothing is timed: fuller batches
            groups = [list(prompts)]
        for group in groups:
            for turn in range(max(len(one.turns) for one in group)):
                asked = self._asked(group, turn, self.system.name, mine)
                timed = self._timed(asked, group, turn, mine)
                self._end([one for one in asked if not one.fits], keep_mine)
                self._decode([one for one in asked if one.fits], keep_mine, timed)

    @property
    def _forced(self) -> bool:
        """Whether rounds are found along answers that are there already."""
        return self.protocol.method == "forced" and self.system.drafter is not None

    def warm_up(self, prompts: Sequence[Conversation]) -> None:
        """Checks the first turns, and compiles what decoding them needs; later ones are compiled before they are timed.

        Where nothing is timed, programs are compiled when they are needed.

        Raises:
            ValueError: a turn that does not fit into the context.
        """
        if self._forced:
            return
        requests = self._checked(self._asked(prompts, 0, self.system.name, {}))
        if self.protocol.clock != "none":
            self._compile(requests)

    # --- prompts ---

    def _asked(
        self, prompts: Sequence[Conversation], turn: int, system: str, answers: Mapping[str, Outcome]
    ) -> list[Asked]:
        """The turn number `turn` of all conversations that come so far, behind the answers of `system`, but for those
        that this system has an outcome of.

        A conversation whose history fills the context ends before its later turns: they do not fit.
        """
        found = []
        for one in prompts:
            name = outcome_id(self.system.name, one.benchmark, one.id, turn)
            before = [answers.get(outcome_id(system, one.benchmark, one.id, i)) for i in range(turn)]
            there = [outcome for outcome in before if outcome is not None]
            if turn >= len(one.turns) or len(there) < turn or name in answers:
                continue
            if not all(outcome.answered for outcome in there):
                found.append(Asked(name, one, turn, fits=False))
                continue
            said = [answer_text(self.target, outcome.token_ids) for outcome in there]
            asked = ask(self.target.tokenizer, self.protocol, self.system.name, one, turn, said)
            if turn and len(asked.prompt_ids) >= self._generator.context:
                logger.warning(
                    "%s: %d tokens with its history fill the context of %d, the conversation ends before it",
                    asked.id, len(asked.prompt_ids), self._generator.context,
                )  # fmt: skip
                asked = asked._replace(fits=False)
            found.append(asked)
        return found

    def _timed(
        self, asked: Sequence[Asked], group: Sequence[Conversation], turn: int, answers: Mapping[str, Outcome]
    ) -> bool:
        """Whether turns that are `asked` are timed: not in a batch where a run that stopped has answered others of the
        `group`, whose time was also that of answers which were lost."""
        if self.protocol.clock != "shared":
            return self.protocol.clock == "own"
        there = [answers.get(outcome_id(self.system.name, one.benchmark, one.id, turn)) for one in group]
        before = sum(outcome is not None and outcome.answered for outcome in there)
        left = sum(one.fits for one in asked)
        if before and left:
            logger.warning(
                "%s, %s, turn %d: %d answers are there already, the other %d are not timed: no tokens/s",
                self.system.name, group[0].benchmark, turn + 1, before, left,
            )  # fmt: skip
        return not before

    def _end(self, asked: Sequence[Asked], keep: Keep) -> None:
        """Outcomes of turns that do not fit."""
        for one in asked:
            keep(Outcome(**_parts(self.system.name, one), token_ids=(), finish_reason=NO_ROOM))

    def _checked(self, asked: Iterable[Asked]) -> list[Request]:
        requests = [self._request(one) for one in asked]
        for request in requests:
            self._generator.check(request)
        return requests

    def _request(self, asked: Asked) -> Request:
        room = self._generator.context - len(asked.prompt_ids)
        return Request(asked.id, asked.prompt_ids, self.protocol.sampling(max(room, 1)), asked.stream)

    # --- decoding ---

    def _decode(self, asked: Sequence[Asked], keep: Keep, timed: bool) -> None:
        """A run of the engine, shortest prompts first: caches are as long as the longest text at work."""
        by_id = {one.id: one for one in sorted(asked, key=lambda one: len(one.prompt_ids))}
        requests = self._checked(by_id.values())
        if not requests:
            return
        if timed:
            self._compile(requests)
        rounds: dict[str, list[RoundTrace]] = defaultdict(list)

        def note(name: str, new: tuple[RoundTrace, ...]) -> None:
            rounds[name] += new

        began = time.perf_counter()
        for completion in self._generator.stream(requests, mode_of(requests), on_rounds=note):
            wall = time.perf_counter() - began if timed else None
            keep(_outcome(self.system.name, by_id[completion.id], completion, rounds.pop(completion.id), wall))
            began = time.perf_counter()

    def _compile(self, requests: Sequence[Request]) -> None:
        """Warms up for requests unlike those before them, with those: batches hold both."""
        generator, fresh = self._generator, False
        for request in requests:
            tokens = len(request.prompt_ids)
            plan = chunks_of(tokens, generator.prefill_chunk)
            end = capacity_for(tokens + generator.limit(request) + generator.block_size + 1)
            fresh |= (str(plan), end) not in self._warm
            self._warm.setdefault((str(plan), end), request)
        if fresh:
            generator.warm_up(self._warm.values())

    # --- forced decoding ---

    def _force(self, prompts: Sequence[Conversation], keep: Keep, done: Mapping[str, Outcome]) -> None:
        """The drafter's rounds along the answers of plain decoding."""
        asked: dict[str, tuple[Asked, Outcome]] = {}
        for turn in range(max((len(one.turns) for one in prompts), default=0)):
            coming = self._asked(prompts, turn, PLAIN, done)
            self._end([one for one in coming if not one.fits], keep)
            for one in (one for one in coming if one.fits):
                source = done.get(outcome_id(PLAIN, one.conversation.benchmark, one.conversation.id, turn))
                if source is None:
                    raise ValueError(f"{one.id}: there is no plain answer to follow, answer with {PLAIN!r} first")
                asked[one.id] = one, source
        texts = [
            Text(
                name,
                one.prompt_ids,
                source.token_ids,
                self._request(one).sampling,
                source.finish_reason == "stop",
                one.stream,
            )
            for name, (one, source) in asked.items()
        ]
        found = forced_rounds(
            self.target,
            self.system.drafter,
            texts,
            schedule=self.system.schedule,
            threshold=self.system.threshold,
            whole=True if self.protocol.confidences else None,
            batch_size=self.protocol.batch_size,
            reader=self.reader,
        )
        for rounds in found:
            one, source = asked[rounds.id]
            keep(
                Outcome(
                    **_parts(self.system.name, one),
                    token_ids=source.token_ids,
                    finish_reason=source.finish_reason,
                    accepted=rounds.accepted,
                    verified=rounds.verified,
                    reached=rounds.reached,
                    confidence=rounds.confidence,
                )
            )


def _parts(system: str, asked: Asked) -> dict[str, Any]:
    """What an outcome says of its turn."""
    one = asked.conversation
    about = {"id": asked.id, "system": system, "benchmark": one.benchmark, "conversation": one.id, "turn": asked.turn}
    return about | {"prompt_tokens": len(asked.prompt_ids)}


def _outcome(system: str, asked: Asked, done: Completion, traced: Sequence[RoundTrace], wall: float | None) -> Outcome:
    """The outcome of a request; `traced`: its prefill and its rounds."""
    rounds = traced[1:]
    verified = tuple(one.verified for one in rounds)
    reached = list(verified)
    if rounds and len(rounds[-1].tokens) == rounds[-1].accepted:
        reached[-1] = rounds[-1].accepted  # it ended with an accepted stop token: nothing behind it was decided
    return Outcome(
        **_parts(system, asked),
        token_ids=tuple(done.token_ids),
        finish_reason=done.finish_reason,
        accepted=tuple(one.accepted for one in rounds),
        verified=verified,
        reached=tuple(reached),
        confidence=tuple(one.confidence for one in rounds) if any(one.confidence for one in rounds) else (),
        wall=wall,
    )
