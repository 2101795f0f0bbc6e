"""Sampling settings that other programs have and the engine has not, and the values at which they change nothing.

Files of prompts and HTTP bodies are held to the same table: a setting that would change the answers is refused by name.
"""

from __future__ import annotations

from typing import Any

NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1,
    "logit_bias": {},
    "bad_words": [],
    "min_tokens": 0,
    "ignore_eos": False,
    "num_beams": 1,
}


def check_neutral(value: Any, *neutral: Any) -> None:
    """Accepts null and the values `neutral`; true and false are no numbers.

    Raises:
        ValueError: any other value; says what would be right, and leaves field and value to the caller.
    """
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        return
    rule = f"must be {' or '.join(map(repr, neutral))}, or left out" if neutral else "must be left out"
    raise ValueError(f"not supported, {rule}")
