"""One answer as it grows: the engine's tokens become text, cut where a stop string or a stop token ends it.

An answer that is told of in detail (log-probabilities, a trace of rounds) gives out whole rounds, as soon as none of
their text can be taken back by a stop string and no character in them is unfinished. The texts of their tokens, joined,
are the answer's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dspark_jax.checkpoints.tokenizer import Tokenizer
from dspark_jax.decoding.batching import Event
from dspark_jax.decoding.trace import RoundTrace
from dspark_jax.serving.stream import TextStream


@dataclass
class Token:
    """A token of an answer.

    Attributes:
        id: of the vocabulary. text: characters that it completes. start: characters of the answer before it.
        origin: draft, corrected, bonus or plain. logprob, top: of the target; (id, logprob) of the most likely ones.
    """

    id: int
    text: str
    start: int
    origin: str
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass
class Round:
    """A round of decoding: what it drafted, and its tokens that belong to the answer."""

    trace: RoundTrace
    tokens: list[Token] = field(default_factory=list)
    end: int = 0  # characters of the answer behind it
    taken: int = 0  # tokens of it that count, one that ends the answer included

    @property
    def accepted(self) -> int:
        """Drafts that count."""
        return min(self.trace.accepted, self.taken)


@dataclass(frozen=True)
class Piece:
    """What a look at an answer brought: text, in detail the rounds that it came from, and why the answer ends there."""

    text: str = ""
    rounds: tuple[Round, ...] = ()
    end: str | None = None

    def __add__(self, other: Piece) -> Piece:
        return Piece(self.text + other.text, self.rounds + other.rounds, other.end or self.end)

    @property
    def tokens(self) -> Iterable[Token]:
        """Those of all rounds."""
        return (token for one in self.rounds for token in one.tokens)


class AnswerText:
    """An answer, from the engine's events.

    Args:
        stop: texts that end it and are no part of it. stop_ids: the model's tokens that end it; the engine heeds them.
        more_stop_ids: further ones, which nobody but this class knows. detailed: tell of rounds.

    Attributes:
        finish_reason: None while it grows; then "stop", "length" or "cancelled".
        rounds: in detail, all that were given out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        stop_ids: Iterable[int] = (),
        more_stop_ids: Iterable[int] = (),
        detailed: bool = False,
    ) -> None:
        self._more_stop_ids = frozenset(more_stop_ids)
        self._stop_ids = self._more_stop_ids | frozenset(stop_ids)
        self._stream = TextStream(tokenizer, stop, tuple(self._stop_ids))
        self._detailed = detailed
        self._seen = 0  # characters that are known
        self._pending: list[Round] = []
        self.finish_reason: str | None = None
        self.rounds: list[Round] = []

    @property
    def text(self) -> str:
        """All that was given out."""
        return self._stream.text if not self._detailed else "".join(t.text for r in self.rounds for t in r.tokens)

    @property
    def token_count(self) -> int:
        """Tokens generated for it: with one that ends it, without what follows a stop string."""
        return len(self._stream.token_ids)

    def push(self, event: Event) -> Piece:
        """Takes what the engine brought; nothing after the end."""
        if self.finish_reason is not None:
            return Piece()
        ids = self._until_stop(event.tokens)
        ended = len(ids) > 0 and ids[-1] in self._more_stop_ids
        text = ""
        if self._detailed:
            self._push_rounds(event, len(ids))
        else:
            text = self._stream.push(ids)
        if self._stream.stopped or ended:
            text += self._end("stop")
        elif event.completion is not None:
            text += self._end(event.completion.finish_reason)
        return self._release() if self._detailed else Piece(text, (), self.finish_reason)

    def _until_stop(self, ids: list[int]) -> list[int]:
        """Tokens up to the first one that ends the answer for this request only."""
        at = next((i for i, token in enumerate(ids) if token in self._more_stop_ids), None)
        return ids if at is None else ids[: at + 1]

    def _push_rounds(self, event: Event, count: int) -> None:
        """The first `count` tokens of an event."""
        for trace in event.rounds:
            one = Round(trace)
            self._pending.append(one)
            for i, token in enumerate(trace.tokens[:count]):
                if self._stream.stopped:
                    break
                self._push_token(one, i, token)
            count = max(count - len(trace.tokens), 0)
            one.end = self._seen
            if not one.taken:
                self._pending.pop()

    def _push_token(self, one: Round, i: int, token: int) -> None:
        held, start, trace = self._stream.held, self._seen, one.trace
        given = self._stream.push([token])
        one.taken += 1
        text = (given + self._stream.held)[len(held) :]
        if self._stream.stopped:
            end = len(self._stream.text)
            self._cut(end)
            if start >= end:
                return
            text = self._stream.text[start:]
        if token not in self._stop_ids:
            logprob, top = (trace.logprobs[i], trace.top[i]) if trace.logprobs else (None, ())
            one.tokens.append(Token(token, text, start, trace.origin(i), logprob, top))
            self._seen = start + len(text)

    def _cut(self, end: int) -> None:
        """Takes back what lies behind `end` characters: a stop string began there."""
        for one in self._pending:
            one.tokens = [token for token in one.tokens if token.start < end]
            for token in one.tokens[-1:]:
                token.text = token.text[: end - token.start]
        self._seen = min(self._seen, end)

    def _end(self, reason: str) -> str:
        """The answer is over; the text that was held back."""
        rest = self._stream.finish()
        self.finish_reason = "stop" if self._stream.stopped else reason
        if self._detailed:
            self._cut(len(self._stream.text))
            never_whole = self._stream.text[self._seen :]  # stands for a character that was never finished
            last = next((one.tokens[-1] for one in reversed(self._pending) if one.tokens), None)
            if never_whole and last is not None:
                last.text += never_whole
        return rest

    def _release(self) -> Piece:
        """Rounds that are sure by now."""
        if self.finish_reason is not None:
            sure, self._pending = self._pending, []
        else:
            sure, given = [], len(self._stream.text)
            while self._stream.whole and self._pending and self._pending[0].end <= given:
                sure.append(self._pending.pop(0))
        self.rounds += sure
        text = "".join(token.text for one in sure for token in one.tokens)
        return Piece(text, tuple(sure), self.finish_reason)


@dataclass(frozen=True)
class Tally:
    """Counts over the rounds of an answer; the token of the prefill belongs to none."""

    rounds: int
    drafted: int
    verified: int
    accepted: int

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> Tally:
        """Of all of an answer's rounds; the first one is the prefill's."""
        own = rounds[1:]
        return cls(
            len(own),
            sum(len(one.trace.drafts) for one in own),
            sum(one.trace.verified for one in own),
            sum(one.accepted for one in own),
        )

    @property
    def verify_budget(self) -> float:
        """Rows of the target per round, the anchor's included."""
        return (self.verified + self.rounds) / self.rounds if self.rounds else 0.0
