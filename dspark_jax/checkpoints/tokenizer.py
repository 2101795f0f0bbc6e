"""Text to token ids and back: one wrapper over Hugging Face fast tokenizers, from a folder, a hub id or a GGUF file.

A GGUF file stores vocabulary and merges, but only the *name* of its pre-tokenizer (the rule that cuts text into words
before the merges). `_SPLITTERS` gives the rule by that name. An unknown name is refused, because a wrong rule shifts
token boundaries without any error. SentencePiece vocabularies (Gemma) are read by `scored_bpe`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from dspark_jax.checkpoints.gguf import GGUFFile, TokenType
from dspark_jax.checkpoints.scored_bpe import scored_bpe
from dspark_jax.checkpoints.spelling import Spelling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]
_LONG = 10_000  # characters, from which on a text is encoded by the call that lets other threads run meanwhile

_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    """SmolLM's rule: each digit alone, then GPT-2's words.

    Some conversions of SmolLM2's tokenizer lack the digit rule. They differ where a digit follows two or more blanks:
    this rule keeps two newlines before "1." in one token, theirs makes two tokens. The model tells which is right: five
    such texts are 4 to 11 nats likelier to SmolLM2-135M-Instruct in the ids of this rule, which llama.cpp has too.
    """
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_SPLITTERS = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "qwen2": lambda: _by_regex(_WORDS_QWEN2),
    "llama-bpe": lambda: _by_regex(_WORDS_LLAMA3),
}


class Tokenizer:
    """Token ids of texts and chats.

    Attributes:
        eos_ids: ids that end a generation. bos_id: the family's first token, or None.
        prefix_ids: ids that the family puts before a plain text (BOS or nothing); chat templates bring their own.
        vocab_size: ids lie in 0..vocab_size-1. chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        fast: PreTrainedTokenizerFast,
        *,
        eos_ids: Sequence[int] = (),
        prefix_ids: Sequence[int] = (),
    ) -> None:
        self._fast = fast
        self._raw: RawTokenizer = fast.backend_tokenizer
        self._raw.no_truncation()
        self._raw.no_padding()
        own = () if fast.eos_token_id is None else (fast.eos_token_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_ids, *own)))
        self.bos_id: int | None = fast.bos_token_id
        self.prefix_ids = tuple(prefix_ids)
        self.vocab_size = max(self._raw.get_vocab(with_added_tokens=True).values()) + 1
        self.chat_template: str | None = fast.chat_template

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Special tokens written out in the text are recognised; none is added."""
        if len(text) >= _LONG:
            (encoding,) = self._raw.encode_batch([text], add_special_tokens=False)
            return encoding.ids
        return self._raw.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are no valid UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self._raw.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    @cached_property
    def spelling(self) -> Spelling:
        """Names and bytes of single tokens."""
        return Spelling(self._raw)

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **options: Any) -> str:
        """Text of a chat by the model's own template.

        Args:
            messages: dicts with `role` and `content`.
            add_generation_prompt: end with the header of an assistant turn.
            options: further template variables, such as `enable_thinking`.

        Raises:
            ValueError: no template, or one that refuses these messages.
        """
        from jinja2 import TemplateError

        if not self.chat_template:
            raise ValueError("the tokenizer has no chat template: give a plain prompt, or a model tuned for chat")
        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Ids of `render_chat`'s text; same arguments and errors."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **options))


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a chat, ready to be answered: what is asked in serving, in measurements and for training data.

    The chat template opens the assistant's turn; thinking is switched off where the template knows that switch. Without
    a template the text of a single user message is taken as it is, after the family's first token.

    Raises:
        ValueError: the template refuses the messages, or there is none and they are more than one user message.
    """
    template = tokenizer.chat_template
    if template:
        options = {"enable_thinking": False} if "enable_thinking" in str(template) else {}
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options))
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise ValueError(
            f"messages: the tokenizer has no chat template, must be one user message and not {len(messages)}"
        )
    return (*tokenizer.prefix_ids, *tokenizer.encode(messages[0]["content"]))


class IncrementalDecoder:
    """Text of a growing sequence of ids, in pieces that never cut a character: joined they are the text of all ids.

    A character may span several tokens. Until it is complete the text ends in U+FFFD, so that tail is held back. Only a
    window of recent ids is decoded again; it slides at places where a character ends.

    Attributes:
        whole: whether no character is unfinished.
    """

    _SLIDE_AT = 32  # ids

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that are out
        self._boundary = 0  # a position in the window where a character ended
        self.whole = True

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids, gives the characters that are complete by now (maybe none)."""
        before = len(self._window)
        self._window.extend(ids)
        text = self._decode(self._window)
        stable = text.rstrip("\ufffd")
        piece = stable[self._emitted :]
        self.whole = stable == text
        self._emitted = max(self._emitted, len(stable))
        if self.whole:
            if before >= self._SLIDE_AT:
                self._slide()
            self._boundary = len(self._window)
        return piece

    def finish(self) -> str:
        """The rest, with U+FFFD for a character that never became complete. The decoder is empty afterwards."""
        rest = self._decode(self._window)[self._emitted :]
        self._window, self._emitted, self._boundary, self.whole = [], 0, 0, True
        return rest

    def _slide(self) -> None:
        """Drops the ids before the last boundary. What is left must show text: decoders treat a text's start apart."""
        recent = self._window[self._boundary :]
        text = self._decode(recent)
        if text:
            self._window, self._emitted = recent, len(text)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        path: a GGUF file, a folder with tokenizer files, or a hub id.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: no tokenizer files, unreadable ones, or a GGUF tokenizer of a kind that is not supported.
    """
    local = Path(path)
    if local.suffix == ".gguf" or local.is_file():
        return _from_gguf(GGUFFile(local))
    if not local.is_dir():
        from dspark_jax.checkpoints.hf import TOKENIZER_FILES, resolve

        local = resolve(path, patterns=TOKENIZER_FILES)
    return _from_folder(local)


def _import_fast() -> type[PreTrainedTokenizerFast]:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else it deplores that torch is absent
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


def _from_folder(folder: Path) -> Tokenizer:
    fast_class = _import_fast()
    try:
        if (folder / "tokenizer.json").is_file():
            fast = fast_class.from_pretrained(folder, local_files_only=True)
        elif any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "spiece.model")):
            from transformers import AutoTokenizer

            fast = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        else:
            raise FileNotFoundError(f"{folder}: no tokenizer.json (nor tokenizer.model, vocab.json)")
    except FileNotFoundError:
        raise
    except Exception as error:  # the Rust reader raises plain Exception
        raise ValueError(f"{folder}: tokenizer files are not readable ({error})") from error
    return Tokenizer(
        fast,
        eos_ids=_generation_eos(folder / "generation_config.json"),
        prefix_ids=[i for i in fast.backend_tokenizer.encode("").ids if i == fast.bos_token_id],
    )


def _generation_eos(file: Path) -> tuple[int, ...]:
    """The ids that `generation_config.json` names as ends of a generation; empty without the file."""
    if not file.is_file():
        return ()
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(f"{file}: not a JSON object ({error})") from error
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _from_gguf(file: GGUFFile) -> Tokenizer:
    kind, splitter = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model {kind!r}: only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) "
            "are supported"
        )
    if kind == "gpt2" and splitter not in _SPLITTERS:
        raise ValueError(f"{file.path}: tokenizer.ggml.pre {splitter!r}: supported are {sorted(_SPLITTERS)}")
    tokens: list[str] = file.need("tokenizer.ggml.tokens")[: file.num_tokens()]
    raw = _byte_level_bpe(file, tokens, splitter) if kind == "gpt2" else scored_bpe(file, tokens)
    names = ("bos", "eos", "eot", "eom", "unknown", "padding")
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    for name, token in ids.items():
        if token is not None and not 0 <= token < len(tokens):
            raise ValueError(f"{file.path}: {name} token id {token} lies outside the token list (0..{len(tokens) - 1})")
    named = {
        f"{ours}_token": tokens[ids[theirs]]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if ids[theirs] is not None
    }
    fast = _import_fast()(
        tokenizer_object=raw,
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )
    ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    if kind == "llama":  # Gemma's chats end their turns with these, which some files name under no key
        ends += [i for i, token in enumerate(tokens) if token in ("<end_of_turn>", "<turn|>")]
    if splitter == "qwen2":  # Qwen's generation_config stops at this one too, which GGUF has no key for
        ends += [i for i, token in enumerate(tokens) if token == "<|endoftext|>"]
    by_default = kind == "llama" or splitter == "llama-bpe"
    add_bos = file.get("tokenizer.ggml.add_bos_token", by_default) and ids["bos"] is not None
    return Tokenizer(fast, eos_ids=ends, prefix_ids=[ids["bos"]] if add_bos else [])


def _byte_level_bpe(file: GGUFFile, tokens: Sequence[str], splitter: str) -> RawTokenizer:
    merges = [_split_merge(merge) for merge in file.need("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        raw = RawTokenizer(models.BPE(vocabulary, merges, ignore_merges=splitter == "llama-bpe"))
    except Exception as error:  # the Rust code raises plain Exception
        raise ValueError(f"{file.path}: tokens and merges do not belong together ({error})") from error
    if splitter == "qwen2":
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = _SPLITTERS[splitter]()
    raw.decoder = decoders.ByteLevel()
    kinds = file.get("tokenizer.ggml.token_type") or []
    added = []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            added.append(AddedToken(token, normalized=False, special=kind == TokenType.CONTROL))
    raw.add_tokens(added)
    return raw


def _split_merge(merge: str) -> tuple[str, str]:
    """The two halves of a merge; the first character belongs to the left half whatever it is."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]
