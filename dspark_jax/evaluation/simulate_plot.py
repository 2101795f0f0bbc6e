"""Pictures of a sweep: throughput against speed per user, and verify budget against concurrency (figures 7 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_jax.evaluation.tally import Result

_COLOURS = {
    "plain": "0.4",
    "mtp1": "tab:orange",
    "fixed": "tab:green",
    "threshold": "tab:purple",
    "causal": "tab:blue",
    "async": "tab:red",
}


def plot(folder: Path, results: Sequence[Result]) -> list[Path]:
    """Writes `throughput.png` and `budget.png` into `folder`, which is made; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "throughput.png", folder / "budget.png"]
    _throughput(paths[0], results)
    _budget(paths[1], results)
    return paths


def _figure() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.grid(alpha=0.3)
    return figure, axis


def _by_system(results: Sequence[Result]) -> dict[str, list[Result]]:
    names = dict.fromkeys(result.system for result in results)
    return {name: [r for r in results if r.system == name] for name in names}


def _throughput(path: Path, results: Sequence[Result]) -> None:
    figure, axis = _figure()
    for name, rows in _by_system(results).items():
        shown = [r for r in rows if r.tokens_per_second_per_user is not None]
        x, y = [r.tokens_per_second_per_user for r in shown], [r.tokens_per_second for r in shown]
        axis.plot(x, y, marker="o", markersize=4, color=_COLOURS[name], label=name)
        for result, across, up in zip(shown, x, y, strict=True):
            axis.annotate(f"{result.load:g}", (across, up), xytext=(3, 3), textcoords="offset points", fontsize=7)
    axis.set(xlabel="tokens/s per user (median)", ylabel="tokens/s in all", xscale="log", yscale="log")
    unit = "requests/s" if results and results[0].kind == "open" else "concurrent requests"
    axis.set_title(f"Throughput against speed per user (numbers: {unit})", fontsize=10)
    axis.legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=120)


def _budget(path: Path, results: Sequence[Result]) -> None:
    figure, axis = _figure()
    for name, rows in _by_system(results).items():
        shown = [r for r in rows if r.budget is not None]
        x = [r.concurrency if r.kind == "open" else r.load / r.replicas for r in shown]
        axis.plot(x, [r.budget for r in shown], marker="o", markersize=4, color=_COLOURS[name], label=name)
    axis.set(xlabel="concurrent requests of one replica", ylabel="verified rows per request and round")
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_title("Verify budget against concurrency (anchor included)", fontsize=10)
    axis.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=120)
