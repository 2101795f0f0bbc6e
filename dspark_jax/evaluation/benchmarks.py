"""The benchmarks of the paper, and conversations to ask: from JSONL files with `turns`, or from data sets on the hub.

The hub's names, columns and the wording of prompts are those of the public releases. Rows of the hub were checked
against stand-ins only: this was written without a network. Arena-Hard and LiveCodeBench are read from the files inside
their repositories, because the `datasets` library cannot load those repositories as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_jax.data.prompts import HUB_PREFIX, LINE_FILTERS, checked_text, hub_place, jsonl_rows

DOMAINS = ("math", "code", "chat", "other")  # in the order of the tables
ALL = "all"  # stands for the mean over all benchmarks, beside the domains
_STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
_PROGRAMMER = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program"
)
_LCB_FILES = ("test", "test2", "test3", "test4", "test5", "test6")  # release 6: 1055 problems

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """What a user says, turn by turn; `id` is unique in its benchmark."""

    benchmark: str
    id: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Benchmark:
    """Conversations of one kind. name: as in ids and files. title: as in tables. domain: whose mean it counts in."""

    name: str
    title: str
    domain: str
    conversations: tuple[Conversation, ...]


Fits = Callable[[Conversation], bool]


# --- what is known ---


@dataclass(frozen=True)
class HubSet:
    """Where a data set lies on the hub, and how its rows are asked.

    Attributes:
        name, config, split: as `datasets.load_dataset` takes them. turns: the user's turns of a row.
        files: files inside the repository, JSON lines, where it cannot be loaded by its name.
    """

    name: str
    config: str | None
    split: str
    turns: Callable[[Row], Sequence[str]]
    files: tuple[str, ...] = ()

    def rows(self) -> Iterator[Row]:
        """The rows, streamed."""
        import datasets

        if self.files:
            places = [f"hf://datasets/{self.name}/{file}" for file in self.files]
            yield from datasets.load_dataset("json", data_files={"test": places}, split="test", streaming=True)
        else:
            yield from datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)


@dataclass(frozen=True)
class Known:
    """A benchmark of the paper. spellings: other stems of its files, without punctuation."""

    name: str
    title: str
    domain: str
    hub: HubSet
    spellings: tuple[str, ...] = ()


def _math(column: str) -> Callable[[Row], Sequence[str]]:
    return lambda row: [f"{row[column]}\n{_STEPS}"]


def _human_eval(row: Row) -> Sequence[str]:
    ask = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{ask}\n```python\n{row['prompt']}\n```"]


def _live_code(row: Row) -> Sequence[str]:
    starter = row.get("starter_code")
    how = "Use the following code structure" if starter else "Write your code in the following format"
    return [
        f"{_PROGRAMMER}\n\n### Question:\n{row['question_content']}\n\n### Format: {how}:\n"
        f"```python\n{starter or '# YOUR CODE HERE'}\n```\n\n### Answer: (use the provided format with backticks)"
    ]


def _alpaca(row: Row) -> Sequence[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row.get("input") else row["instruction"]]


def _prompt(row: Row) -> Sequence[str]:
    return [row["prompt"]]


def _any(row: Row) -> Sequence[str]:
    """Of a data set that is not known: `turns`, or one of `prompt` and `question`."""
    if row.get("turns") is not None:
        return row["turns"]
    name = next((name for name in ("prompt", "question") if row.get(name) is not None), None)
    if name is None:
        raise ValueError(f"columns {', '.join(row)}: must have one of turns, prompt, question")
    return row[name] if isinstance(row[name], list) else [row[name]]


_GSM8K = HubSet("openai/gsm8k", "main", "test", _math("question"))
_MATH500 = HubSet("HuggingFaceH4/MATH-500", None, "test", _math("problem"))
_AIME25 = HubSet("MathArena/aime_2025", None, "train", _math("problem"))
_MBPP = HubSet("google-research-datasets/mbpp", "sanitized", "test", _prompt)
_HUMAN = HubSet("openai/openai_humaneval", None, "test", _human_eval)
_LIVE = HubSet(
    "livecodebench/code_generation_lite", None, "test", _live_code, tuple(f"{name}.jsonl" for name in _LCB_FILES)
)
_MT = HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"])
_ALPACA = HubSet("tatsu-lab/alpaca", None, "train", _alpaca)
_ARENA = HubSet("lmarena-ai/arena-hard-auto", None, "test", _prompt, ("data/arena-hard-v2.0/question.jsonl",))

KNOWN = (
    Known("gsm8k", "GSM8K", "math", _GSM8K),
    Known("math500", "MATH500", "math", _MATH500),
    Known("aime25", "AIME25", "math", _AIME25, ("aime2025",)),
    Known("mbpp", "MBPP", "code", _MBPP),
    Known("humaneval", "HumanEval", "code", _HUMAN),
    Known("livecodebench", "LiveCodeBench", "code", _LIVE, ("lcb",)),
    Known("mt-bench", "MT-Bench", "chat", _MT),
    Known("alpaca", "Alpaca", "chat", _ALPACA),
    Known("arena-hard-v2", "Arena-Hard", "chat", _ARENA, ("arenahard",)),
)


def _bare(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


_BY_SPELLING = {spelling: known for known in KNOWN for spelling in (_bare(known.name), *known.spellings)}
_BY_HUB = {known.hub.name: known for known in KNOWN}


# --- sources ---


@dataclass(frozen=True)
class _Source:
    """A benchmark to read. text: as messages name it. rows: numbered from 1, each a row or what is wrong with it.
    has_ids: whether rows may name themselves by `id`."""

    text: str
    name: str
    title: str
    domain: str
    rows: Callable[[], Iterator[tuple[int, Row | ValueError]]]
    turns: Callable[[Row], Any]
    has_ids: bool


def _of_file(path: Path) -> _Source:
    if not path.is_file():
        raise FileNotFoundError(f"prompts {path}: no such file or folder")
    known = _BY_SPELLING.get(_bare(path.stem))
    how = (str(path), known.name, known.title, known.domain) if known else (str(path), path.stem, path.stem, "other")
    return _Source(*how, lambda: jsonl_rows(path), lambda row: row.get("turns"), True)


def _of_folder(folder: Path) -> list[_Source]:
    """The files of a folder: the paper's benchmarks in its order, then others by name."""
    found = [_of_file(path) for path in sorted(folder.glob("*.jsonl"))]
    if not found:
        raise ValueError(f"prompts {folder}: holds no *.jsonl files, must hold one for each benchmark")
    order = [known.name for known in KNOWN]
    return sorted(found, key=lambda source: order.index(source.name) if source.name in order else len(order))


def _of_hub(text: str, name: str, title: str, domain: str, hub: HubSet) -> _Source:
    return _Source(text, name, title, domain, lambda: enumerate(hub.rows(), start=1), hub.turns, False)


def _of_hub_name(text: str) -> _Source:
    """The source that hf:NAME[@CONFIG][:SPLIT] names; a known data set keeps its wording."""
    name, config, split = hub_place(text, "prompts")
    known = _BY_HUB.get(name)
    if known is None:
        stem = name.rsplit("/", 1)[-1]
        return _of_hub(text, stem, stem, "other", HubSet(name, config or None, split or "test", _any))
    own = known.hub
    if own.files and (config or split):
        raise ValueError(f"prompts {text!r}: is read from files of its own, leave out @CONFIG and :SPLIT")
    hub = HubSet(own.name, config or own.config, split or own.split, own.turns, own.files)
    return _of_hub(text, known.name, known.title, known.domain, hub)


def _sources(text: str) -> list[_Source]:
    """What one entry of --prompts names."""
    if text.startswith(HUB_PREFIX):
        return [_of_hub_name(text)]
    path, known = Path(text).expanduser(), _BY_SPELLING.get(_bare(text))
    if path.is_dir():
        return _of_folder(path)
    if known is not None and not path.exists() and "/" not in text and not text.endswith(".jsonl"):
        return [_of_hub(text, known.name, known.title, known.domain, known.hub)]
    if path.exists() or "/" in text or text.endswith(".jsonl"):
        return [_of_file(path)]
    names = ", ".join(known.name for known in KNOWN)
    raise ValueError(f"prompts {text!r}: unknown benchmark, must be a JSONL file, a folder, hf:NAME or one of {names}")


# --- rows ---


def _conversation(source: _Source, row: Row, number: int) -> Conversation:
    turns = _turns(source, row)
    if isinstance(turns, str) or not isinstance(turns, Sequence) or not turns:
        shown = "is missing" if turns is None else f"{json.dumps(turns, default=str)[:60]}"
        raise ValueError(f"turns {shown}: must be a non-empty list of non-empty strings")
    said = tuple(checked_text(f"turns[{i}]", turn) for i, turn in enumerate(turns))
    name = row.get("id") if source.has_ids else None
    if name is None:
        name = number
    elif isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise ValueError(f"id {name!r}: must be a non-empty string or an integer")
    return Conversation(source.name, str(name), said)


def _read(source: _Source, lines: str, limit: int, fits: Fits | None) -> tuple[Conversation, ...]:
    seen: dict[str, int] = {}
    found: list[Conversation] = []
    for number, row in source.rows():
        if lines != "all" and number % 2 != (lines == "odd"):
            continue
        try:
            if isinstance(row, ValueError):
                raise row
            one = _conversation(source, row, number)
            if one.id in seen:
                raise ValueError(f"id {one.id!r}: already used on line {seen[one.id]}, ids must differ")
        except ValueError as error:
            raise ValueError(f"{source.text}, line {number}: {error}") from error
        seen[one.id] = number
        if fits is None or fits(one):
            found.append(one)
        if limit and len(found) == limit:
            break
    if not found:
        which = f"{lines} lines{', within the length allowed' if fits else ''}"
        raise ValueError(f"{source.text}: holds no prompts ({which}), must have at least one")
    return tuple(found)


def _turns(source: _Source, row: Row) -> Any:
    try:
        return source.turns(row)
    except KeyError as error:
        raise ValueError(f"column {error.args[0]!r}: is missing, the row has {', '.join(row)}") from error


def read_benchmarks(
    sources: Iterable[str],
    *,
    lines: str = "all",
    limit: int = 0,
    domains: Iterable[str] = (),
    fits: Fits | None = None,
) -> list[Benchmark]:
    """The benchmarks that `sources` name, in their order.

    Args:
        sources: JSONL files with `turns` on each line, folders of such, hf:NAME[@CONFIG][:SPLIT], or names of KNOWN,
            which are read from the hub. A file is known by its stem; one that is not is a benchmark of its own.
        lines: odd, even or all, by 1-based line number. limit: of each benchmark, the first ones; 0: all.
        fits: says which conversations to take; all by default.
        domains: "NAME=DOMAIN": puts a benchmark into a domain.

    Raises:
        FileNotFoundError: a missing file.
        ValueError: an unknown benchmark, one that comes twice, a wrong line (by number), or wrong settings.
    """
    if lines not in LINE_FILTERS:
        raise ValueError(f"lines {lines!r}: must be one of {', '.join(LINE_FILTERS)}")
    if limit < 0:
        raise ValueError(f"limit {limit}: must be at least 0 (0: all)")
    found = [source for text in sources for source in _sources(text)]
    places: dict[str, str] = {}
    for source in found:
        if source.name in places:
            other = places[source.name]
            raise ValueError(f"benchmark {source.name!r}: comes twice, from {other} and {source.text}; leave one out")
        places[source.name] = source.text
    own = _domains(domains, places)
    return [Benchmark(s.name, s.title, own.get(s.name, s.domain), _read(s, lines, limit, fits)) for s in found]


def _domains(entries: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Benchmark to domain, from "NAME=DOMAIN"."""
    found: dict[str, str] = {}
    for entry in entries:
        name, _, domain = entry.partition("=")
        known = _BY_SPELLING.get(_bare(name))
        name = known.name if known and name not in names else name
        if not re.fullmatch(r"[\w-]+", domain) or domain == ALL:
            raise ValueError(f"domains {entry!r}: must be NAME=DOMAIN, as notes=chat; {ALL!r} is the mean of all")
        if name not in names:
            raise ValueError(f"domains {entry!r}: no such benchmark here, must be one of {', '.join(names)}")
        if name in found:
            raise ValueError(f"domains {entry!r}: {name} has {found[name]!r} already, give one")
        found[name] = domain
    return found
