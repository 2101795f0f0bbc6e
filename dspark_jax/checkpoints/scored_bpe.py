"""SentencePiece vocabularies with scores (GGUF's tokenizer model `llama`, as Gemma has it) as a BPE tokenizer.

SentencePiece joins the two neighbours whose joint piece has the best score. The same as a list of merges: every way to
cut a piece into two pieces, best piece first. Runs of one blank character are pieces of the user's making, which no
score ranks: they come before all others, the longest first. Text is not cut into words; a blank is written as U+2581,
and characters without a piece become byte tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RawTokenizer

from dspark_jax.checkpoints.gguf import GGUFFile, TokenType

_BLANK = "\u2581"


def scored_bpe(file: GGUFFile, tokens: Sequence[str]) -> RawTokenizer:
    """The tokenizer of a GGUF file whose `tokenizer.ggml.model` is `llama`.

    Args:
        file: holds scores and token types. tokens: the pieces by id, without padding at the end.

    Raises:
        ValueError: scores or types missing or of another length, no piece for unknown text, or a tokenizer that puts a
            blank before each text.
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
    joined = ranked_pieces(pieces, scores, kinds)
    model = models.BPE(
        vocabulary, merges_of(joined, vocabulary), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
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


def ranked_pieces(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[str]:
    """The pieces that merges may make, first ones first: runs of blank characters by length, then the rest by score."""
    runs = [
        piece
        for piece, kind in zip(pieces, kinds, strict=True)
        if kind == TokenType.USER_DEFINED and len(piece) > 1 and len(set(piece)) == 1
    ]
    normal = [i for i, kind in enumerate(kinds) if kind == TokenType.NORMAL and len(pieces[i]) > 1]
    return sorted(runs, key=len, reverse=True) + [pieces[i] for i in sorted(normal, key=lambda i: -scores[i])]


def merges_of(joined: Sequence[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that make the pieces `joined`, in their order; pairs of one piece by the ids of the parts."""
    merges = []
    for piece in joined:
        pairs = [
            (left, right)
            for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            if left in vocabulary and right in vocabulary
        ]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges
