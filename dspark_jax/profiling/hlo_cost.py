"""What a compiled program costs on each device, from its text: matrix FLOPs, HBM traffic, collectives, cycles.

XLA's own `cost_analysis` counts the body of a loop once. Here a body counts as often as it runs, which is read from the
loop's condition; loops whose number of rounds depends on data count once, and are reported.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import numpy as np

from dspark_jax.profiling.hlo_text import Computation, Instruction, Module, Shape

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
# What moves no data: bookkeeping, and the ends of what was counted at its start.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "iota", "opt-barrier", "async-start", "async-update", "async-done", "add-dependency",
}  # fmt: skip
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_NO_ESTIMATE = 1 << 60  # the compiler writes the largest integer where it has no estimate
_TRIPS = re.compile(r'known_trip_count[^\d}]*"?n"?:"?(\d+)')
_KERNEL = 'custom_call_target="tpu_custom_call"'  # Pallas
_KERNEL_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')


@dataclass
class Collective:
    """One kind of collective: how often a device takes part, bytes of the arrays, and bytes that it sends.

    `sent` is what a ring needs: for a group of g devices (g - 1) / g of the whole array, twice that for an all-reduce.
    """

    count: float = 0
    nbytes: float = 0
    sent: float = 0


@dataclass
class Cost:
    """Of one device.

    Attributes:
        flops: of matrix products, and what kernels claim. nbytes: read from and written to HBM.
        cycles: the compiler's own estimates, added up; 0 where it gives none. collectives: by kind.
        unknown_loops: loops that count once because their number of rounds is not known.
        silent_kernels: runs of kernels that claim no FLOPs, so that theirs are missing.
    """

    flops: float = 0
    nbytes: float = 0
    cycles: float = 0
    collectives: dict[str, Collective] = field(default_factory=dict)
    unknown_loops: int = 0
    silent_kernels: float = 0


def program_cost(module: Module) -> Cost:
    """Costs of one run of a program on one of its devices."""
    cost = Cost()
    _walk(module, module.computations[module.entry], 1, cost, executed=True)
    return cost


def _walk(module: Module, where: Computation, times: float, cost: Cost, executed: bool) -> None:
    """Adds `times` runs of a computation; `executed`: its arrays go through memory (not so inside a fusion)."""
    for one in where:
        if one.opcode == "while":
            trips = trip_count(module, where, one)
            cost.unknown_loops += trips is None
            rounds = times * (1 if trips is None else trips)
            _walk(module, module.computations[one.attribute("body") or ""], rounds, cost, executed)
            continue
        _add_matrix(where, one, times, cost)
        _add_collective(module, where, one, times, cost)
        if executed:
            found = _CYCLES.search(one.attributes)
            cycles = int(found[1]) if found else 0
            cost.cycles += times * cycles if cycles < _NO_ESTIMATE else 0
            cost.nbytes += times * traffic(module, where, one)
        for name in _called(one):
            if name in module.computations:
                inner = executed and one.opcode != "fusion"
                _walk(module, module.computations[name], times, cost, inner)


def _called(one: Instruction) -> list[str]:
    """Computations that run as part of an instruction; those applied to each element do not count."""
    if one.opcode == "conditional":
        return re.findall(r"%([\w.\-]+)", one.attributes.split("branch_computations=")[-1].split("}")[0]) or [
            name for key in ("true_computation", "false_computation") if (name := one.attribute(key))
        ]
    key = {"fusion": "calls", "async-start": "calls", "call": "to_apply"}.get(one.opcode)
    name = one.attribute(key) if key else None
    return [name] if name else []


def trip_count(module: Module, where: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs its body; None where its condition is no comparison of a counter with a constant."""
    known = _TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    condition = module.computations.get(loop.attribute("condition") or "")
    if condition is None:
        return None
    test, bounds = _comparison(module, condition)
    if test is None or "direction=LT" not in test.attributes:
        return None
    first, last = (_number(*bound, where, loop) for bound in bounds)
    return None if last is None else max(last - (first or 0), 0)


def _comparison(module: Module, condition: Computation) -> tuple[Instruction | None, list[tuple[Computation, str]]]:
    """The comparison that a condition ends with, and where its two operands are found; None where it ends otherwise."""
    root = condition[condition.root]
    if root.opcode == "compare":
        return root, [(condition, name) for name in root.operands]
    body = module.computations.get(root.attribute("calls") or "")
    if body is None or body[body.root].opcode != "compare":
        return None, []
    test = body[body.root]
    numbers = {p.name: number for number, p in body.parameters.items()}
    given = {name: (condition, root.operands[number]) for name, number in numbers.items()}
    return test, [given.get(name, (body, name)) for name in test.operands]


def _number(inside: Computation, name: str, where: Computation, loop: Instruction) -> int | None:
    """An integer that a condition reads: a constant, or what the loop's state starts with, if that is one."""
    one = _plain(inside, name)
    if one is not None and one.opcode == "get-tuple-element":
        index, start = re.search(r"index=(\d+)", one.attributes), where.get(loop.operands[0])
        if index is None or start is None or start.opcode != "tuple":
            return None
        one = _plain(where, start.operands[int(index[1])])
    literal = one is not None and one.opcode == "constant" and re.fullmatch(r"-?\d+", one.inside)
    return int(literal[0]) if literal else None


def _plain(inside: Computation, name: str) -> Instruction | None:
    """The instruction behind copies."""
    one = inside.get(name)
    while one is not None and one.opcode in ("copy", "bitcast"):
        one = inside.get(one.operands[0])
    return one


def _add_matrix(where: Computation, one: Instruction, times: float, cost: Cost) -> None:
    if one.opcode == "dot":
        left = where[one.operands[0]].shapes[0]
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        inner = math.prod(left.dims[int(a)] for a in axes[1].split(",") if a) if axes else 1
        cost.flops += times * 2 * one.shapes[0].size * inner
    elif one.opcode == "convolution":
        left, right = (where[name].shapes[0] for name in one.operands[:2])
        cost.flops += times * convolution_flops(left, right, one.shapes[0], one.attributes)
    elif one.opcode == "custom-call" and _KERNEL in one.attributes:
        claimed = _KERNEL_FLOPS.search(one.attributes)
        cost.flops += times * int(claimed[1]) if claimed else 0
        cost.silent_kernels += 0 if claimed else times


def convolution_flops(left: Shape, right: Shape, out: Shape, attributes: str) -> float:
    """FLOPs of a convolution, the form that products take on TPUs; only the pairs inside the input count.

    A batch axis becomes a dilated spatial axis there, where each output position meets one input position.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        return 0.0
    inputs, kernel, outputs = labels[1], labels[2], labels[3]
    window = re.search(r"window=\{([^}]*)\}", attributes)
    given = dict(part.split("=", 1) for part in window[1].split()) if window else {}
    spatial = [label for label in kernel if label.isdigit()]
    pairs = 1.0
    for number, label in enumerate(sorted(spatial)):
        pick = {name: int(value.split("x")[number]) for name, value in given.items() if name not in ("pad", "size")}
        low = int(given["pad"].split("x")[number].split("_")[0]) if "pad" in given else 0
        size = right.dims[kernel.index(label)], left.dims[inputs.index(label)], out.dims[outputs.index(label)]
        pairs *= _valid_pairs(*size, pick, low)
    shared = right.dims[kernel.index("i")] if "i" in kernel else 1
    made = out.dims[outputs.index("b")] * out.dims[outputs.index("f")]
    batches = re.search(r"batch_group_count=(\d+)", attributes)
    return 2.0 * pairs * shared * made * (int(batches[1]) if batches else 1)


def _valid_pairs(kernel: int, size: int, out: int, given: dict[str, int], low: int) -> int:
    """Pairs of kernel and output positions of one axis that meet an element of the input, not padding or a gap."""
    dilate = given.get("lhs_dilate", 1)
    if kernel * out > 1 << 26:  # never seen; an upper bound
        return kernel * out
    at = np.arange(out)[:, None] * given.get("stride", 1) + np.arange(kernel) * given.get("rhs_dilate", 1) - low
    return int(np.sum((at >= 0) & (at % dilate == 0) & (at // dilate < size)))


def _add_collective(module: Module, where: Computation, one: Instruction, times: float, cost: Cost) -> None:
    kind = one.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return
    inputs = sum(i.nbytes for name in one.operands if (i := where.get(name)))
    outputs = one.nbytes - inputs if one.opcode == "all-gather-start" else one.nbytes
    if where.name.startswith("all-reduce-scatter"):  # a fusion that keeps a slice of an all-reduce
        kind = "reduce-scatter"
    nbytes = outputs if kind == "all-gather" else inputs
    group = group_size(one.attributes, module.devices)
    share = 1.0 if kind.startswith("collective") else (group - 1) / group
    entry = cost.collectives.setdefault(kind, Collective())
    entry.count += times
    entry.nbytes += times * nbytes
    entry.sent += times * nbytes * share * (2 if kind == "all-reduce" else 1)


def group_size(attributes: str, devices: int) -> int:
    """Devices of one group of a collective: `{{0,1},{2,3}}`, `[2,4]<=[8]`, or axes of a mesh; all of them without."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed:
        return len(listed[1].split(","))
    tiled = re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)
    if tiled:
        return int(tiled[1])
    mesh = re.search(r"replica_groups=@?\w*\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes.get(name, 1) for name, part in parts)
    return max(devices, 1)


def traffic(module: Module, where: Computation, one: Instruction) -> float:
    """Bytes that an instruction reads from HBM and writes to it; arrays in other memories are free."""
    if one.opcode in _FREE or one.opcode.endswith(("-done", "-update")):
        return 0.0
    operands = [where.get(name) for name in one.operands]
    if one.opcode in ("copy-start", "slice-start"):  # results: destination (first or second), source, context
        target = one.shapes[0] if one.opcode == "copy-start" else one.shapes[-2]
        source = operands[0].shapes[0] if operands and operands[0] else target
        return sum(target.nbytes for shape in (target, source) if shape.space == 0)
    body = module.computations.get(one.attribute("calls") or "") if one.opcode == "fusion" else None
    if body is not None:
        return _fusion_traffic(body, one, operands)
    if one.opcode in ("dynamic-slice", "slice", "gather"):
        return _hbm(one) * (2 if operands[0] is not None and _hbm(operands[0]) else 1)
    if one.opcode == "dynamic-update-slice":
        return 2 * (operands[1].nbytes if operands[1] else 0.0) if _hbm(one) else 0.0
    return _hbm(one) + sum(_hbm(operand) for operand in operands if operand is not None)


def _hbm(one: Instruction) -> float:
    return sum(shape.nbytes for shape in one.shapes if shape.space == 0)


def _fusion_traffic(body: Computation, one: Instruction, operands: list[Instruction | None]) -> float:
    """Inputs that are only sliced count their slices, results that are updated in place their updates."""
    total = 0.0
    for number, operand in enumerate(operands):
        parameter = body.parameters.get(number)
        if operand is None or parameter is None or not _hbm(operand):
            continue
        total += min(_read(body, parameter), _hbm(operand))
    root = body[body.root]
    results = [body.get(name) for name in root.operands] if root.opcode == "tuple" else [root]
    if len(results) != len(one.shapes):
        return total + _hbm(one)
    for shape, result in zip(one.shapes, results, strict=True):
        if shape.space == 0:
            total += min(_written(body, result), shape.nbytes) if result is not None else shape.nbytes
    return total


def _read(body: Computation, parameter: Instruction) -> float:
    total = 0.0
    for user in body.users[parameter.name]:
        first = bool(user.operands) and user.operands[0] == parameter.name
        if user.opcode == "bitcast":
            total += _read(body, user)
        elif first and user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.nbytes
        elif not (first and user.opcode == "dynamic-update-slice"):
            return parameter.nbytes
    return total


def _written(body: Computation, result: Instruction) -> float:
    while result.opcode == "bitcast" and (inner := body.get(result.operands[0])) is not None:
        result = inner
    if result.opcode == "dynamic-update-slice" and (update := body.get(result.operands[1])) is not None:
        return update.nbytes
    return result.nbytes
