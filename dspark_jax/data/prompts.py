"""Prompts for generation, from a JSONL file or from a data set on the Hugging Face hub.

A JSONL line is {"prompt": str}, {"messages": [...]}, {"turns": [str, ...]} or {"conversations": [...]}, with an
optional "id" and sampling fields. Sampling settings that other programs have and this one has not are refused unless
they change nothing (`_UNSUPPORTED`); other keys are the user's own. Of `turns` and `conversations` only the first user
turn is asked (later turns answer to another model's words); `messages` is taken whole and must end with what is to be
answered.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dspark_jax.data.chat import Message, split_roles
from dspark_jax.data.neutral import NEUTRAL, check_neutral

logger = logging.getLogger(__name__)

LINE_FILTERS = ("all", "odd", "even")
PROMPT_FIELDS = ("messages", "conversations", "turns", "prompt")
DATASET_COLUMNS = ("conversations", "messages", "turns", "prompt", "question")
HUB_PREFIX = "hf:"


@dataclass(frozen=True)
class PromptRecord:
    """One prompt.

    Attributes:
        id: unique name within its source; "FILESTEM:LINE" (1-based) where the source gives none.
        messages: chat messages {"role", "content", ...}, the last one to be answered.
        sampling: the sampling fields that the source gives (`sampling_fields`); absent ones are up to the caller.
        prompt_text: the last user message, for reports and output files.
    """

    id: str
    messages: tuple[Message, ...]
    sampling: dict[str, Any]
    prompt_text: str


# --- checks of single values ---


def _number(name: str, value: Any, rule: str, low: float, high: float) -> float:
    """`value` as a finite float in [low, high]; ValueError states `rule`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} {value!r}: must be a number, {rule}")
    if not low <= value <= high:  # refuses NaN too
        raise ValueError(f"{name} {value!r}: must be {rule}")
    return float(value)


def _integer(name: str, value: Any, rule: str, low: int, high: int) -> int:
    """`value` as an int in low..high; ValueError states `rule`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} {value!r}: must be an integer, {rule}")
    if not low <= value <= high:
        raise ValueError(f"{name} {value!r}: must be {rule}")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop {value!r}: must be a non-empty string or a list of non-empty strings")
    return tuple(texts)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "temperature": lambda value: _number("temperature", value, "finite and at least 0", 0.0, sys.float_info.max),
    "top_p": lambda value: _number("top_p", value, "above 0 and at most 1", sys.float_info.min, 1.0),
    "top_k": lambda value: _integer("top_k", value, "0 (off) or more, below 2^31", 0, 2**31 - 1),
    "min_p": lambda value: _number("min_p", value, "at least 0 and below 1", 0.0, math.nextafter(1.0, 0.0)),
    "seed": lambda value: _integer("seed", value, "from 0 to 2^63 - 1", 0, 2**63 - 1),
    "max_tokens": lambda value: _integer("max_tokens", value, "at least 1 and below 2^31", 1, 2**31 - 1),
    "stop": _stop,
}

# What a line cannot ask for, and the values at which it changes nothing. Most of what is added here the server can do.
_UNSUPPORTED: dict[str, Any] = NEUTRAL | {
    "stop_token_ids": [],
    "logprobs": False,
    "top_logprobs": 0,
    "n": 1,
    "best_of": 1,
    "num_return_sequences": 1,
}
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
    "do_sample": "temperature",
}


def _refuse_others(fields: Mapping[str, Any]) -> None:
    """ValueError for a sampling setting that would be ignored though it means something."""
    for name, neutral in _UNSUPPORTED.items():
        try:
            check_neutral(fields.get(name), neutral)
        except ValueError as error:
            raise ValueError(f"{name} {repr(fields[name])[:60]}: {error}") from error
    for name, ours in _OTHER_NAMES.items():
        if fields.get(name) is not None:
            raise ValueError(f"{name} {fields[name]!r}: not a field here, must be {ours}")


def sampling_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Check the sampling fields of a mapping and return those that are present and not null.

    temperature float >= 0 (0 is greedy), top_p float in (0, 1], top_k int >= 0 (0 is off), min_p float in [0, 1),
    seed int in 0..2^63-1, max_tokens int >= 1 (tokens to generate), stop str or list of str (returned as a tuple).

    Raises:
        ValueError: naming the field, its value and what would be right; also for settings of other programs that mean
            something (penalties, `n`, `logprobs`, `max_new_tokens`, ...).
    """
    _refuse_others(fields)
    return {name: check(fields[name]) for name, check in _CHECKS.items() if fields.get(name) is not None}


def checked_text(name: str, value: Any) -> str:
    """A non-empty string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}: must be a string")
    if not value:
        raise ValueError(f"{name} '': must not be empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: holds half of a surrogate pair at character {error.start}, write whole ones"
        ) from error
    return value


# --- one row ---


def _first_turn(messages: list[Message]) -> list[Message]:
    """The system message, if any, and the first user message."""
    for number, message in enumerate(messages):
        if message["role"] == "user":
            return [other for other in messages[:number] if other["role"] == "system"] + [message]
    raise ValueError("conversations: no user message, must hold at least one")


def _messages(row: Mapping[str, Any], names: Iterable[str]) -> list[Message]:
    """The messages of a row, from the first of the fields `names` that it has."""
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise ValueError(f"no prompt, must have one of the fields {', '.join(names)}")
    value = row[name]
    if name == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(turn, str) for turn in value):
            raise ValueError(f"turns {str(value)[:60]}: must be a non-empty list of strings")
        return [{"role": "user", "content": checked_text("turns[0]", value[0])}]
    if name in ("prompt", "question"):
        return [{"role": "user", "content": checked_text(name, value)}]
    messages = split_roles(value)
    if name == "conversations":
        messages = _first_turn(messages)
    for number, message in enumerate(messages):
        if message["role"] in ("user", "system"):
            checked_text(f"{name}[{number}].content", message["content"])
    return messages


def prompt_record(row: Mapping[str, Any], default_id: str, names: Iterable[str] = PROMPT_FIELDS) -> PromptRecord:
    """A `PromptRecord` from one row; `names` are the prompt fields it may have, the first one present counts.

    Raises:
        ValueError: naming the field, its value and what would be right.
    """
    messages = _messages(row, names)
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("messages: no user message, must hold at least one")
    if messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(
            f"messages: the last role is {messages[-1]['role']!r}, must be 'user' (or 'tool') to be answered"
        )
    name = row.get("id")
    if name is None:
        name = default_id
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise ValueError(f"id {name!r}: must be a non-empty string or an integer")
    last_user = [message["content"] for message in messages if message["role"] == "user"][-1]
    return PromptRecord(str(name), tuple(messages), sampling_fields(row), last_user)


# --- sources ---


def jsonl_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | ValueError]]:
    """(1-based line number, object or what is wrong with it) of each line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                yield number, ValueError(f"not JSON ({error}), must be one JSON object a line in UTF-8")
                continue
            yield number, row if isinstance(row, dict) else ValueError(f"{type(row).__name__}, must be a JSON object")


def hub_place(source: str, what: str) -> tuple[str, str, str]:
    """NAME, CONFIG and SPLIT of hf:NAME[@CONFIG][:SPLIT]; '' where it does not say.

    Raises:
        ValueError: no name. `what`: what the message calls the source.
    """
    place, _, split = source.removeprefix(HUB_PREFIX).partition(":")
    name, _, config = place.partition("@")
    if not name:
        raise ValueError(f"{what} {source!r}: must be hf:NAME, hf:NAME@CONFIG or either with :SPLIT")
    return name, config, split


def _hub_rows(name: str, config: str | None, split: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(1-based row number, the prompt columns) of each row of a data set, streamed by the datasets library.

    `config`: one of the set's configurations (subsets), None where it has only one.

    Other columns are not looked at: an "id" of the set need not be unique, a "seed" not ours.
    """
    import datasets

    rows = datasets.load_dataset(name, config, split=split, streaming=True)
    return ((number, {key: row.get(key) for key in DATASET_COLUMNS}) for number, row in enumerate(rows, start=1))


def _rows(source: str) -> tuple[str, tuple[str, ...], Iterator[tuple[int, Any]]]:
    """The stem for ids, the prompt fields to look for, and the numbered rows of a source."""
    if source.startswith(HUB_PREFIX):
        name, config, split = hub_place(source, "source")
        return Path(name).name, DATASET_COLUMNS, _hub_rows(name, config or None, split or "train")
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"prompt file {source}: not found, must be a JSONL file or hf:NAME[@CONFIG][:SPLIT]")
    return path.stem, PROMPT_FIELDS, jsonl_rows(path)


def iter_prompts(
    source: str | Path, *, line_filter: str = "all", limit: int | None = None, skip_bad: bool = False
) -> Iterator[PromptRecord]:
    """Prompts of a source one by one, for sources too large to hold.

    Args:
        source: a JSONL file, or "hf:NAME[@CONFIG][:SPLIT]" (split "train" if not given; CONFIG is a subset of the data
            set, as `main` of openai/gsm8k) through the datasets library; there the columns conversations, messages,
            turns, prompt, question are looked for, and nothing else is read.
        line_filter: "all", "odd" or "even" 1-based lines (blank lines count). A split without a second file: train on
            the odd lines, measure on the even ones.
        limit: stop after so many prompts; None reads all.
        skip_bad: log a wrong line as a warning and go on, for large raw data sets.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: line_filter or limit are wrong; while iterating, a line that is wrong or an id that comes twice
            (unless skip_bad), naming source, line, field, value and remedy.
    """
    if line_filter not in LINE_FILTERS:
        raise ValueError(f"line_filter {line_filter!r}: must be one of {', '.join(LINE_FILTERS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit}: must be at least 1 (None reads all)")
    stem, names, rows = _rows(str(source))
    if line_filter != "all":
        wanted = 1 if line_filter == "odd" else 0
        rows = ((number, row) for number, row in rows if number % 2 == wanted)
    return islice(_records(str(source), stem, names, rows, skip_bad), limit)


def _records(
    source: str, stem: str, names: Iterable[str], rows: Iterable[tuple[int, Any]], skip_bad: bool
) -> Iterator[PromptRecord]:
    """Records of numbered rows, with unique ids; errors name source and line."""
    seen: dict[str, int] = {}
    for number, row in rows:
        try:
            if isinstance(row, ValueError):
                raise row
            record = prompt_record(row, f"{stem}:{number}", names)
            if record.id in seen:
                raise ValueError(f"id {record.id!r}: already used on line {seen[record.id]}, ids must differ")
        except ValueError as error:
            if not skip_bad:
                raise ValueError(f"{source}, line {number}: {error}") from error
            logger.warning("%s, line %d left out: %s", source, number, error)
            continue
        seen[record.id] = number
        yield record


def read_prompts(
    source: str | Path, *, line_filter: str = "all", limit: int | None = None, skip_bad: bool = False
) -> list[PromptRecord]:
    """`iter_prompts` as a list; ValueError too where nothing is left."""
    records = list(iter_prompts(source, line_filter=line_filter, limit=limit, skip_bad=skip_bad))
    if not records:
        raise ValueError(f"{source}: holds no prompts (line_filter {line_filter!r}), must have at least one line")
    return records
