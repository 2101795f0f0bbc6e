"""Compiles programs ahead of time for machines that are not here, and takes what the compiler knows about them.

The compiler is asked to write its own account of a program into a folder: the text of the program (also where memory
does not suffice, and where jaxlib cannot read what a newer libtpu made) and how it lays buffers out.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from dspark_jax.models.platform import compiling_for
from dspark_jax.profiling.aot_report import (
    Buffer,
    Memory,
    ProgramReport,
    estimate_times,
    sizes_of_refusal,
)
from dspark_jax.profiling.hlo_cost import Cost, program_cost
from dspark_jax.profiling.hlo_text import Module, parse_module
from dspark_jax.profiling.topology import Topology

# Newest stage first: only the last has estimates of cycles, only the second is there when memory does not suffice.
_TEXTS = ("*after_codegen.txt", "*after_optimizations.txt")
_LAYOUT = "*after_optimizations-buffer-assignment.txt"
_VALUE = re.compile(r"value: <\d+ (\S+) @0> \(size=(\d+),offset=\d+\): (\S+)")
_LARGEST = 8  # arrays to name


def compile_program(
    name: str,
    lower: Callable[[], Any],
    topology: Topology,
    mesh: dict[str, int],
    micro_batches: int = 1,
    hbm: int | None = None,
) -> ProgramReport:
    """Lowers and compiles one program.

    Args:
        lower: makes the lowered program, from functions that were not traced before. mesh: devices by axis.
        hbm: bytes of a device; None: the chip's own.

    Raises:
        jax.errors.JaxRuntimeError: the compiler fails for another reason than memory.
    """
    if hbm is None and topology.chip is not None:
        hbm = topology.chip.hbm
    began = time.perf_counter()
    with compiling_for(topology.platform):
        lowered = lower()
    traced = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dspark_aot_") as folder, _uncached():
        compiled, message = _compile(lowered, folder)
        took = time.perf_counter() - traced
        module = _module(Path(folder), compiled)
        cost = program_cost(module) if module else Cost()
        largest = _largest(Path(folder), module)
    times = estimate_times(cost, topology.chip, traced - began, took)
    if compiled is None:
        needed, there = sizes_of_refusal(message)
        there = there if hbm is None else hbm
        return ProgramReport(name, mesh, micro_batches, there, needed, times, None, cost, largest)
    memory = _memory(compiled)
    return ProgramReport(name, mesh, micro_batches, hbm, memory.total, times, memory, cost, largest)


def _compile(lowered: Any, folder: str) -> tuple[Any, str]:
    """The compiled program, or None and the compiler's message where it found too little memory."""
    try:
        return lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True}), ""
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, str(error)


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Compiles anew: a program from the compilation cache comes without the compiler's account, in no time."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _module(folder: Path, compiled: Any) -> Module | None:
    for pattern in _TEXTS:
        files = sorted(folder.glob(pattern), key=lambda file: file.stat().st_size)
        if files:
            return parse_module(files[-1].read_text())
    return parse_module(compiled.as_text()) if compiled is not None else None


def _memory(compiled: Any) -> Memory:
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
    )


def _largest(folder: Path, module: Module | None) -> tuple[Buffer, ...]:
    """The biggest arrays in the devices' memory, alike ones together, with the operation that they come from."""
    files = sorted(folder.glob(_LAYOUT), key=lambda file: file.stat().st_size)
    if not files:
        return ()
    alike: dict[tuple[int, str], list[str]] = {}
    for name, size, shape in _VALUE.findall(files[-1].read_text()):
        if not shape.startswith("("):
            alike.setdefault((int(size), shape.split("{")[0]), []).append(name.split("{")[0])
    biggest = sorted(alike.items(), key=lambda item: -item[0][0])[:_LARGEST]
    return tuple(Buffer(size, shape, len(set(names)), _made_by(names[0], module)) for (size, shape), names in biggest)


def _made_by(name: str, module: Module | None) -> str:
    """An instruction's name in the traced program, where the compiler kept it."""
    for computation in module.computations.values() if module else ():
        one = computation.get(name)
        if one is not None:
            found = re.search(r'op_name="([^"]*)"', one.attributes)
            return found[1] if found else name
    return name
