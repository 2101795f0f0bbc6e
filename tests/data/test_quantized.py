"""8-bit states: error bounds, host and device alike, what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data.quantized import Quantized, dequantize, quantize, scale_group

KINDS = ("int8", "fp8")


def error_bound(q: Quantized, x: np.ndarray) -> np.ndarray:
    """The largest allowed error of each value; float64, with room for float32's own rounding."""
    scales = np.repeat(np.asarray(q.scales, np.float64), x.shape[-1] // q.scales.shape[-1], axis=-1)
    if q.values.dtype == np.int8:
        return scales * 0.5 * (1 + 1e-5)
    return np.maximum(np.abs(x) / 16, scales * 2.0**-10) * (1 + 1e-5)


def assert_close(q: Quantized, x: np.ndarray) -> None:
    exact = x.astype(np.float64)
    found = np.asarray(dequantize(q, jnp.float32), np.float64)
    assert np.isfinite(found).all()
    assert (np.abs(found - exact) <= error_bound(q, exact)).all()


@st.composite
def states(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Values of very different sizes, with zero tokens and outliers; and a group that divides them."""
    group, groups, tokens = draw(st.sampled_from((1, 4, 96))), 2, 4  # few shapes, as each is compiled
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(size=(tokens, group * groups)) * np.exp(rng.normal(size=(tokens, group * groups)) * 3)
    x *= 10.0 ** draw(st.integers(-40, 25))
    x[rng.random(tokens) < 0.3] = 0
    x[:, 0] *= draw(st.sampled_from((1.0, 1e4)))
    dtype = draw(st.sampled_from((np.float32, ml_dtypes.bfloat16)))
    return x.astype(dtype), group


@pytest.mark.parametrize("kind", KINDS)
@given(case=states())
def test_errors_are_bounded_and_zeros_stay(kind: str, case: tuple[np.ndarray, int]) -> None:
    x, group = case
    q = quantize(x, kind, group)
    assert q.values.shape == x.shape and q.scales.shape == (len(x), x.shape[-1] // group)
    assert q.scales.dtype == ml_dtypes.bfloat16 and q.values.dtype.itemsize == 1
    assert_close(q, x)
    zero = ~x.astype(np.float32).any(axis=-1)
    assert not np.asarray(q.values[zero], np.float32).any()
    top = 127 if kind == "int8" else 448
    assert np.abs(q.values.astype(np.float32)).max() <= top


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_device_gives_the_same(kind: str, dtype: str) -> None:
    """Up to the last bit of a scale: XLA multiplies by a reciprocal where NumPy divides."""
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.normal(size=(2, 8, 256)) * 5, dtype))
    x = np.concatenate([x, np.zeros_like(x)])
    host = quantize(x, kind, 128)
    device = jax.jit(lambda x: quantize(x, kind, 128))(x)
    assert isinstance(device.values, jax.Array) and device.values.dtype == host.values.dtype
    np.testing.assert_allclose(np.asarray(device.scales, np.float32), host.scales.astype(np.float32), rtol=2**-7)
    assert (np.asarray(device.values, np.float32) == host.values.astype(np.float32)).mean() > 0.9
    assert_close(Quantized(*map(np.asarray, device)), x)


def test_every_value_of_fp8_and_int8_comes_back() -> None:
    for kind, top, dtype in (("int8", 127, np.int8), ("fp8", 448, ml_dtypes.float8_e4m3fn)):
        codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        codes = np.sort(codes[np.isfinite(codes) & (np.abs(codes) <= top)])
        x = np.concatenate([codes, np.full(-len(codes) % 2, top, np.float32)])[None] * 0.25
        found = np.asarray(dequantize(quantize(x, kind, x.shape[-1]), jnp.float32))
        np.testing.assert_array_equal(found, x)


def test_dequantize_compiles_to_any_dtype() -> None:
    x = np.random.default_rng(1).normal(size=(3, 5, 192)).astype(np.float32)
    q = quantize(x, "int8", 96)
    want = np.asarray(q.values, np.float32).reshape(3, 5, 2, 96) * np.asarray(q.scales, np.float32)[..., None]
    for dtype in (jnp.float32, jnp.bfloat16):
        got = jax.jit(lambda q, dtype=dtype: dequantize(q, dtype))(q)
        assert got.shape == x.shape and got.dtype == dtype
        np.testing.assert_array_equal(got, jnp.asarray(want.reshape(x.shape), dtype))
    empty = Quantized(np.zeros((2, 192), np.int8), np.zeros((2, 2), ml_dtypes.bfloat16))
    assert not np.asarray(dequantize(empty, jnp.float32)).any()  # padding of a batch


@pytest.mark.parametrize(("hidden", "group"), [(2560, 128), (5120, 128), (3840, 128), (576, 96), (48, 48), (1, 1)])
def test_groups_divide_the_hidden_size(hidden: int, group: int) -> None:
    assert scale_group(hidden) == group


@pytest.mark.parametrize(
    ("args", "message"), [(("int4", 4), "kind 'int4'"), (("int8", 5), "group 5"), (("fp8", 0), "group 0")]
)
def test_bad_input_is_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(np.zeros((2, 8), np.float32), *args)
