"""Building blocks of every transformer here, on feature-major activations.

Activations are `[D, B]`: features first, packed tokens last, so that a matrix product is `W[out, in] @ x[in, B]`.
Verify steps have 2 to 64 rows, and on CPUs this orientation is the fast one there (weights stream once, in memory
order); GPUs and TPUs lay the operands out as they like either way. Products take operands in the weights' dtype and
accumulate in float32; the residual stream, norms, softmax and RoPE stay in float32.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from dspark_jax.models.config import RopeConfig
from dspark_jax.models.platform import for_cpu
from dspark_jax.sharding import active, constrain

Array = jax.Array
_FEW_ROWS = 64  # rows up to which a step decodes or verifies; beyond are prefills and training


def linear(weight: Array, x: Array, num_inputs: int = 1) -> Array:
    """`weight [out..., in...] @ x [in..., B]` -> float32 `[out..., B]`.

    Args:
        weight: any float dtype; its last `num_inputs` axes are contracted with the first ones of `x`.
        x: cast to the weight's dtype before the product.
        num_inputs: number of contracted axes.
    """
    if active() and weight.ndim > 2:
        return _wide(weight, x.astype(weight.dtype), num_inputs)
    outputs = weight.shape[: weight.ndim - num_inputs]
    rows = x.shape[-1]
    matrix = weight.reshape(math.prod(outputs), -1)
    return _matmul(matrix, x.astype(weight.dtype).reshape(-1, rows), 0).reshape(*outputs, rows)


def linear_rows(weight: Array, x: Array) -> Array:
    """`weight [o, i]` on rows `x [B, i]` (cast to the weight's dtype): float32 `[o, B]`, without a transpose of `x`."""
    return _matmul(weight, x.astype(weight.dtype), 1)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(weight: Array, x: Array, axis: int) -> Array:
    """`weight [o, i]` with axis `axis` of `x` (`[i, B]` or `[B, i]`), operands of one dtype, float32 `[o, B]` out."""
    rows = x.shape[1 - axis]
    if axis == 0 and rows == 1 and weight.dtype == jnp.bfloat16:
        # One bf16 row misses the matrix units of CPUs (8 times slower here than two rows).
        x = jnp.pad(x, ((0, 0), (0, 1)))
    if axis == 0 and rows == 1 and weight.dtype == jnp.float32 and for_cpu():
        return dot(x.reshape(1, -1), weight, 1).reshape(-1, 1)  # faster for one row, by 5 % with jax 0.10
    if axis == 0 and weight.dtype == jnp.float32 and rows % 8 and 4 < rows < 32 and for_cpu():
        x = jnp.pad(x, ((0, 0), (0, -rows % 8)))  # 20 % faster: products of 7 or 12 columns take longer than of 8 or 16
    return dot(weight, row_major(x), axis)[:, :rows]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _wide(weight: Array, x: Array, num_inputs: int) -> Array:
    """`linear` on a mesh: the axes stay as they are, since one that is cut cannot be merged with others without moving
    data. Gradients are products of the weights' dtype, as in `_matmul`.
    """
    outputs = weight.ndim - num_inputs
    return _contract(weight, x, tuple(range(outputs, weight.ndim)), tuple(range(num_inputs)))


def _contract(a: Array, b: Array, axes_a: tuple[int, ...], axes_b: tuple[int, ...]) -> Array:
    return jax.lax.dot_general(a, b, ((axes_a, axes_b), ((), ())), preferred_element_type=jnp.float32)


def _wide_forward(weight: Array, x: Array, num_inputs: int) -> tuple[Array, tuple[Array, Array]]:
    return _wide(weight, x, num_inputs), (weight, x)


def _wide_backward(num_inputs: int, saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    weight, x = saved
    cotangent = cotangent.astype(weight.dtype)  # [out..., B]
    outputs = tuple(range(weight.ndim - num_inputs))
    dx = _contract(weight, cotangent, outputs, outputs)  # [in..., B]
    dw = _contract(cotangent, x, (cotangent.ndim - 1,), (x.ndim - 1,))  # [out..., in...]
    return dw.astype(weight.dtype), dx.astype(x.dtype)


_wide.defvjp(_wide_forward, _wide_backward)


def dot(a: Array, b: Array, axis_b: int) -> Array:
    """`a [m, k]` with `b`'s axis `axis_b`, operands of one dtype, float32 out."""
    return jax.lax.dot_general(a, b, (((1,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)


def row_major(x: Array) -> Array:
    """`x` laid out in its own axis order, where that decides how a product runs.

    XLA's CPU compiler turns a bf16 product into a float32 one, weights included, unless both operands are row-major and
    the left one is contracted over its last axis (4 times slower here); a transposed array upstream is enough for that.
    """
    if x.dtype != jnp.bfloat16 or not for_cpu():
        return x
    return jax.lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)


def _matmul_forward(weight: Array, x: Array, axis: int) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(weight, x, axis), (weight, x)


def _matmul_backward(axis: int, saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    """Gradients by products of the weights' dtype too: a float32 cotangent would take them off the matrix units."""
    weight, x = saved
    cotangent = row_major(cotangent.astype(weight.dtype))  # [o, B]
    left, right = (weight, cotangent) if axis == 0 else (cotangent, weight)
    dx = dot(row_major(left.T), right, 0)  # [i, B] or [B, i]
    return dot(cotangent, row_major(x), 1 - axis).astype(weight.dtype), dx.astype(x.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


@jax.custom_vjp
def gather_rows(table: Array, ids: Array) -> Array:
    """Rows `ids [B]` of `table [V, D]`, as they are: `[B, D]`. The gradient of a row adds up in float32."""
    if table.dtype == jnp.bfloat16 and for_cpu():
        # The CPU compiler gathers no bf16, and would convert the whole table; the barrier keeps it from doing so once
        # per call, outside the loop over rounds, so that it fuses the conversion with the gather.
        table, ids = jax.lax.optimization_barrier((table, ids))
        bits = jnp.take(jax.lax.bitcast_convert_type(table, jnp.uint16), ids, axis=0)
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return jnp.take(table, ids, axis=0)


def _gather_forward(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return gather_rows(table, ids), (table, ids)


def _gather_backward(inputs: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    """Of its own: bits have no gradient, and sums in bf16 would lose what frequent rows get."""
    table, ids = inputs
    sums = jnp.zeros(table.shape, jnp.float32).at[ids].add(cotangent.astype(jnp.float32))
    return sums.astype(table.dtype), None


gather_rows.defvjp(_gather_forward, _gather_backward)


def take_rows(table: Array, ids: Array) -> Array:
    """Rows `ids [B]` of `table [V, D]` as columns: float32 `[D, B]`."""
    return gather_rows(table, ids).T.astype(jnp.float32)


def embed_rows(table: Array, ids: Array, scaled: bool) -> Array:
    """Embeddings of `ids [B]` from `table [V, D]`: float32 `[D, B]`; `scaled`: times sqrt(D) in the table's dtype."""
    rows = take_rows(table, ids)
    return rows * jnp.asarray(table.shape[1] ** 0.5, table.dtype).astype(jnp.float32) if scaled else rows


def softcap(x: Array, cap: float) -> Array:
    """`cap * tanh(x / cap)`; `x` itself for cap 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def rms_norm(x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
    """RMSNorm over axis 0 of `x [D, B]`, scaled by `offset + weight [D]`; float32 out."""
    return head_norm(x.astype(jnp.float32), weight, eps, offset)


def _sum_squares(x: Array) -> Array:
    """Sums of squares of float32 `x [..., D, B]` over D, which stays as 1, in an order that does not depend on B.

    On CPUs a reduction is compiled differently for different B. In bf16 an ulp of difference may turn into one of the
    rounded product's operands, and a verified token differ from the one that plain decoding gives. A product (of two
    rows and columns at least) is the same for all B.
    """
    squares, columns = jnp.square(x), x.shape[-1]
    if columns == 1:
        squares = jnp.repeat(squares, 2, axis=-1)
    ones = jnp.ones((*x.shape[:-2], 2, x.shape[-2]))
    return (ones @ jax.lax.optimization_barrier(squares))[..., :1, :columns]  # unfused: that too would change rounding


def head_norm(x: Array, weight: Array, eps: float, offset: float = 0.0) -> Array:
    """RMSNorm of each head: `x [..., hd, B]` over axis -2, scaled by `offset + weight [hd]`; float32 out."""
    fixed_order = weight.dtype == jnp.bfloat16 and x.shape[-1] <= _FEW_ROWS and for_cpu()
    squares = _sum_squares(x) if fixed_order else jnp.sum(jnp.square(x), axis=-2, keepdims=True)
    scale = jax.lax.rsqrt(squares / x.shape[-2] + eps)
    normed = x * scale
    factor = weight.astype(jnp.float32) + offset if offset else weight.astype(jnp.float32)
    return normed * factor[:, None]


def gated_mlp(gate_up: Array, down: Array, x: Array, activation: str = "silu") -> Array:
    """Gated MLP `down @ (act(gate @ x) * (up @ x))`, act being `silu` or `gelu` (tanh form).

    `gate_up [2, F, D]`, `down [D, F]`, `x` and float32 out `[D, B]`.
    """
    hidden = constrain(linear(gate_up, x), None, "mlp", "batch")  # [2, F, B]
    act = jax.nn.silu if activation == "silu" else jax.nn.gelu  # jax's gelu is the tanh form
    return linear(down, act(hidden[0]) * hidden[1])  # [D, B]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Array:
    """Angles per position of each rotated pair, float32 `[hd/2]`, with the config's scaling applied.

    Sources: linear (position interpolation), llama3 (Llama 3.1's bands), yarn (Peng et al. 2023, NTK by parts), and
    proportional (Gemma4: the first pairs rotate as in a whole head, the others not at all).
    """
    pairs = head_dim // 2
    base = rope.theta ** (-jnp.arange(pairs, dtype=jnp.float32) * 2.0 / head_dim)  # [hd/2]
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "proportional":
        return jnp.where(jnp.arange(pairs) < int(rope.rotary_fraction * head_dim // 2), base / rope.factor, 0.0)
    if rope.kind == "llama3":
        turns = rope.original_max_position * base / (2 * math.pi)
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return base * (1 - (1 - jnp.clip(smooth, 0.0, 1.0)) * (1 - 1 / rope.factor))
    low, high = (
        head_dim * math.log(rope.original_max_position / (beta * 2 * math.pi)) / (2 * math.log(rope.theta))
        for beta in (rope.beta_fast, rope.beta_slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
    ramp = jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - low) / max(high - low, 0.001), 0.0, 1.0)
    return base * (1 - ramp * (1 - 1 / rope.factor))


def rope_tables(rope: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines, float32 `[hd/2, B]` each, at int32 `positions [B]`."""
    angles = rope_frequencies(rope, head_dim)[:, None] * positions.astype(jnp.float32)[None]  # [hd/2, B]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """Applies RoPE to heads `x [..., hd, B]` (half-split pairs: i with i + hd/2)."""
    cos, sin = tables
    half = x.shape[-2] // 2
    first, second = x[..., :half, :], x[..., half:, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-2)
