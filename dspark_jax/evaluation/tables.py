"""The report of an evaluation in Markdown: the paper's table of accepted lengths, intervals, speed and positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dspark_jax.evaluation.scores import Column, Estimate, Score, Scores

_NOTHING = "-"


def markdown_table(rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Rows as a Markdown table, the first one its head; the first `words` columns are text, the others numbers."""
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def padded(row: Sequence[str]) -> str:
        return line(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )

    rule = line("-" * width if i < words else "-" * (width - 1) + ":" for i, width in enumerate(widths))
    return "\n".join([padded(rows[0]), rule, *map(padded, rows[1:])])


def number(value: float | None, digits: int = 2, factor: float = 1.0) -> str:
    """A figure as text."""
    return _NOTHING if value is None else f"{factor * value:.{digits}f}"


def with_interval(estimate: Estimate, digits: int = 2, factor: float = 1.0, sign: bool = False) -> str:
    """A figure with its interval behind it, where it has one."""
    form = f"{'+' if sign else ''}.{digits}f"
    if estimate.value is None:
        return _NOTHING
    if estimate.low is None or estimate.high is None:
        return f"{factor * estimate.value:{form}}"
    text, low, high = (f"{factor * x:{form}}" for x in (estimate.value, estimate.low, estimate.high))
    return text if low == high else f"{text} [{low}, {high}]"


def best_in_bold(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Columns of numbers as text, the largest of each in bold, as it is shown."""
    marked = []
    for column in columns:
        values = [float(cell) if cell != _NOTHING else float("-inf") for cell in column]
        best = max(values)
        several = len(column) > 1 and best > float("-inf")
        marked.append([f"**{c}**" if several and v == best else c for c, v in zip(column, values, strict=True)])
    return marked


def accepted_lengths(scores: Scores) -> str:
    """The paper's table: a row for each system, a column for each benchmark and for the means by domain."""
    heads = ["drafter", *_heads(scores)]
    columns = [[number(score.accepted_length.value) for score in column] for column in _by_column(scores)]
    rows = zip(scores.systems, *best_in_bold(columns), strict=True)
    return markdown_table([heads, *map(list, rows)])


def intervals(scores: Scores) -> str:
    """The same table with 95 % intervals."""
    rows = [["drafter", *_heads(scores)]]
    for i, system in enumerate(scores.systems):
        rows.append([system, *(with_interval(column[i].accepted_length) for column in _by_column(scores))])
    return markdown_table(rows)


def differences(scores: Scores) -> str:
    """Paired differences between all pairs of drafters, by domain; '' where there is no pair."""
    rows = [["difference", *(column.title for column in scores.domains)]]
    for (one, other), row in scores.differences.items():
        cells = (with_interval(row[column.name], sign=True) for column in scores.domains)
        rows.append([f"{one} - {other}", *cells])
    return markdown_table(rows) if len(rows) > 1 else ""


_SPEED: tuple[tuple[str, Callable[[Score], str]], ...] = (
    ("answers", lambda score: str(score.answers)),
    ("tokens", lambda score: str(score.tokens)),
    ("stopped %", lambda score: number(score.stopped, 1, 100)),
    ("tokens/s", lambda score: number(score.tokens_per_second, 1)),
    ("speed-up", lambda score: with_interval(score.speedup)),
    ("accepted length", lambda score: number(score.accepted_length.value)),
    ("verified per round", lambda score: with_interval(score.verified)),
    ("acceptance rate %", lambda score: with_interval(score.acceptance_rate, 1, 100)),
)


def speed(scores: Scores) -> str:
    """Tokens per second, speed-up, what was verified and how much of it accepted, by domain."""
    rows = [["domain", "drafter", *(head for head, _ in _SPEED)]]
    for column in scores.domains:
        for system in scores.systems:
            score = scores.by_domain[system][column.name]
            rows.append([column.title, system, *(cell(score) for _, cell in _SPEED)])
    return markdown_table(rows, words=2)


def untimed(scores: Scores) -> str:
    """Why systems have no speed; '' where all have."""
    if all(score.tokens_per_second is not None for row in scores.by_domain.values() for score in row.values()):
        return ""
    return (
        "`-` for tokens/s: some of the answers were not timed. With method forced none is; in batches none of those "
        "that were left of a benchmark when a run stopped."
    )


def dropped(scores: Scores) -> str:
    """What was left out of the comparison; '' where nothing was."""
    if not scores.dropped:
        return ""
    return f"Turns that not every system had room to answer in the context: {scores.dropped}; they count for none."


def positions(scores: Scores) -> str:
    """Acceptance at each position of a block, given that all before it were accepted, in per cent."""
    longest = max(len(row[column].positions) for row in scores.by_domain.values() for column in row)
    rows = [["domain", "drafter", *(f"k = {k + 1}" for k in range(longest))]]
    for column in scores.domains:
        for system in scores.systems:
            found = scores.by_domain[system][column.name].positions
            if found:
                cells = [with_interval(estimate, 1, 100) for estimate in found]
                rows.append([column.title, system, *cells, *[_NOTHING] * (longest - len(cells))])
    return markdown_table(rows, words=2) if len(rows) > 1 else ""


def _heads(scores: Scores) -> list[str]:
    return [column.title for column in (*scores.benchmarks, *_means(scores))]


def _means(scores: Scores) -> tuple[Column, ...]:
    """Domains that say more than the columns of the benchmarks."""
    return scores.domains if len(scores.domains) > 2 else scores.domains[-1:]


def _by_column(scores: Scores) -> list[list[Score]]:
    """The scores of all systems for each column of the paper's table."""
    of_benchmarks = [[scores.by_benchmark[s][column.name] for s in scores.systems] for column in scores.benchmarks]
    return of_benchmarks + [[scores.by_domain[s][column.name] for s in scores.systems] for column in _means(scores)]


def report(scores: Scores, how: Sequence[str]) -> str:
    """The whole report. `how`: lines that say how it was made."""
    parts = [
        "# Evaluation",
        "\n".join(f"- {line}" for line in how),
        "## Accepted length\n\nCommitted tokens per round, bonus token included; the largest of each column in bold. "
        "The columns of domains, and of all, are means of their benchmarks.",
        accepted_lengths(scores),
        dropped(scores),
        "## Intervals\n\n95 % intervals by resampling conversations.",
        intervals(scores),
    ]
    pairs = differences(scores)
    if pairs:
        parts += ["Differences of the accepted length over the same conversations, resampled together:", pairs]
    parts += [
        "## Speed\n\nSpeed-ups are ratios of tokens per second to plain decoding of the same run, above 1 where "
        "drafting is faster; a domain's is the mean of its benchmarks. Verified: draft tokens of a round that the "
        "target looked at. Acceptance rate: accepted by verified.",
        speed(scores),
        untimed(scores),
    ]
    by_position = positions(scores)
    if by_position:
        parts += [
            "## Acceptance by position\n\nPer cent of the draft tokens at position k that were accepted, where all "
            "before them were; rounds of a domain's benchmarks together.",
            by_position,
        ]
    return "\n\n".join(filter(None, parts)) + "\n"
