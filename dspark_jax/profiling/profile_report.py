"""What a measured curve says: target, draft and whole round by bucket, rates, noise, and what looks odd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from dspark_jax.profiling.curves import MeasuredPoint, Profile

_HEADS = ("rows", "target ms", "draft ms", "round ms", "rounds/s", "rows/s", "spread %")


def point_rows(measured: MeasuredPoint) -> list[dict[str, float]]:
    """A plain round, where it is another, and then a round in each bucket.

    Keys: `rows` B; `drafted`, 1 for a round with a draft; `target_seconds`, `draft_seconds` and their sum
    `round_seconds`; `rounds_per_second`, `rows_per_second`; `spread`, relative.
    """
    point = measured.point
    draft = draft_seconds(measured)
    rows = [_row(point.slots, 0.0, point.plain, measured.spread[-1])]
    if has_draft(measured):
        entries = zip(point.buckets, point.drafted, measured.spread[:-1], strict=True)
        rows += [_row(size, draft, seconds, spread) | {"drafted": 1} for size, seconds, spread in entries]
    return rows


def _row(rows: int, draft: float, seconds: float, spread: float) -> dict[str, float]:
    return {
        "rows": rows,
        "drafted": 0,
        "target_seconds": seconds - draft,
        "draft_seconds": draft,
        "round_seconds": seconds,
        "rounds_per_second": 1 / seconds,
        "rows_per_second": rows / seconds,
        "spread": spread,
    }


def has_draft(measured: MeasuredPoint) -> bool:
    """Whether rounds with a draft were measured (blocks of at least one token have two buckets or more)."""
    return len(measured.point.buckets) > 1


def draft_seconds(measured: MeasuredPoint) -> float:
    """Seconds that the draft adds to a round of the same rows; 0 where it was not found to add any."""
    point = measured.point
    return max(point.drafted[0] - point.plain, 0.0) if has_draft(measured) else 0.0


def oddities(measured: MeasuredPoint) -> list[str]:
    """What a reader should know before believing a point, in sentences: it is kept as it was measured all the same."""
    point, said = measured.point, []
    where = f"{point.slots} slots, {point.context} tokens"
    entries = list(zip(point.buckets, point.drafted, measured.spread[:-1], strict=True))
    for (size, seconds, noise), (next_size, next_seconds, next_noise) in pairwise(entries):
        if seconds - next_seconds > max(seconds * noise, next_seconds * next_noise):
            fall = 100 * (1 - next_seconds / seconds)
            said.append(
                f"{where}: {next_size} rows take {fall:.1f} % less time than {size}, beyond the repeats' spread"
            )
    if has_draft(measured) and point.drafted[0] < point.plain:
        said.append(f"{where}: a round with a draft took less time than one without: the draft's time is within noise")
    noisiest = max(measured.spread)
    if noisiest > 0.1:
        said.append(f"{where}: repeats differ by {100 * noisiest:.0f} %: other work on this machine?")
    return said


def table(profile: Profile) -> str:
    """Text of a profile: a table for each point, the prefills, and the oddities."""
    lines: list[str] = []
    for measured in profile.points:
        point = measured.point
        kind = f"medians of {measured.repeats}" if measured.repeats else "estimated"
        lines += [f"{point.slots} slots, caches of {point.context} tokens ({kind})"]
        lines += [*_aligned([_HEADS, *(_cells(row) for row in point_rows(measured))]), ""]
    if profile.prefills:
        cells = [(str(p.tokens), f"{1e3 * p.seconds:.2f}", f"{p.tokens / p.seconds:.0f}") for p in profile.prefills]
        lines += ["prefill of one prompt", *_aligned([("tokens", "ms", "tokens/s"), *cells]), ""]
    notes = [note for measured in profile.points for note in oddities(measured)]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)]).rstrip()


def _cells(row: dict[str, float]) -> tuple[str, ...]:
    rows = f"{row['rows']:.0f}" + ("" if row["drafted"] else " plain")
    times = (f"{1e3 * row[name]:.2f}" for name in ("target_seconds", "draft_seconds", "round_seconds"))
    rates = (f"{row[name]:.1f}" for name in ("rounds_per_second", "rows_per_second"))
    return rows, *times, *rates, f"{100 * row['spread']:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def as_json(profile: Profile) -> dict[str, Any]:
    """The tables as JSON values, in seconds."""
    points = [
        {
            "slots": measured.point.slots,
            "context": measured.point.context,
            "repeats": measured.repeats,
            "rounds": point_rows(measured),
            "notes": oddities(measured),
        }
        for measured in profile.points
    ]
    return {"points": points, "prefills": [asdict(p) for p in profile.prefills]}
