"""Tokens and their log-probabilities in the words of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from dspark_jax.checkpoints.spelling import Spelling
from dspark_jax.serving.http.answer import Token

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot write


class TokenNames:
    """How tokens are written in answers."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self.longest = spelling.longest
        self.name = lru_cache(maxsize=1 << 16)(self._name)

    def _name(self, token: int) -> str:
        """Its text; `bytes:\\xe2\\x82` where that is a part of a character, the vocabulary's entry for special ones."""
        raw = self._spelling.token_bytes(token)
        if raw is None:
            return self._spelling.name(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def text(self, token: int) -> str:
        """Its text for people: U+FFFD for parts of characters, nothing for special tokens."""
        return (self._spelling.token_bytes(token) or b"").decode("utf-8", errors="replace")

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._spelling.token_bytes(token)
        return {
            "token": self.name(token),
            "logprob": _finite(logprob),
            "bytes": None if raw is None else list(raw),
        }

    def chat(self, tokens: Iterable[Token]) -> dict[str, Any]:
        """The `logprobs` of a chat choice."""
        content = [
            self._entry(one.id, one.logprob) | {"top_logprobs": [self._entry(*entry) for entry in one.top]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def completion(self, tokens: Iterable[Token]) -> dict[str, Any]:
        """The `logprobs` of a completion's choice: columns, with the chosen token among the likely ones."""
        tokens = list(tokens)
        return {
            "tokens": [self.name(one.id) for one in tokens],
            "token_logprobs": [_finite(one.logprob) for one in tokens],
            "top_logprobs": [
                {self.name(token): _finite(value) for token, value in (*one.top, (one.id, one.logprob))}
                for one in tokens
            ],
            "text_offset": [one.start for one in tokens],
        }


def _finite(logprob: float | None) -> float:
    """A log-probability that JSON can write."""
    return LEAST_LOGPROB if logprob is None else max(float(logprob), LEAST_LOGPROB)
