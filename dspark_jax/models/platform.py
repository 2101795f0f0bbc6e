"""For which platform programs are shaped: XLA's CPU compiler wants some products and sums written its own way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_COMPILING_FOR: ContextVar[str | None] = ContextVar("compiling_for", default=None)


def platform() -> str:
    """What is traced now will run on this: the default backend's platform, or what `compiling_for` says."""
    return _COMPILING_FOR.get() or jax.default_backend()


def for_cpu() -> bool:
    """Whether what is traced now will run on a CPU."""
    return platform() == "cpu"


def for_tpu() -> bool:
    """Whether what is traced now will run on a TPU."""
    return platform() == "tpu"


@contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Traces for another platform ("tpu", "gpu", "cpu") than the default backend, for compilation ahead of time.

    JAX keeps traces of a jitted function by its arguments alone: wrap a function anew for each platform.
    """
    before = _COMPILING_FOR.set(platform)
    try:
        yield
    finally:
        _COMPILING_FOR.reset(before)
