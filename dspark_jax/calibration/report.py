"""Before and after: tables, one JSON object, and reliability diagrams of a drafter's confidences."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from dspark_jax.calibration.sts import scaled

READINGS: tuple[Reading, ...] = ("cumulative", "conditional")
STAGES = ("before", "after")


@dataclass(frozen=True)
class SplitReport:
    """What the confidences of one set of prompts are worth.

    Attributes:
        name: which set. requests, rounds: how many. accepted: mean accepted draft tokens of a round.
        metrics: by stage (before and after the temperatures) and reading, one entry a position.
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


def stages(records: Records, temperatures: Sequence[float]) -> dict[str, np.ndarray]:
    """Confidences `[n, K]` as the head gave them, and divided by `temperatures`."""
    before = np.asarray(records.confidence, np.float64)
    return {"before": before, "after": scaled(before, tuple(temperatures))}


def split_report(name: str, records: Records, temperatures: Sequence[float], bins: int = BINS) -> SplitReport:
    """Metrics of all rounds of `records`.

    Args:
        temperatures: T_1..T_K. bins: of the calibration error.

    Raises:
        ValueError: not K temperatures.
    """
    metrics: dict[str, dict[str, list[PositionMetrics]]] = {}
    domains: dict[str, dict[str, Any]] = {}
    for stage, confidence in stages(records, temperatures).items():
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


def _cells(before: PositionMetrics, after: PositionMetrics, temperature: float) -> list[str]:
    def percent(*values: float) -> str:
        return " > ".join(f"{100 * value:.2f}" for value in values)

    return [
        str(before.position),
        str(before.count),
        f"{100 * before.base_rate:.1f}",
        f"{temperature:.3f}",
        percent(before.ece, after.ece),
        percent(before.ece_mass, after.ece_mass),
        f"{100 * after.floor:.2f}",
        f"{before.auroc:.3f} > {after.auroc:.3f}",
        f"{before.brier:.4f} > {after.brier:.4f}",
    ]


_HEADS = ["k", "rounds", "rate %", "T", "ECE %", "equal mass", "floor", "AUROC", "Brier"]


def table(report: SplitReport, temperatures: Sequence[float]) -> str:
    """Text of a split: a line per position and reading, before > after. Shares in per cent."""
    lines = [
        f"{report.name}: {report.requests} requests, {report.rounds} rounds, {report.accepted:.3f} drafts accepted in "
        "a round"
    ]
    for reading in READINGS:
        before, after = (report.metrics[stage][reading] for stage in STAGES)
        rows = [_HEADS, *(_cells(*pair) for pair in zip(before, after, temperatures, strict=True))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
        lines += ["", f"  {reading}"]
        lines += ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        means = " > ".join(f"{100 * report.mean_ece(stage, reading):.2f}" for stage in STAGES)
        lines.append(f"  mean ECE over positions {means} %")
    lines += ["", "  domain: mean cumulative ECE (its floor), before > after, %"]
    for domain, entry in report.domains.items():
        values = " > ".join(f"{100 * entry[s]['ece']:.2f} ({100 * entry[s]['floor']:.2f})" for s in STAGES)
        lines.append(f"  {domain}: {values}, {entry['rounds']} rounds")
    return "\n".join(lines)


def as_json(report: SplitReport) -> dict[str, Any]:
    """The report as JSON values; what could not be measured is null."""
    plain = asdict(report)
    plain["mean_ece"] = {r: {stage: report.mean_ece(stage, r) for stage in STAGES} for r in READINGS}
    return _without_nan(plain)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(path: Path, records: Records, temperatures: Sequence[float], title: str, bins: int = BINS) -> None:
    """Reliability diagrams as a PNG: a panel per position, cumulative above and conditional below, before and after.

    A point is a bin; its area grows with the share of rounds in it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    block = records.block_size
    figure = Figure(figsize=(2.3 * block + 0.6, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(READINGS), block, sharex=True, sharey=True, squeeze=False)
    for stage, confidence in stages(records, temperatures).items():
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
    colour = {"before": "tab:orange", "after": "tab:blue"}[stage]
    full = count > 0
    if stage == "before":
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
        axis.tick_params(labelsize=7)
        axis.set(xlim=(0, 1), ylim=(0, 1))
    axis.plot(probability[full], rate[full], color=colour, linewidth=0.8, label=stage)
    if full.any():
        axis.scatter(probability[full], rate[full], s=4 + 60 * count[full] / count.sum(), color=colour, alpha=0.7)
