"""The text of an answer: committed ids as text that grows in whole characters.

Stop strings are looked for in the decoded text, because they may begin and end inside a token. What could still become
a stop string is held back, so a piece that was shown never has to be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_jax.checkpoints.tokenizer import IncrementalDecoder, Tokenizer


class TextStream:
    """Text of one answer, from its token ids as they are committed.

    Attributes:
        token_ids: ids of the answer so far, the model's stop token included; nothing behind a stop string.
        text: what has been given out so far. held: what is known behind it, and held back because it may begin a stop
            string. stopped: a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), stop_ids: Sequence[int] = ()) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped = False
        self._decoder = IncrementalDecoder(tokenizer)
        self._stop = tuple(stop)
        self._stop_ids = frozenset(stop_ids)
        self.held = ""

    @property
    def whole(self) -> bool:
        """Whether no character is unfinished."""
        return self._decoder.whole

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids and gives the text that is sure by now; '' for everything after a stop string."""
        if not self._stop:
            self.token_ids.extend(ids)
            return self._give(self._decoder.push([token for token in ids if token not in self._stop_ids]))
        pieces = []
        for token in ids:  # one by one: the answer's ids end with the one that completes a stop string
            if self.stopped:
                break
            self.token_ids.append(token)
            pieces.append(self._scan("" if token in self._stop_ids else self._decoder.push([token])))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text, when no ids follow."""
        if self.stopped:
            return ""
        rest = self._scan(self._decoder.finish())
        if not self.stopped:
            rest += self._give(self.held)
        self.held = ""
        return rest

    def _scan(self, piece: str) -> str:
        """Text up to the first stop string, less what may be the beginning of one."""
        text = self.held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self.held = True, ""
            return self._give(text[: min(found)])
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self.held = text[len(text) - keep :]
        return self._give(text[: len(text) - keep])

    def _give(self, piece: str) -> str:
        self.text += piece
        return piece


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop` (and not all of it)."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
