"""Bytes of single tokens, for byte-level and SentencePiece vocabularies."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dspark_jax.checkpoints.spelling import Spelling, byte_letters


def test_the_letters_are_those_of_the_library():
    letters = byte_letters()
    assert sorted(letters.values()) == list(range(256))
    assert sorted(letters) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_byte_level_tokens_join_to_the_bytes_of_a_text():
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(byte_letters()))}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken("<end>", special=True), AddedToken(" é", normalized=False)])
    spelling, text = Spelling(raw), "añ 🙂\n\x00"
    ids = raw.encode(text).ids
    assert b"".join(spelling.token_bytes(i) or b"" for i in ids) == text.encode()
    assert all(len(spelling.token_bytes(i) or b"") == 1 for i in ids)
    assert spelling.token_bytes(256) is None and spelling.name(256) == "<end>"
    assert spelling.token_bytes(257) == " é".encode()
    assert spelling.token_bytes(999) is None and spelling.name(999) == ""


def test_sentencepiece_blanks_and_bytes():
    raw = Tokenizer(models.BPE({"▁a": 0, "<0xE2>": 1, "b": 2}, []))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    spelling = Spelling(raw)
    assert [spelling.token_bytes(i) for i in range(3)] == [b" a", b"\xe2", b"b"]


def test_other_decoders_are_asked_for_each_token():
    raw = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece(prefix="##")
    assert Spelling(raw).token_bytes(1) == b"play"
