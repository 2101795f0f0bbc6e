"""Pictures of an evaluation, and its figures for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tensorboardX import SummaryWriter

from dspark_jax.evaluation.scores import Column, Estimate, Scores

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
_GREY = "0.55"  # of the baseline
_FEW = 30  # rounds that must have reached a position for it to be drawn


def colours(scores: Scores, baseline: str = "plain") -> dict[str, str]:
    """A colour for each system, the same in all pictures."""
    others = [system for system in scores.systems if system != baseline]
    return {baseline: _GREY} | {system: COLOURS[i % len(COLOURS)] for i, system in enumerate(others)}


def plot(folder: Path, scores: Scores) -> list[Path]:
    """Writes `accepted.png` and, where anything was drafted, `position.png` into `folder`; returns their paths."""
    written = [folder / "accepted.png"]
    _accepted(written[0], scores)
    if any(row[column].positions for row in scores.by_domain.values() for column in row):
        written.append(folder / "position.png")
        _positions(written[1], scores)
    return written


def panels(scores: Scores) -> tuple[Column, ...]:
    """The domains that a picture shows: all of them, or their mean alone where there is one only."""
    return scores.domains if len(scores.domains) > 2 else scores.domains[-1:]


def row_of_panels(width: float, height: float, columns: int, grid: Literal["y", "both"]) -> tuple[Any, Sequence[Any]]:
    """A figure with panels side by side, which share y. `width`, `height`: inches. `grid`: lines for which axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3, axis=grid)
    return figure, axes


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, Sequence[Any]]:
    figure, axes = row_of_panels(width, height, columns, "y")
    for axis in axes:
        axis.set_axisbelow(True)
    return figure, axes


def _errors(estimates: Sequence[Estimate]) -> np.ndarray:
    """Lengths of error bars, `[2, n]`; NaN, which draws nothing, where there is no interval or it is a point."""
    value, low, high = np.array([[np.nan if x is None else x for x in entry] for entry in estimates]).T
    drawn = np.where(high > low, 1.0, np.nan)
    return np.maximum([value - low, high - value], 0) * drawn


def _accepted(path: Path, scores: Scores) -> None:
    """Accepted lengths: a group of bars for each benchmark, and for the means behind a line."""
    means = panels(scores)
    columns = [(column, scores.by_benchmark) for column in scores.benchmarks]
    columns += [(column, scores.by_domain) for column in means]
    groups, width = len(columns), 0.8 / len(scores.systems)
    figure, (axis,) = _figure(max(6.4, 0.9 * groups + 1.5), 4.2)
    for i, (system, colour) in enumerate((s, colours(scores)[s]) for s in scores.systems):
        found = [table[system][column.name].accepted_length for column, table in columns]
        at = np.arange(groups) + (i - (len(scores.systems) - 1) / 2) * width
        heights = [estimate.value or 0 for estimate in found]
        errors = {"linewidth": 0.8, "ecolor": "0.2"}
        axis.bar(at, heights, width, color=colour, label=system, yerr=_errors(found), capsize=1.5, error_kw=errors)
    axis.axvline(len(scores.benchmarks) - 0.5, color="0.7", linewidth=0.8)
    labels = [column.title for column in scores.benchmarks] + [f"mean\n{column.title}" for column in means]
    axis.set_xticks(range(groups), labels, fontsize=8, rotation=0 if groups < 9 else 20)
    axis.set_ylabel("committed tokens per round")
    axis.margins(x=0.02)
    axis.set_title("Accepted length, bonus token included (95 % intervals)", fontsize=10)
    axis.legend(fontsize=8, ncols=min(len(scores.systems), 6))
    axis.set_ylim(0, axis.get_ylim()[1] * 1.12)
    figure.savefig(path, dpi=120)


def _positions(path: Path, scores: Scores) -> None:
    """Acceptance by position given the prefix: a panel for each domain, a curve with its interval for each system.

    Positions that hardly a round reached are left out; tables have them.
    """
    domains = panels(scores)
    longest = max(len(row[column].positions) for row in scores.by_domain.values() for column in row)
    figure, axes = _figure(3.0 * len(domains) + 0.8, 3.6, len(domains))
    for axis, column in zip(axes, domains, strict=True):
        for system in scores.systems:
            score = scores.by_domain[system][column.name]
            found = zip(score.positions, score.reached, strict=True)
            shown = [(k, e) for k, (e, count) in enumerate(found, start=1) if count >= _FEW]
            if not shown:
                continue
            x, colour = [k for k, _ in shown], colours(scores)[system]
            axis.plot(x, [e.value for _, e in shown], marker="o", markersize=3.5, color=colour, label=system)
            low, high = ([e.value if bound is None else bound for _, e in shown for bound in [e[i]]] for i in (1, 2))
            axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_title(column.title, fontsize=10)
        axis.set_xlabel("position in the block")
        axis.set_xlim(0.7, longest + 0.3)
        axis.set_xticks(range(1, longest + 1))
    axes[0].set_ylabel("accepted, given all before it")
    axes[0].set_ylim(0, 1)
    lines, names = axes[-1].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(len(names), 8), fontsize=8)
    figure.savefig(path, dpi=120)


def write_board(folder: Path, scores: Scores) -> None:
    """Writes the figures as TensorBoard events, a run for each system; those of an earlier report are replaced.

    Positions are steps, so that acceptance by position is a curve.
    """
    for system in scores.systems:
        run = folder / system
        for old in run.glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(str(run)) as board:
            for table in (scores.by_benchmark[system], scores.by_domain[system]):
                for name, score in table.items():
                    values = {
                        "accepted_length": score.accepted_length.value,
                        "verified": score.verified.value,
                        "acceptance_rate": score.acceptance_rate.value,
                        "tokens_per_second": score.tokens_per_second,
                        "speedup": score.speedup.value,
                    }
                    for figure, value in values.items():
                        if value is not None:
                            board.add_scalar(f"{figure}/{name}", value, 0)
                    for k, estimate in enumerate(score.positions, start=1):
                        if estimate.value is not None:
                            board.add_scalar(f"acceptance_by_position/{name}", estimate.value, k)
