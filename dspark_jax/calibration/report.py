"""Before and after: tables, one JSON object, and reliability diagrams of a drafter's confidences.

Stages have names: `before`, `temperatures` (plain STS, where biases are fitted too) and `after`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.calibration.collect import Records
from dspark_jax.calibration.metrics import (
    BINS,
    PositionMetrics,
    Reading,
    asked,
    mean_ece,
    position_metrics,
    reliability,
    survival,
)
from dspark_jax.calibration.sts import STSFit, scaled

READINGS: tuple[Reading, ...] = ("cumulative", "conditional")
COLOURS = {"before": "tab:orange", "temperatures": "tab:green", "after": "tab:blue"}


@dataclass(frozen=True)
class SplitReport:
    """What the confidences of one set of prompts are worth.

    Attributes:
        name: which set. requests, rounds: how many. accepted: mean accepted draft tokens of a round.
        metrics: by stage and reading, one entry a position. Stages are `before` and one for each fit, the last of which
            is `after`.
        domains: by domain: rounds, and the mean cumulative calibration error and its floor by stage.
    """

    name: str
    requests: int
    rounds: int
    accepted: float
    metrics: dict[str, dict[str, list[PositionMetrics]]]
    domains: dict[str, dict[str, Any]]

    def mean_ece(self, stage: str, reading: Reading = "cumulative") -> float:
        """Calibration error averaged over the positions."""
        return mean_ece(self.metrics[stage][reading])


def stages(records: Records, fits: Mapping[str, STSFit]) -> dict[str, np.ndarray]:
    """Confidences `[n, K]` as the head gave them (`before`), and as each of `fits` makes them."""
    before = np.asarray(records.confidence, np.float64)
    return {"before": before} | {name: scaled(before, fit.temperatures, fit.biases) for name, fit in fits.items()}


def split_report(name: str, records: Records, fits: Mapping[str, STSFit], bins: int = BINS) -> SplitReport:
    """Metrics of all rounds of `records`.

    Args:
        fits: by the name of their stage, in the order of the tables. bins: of the calibration error.

    Raises:
        ValueError: fits of another block size.
    """
    metrics: dict[str, dict[str, list[PositionMetrics]]] = {}
    domains: dict[str, dict[str, Any]] = {}
    for stage, confidence in stages(records, fits).items():
        metrics[stage] = {
            reading: position_metrics(confidence, records.accepted, records.verified, reading, bins)
            for reading in READINGS
        }
        for number, domain in enumerate(records.domains):
            rows = records.domain[records.request] == number
            if rows.any():
                found = position_metrics(confidence[rows], records.accepted[rows], records.verified[rows], bins=bins)
                floor = float(np.mean([m.floor for m in found if m.count]))
                entry = domains.setdefault(domain, {"rounds": int(rows.sum())})
                entry[stage] = {"ece": mean_ece(found), "floor": floor}
    rounds = len(records.accepted)
    accepted = float(np.mean(records.accepted)) if rounds else float("nan")
    return SplitReport(name, len(np.unique(records.request)), rounds, accepted, metrics, domains)


def _cells(position: list[PositionMetrics], fit: STSFit) -> list[str]:
    """A line of the table: `position` holds one block position's metrics, stage by stage."""

    def each(name: str, scale: float, digits: int) -> str:
        return " > ".join(f"{scale * getattr(metrics, name):.{digits}f}" for metrics in position)

    first, last = position[0], position[-1]
    k = first.position - 1
    return [
        str(first.position),
        str(first.count),
        f"{100 * first.base_rate:.1f}",
        f"{fit.temperatures[k]:.3f}",
        *([f"{fit.biases[k]:.3f}"] if fit.biases else []),
        each("ece", 100, 2),
        each("ece_mass", 100, 2),
        f"{100 * last.floor:.2f}",
        each("auroc", 1, 3),
        each("brier", 1, 4),
    ]


def table(report: SplitReport, fit: STSFit) -> str:
    """Text of a split: a line per position and reading, stage > stage. Shares in per cent.

    Args:
        fit: the last stage's, whose temperatures and biases stand in the lines.
    """
    order = " > ".join(report.metrics)
    lines = [
        f"{report.name}: {report.requests} requests, {report.rounds} rounds, {report.accepted:.3f} drafts accepted in "
        "a round"
    ]
    heads = ["k", "rounds", "rate %", "T", *(["b"] if fit.biases else [])]
    heads += ["ECE %", "equal mass", "floor", "AUROC", "Brier"]
    for reading in READINGS:
        columns = (stage[reading] for stage in report.metrics.values())
        rows = [heads, *(_cells(list(position), fit) for position in zip(*columns, strict=True))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
        lines += ["", f"  {reading}, {order}"]
        lines += ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        means = " > ".join(f"{100 * report.mean_ece(stage, reading):.2f}" for stage in report.metrics)
        lines.append(f"  mean ECE over positions {means} %")
    lines += ["", f"  domain: mean cumulative ECE (its floor), {order}, %"]
    for domain, entry in report.domains.items():
        values = " > ".join(f"{100 * entry[s]['ece']:.2f} ({100 * entry[s]['floor']:.2f})" for s in report.metrics)
        lines.append(f"  {domain}: {values}, {entry['rounds']} rounds")
    return "\n".join(lines)


def as_json(report: SplitReport) -> dict[str, Any]:
    """The report as JSON values; what could not be measured is null."""
    plain = asdict(report)
    plain["mean_ece"] = {r: {stage: report.mean_ece(stage, r) for stage in report.metrics} for r in READINGS}
    return _without_nan(plain)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(path: Path, records: Records, fits: Mapping[str, STSFit], title: str, bins: int = BINS) -> None:
    """Reliability diagrams as a PNG: a panel per position, cumulative above and conditional below, a curve per stage.

    A point is a bin; its area grows with the share of rounds in it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    block = records.block_size
    figure = Figure(figsize=(2.3 * block + 0.6, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(READINGS), block, sharex=True, sharey=True, squeeze=False)
    for stage, confidence in stages(records, fits).items():
        for row, reading in enumerate(READINGS):
            values = survival(confidence) if reading == "cumulative" else confidence
            for k in range(1, block + 1):
                rows = asked(records.accepted, records.verified, k, reading)
                found = reliability(values[rows, k - 1], records.accepted[rows] >= k, bins)
                _panel(axes[row][k - 1], stage, found.probability, found.rate, found.counts)
    for k in range(block):
        axes[0][k].set_title(f"k = {k + 1}", fontsize=9)
        axes[-1][k].set_xlabel("confidence", fontsize=8)
    for row, reading in enumerate(READINGS):
        axes[row][0].set_ylabel(f"accepted ({reading})", fontsize=8)
    axes[0][0].legend(fontsize=7, loc="upper left")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def _panel(axis: Any, stage: str, probability: np.ndarray, rate: np.ndarray, count: np.ndarray) -> None:
    colour = COLOURS[stage]
    full = count > 0
    if stage == "before":
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
        axis.tick_params(labelsize=7)
        axis.set(xlim=(0, 1), ylim=(0, 1))
    axis.plot(probability[full], rate[full], color=colour, linewidth=0.8, label=stage)
    if full.any():
        axis.scatter(probability[full], rate[full], s=4 + 60 * count[full] / count.sum(), color=colour, alpha=0.7)
