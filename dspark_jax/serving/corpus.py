"""A file of prompts as a stream, of any size: which of them this run answers, and which an earlier run has answered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dspark_jax.data.prompts import PromptRecord, iter_prompts
from dspark_jax.data.records import read_records
from dspark_jax.serving.settings import ServeSettings, parse_shard


def _digest(text: str) -> bytes:
    """A short name of a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def answered(output: Path) -> dict[str, bytes]:
    """The ids of an output file, with digests of their prompts; none where there is no file.

    Raises:
        ValueError: the file is no file of answers.
    """
    if not output.exists():
        return {}
    return {str(record.get("id")): _digest(str(record.get("prompt"))) for record in read_records(output)}


@dataclass(frozen=True)
class Corpus:
    """The prompts of a run, read again and again from their file instead of held.

    Attributes:
        settings: of the run. done: ids of the answers that are there already. total: prompts, those answered included.
    """

    settings: ServeSettings
    done: frozenset[str]
    total: int

    @property
    def skipped(self) -> int:
        """Prompts that need no answer any more."""
        return len(self.done)

    @property
    def left(self) -> int:
        """Prompts to answer."""
        return self.total - self.skipped

    def todo(self) -> Iterator[PromptRecord]:
        """Prompts to answer, in their order."""
        return (record for record in selected(self.settings) if record.id not in self.done)


def selected(settings: ServeSettings) -> Iterator[PromptRecord]:
    """The prompts that the settings choose: filtered by line, then limited, then every n-th for a shard."""
    assert settings.prompts is not None  # checked by ServeSettings
    records = iter_prompts(settings.prompts, line_filter=settings.line_filter, limit=settings.limit)
    if settings.shard is None:
        return records
    number, count = parse_shard(settings.shard)
    return islice(records, number - 1, None, count)


def open_corpus(settings: ServeSettings) -> Corpus:
    """Reads all lines of the prompts once, and the output of an earlier run.

    Raises:
        ValueError: a wrong line (by number), no prompt at all, or an id that was answered for another prompt.
    """
    assert settings.prompts is not None and settings.output is not None  # checked by ServeSettings
    there = answered(settings.output)
    done, total = set[str](), 0
    for record in selected(settings):
        total += 1
        if record.id in there:
            if there[record.id] != _digest(record.prompt_text):
                raise ValueError(
                    f"output {settings.output}: id {record.id!r} is there for another prompt, not for "
                    f"{record.prompt_text[:40]!r}; choose another --output"
                )
            done.add(record.id)
    if not total:
        chosen = f"line_filter {settings.line_filter!r}" + (f", shard {settings.shard}" if settings.shard else "")
        raise ValueError(f"{settings.prompts}: holds no prompts ({chosen}), must have at least one line")
    return Corpus(settings, frozenset(done), total)
