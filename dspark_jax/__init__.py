"""Speculative decoding with semi-autoregressive drafters and confidence-scheduled verification, in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_jax.checkpoints.load import load_drafter, load_target

__all__ = ["load_drafter", "load_target"]


def __getattr__(name: str) -> Any:
    """Imports the loaders when they are first used, so that `import dspark_jax` stays light."""
    if name in __all__:
        from dspark_jax.checkpoints import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
