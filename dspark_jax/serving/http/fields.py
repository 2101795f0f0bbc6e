"""Types of the fields of request bodies: each checks a value, says what would be right, and describes itself.

Types are strict: "5" is no number and 1.0 no count. Fields of OpenAI's API that are not supported are there too, and
take only the values that change nothing (`neutral`): nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Strict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from dspark_jax.data.neutral import check_neutral

MOST_CHOICES = 128  # answers, and prompts, of one request
MOST_STOPS = 4
LONGEST_STOP = 512  # characters: the end of the text is compared with all beginnings of a stop string
MOST_STOP_IDS = 64
INT32, INT63 = 2**31 - 1, 2**63 - 1

Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]


@dataclass(frozen=True, eq=False)
class Checked:
    """Annotates a type.

    Attributes:
        check: turns what JSON held into a value of the type, or raises ValueError. schema: describes it.
    """

    check: Callable[[Any], Any]
    schema: dict[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return self.schema


def neutral(*values: Any) -> Checked:
    """For a field that must have one of `values`, or be null or absent."""

    def check(value: Any) -> Any:
        check_neutral(value, *values)
        return value

    return Checked(check, {"enum": [*values, None]})


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32


def _check_texts(texts: list[str]) -> None:
    """Refuses what UTF-8 cannot write: JSON may hold halves of surrogate pairs."""
    try:
        for text in texts:
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair at character {error.start}, must be whole ones") from error


# --- stop ---


def check_stop(value: Any) -> tuple[str, ...]:
    """Stop strings as a tuple; none for null."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a non-empty string or a list of them")
    if len(texts) > MOST_STOPS:
        raise ValueError(f"has {len(texts)} strings, must have at most {MOST_STOPS}")
    if any(len(text) > LONGEST_STOP for text in texts):
        raise ValueError(f"a string has {max(map(len, texts))} characters, must have at most {LONGEST_STOP}")
    _check_texts(texts)
    return tuple(texts)


_STOP = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
_STOPS = {"type": "array", "items": _STOP, "maxItems": MOST_STOPS}
Stop = Annotated[tuple[str, ...], Checked(check_stop, {"anyOf": [_STOP, _STOPS, {"type": "null"}]})]

# --- prompts of completions ---


def check_prompts(value: Any) -> list[str | list[int]]:
    """A string, a list of strings, a list of token ids or a list of such lists, as a list of prompts."""
    rule = "must be a string, a list of strings, a list of token ids (0 or more), or a list of such lists"
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_id, value))):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{rule}, and not empty")
    texts = [one for one in value if isinstance(one, str)]
    ids = [one for one in value if isinstance(one, list) and one and all(map(_is_id, one))]
    if len(value) not in (len(texts), len(ids)):
        raise ValueError(rule)
    if len(value) > MOST_CHOICES:
        raise ValueError(f"has {len(value)} prompts, must have at most {MOST_CHOICES}")
    _check_texts(texts)
    return value


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32}, "minItems": 1}
_MANY = {"type": "array", "minItems": 1, "maxItems": MOST_CHOICES}
_PROMPTS = [{"type": "string"}, {**_MANY, "items": {"type": "string"}}, _IDS, {**_MANY, "items": _IDS}]
Prompts = Annotated[list[Any], Checked(check_prompts, {"anyOf": _PROMPTS})]

# --- content of chat messages ---


def check_content(value: Any) -> str:
    """A message's text; the parts of a list are joined by line breaks."""
    if isinstance(value, str):
        _check_texts([value])
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a non-empty list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
            what = "a text part" if kind == "text" else f"a part of type {str(kind)[:40]!r}"
            raise ValueError(f'{what}: must be {{"type": "text", "text": string}}, this server reads text only')
        texts.append(part["text"])
    _check_texts(texts)
    return "\n".join(texts)


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_PARTS = {"type": "array", "items": _PART, "minItems": 1}
Content = Annotated[str, Checked(check_content, {"anyOf": [{"type": "string"}, _PARTS]})]
