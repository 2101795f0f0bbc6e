"""A measured curve as a picture: rates and the draft's share of a round, by rows verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark_jax.profiling.curves import MeasuredPoint, Profile
from dspark_jax.profiling.profile_report import draft_seconds, has_draft, point_rows

_STYLES = ("-", "--", ":", "-.")  # of contexts


def plot(path: Path, profile: Profile) -> None:
    """Writes a PNG: rows per second, rounds per second and the draft's share against rows, a line for each R and T.

    Open circles are rounds without a draft.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    contexts = sorted({measured.point.context for measured in profile.points})
    for measured in profile.points:
        colour = f"C{profile.slot_sizes.index(measured.point.slots) % 10}"
        style = _STYLES[contexts.index(measured.point.context) % len(_STYLES)]
        _lines(axes, measured, colour, style)
    for axis, label in zip(axes, ("rows/s", "rounds/s", "draft's share of a round, %"), strict=True):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_xlabel("rows verified (B)")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[:2]:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
    axes[1].legend(fontsize=7)
    key = profile.key
    mesh = " x ".join(map(str, key.mesh))
    figure.suptitle(f"{key.device}, mesh {mesh}, {key.dtype}, {key.mode}", fontsize=10)
    figure.savefig(path, dpi=120)


def _lines(axes: Any, measured: MeasuredPoint, colour: str, style: str) -> None:
    """One point's line in each panel."""
    plain, *drafted = point_rows(measured)
    label = f"R = {measured.point.slots}, T = {measured.point.context}"
    for axis, rate in zip(axes, ("rows_per_second", "rounds_per_second"), strict=False):
        axis.plot([plain["rows"]], [plain[rate]], "o", color=colour, fillstyle="none")
        rows, rates = [row["rows"] for row in drafted], [row[rate] for row in drafted]
        axis.plot(rows, rates, style, color=colour, marker=".", label=label)
    if has_draft(measured):
        shares = [100 * draft_seconds(measured) / row["round_seconds"] for row in drafted]
        axes[2].plot([row["rows"] for row in drafted], shares, style, color=colour, marker=".")
