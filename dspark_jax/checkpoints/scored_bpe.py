"""SentencePiece vocabularies with scores (GGUF's tokenizer model `llama`, as Gemma has it) as a BPE tokenizer.

SentencePiece joins the two neighbours whose joint piece has the best score. The same as a list of merges: every way to
cut a piece into two pieces, best piece first. Runs of one character (blanks, newlines, tabs) are pieces of the user's
making, which no score ranks: they count as 0, the best. Text is not cut into words; a blank is written as U+2581, and
characters without a piece become byte tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RawTokenizer

from dspark_jax.checkpoints.gguf import GGUFFile, TokenType

_BLANK = "\u2581"


def scored_bpe(file: GGUFFile, tokens: Sequence[str]) -> RawTokenizer:
    """The tokenizer of a GGUF file whose `tokenizer.ggml.model` is `llama`.

    Args:
        file: holds scores and token types. tokens: the pieces by id, without padding at the end.

    Raises:
        ValueError: scores or types missing or of another length, tokens of the same text, no token for unknown text,
            or a tokenizer that puts a blank before each text.
    """
    if file.get("tokenizer.ggml.add_space_prefix", True):
        raise ValueError(f"{file.path}: tokenizer.ggml.add_space_prefix true or missing: only false is supported")
    scores: list[float] = file.need("tokenizer.ggml.scores")[: len(tokens)]
    kinds: list[int] = file.need("tokenizer.ggml.token_type")[: len(tokens)]
    if not len(scores) == len(kinds) == len(tokens):
        raise ValueError(
            f"{file.path}: {len(tokens)} tokens, but {len(scores)} tokenizer.ggml.scores and {len(kinds)} token types"
        )
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    if unknown is None or not 0 <= unknown < len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.unknown_token_id {unknown}: must name a token")
    pieces = [
        token.replace(" ", _BLANK) if kind == TokenType.USER_DEFINED else token
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens: two of the tokens have the same text")
    merges = scored_merges(pieces, scores, kinds)
    model = models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    raw = RawTokenizer(model)
    raw.normalizer = normalizers.Replace(" ", _BLANK)
    raw.decoder = decoders.Sequence([decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    written = (TokenType.CONTROL, TokenType.USER_DEFINED)
    raw.add_tokens(
        [
            AddedToken(piece, normalized=False, special=kind == TokenType.CONTROL)
            for piece, kind in zip(pieces, kinds, strict=True)
            if kind in written
        ]
    )
    return raw


def scored_merges(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """All pairs of pieces that make another one, by its score; of one score, pairs with the longer left part first."""
    known = frozenset(pieces)
    merges = []
    for piece, score, kind in zip(pieces, scores, kinds, strict=True):
        if kind == TokenType.USER_DEFINED and len(set(piece)) == 1:
            score = 0.0
        elif kind != TokenType.NORMAL:
            continue
        for cut in range(1, len(piece)):
            if piece[:cut] in known and piece[cut:] in known:
                merges.append((-score, -cut, cut - len(piece), piece[:cut], piece[cut:]))
    merges.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in merges]
