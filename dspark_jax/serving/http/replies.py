"""Answers in the form of OpenAI's API: whole objects, and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from dspark_jax.serving.http.answer import Piece, Round, Tally
from dspark_jax.serving.http.service import Choice, Exchange
from dspark_jax.serving.http.tokens import TokenNames

Json = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}-{uuid.uuid4().hex}"


class Reply(ABC):
    """How the answer to one request is written.

    Args:
        name: its id. model, fingerprint: of the server. logprobs, trace, include_usage: as asked for.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        name: str,
        model: str,
        fingerprint: str,
        names: TokenNames,
        *,
        logprobs: bool = False,
        trace: bool = False,
        include_usage: bool = False,
    ) -> None:
        self.name, self._model, self._fingerprint, self._names = name, model, fingerprint, names
        self._logprobs, self._trace, self._include_usage = logprobs, trace, include_usage
        self._created = int(time.time())

    # --- what differs between chats and completions ---

    @abstractmethod
    def opening(self, choice: Choice) -> Json | None:
        """What the stream of a choice begins with, before the engine has said anything."""

    @abstractmethod
    def _part(self, choice: Choice, piece: Piece) -> Json:
        """The fields of a choice in a chunk with text."""

    @abstractmethod
    def _last(self) -> Json:
        """Those in the chunk that has the finish reason."""

    @abstractmethod
    def _all(self, choice: Choice, text: str, rounds: Sequence[Round]) -> Json:
        """Those of a whole choice."""

    # --- whole ---

    def whole(self, exchange: Exchange) -> Json:
        """The answer in one object, when all of it is there."""
        choices = []
        for choice in exchange.choices:
            fields = self._all(choice, choice.text.text, choice.text.rounds)
            choices.append({"index": choice.index, **fields, "finish_reason": choice.text.finish_reason})
        answer = {**self._head(self.whole_object), "choices": choices, "usage": usage(exchange)}
        if self._trace:
            (choice,) = exchange.choices
            rounds = [trace_round(one, self._names) for one in choice.text.rounds]
            answer["dspark"] = {"rounds": rounds, "summary": summary(choice)}
        return answer

    # --- streamed ---

    def chunks(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        """What a piece of a choice is as chunks: text, then the end."""
        if piece.text or piece.rounds:
            yield self._chunk(choice, self._part(choice, piece), None, piece)
        if piece.end is not None:
            yield self._chunk(choice, self._last(), piece.end)

    def usage_chunk(self, exchange: Exchange) -> Json | None:
        """The last chunk, where the counts of tokens are asked for."""
        if not self._include_usage:
            return None
        return {**self._head(self.chunk_object), "choices": [], "usage": usage(exchange)}

    def _chunk(self, choice: Choice, fields: Json, reason: str | None, piece: Piece | None = None) -> Json:
        entry = {"index": choice.index, **fields, "finish_reason": reason}
        chunk = {**self._head(self.chunk_object), "choices": [entry]}
        if self._include_usage:
            chunk["usage"] = None
        if self._trace and piece is not None:
            chunk["dspark"] = {"rounds": [trace_round(one, self._names) for one in piece.rounds]}
        elif self._trace and reason is not None:
            chunk["dspark"] = {"summary": summary(choice)}
        return chunk

    def _head(self, kind: str) -> Json:
        return {
            "id": self.name,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }


class ChatReply(Reply):
    """Answers to POST /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: Choice) -> Json | None:
        """The role."""
        return self._chunk(choice, {"delta": {"role": "assistant", "content": ""}, "logprobs": None}, None)

    def _part(self, choice: Choice, piece: Piece) -> Json:
        logprobs = self._names.chat(piece.tokens) if self._logprobs else None
        return {"delta": {"content": piece.text}, "logprobs": logprobs}

    def _last(self) -> Json:
        return {"delta": {}, "logprobs": None}

    def _all(self, choice: Choice, text: str, rounds: Sequence[Round]) -> Json:
        tokens = (token for one in rounds for token in one.tokens)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._names.chat(tokens) if self._logprobs else None}


class CompletionReply(Reply):
    """Answers to POST /v1/completions; `echo`: texts of the prompts that come first, by choice, or empty."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, *given: Any, echo: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*given, **options)
        self._echo = echo

    def _prompt(self, choice: Choice) -> str:
        return self._echo[choice.index] if self._echo else ""

    def opening(self, choice: Choice) -> Json | None:
        """The prompt's text, where it is asked for."""
        prompt = self._prompt(choice)
        return self._chunk(choice, {"text": prompt, "logprobs": None}, None) if prompt else None

    def _part(self, choice: Choice, piece: Piece) -> Json:
        return {"text": piece.text, "logprobs": self._names.completion(piece.tokens) if self._logprobs else None}

    def _last(self) -> Json:
        return {"text": "", "logprobs": None}

    def _all(self, choice: Choice, text: str, rounds: Sequence[Round]) -> Json:
        tokens = (token for one in rounds for token in one.tokens)
        logprobs = self._names.completion(tokens) if self._logprobs else None
        return {"text": self._prompt(choice) + text, "logprobs": logprobs}


# --- counts and traces ---


def usage(exchange: Exchange) -> Json:
    """Counts of tokens; each prompt counts once, however many choices it has."""
    prompt, completion = exchange.ask.prompt_tokens, exchange.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def trace_round(one: Round, names: TokenNames) -> Json:
    """A round of decoding, for people to look at."""
    return {
        "tokens": [{"text": token.text, "origin": token.origin} for token in one.tokens],
        "drafts": [names.text(token) for token in one.trace.drafts],
        "confidence": [round(float(value), 4) for value in one.trace.confidence],
        "verified": one.trace.verified,
        "accepted": one.accepted,
    }


def summary(choice: Choice) -> Json:
    """The whole answer in numbers: lengths as in the paper's tables, seconds from the request on, waiting included."""
    tally, tokens = Tally.of(choice.text.rounds), choice.text.token_count
    seconds = choice.last or 0.0
    return {
        "rounds": tally.rounds,
        "accepted_length": round((tokens - 1) / tally.rounds, 4) if tally.rounds else 0.0,
        "verify_budget": round(tally.verify_budget, 4),
        "tokens_per_second": round(tokens / seconds, 3) if seconds else 0.0,
        "first_token_seconds": round(choice.first or 0.0, 6),
        "drafted": tally.drafted,
        "verified": tally.verified,
        "accepted": tally.accepted,
    }
