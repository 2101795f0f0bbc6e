"""Settings that all programs share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


def auto_dtype(cpuinfo: str | Path = "/proc/cpuinfo") -> str:
    """The fast dtype of the default device: bfloat16 on GPU, TPU and CPUs with AMX, else float32.

    Args:
        cpuinfo: where Linux lists the processor's flags; a file that is absent means no AMX.
    """
    if jax.default_backend() != "cpu":
        return "bfloat16"
    file = Path(cpuinfo)
    return "bfloat16" if file.is_file() and "amx_bf16" in file.read_text().split() else "float32"


@contextmanager
def log_to_stderr(form: str = "%(message)s") -> Iterator[None]:
    """Shows this package's log on stderr while it is open; for programs. `form`: of a line, as `logging.Formatter`."""
    package, handler = logging.getLogger("dspark_jax"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(form, "%H:%M:%S"))
    level, propagates = package.level, package.propagate
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False  # libraries give the root logger a handler of their own, and each line would come twice
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        package.propagate = propagates
