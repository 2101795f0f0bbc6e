"""What is said about programs that were compiled ahead of time: a table, JSON, and the sizes where one does not fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dspark_jax.profiling.hlo_cost import Cost
from dspark_jax.profiling.topology import Chip

GIB = 1 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}
_EXCEEDS = re.compile(r"\(([\d.]+)([KMGT]?)i?B?\)[^()]*exceeds[^()]*\(([\d.]+)([KMGT]?)i?B?\)")
_USED = re.compile(r"Used ([\d.]+)([KMGT]?)i?B? of ([\d.]+)([KMGT]?)i?B? hbm")


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
        arguments, outputs: of the program. aliased: outputs that take an argument's place. temporaries: everything
            between. code: the program itself. peak: most that is in use at one time, as far as the compiler says.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    peak: int

    @property
    def total(self) -> int:
        """What the program needs: each part of it, with aliased outputs once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True)
class Buffer:
    """Arrays of one shape among the largest of a program: bytes of each, how many there are, what makes the first."""

    nbytes: int
    shape: str
    count: int
    made_by: str


@dataclass(frozen=True)
class Times:
    """Seconds: tracing and compiling here; then of one run on the device, None where the machine's speed is not known.

    Attributes:
        compiler: the compiler's own estimates of cycles, loops counted in full, without collectives. links: bytes sent
            to other chips, over all links at once. roofline: the longest of FLOPs, memory traffic and links at the
            chip's public peaks, which is an estimate too, and a lower bound.
    """

    trace: float
    compile: float
    compiler: float | None = None
    links: float | None = None
    roofline: float | None = None


@dataclass(frozen=True)
class ProgramReport:
    """One compiled program, or one that there is too little memory for.

    Attributes:
        name: train, or decode with its rows. mesh: devices by axis. micro_batches: of a train step, else 1.
        hbm: bytes that a device has for programs; None: not limited. needed: bytes that the program needs at least.
        memory: None where the compiler gave up, or was not asked because what is sure is too much (then `times` are 0).
        largest: its biggest arrays.
    """

    name: str
    mesh: dict[str, int]
    micro_batches: int
    hbm: int | None
    needed: int
    times: Times
    memory: Memory | None = None
    cost: Cost = field(default_factory=Cost)
    largest: tuple[Buffer, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a device has room for it."""
        return self.memory is not None and (self.hbm is None or self.needed <= self.hbm)

    def as_json(self) -> dict[str, Any]:
        """All of it, in bytes, FLOPs and seconds of one device."""
        memory = None if self.memory is None else asdict(self.memory) | {"total": self.memory.total}
        return asdict(self) | {"fits": self.fits, "memory": memory}


def estimate_times(cost: Cost, chip: Chip | None, trace: float, compile_seconds: float) -> Times:
    """`Times` of a program on a chip; a machine that is not known gets none for its runs."""
    if chip is None:
        return Times(trace, compile_seconds)
    links = sum(one.sent for one in cost.collectives.values()) / chip.links
    roofline = max(cost.flops / chip.flops, cost.nbytes / chip.bandwidth, links)
    return Times(trace, compile_seconds, cost.cycles / chip.clock if cost.cycles else None, links, roofline)


def sizes_of_refusal(message: str) -> tuple[int, int | None]:
    """Bytes needed and bytes there, from a compiler's RESOURCE_EXHAUSTED message; (0, None) where it names none."""
    found = _EXCEEDS.search(message) or _USED.search(message)
    if found is None:
        return 0, None
    needed, there = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    return needed, there


def mesh_text(mesh: dict[str, int], micro_batches: int = 0) -> str:
    """A mesh in words, as its options would be given."""
    text = " ".join(f"--mesh.{axis} {size}" for axis, size in mesh.items())
    return text + (f" --micro-batches {micro_batches}" if micro_batches else "")


def refusal(report: ProgramReport) -> str:
    """Why a program does not fit, with the sizes; for one that does not."""
    there = "what a chip has" if report.hbm is None else f"the {report.hbm / GIB:.2f} GiB that a chip has"
    sure = " (arguments, and gradients in training; not compiled)" if report.times.compile == 0 else ""
    text = f"{report.name}: does not fit: needs {report.needed / GIB:.2f} GiB{sure} of {there}"
    if report.memory is not None:
        m = report.memory
        text += (
            f" (arguments {m.arguments / GIB:.2f}, outputs beside them {(m.outputs - m.aliased) / GIB:.2f}, "
            f"temporaries {m.temporaries / GIB:.2f}, code {m.code / GIB:.2f})"
        )
    return text


def largest_lines(report: ProgramReport) -> list[str]:
    """The biggest arrays of a program, a line each."""
    return [f"  {b.nbytes / GIB:7.3f} GiB  {b.count:4d} x {b.shape}  {b.made_by}" for b in report.largest]


def table(reports: Sequence[ProgramReport]) -> str:
    """Quantities of one device down, programs across."""
    rows: list[tuple[str, list[str]]] = [("", [report.name for report in reports])]
    rows.append(("mesh data x fsdp x tensor", ["x".join(map(str, r.mesh.values())) for r in reports]))
    rows.append(("micro-batches", [str(r.micro_batches) for r in reports]))
    for name in ("arguments", "outputs", "aliased", "temporaries", "code", "total", "peak"):
        parts = [None if r.memory is None else getattr(r.memory, name) for r in reports]
        if name == "total":
            parts = [r.needed for r in reports]
        rows.append((f"{name}, GiB", [_number(part, GIB) for part in parts]))
    rows.append(("memory of a chip, GiB", [_number(r.hbm, GIB) for r in reports]))
    rows.append(("fits", ["yes" if r.fits else "NO" for r in reports]))
    rows.append(("matrix products, TFLOP", [_number(r.cost.flops, 1e12) for r in reports]))
    rows.append(("memory traffic, GB", [_number(r.cost.nbytes, 1e9) for r in reports]))
    for kind in sorted({kind for r in reports for kind in r.cost.collectives}):
        cells = []
        for r in reports:
            one = r.cost.collectives.get(kind)
            cells.append("-" if one is None else f"{one.count:.0f} / {_number(one.sent, 1e9)}")
        rows.append((f"{kind}, number / GB sent", cells))
    for name, text in (
        ("trace", "tracing here, s"),
        ("compile", "compiling here, s"),
        ("compiler", "run: compiler's cycles, s"),
        ("links", "run: links (estimate), s"),
        ("roofline", "run: roofline (estimate), s"),
    ):
        rows.append((text, [_number(getattr(r.times, name), 1) for r in reports]))
    widths = [max(len(label) for label, _ in rows)]
    widths += [max(len(cells[i]) for _, cells in rows) for i in range(len(reports))]
    return "\n".join(
        "  ".join([label.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]).rstrip()
        for label, cells in rows
    )


def _number(value: float | None, unit: float) -> str:
    """Three digits or more of a quantity in its unit; "-" for none."""
    if value is None:
        return "-"
    value /= unit
    if value == 0:
        return "0"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}" if value >= 1e-3 else f"{value:.1e}"
