"""What a single token stands for: its bytes, also where they are only a part of a character.

Byte-level vocabularies (GPT-2, Llama 3, Qwen) write each byte as one letter; SentencePiece vocabularies write a blank
as U+2581 and bytes without a letter as <0xNN>. The decoder of a tokenizer tells which of both it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for.

    Printable Latin-1 characters are themselves; the other bytes follow, in their order, from U+0100 on.
    """
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in own)
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


class Spelling:
    """Names and bytes of the tokens of a tokenizer."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        self._added = raw.get_added_tokens_decoder()
        kinds = set(_kinds(json.loads(raw.decoder.__getstate__()))) if raw.decoder is not None else set()
        self._letters = byte_letters() if "ByteLevel" in kinds else None
        self._pieces = bool(kinds & {"ByteFallback", "Metaspace", "Replace"})

    @cached_property
    def longest(self) -> int:
        """Characters of the longest entry: a token stands for no more of a text, normalisation aside."""
        return max(map(len, self._raw.get_vocab()), default=1)

    def name(self, token: int) -> str:
        """The vocabulary's own entry; '' for ids outside it."""
        return self._raw.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes | None:
        """Bytes that a token adds to a text; None for special tokens and ids outside the vocabulary, which add none."""
        if token in self._added:
            added = self._added[token]
            return None if added.special else added.content.encode()
        name = self._raw.id_to_token(token)
        if name is None:
            return None
        if self._letters is not None:
            known = [self._letters.get(letter) for letter in name]
            return name.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if not self._pieces:
            return self._raw.decode([token]).encode()
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()
