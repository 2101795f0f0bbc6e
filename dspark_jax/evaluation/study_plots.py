"""Pictures of studies: figures along an axis with their intervals, a panel for each domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.evaluation.plots import COLOURS, row_of_panels
from dspark_jax.evaluation.scores import Estimate

Curves = Mapping[str, Sequence[tuple[float, Estimate]]]  # series to its points: x, and the figure there


def draw(
    path: Path,
    curves: Mapping[str, Curves],
    title: str,
    axis: str,
    figure: str,
    *,
    places: Sequence[tuple[float, str]] = (),
    share: bool = False,
    logarithmic: bool = False,
) -> Path:
    """Writes a PNG with a panel for each of `curves`, and returns its path.

    Args:
        axis, figure: labels of x and y. places: marks on the axis, with their text; none: as it comes.
        share: whether figures are shares, from 0 to 1.
    """
    whole, axes = row_of_panels(3.0 * len(curves) + 1.2, 3.6, len(curves), "both")
    for panel, (name, lines) in zip(axes, curves.items(), strict=True):
        _panel(panel, lines)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel(axis, fontsize=8)
        if logarithmic:
            panel.set_xscale("log", base=2)
        if places:
            panel.set_xticks([x for x, _ in places], [text for _, text in places], fontsize=8)
            panel.minorticks_off()
    axes[0].set_ylabel(figure, fontsize=9)
    if share:
        axes[0].set_ylim(0, 1)
    if any(len(lines) > 1 for lines in curves.values()):
        whole.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    whole.suptitle(title, fontsize=10)
    whole.savefig(path, dpi=120)
    return path


def _panel(panel: Any, lines: Curves) -> None:
    for i, (series, points) in enumerate(lines.items()):
        shown = [(x, e) for x, e in sorted(points, key=lambda point: point[0]) if e.value is not None]
        colour = COLOURS[i % len(COLOURS)]
        x, y = [x for x, _ in shown], np.array([e.value for _, e in shown], float)
        ends = np.array([[e.value if end is None else end for end in e[1:]] for _, e in shown], float).reshape(-1, 2).T
        errors = np.abs(ends - y)
        how = {"marker": "o", "markersize": 4, "capsize": 2, "elinewidth": 0.8, "color": colour}
        panel.errorbar(x, y, errors, label=series, **how)
