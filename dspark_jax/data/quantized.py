"""Hidden states in 8 bits: groups of channels of one token share a scale, as in block-wise quantisation (LLM.int8, MX).

A value is `values * scale`. The scale of a group is its largest magnitude over the largest 8-bit value, rounded up to
bfloat16, so that no value overflows. int8 rounds to the nearest of 255 equal steps: the error is at most half a scale.
fp8 (e4m3) has steps that grow with the value: the error is at most 1/16 of it, or 2**-10 scales for small ones.
Letters: W values of a token, D hidden.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

GROUP = 128  # channels that share a scale, at most

_VALUES: dict[str, np.dtype] = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
_TOP = {"int8": 127.0, "fp8": 448.0}  # largest value
_SCALE = np.dtype(ml_dtypes.bfloat16)
_SMALLEST = 2.0**-100  # of a scale: devices flush numbers below 2**-126 to zero, products with it must stay above

Array = TypeVar("Array", np.ndarray, jax.Array)


class Quantized(NamedTuple):
    """Values in 8 bits with their scales; a pytree.

    Attributes:
        values: int8 or float8_e4m3fn [..., W]. scales: bfloat16 [..., W / group].
    """

    values: Any
    scales: Any


def scale_group(hidden_size: int) -> int:
    """Channels that share a scale: the largest divisor of D up to 128, so that no group crosses into another layer."""
    return next(size for size in range(min(GROUP, hidden_size), 0, -1) if hidden_size % size == 0)


def value_dtype(kind: str) -> np.dtype:
    """The dtype of the values of `int8` or `fp8`.

    Raises:
        ValueError: another kind.
    """
    if kind not in _VALUES:
        raise ValueError(f"kind {kind!r}: 8-bit states are one of {sorted(_VALUES)}")
    return _VALUES[kind]


def quantize(x: Any, kind: str, group: int) -> Quantized:
    """`x [..., W]` in 8 bits: by NumPy for a NumPy array, else by JAX (jit-able; on the device, before the transfer).

    Args:
        x: floating-point values below 1e38; a group with inf or NaN gets such a scale. kind: int8 or fp8.
        group: channels that share a scale.

    Raises:
        ValueError: an unknown kind, or a W that is no multiple of the group.
    """
    dtype, top = value_dtype(kind), _TOP[kind]
    width = x.shape[-1]
    if group < 1 or width % group:
        raise ValueError(f"group {group}: must divide the {width} values of a token")
    xp: ModuleType = np if isinstance(x, np.ndarray) else jnp
    parts = x.astype(np.float32).reshape(*x.shape[:-1], width // group, group)  # [..., groups, group]
    largest = xp.max(xp.abs(parts), axis=-1)  # [..., groups]
    scales = _bfloat16_above(xp.maximum(largest / np.float32(top), np.float32(_SMALLEST)))
    with np.errstate(invalid="ignore"):  # inf and NaN show in their scale
        steps = xp.clip(parts / scales[..., None], -top, top)
        values = (xp.rint(steps) if kind == "int8" else steps).astype(dtype)
    return Quantized(values.reshape(x.shape), scales.astype(_SCALE))


def dequantize(q: Quantized, dtype: DTypeLike) -> jax.Array:
    """The values [..., W] in `dtype`, multiplied in float32. jit-able."""
    groups = q.scales.shape[-1]
    parts = jnp.asarray(q.values).astype(jnp.float32).reshape(*q.values.shape[:-1], groups, -1)
    return (parts * jnp.asarray(q.scales).astype(jnp.float32)[..., None]).reshape(q.values.shape).astype(dtype)


def _bfloat16_above(x: Array) -> Array:
    """The smallest bfloat16 that is not below `x`, positive float32; as float32."""
    mask, step = np.uint32(0xFFFF0000), np.uint32(0xFFFF)
    if isinstance(x, np.ndarray):
        return ((x.view(np.uint32) + step) & mask).view(np.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + step) & mask, jnp.float32)
