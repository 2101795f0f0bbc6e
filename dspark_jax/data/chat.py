"""From conversations to token ids with a loss mask: only what the assistant says is supervised.

A conversation is rendered by the tokenizer's own chat template. In the rendered text each stretch from an assistant
header to the next end-of-turn marker (marker included) is found, and text offsets become token offsets by encoding
the prefixes (paper, training section; the answers' end markers are learnt too, so that a drafter predicts the stop).

What differs between model families is data: a row of `FAMILIES`. Letter: T tokens of a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Message = dict[str, Any]  # {"role": str, "content": str, ...}

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}


class ChatTokenizer(Protocol):
    """What this module needs of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text; markers in the text become their special tokens, no others are added."""

    def render_chat(self, messages: list[Message], add_generation_prompt: bool) -> str:
        """The text that the model's chat template makes of the messages."""


@dataclass(frozen=True)
class ChatFamily:
    """How the chat template of a model family marks the assistant's turns.

    Attributes:
        name: key in `FAMILIES`.
        assistant_header: text that opens an assistant turn.
        end_of_turn: text that closes any turn; supervised where it closes an assistant turn.
        system_prompt: put first where a conversation brings no system message; None adds nothing. Training and
            generation must agree on it: change it for both with `dataclasses.replace`.
        empty_thought: text put before each assistant answer that lacks it, and not supervised; None adds nothing.
    """

    name: str
    assistant_header: str
    end_of_turn: str
    system_prompt: str | None = None
    empty_thought: str | None = None


FAMILIES: dict[str, ChatFamily] = {
    family.name: family
    for family in (
        ChatFamily("qwen", "<|im_start|>assistant\n", "<|im_end|>\n", system_prompt="You are a helpful assistant."),
        ChatFamily("gemma4", "<|turn>model\n", "<turn|>\n", empty_thought="<|channel>thought\n<channel|>"),
        ChatFamily("chatml", "<|im_start|>assistant\n", "<|im_end|>\n"),  # SmolLM2: its template adds a system prompt
    )
}


def get_family(name: str) -> ChatFamily:
    """The family of that name; ValueError lists the known ones."""
    if name not in FAMILIES:
        raise ValueError(f"chat family {name!r}: unknown, must be one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def split_roles(conversation: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Bring the messages of a conversation into one form: {"role", "content", ...}.

    Both spellings of raw data are read: {"role", "content"} and {"from", "value"}. Roles become system, user, assistant
    or tool (human -> user, gpt -> assistant). `tool_calls` given as a JSON string is decoded. Other keys are kept.

    Raises:
        ValueError: no messages, an unknown role, content that is not a string, or tool_calls that is not JSON.
    """
    if isinstance(conversation, (str, bytes, Mapping)) or not isinstance(conversation, Iterable):
        raise ValueError(f"messages is {type(conversation).__name__}: must be a list of objects with role and content")
    messages = [_one_message(number, message) for number, message in enumerate(conversation)]
    if not messages:
        raise ValueError("messages []: must hold at least one message")
    return messages


def _one_message(number: int, raw: Any) -> Message:
    """Message `number` (0-based, for errors) in the common form."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"messages[{number}] is {type(raw).__name__}: must be an object with role and content")
    role = raw.get("role", raw.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"messages[{number}].role {role!r}: must be one of {', '.join(ROLES)}")
    message = {key: value for key, value in raw.items() if key not in ("from", "value") and value is not None}
    message["role"] = ROLES[role]
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        try:
            message["tool_calls"] = json.loads(calls)
        except ValueError as error:
            raise ValueError(f"messages[{number}].tool_calls {calls[:40]!r}: not JSON ({error})") from error
    content = raw.get("content", raw.get("value"))
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"messages[{number}].content is {type(content).__name__}: must be a string")
    message["content"] = content
    return message


def render_conversation(
    tokenizer: ChatTokenizer, messages: Sequence[Message], family: ChatFamily, *, add_generation_prompt: bool = False
) -> str:
    """Text of a conversation under the family's rules (default system prompt, empty thoughts) and the chat template.

    Args:
        tokenizer: renders the template.
        messages: as `split_roles` gives them.
        family: the rules.
        add_generation_prompt: also open the assistant's turn, for generation; the last message is then not its own.

    Raises:
        ValueError: no message after the system message, a first one that is not the user's, nothing left to answer, or
            a text that forges an assistant header (it would be supervised).
    """
    turns = [dict(message) for message in messages]
    if turns and turns[0]["role"] != "system" and family.system_prompt is not None:
        turns.insert(0, {"role": "system", "content": family.system_prompt})
    start = 1 if turns and turns[0]["role"] == "system" else 0
    if len(turns) == start:
        raise ValueError("messages: no user message, the conversation must begin with one (after a system message)")
    if turns[start]["role"] != "user":
        raise ValueError(
            f"messages: the first role is {turns[start]['role']!r}, must be 'user' (after a system message)"
        )
    if add_generation_prompt and turns[-1]["role"] == "assistant":
        raise ValueError(
            "messages: the last one is the assistant's, there is nothing to answer; end with a user message"
        )
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            if family.assistant_header in turn["content"]:
                raise ValueError(
                    f"messages[{number}].content: the {turn['role']} message contains the assistant header "
                    f"{family.assistant_header!r}, remove it or drop the record"
                )
        elif family.empty_thought is not None and not turn["content"].startswith(family.empty_thought):
            turn["content"] = family.empty_thought + turn["content"]
    return tokenizer.render_chat(turns, add_generation_prompt=add_generation_prompt)


def loss_spans(text: str, family: ChatFamily) -> list[tuple[int, int]]:
    """Character ranges [start, end) of a rendered text that are supervised, ascending and disjoint.

    One per assistant header: from behind it (and behind the empty thought) to the end of the next end marker, or to the
    end of the text where none follows.
    """
    spans = []
    position = 0
    while (header := text.find(family.assistant_header, position)) >= 0:
        start = header + len(family.assistant_header)
        marker = text.find(family.end_of_turn, start)
        end = len(text) if marker < 0 else marker + len(family.end_of_turn)
        position = end
        if family.empty_thought is not None and text.startswith(family.empty_thought, start):
            start = min(start + len(family.empty_thought), end)
        spans.append((start, end))
    return spans


def loss_mask_from_text(
    tokenizer: ChatTokenizer, text: str, family: ChatFamily, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenise a rendered conversation and mark what is supervised.

    Args:
        tokenizer: encodes the text.
        text: as `render_conversation` gives it.
        family: tells where assistant turns begin and end.
        max_length: tokens to keep; the rest is cut off on the right. An answer that is cut keeps the mask on what
            remains of it.

    Returns:
        input_ids int32 [T] and loss_mask uint8 [T], T <= max_length.

    Raises:
        ValueError: max_length below 1.
    """
    if max_length < 1:
        raise ValueError(f"max_length {max_length}: must be at least 1 token")
    input_ids = np.asarray(tokenizer.encode(text)[:max_length], np.int32)  # [T]
    loss_mask = np.zeros(len(input_ids), np.uint8)  # [T]
    for start, end in loss_spans(text, family):
        first = len(tokenizer.encode(text[:start]))
        if first >= len(input_ids):
            break
        loss_mask[first : len(tokenizer.encode(text[:end]))] = 1
    return input_ids, loss_mask


def encode_conversation(
    tokenizer: ChatTokenizer, conversation: Iterable[Mapping[str, Any]], family: ChatFamily, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Raw conversation -> (input_ids int32 [T], loss_mask uint8 [T]): roles, template and mask in one call.

    Arguments and errors are those of `split_roles`, `render_conversation` and `loss_mask_from_text`.
    """
    text = render_conversation(tokenizer, split_roles(conversation), family)
    return loss_mask_from_text(tokenizer, text, family, max_length)
