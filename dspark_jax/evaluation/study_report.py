"""The report of a study: what the paper says beside what was measured here, in Markdown, with pictures and JSON.

What differs from run to run, timings, stands in a section of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dspark_jax.config import write_json
from dspark_jax.evaluation.scores import Estimate, Scores
from dspark_jax.evaluation.studies import Study
from dspark_jax.evaluation.tables import markdown_table, with_interval

TIMINGS = "## Timings"


class Headline(NamedTuple):
    """A figure of the paper, beside the one that was measured here."""

    figure: str
    paper: str
    here: str


@dataclass
class Report:
    """What a study found.

    Attributes:
        headlines: figures that the paper has too. sections: Markdown. timings: Markdown of what no second run repeats.
        pictures: files. values, timing_values: the same figures as JSON values.
        clocked: whether headlines and pictures are timings too.
        left_out: variants that this target or these settings do not have, with the reason.
    """

    headlines: list[Headline] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)
    timings: list[str] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    timing_values: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    clocked: bool = False

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        headlines = {"headlines": [headline._asdict() for headline in self.headlines]}
        timings = self.timing_values | (headlines if self.clocked else {})
        found = self.values | ({} if self.clocked else headlines)
        return {**found, "timings": timings, "left_out": self.left_out}


def text(study: Study, report: Report, how: Sequence[str], folder: Path) -> str:
    """The Markdown of a report that lies in `folder`. `how`: lines that say how it was made."""
    parts = [f"# {study.title}", study.question, "\n".join(f"- {line}" for line in how)]
    parts += ["## What the paper reports", study.paper]
    beside: list[str] = []
    if report.headlines:
        rows = [["figure", "the paper", "here"], *map(list, report.headlines)]
        beside = ["The paper's figures beside those measured here:", markdown_table(rows, words=3)]
    pictures = [f"![{path.stem}]({path.relative_to(folder)})" for path in report.pictures]
    measured, clocked = [*report.sections], [*report.timings]
    if report.clocked:
        clocked = [*beside, *clocked, *pictures]
    else:
        measured = [*beside, *measured, *pictures]
    if measured:
        parts += ["## What was measured here", *measured]
    if report.left_out:
        parts += ["## Left out", "\n".join(f"- {name}: {reason}" for name, reason in report.left_out.items())]
    if clocked:
        parts += [TIMINGS, "Measured on this machine; another run gives others.", *clocked]
    return "\n\n".join(parts) + "\n"


def write(folder: Path, study: Study, report: Report, how: Sequence[str], made: Mapping[str, Any]) -> str:
    """Writes report.md and report.json into `folder`, which is made; returns the Markdown. `made`: how, as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    markdown = text(study, report, how, folder)
    (folder / "report.md").write_text(markdown, encoding="utf-8")
    write_json(folder / "report.json", {"study": study.name, **made, **report.as_json()})
    return markdown


def differences(scores: Scores, pairs: Sequence[tuple[str, str]]) -> str:
    """Paired differences of the accepted length, by domain, of those `pairs` that are there; '' without any."""
    rows = [["difference", *(column.title for column in scores.domains)]]
    for one, other in pairs:
        if {one, other} <= set(scores.systems):
            found = difference(scores, one, other)
            cells = (with_interval(found[column.name], sign=True) for column in scores.domains)
            rows.append([f"{one} - {other}", *cells])
    return markdown_table(rows) if len(rows) > 1 else ""


def difference(scores: Scores, one: str, other: str) -> dict[str, Estimate]:
    """Accepted length of one system less that of another, by domain."""
    if (one, other) in scores.differences:
        return dict(scores.differences[one, other])
    return {name: _negative(estimate) for name, estimate in scores.differences[other, one].items()}


def _negative(estimate: Estimate) -> Estimate:
    value, low, high = (None if bound is None else 0.0 - bound for bound in estimate)
    return Estimate(value, high, low)


def gain(scores: Scores, one: str, other: str, domain: str) -> float | None:
    """By which share the accepted length of one system is longer than another's; None where there are no rounds."""
    lengths = [scores.by_domain[system][domain].accepted_length.value for system in (one, other)]
    return lengths[0] / lengths[1] - 1 if lengths[0] and lengths[1] else None


def per_cent(value: float | None, digits: int = 1) -> str:
    """A share as text."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"
