"""Fields of a `config.json` that every reader of drafters checks alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def whole(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number; `default` where the field is absent.

    Raises:
        ValueError: absent without a default, or something else.
    """
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"config field {name} {value!r}: must be a whole number")
    return value


def layer_ids(value: Any, name: str, offset: int = 0) -> list[int]:
    """Layer ids in DeepSpec's numbering, where a format counts `offset` more.

    Raises:
        ValueError: no list of whole numbers.
    """
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise ValueError(f"{name} {value!r}: must be a list of whole numbers")
    return [i - offset for i in value]
