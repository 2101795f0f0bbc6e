"""Reads the text of a compiled program (XLA's HLO): computations of instructions, with the shapes of their results.

Only what costs need is kept. XLA's own reader is not used: jaxlib refuses the programs of a newer libtpu, whose text
still reads the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_SIZES = {"pred": 1, "token": 0, "opaque": 0, "c64": 8, "c128": 16}  # bytes; of others the name says the bits
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")


@dataclass(frozen=True)
class Shape:
    """An array's dtype, sizes, and memory: 0 is the device's main memory (HBM), others are on the chip or the host."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> float:
        """Bytes, without padding to tiles."""
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        each = _SIZES.get(self.dtype, int(bits[1]) / 8 if bits else 0)
        return self.size * each


@dataclass(frozen=True)
class Instruction:
    """One operation.

    Attributes:
        shapes: arrays of the result, tuples flattened. operands: names. inside: text between the operands' brackets.
        attributes: text behind them.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    inside: str
    attributes: str

    def attribute(self, name: str) -> str | None:
        """The computation that `name=%...` names, None without."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def nbytes(self) -> float:
        """Bytes of the result, in whatever memory."""
        return sum(shape.nbytes for shape in self.shapes)


@dataclass
class Computation:
    """Instructions by name, in order; `root` is the result's."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    def get(self, name: str) -> Instruction | None:
        """The instruction of that name, None without."""
        return self.instructions.get(name)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its inputs by number."""
        return {int(i.inside): i for i in self if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads each instruction."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self:
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return found


@dataclass
class Module:
    """A program: its computations by name, the one that runs, and the devices that it is partitioned over."""

    computations: dict[str, Computation]
    entry: str
    devices: int


def parse_module(text: str) -> Module:
    """Reads the text of one HLO module.

    Raises:
        ValueError: there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None or not line.startswith(" "):
            header = _HEADER.match(line)
            if header:
                current = computations.setdefault(header[2], Computation(header[2]))
                entry = header[2] if header[1] else entry
            continue
        name = _NAME.match(line)
        if name:
            instruction = _instruction(name[2], line[name.end() :])
            current.instructions[instruction.name] = instruction
            current.root = instruction.name if name[1] else current.root
    if not entry:
        raise ValueError("the compiled program's text has no ENTRY computation: not the text of an HLO module")
    partitions = _PARTITIONS.search(text[: text.index("\n")])
    return Module(computations, entry, int(partitions[1]) if partitions else 1)


def _instruction(name: str, rest: str) -> Instruction:
    """`TYPE opcode(operands), attributes`, where a tuple's type is in brackets itself."""
    kind_end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", kind_end)
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing - 1]
    opcode = rest[kind_end:opening].strip()
    operands = () if opcode == "constant" else tuple(_OPERAND.findall(inside))
    return Instruction(name, opcode, parse_shapes(rest[:kind_end]), operands, inside, rest[closing:])


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed: the index behind it."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """All arrays of a type, `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}` or a tuple of such."""
    shapes = []
    for dtype, dims, layout in _SHAPE.findall(text):
        space = _SPACE.search(layout)
        sizes = tuple(int(re.sub(r"\D", "", d)) for d in dims.split(",") if d)
        shapes.append(Shape(dtype, sizes, int(space[1]) if space else 0))
    return tuple(shapes)
