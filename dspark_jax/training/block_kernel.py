"""Pallas kernels for TPUs of the attention in `block_attention`: forward, gradients of the blocks, of the context.

A grid step holds one chunk of blocks (the slots of b blocks times the Q heads of a KV head, R queries in lanes) and one
tile of context (S keys in sublanes). The chunk's own slots come first, then the tiles that it sees; tiles it does not
see are neither fetched nor computed. JAX's own kernels cannot say this: splash attention wants a mask that is known
when it is compiled or stored whole, and gives no gradients where it also returns the log-sum-exp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Array = jax.Array
_MASKED = -1e30
_LANES = 128
_MOST_ROWS = 1024  # queries of a chunk
_MEMORY = 12 << 20  # bytes that a grid step may hold, of the 16 MiB that the compiler grants
FEWEST = 256  # context positions from which the kernels are used: below, the plain loops hold little


def cut(rows: int, head_dim: int, blocks: int, length: int) -> tuple[int, int]:
    """b, blocks of a chunk, and S, context positions of a tile: the largest that fit, padding queries least.

    Args:
        rows: Q * K, queries of a block. head_dim: hd. blocks: A. length: T.
    """

    def held(size: int, tile: int) -> int:  # bytes: operands twice (one set is being fetched), scores, sums
        queries = size * rows
        return 16 * queries * head_dim + 12 * queries * tile + 16 * tile * head_dim

    def padded(choice: tuple[int, int]) -> tuple[int, int, int]:
        size, tile = choice
        return -(-size * rows // _LANES) * _LANES * -(-blocks // size), -tile, -size

    longest = -(-length // _LANES) * _LANES
    choices = [(size, tile) for size in (8, 16, 32, 48, 64) for tile in (128, 256, 512) if tile <= max(longest, 128)]
    fitting = [choice for choice in choices if held(*choice) <= _MEMORY and choice[0] * rows <= _MOST_ROWS]
    return min(fitting or choices[:1], key=padded)


def forward(parts: Any, tiles: Array, scale: float, size: int, interpret: bool = False) -> tuple[Array, Array]:
    """Attention of all chunks.

    Args:
        parts: `block_attention.Parts` of N sequences, N first, with one group a chunk.
        tiles: int32 `[2, N, C]`, first tile that a chunk sees and the one after the last.
        scale: multiplies the scores. size: b. interpret: runs without a TPU, for tests.

    Returns:
        float32 `[N, C, G, hd, R]`, and the log-sum-exp of each query, float32 `[N, C, G, 1, R]`.
    """
    q, bounds = _padded_queries(parts, size)
    sequences, chunks, groups, head_dim, rows = q.shape
    grid = (sequences, groups, chunks, parts.context_k.shape[1])
    chunk, context = _chunk_spec, _context_spec
    out, normalizer = pl.pallas_call(
        partial(_forward_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[
                chunk(q),
                chunk(parts.k[:, :, :, 0]),
                chunk(parts.v[:, :, :, 0]),
                context(parts.context_k, chunks),
                context(parts.context_v, chunks),
                _bounds_spec(bounds),
            ],
            out_specs=[chunk(q), pl.BlockSpec((None, None, None, 1, rows), _chunk_index)],
            scratch_shapes=[_float32(1, rows), _float32(1, rows), _float32(head_dim, rows)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct((*q.shape[:3], 1, rows), jnp.float32),
        ],
        cost_estimate=_cost(parts, q, products=2, out_bytes=4),
        compiler_params=_parameters(),
        interpret=interpret,
        name="block_attention",
    )(*_flat(tiles), q, parts.k[:, :, :, 0], parts.v[:, :, :, 0], parts.context_k, parts.context_v, bounds)
    there = parts.q.shape[-1]
    return out[..., :there], normalizer[..., :there]


def backward(
    parts: Any,
    tiles: Array,
    normalizer: Array,
    mean: Array,
    cotangent: Array,
    scale: float,
    size: int,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Gradients of the five arrays of `parts`, as these are; sums are float32.

    Args:
        parts, tiles, scale, size, interpret: as `forward` takes them. normalizer: as it returns it.
        mean: of the weights' cotangents under the weights, float32 `[N, C, G, 1, R]`.
        cotangent: of the output, in the operands' dtype, `[N, C, G, hd, R]`.
    """
    q, bounds = _padded_queries(parts, size)
    normalizer, mean, cotangent = (_padded(x) for x in (normalizer, mean, cotangent))
    own = (parts.k[:, :, :, 0], parts.v[:, :, :, 0])
    arguments = (q, *own, parts.context_k, parts.context_v, bounds, normalizer, mean, cotangent)
    dq, dk, dv = _backward_own(parts, arguments, tiles, scale, interpret)
    context = _backward_context(parts, arguments, tiles, scale, interpret)
    return (dq[..., : parts.q.shape[-1]], dk[:, :, :, None], dv[:, :, :, None], *context)


def _backward_own(
    parts: Any, arguments: tuple[Array, ...], tiles: Array, scale: float, interpret: bool
) -> tuple[Array, ...]:
    """Gradients of queries and of the slots' own keys and values: tiles innermost, as forward."""
    q, k, v, context_k, context_v, bounds, normalizer, mean, cotangent = arguments
    chunk, context, chunks = _chunk_spec, _context_spec, q.shape[1]
    return pl.pallas_call(
        partial(_backward_own_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(q.shape[0], q.shape[2], chunks, context_k.shape[1]),
            in_specs=[
                *(chunk(x) for x in (q, k, v)),
                *(context(x, chunks) for x in (context_k, context_v)),
                _bounds_spec(bounds),
                *(chunk(x) for x in (normalizer, mean, cotangent)),
            ],
            out_specs=[chunk(x) for x in (q, k, v)],
            scratch_shapes=[_float32(*q.shape[3:])],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
        cost_estimate=_cost(parts, q, products=3, out_bytes=2),
        compiler_params=_parameters(),
        interpret=interpret,
        name="block_attention_gradient_own",
    )(*_flat(tiles), *arguments)


def _backward_context(
    parts: Any, arguments: tuple[Array, ...], tiles: Array, scale: float, interpret: bool
) -> tuple[Array, ...]:
    """Gradients of the context's keys and values: chunks innermost, those of a tile from the first to the last."""
    q, _, _, context_k, context_v, bounds, normalizer, mean, cotangent = arguments
    chunks, count = q.shape[1], context_k.shape[1]
    index = jnp.arange(count, dtype=jnp.int32)[:, None]
    touched = (tiles[0][:, None] <= index) & (index < tiles[1][:, None])  # [N, T / S, C]
    first = jnp.argmax(touched, axis=-1).astype(jnp.int32)
    last = chunks - 1 - jnp.argmax(touched[..., ::-1], axis=-1).astype(jnp.int32)
    last = jnp.where(jnp.any(touched, axis=-1), last, first)

    def chunk_index(n: Any, g: Any, j: Any, c: Any, begin: Any, end: Any, first: Any, last: Any) -> tuple:
        return n, jnp.clip(c, first[n * count + j], last[n * count + j]), g, 0, 0

    def bounds_index(n: Any, g: Any, j: Any, c: Any, *prefetched: Any) -> tuple:
        return *chunk_index(n, g, j, c, *prefetched)[:2], 0, 0

    per_chunk = lambda x: pl.BlockSpec((None, None, None, *x.shape[3:]), chunk_index)  # noqa: E731
    tile_spec = pl.BlockSpec((None, None, None, *context_k.shape[3:]), lambda n, g, j, c, *_: (n, j, g, 0, 0))
    return pl.pallas_call(
        partial(_backward_context_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(q.shape[0], q.shape[2], count, chunks),
            in_specs=[
                per_chunk(q),
                tile_spec,
                tile_spec,
                pl.BlockSpec((None, None, *bounds.shape[2:]), bounds_index),
                *(per_chunk(x) for x in (normalizer, mean, cotangent)),
            ],
            out_specs=[tile_spec, tile_spec],
            scratch_shapes=[_float32(*context_k.shape[3:]), _float32(*context_k.shape[3:])],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (context_k, context_v)],
        cost_estimate=_cost(parts, q, products=4, out_bytes=0),
        compiler_params=_parameters(),
        interpret=interpret,
        name="block_attention_gradient_context",
    )(*_flat(tiles), first.reshape(-1), last.reshape(-1), q, context_k, context_v, bounds, normalizer, mean, cotangent)


def _forward_kernel(
    begin, end, q, k, v, context_k, context_v, bounds, out, normalizer, peak, total, sums, *, scale: float
) -> None:
    """Running maximum `peak [1, R]`, sum of weights `total [1, R]` and of weighted values `sums [hd, R]`."""
    index, here = _place(begin, end)

    @pl.when(index == 0)
    def own() -> None:
        scores = _own_scores(q, k, bounds, scale)
        peak[...] = jnp.max(scores, axis=0, keepdims=True)
        weights = jnp.exp(scores - peak[...])
        total[...] = jnp.sum(weights, axis=0, keepdims=True)
        sums[...] = _dot(v[...], weights.astype(v.dtype), 0, 0)

    @pl.when(here)
    def context() -> None:
        scores = _context_scores(q, context_k, bounds, index, scale)
        higher = jnp.maximum(peak[...], jnp.max(scores, axis=0, keepdims=True))
        weights = jnp.exp(scores - higher)
        shrink = jnp.exp(peak[...] - higher)
        peak[...] = higher
        total[...] = total[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        sums[...] = sums[...] * shrink + _dot(context_v[...], weights.astype(v.dtype), 0, 0)

    @pl.when(index == pl.num_programs(3) - 1)
    def finish() -> None:
        out[...] = sums[...] / total[...]
        normalizer[...] = peak[...] + jnp.log(total[...])


def _backward_own_kernel(
    begin, end, q, k, v, context_k, context_v, bounds, normalizer, mean, cotangent, dq, dk, dv, sums, *, scale: float
) -> None:
    """`sums [hd, R]` of the queries' gradients."""
    index, here = _place(begin, end)
    dtype = q.dtype

    @pl.when(index == 0)
    def own() -> None:
        weights = jnp.exp(_own_scores(q, k, bounds, scale) - normalizer[...])  # [b * K, R]
        change = (scale * weights * (_dot(v[...], cotangent[...], 1, 0) - mean[...])).astype(dtype)
        sums[...] = _dot(k[...], change, 0, 0)
        dk[...] = _dot(change, q[...], 1, 1).astype(dtype)
        dv[...] = _dot(weights.astype(dtype), cotangent[...], 1, 1).astype(dtype)

    @pl.when(here)
    def context() -> None:
        weights = jnp.exp(_context_scores(q, context_k, bounds, index, scale) - normalizer[...])  # [S, R]
        change = scale * weights * (_dot(context_v[...], cotangent[...], 1, 0) - mean[...])
        sums[...] += _dot(context_k[...], change.astype(dtype), 0, 0)

    @pl.when(index == pl.num_programs(3) - 1)
    def finish() -> None:
        dq[...] = sums[...].astype(dtype)


def _backward_context_kernel(
    begin,
    end,
    first,
    last,
    q,
    context_k,
    context_v,
    bounds,
    normalizer,
    mean,
    cotangent,
    dkeys,
    dvalues,
    key_sums,
    value_sums,
    *,
    scale: float,
) -> None:
    """Sums `[S, hd]` of the gradients of a tile's keys and values, over the chunks that see it."""
    del first, last  # the index maps read them
    index, chunk = pl.program_id(2), pl.program_id(3)
    at = pl.program_id(0) * pl.num_programs(3) + chunk
    dtype = q.dtype

    @pl.when(chunk == 0)
    def start() -> None:
        key_sums[...] = jnp.zeros_like(key_sums)
        value_sums[...] = jnp.zeros_like(value_sums)

    @pl.when((begin[at] <= index) & (index < end[at]))
    def add() -> None:
        weights = jnp.exp(_context_scores(q, context_k, bounds, index, scale) - normalizer[...])  # [S, R]
        change = scale * weights * (_dot(context_v[...], cotangent[...], 1, 0) - mean[...])
        key_sums[...] += _dot(change.astype(dtype), q[...], 1, 1)
        value_sums[...] += _dot(weights.astype(dtype), cotangent[...], 1, 1)

    @pl.when(chunk == pl.num_programs(3) - 1)
    def finish() -> None:
        dkeys[...] = key_sums[...].astype(dtype)
        dvalues[...] = value_sums[...].astype(dtype)


def _place(begin: Any, end: Any) -> tuple[Array, Array]:
    """The tile of this grid step `(n, g, chunk, tile)`, and whether its chunk sees it."""
    index = pl.program_id(3)
    at = pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)
    return index, (begin[at] <= index) & (index < end[at])


def _own_scores(q: Any, k: Any, bounds: Any, scale: float) -> Array:
    """`[b * K, R]`: each query sees the slots of its block."""
    return _masked(_dot(k[...], q[...], 1, 0) * scale, bounds[2:3], bounds[3:4], 0)


def _context_scores(q: Any, keys: Any, bounds: Any, index: Array, scale: float) -> Array:
    """`[S, R]`: each query sees what its bounds say."""
    return _masked(_dot(keys[...], q[...], 1, 0) * scale, bounds[0:1], bounds[1:2], index * keys.shape[0])


def _masked(scores: Array, low: Array, high: Array, offset: Any) -> Array:
    positions = offset + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    return jnp.where((positions >= low) & (positions < high), scores, _MASKED)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)


def _padded(x: Array) -> Array:
    """Zeros behind the last axis up to a multiple of the lanes."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _LANES)])


def _padded_queries(parts: Any, size: int) -> tuple[Array, Array]:
    """Queries `[N, C, G, hd, R]`, and int32 `[N, C, 4, R]`: their bounds in the context and among the own slots.

    Queries that only fill up lanes see nothing; what comes out for them is finite and dropped.
    """
    own = parts.k.shape[-2]
    slots = own // size
    start = jnp.arange(parts.q.shape[-1], dtype=jnp.int32) % own // slots * slots  # of each query's block
    start = jnp.broadcast_to(start, (*parts.bounds.shape[:2], 1, start.shape[0]))
    return _padded(parts.q), _padded(jnp.concatenate([parts.bounds, start, start + slots], axis=2))


def _flat(tiles: Array) -> tuple[Array, Array]:
    return tiles[0].reshape(-1), tiles[1].reshape(-1)


def _chunk_index(n: Any, g: Any, c: Any, j: Any, *_: Any) -> tuple:
    return n, c, g, 0, 0


def _chunk_spec(x: Array) -> pl.BlockSpec:
    """One chunk and KV head of `x [N, C, G, ., .]`."""
    return pl.BlockSpec((None, None, None, *x.shape[3:]), _chunk_index)


def _bounds_spec(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda n, g, c, j, *_: (n, c, 0, 0))


def _context_spec(x: Array, chunks: int) -> pl.BlockSpec:
    """One tile and KV head of `x [N, T / S, G, S, hd]`; outside a chunk's range the nearest, already fetched one."""

    def place(n: Any, g: Any, c: Any, j: Any, begin: Any, end: Any) -> tuple:
        at = n * chunks + c
        return n, jnp.clip(j, begin[at], jnp.maximum(end[at] - 1, begin[at])), g, 0, 0

    return pl.BlockSpec((None, None, None, *x.shape[3:]), place)


def _float32(*shape: int) -> Any:
    return pltpu.VMEM(shape, jnp.float32)


def _parameters() -> Any:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))


def _cost(parts: Any, q: Array, products: int, out_bytes: int) -> pl.CostEstimate:
    """What a call costs where a block sees half the context, as random anchors do; for the compiler's schedule."""
    context = parts.context_k
    queries = q.size // q.shape[3]
    scores = queries * (context.shape[1] * context.shape[3] // 2)
    read = sum(x.size * x.dtype.itemsize for x in (q, parts.k, parts.v))
    tiles = q.shape[1] * context.size * context.dtype.itemsize  # keys and values, half of them by each chunk
    return pl.CostEstimate(
        flops=2 * products * scores * q.shape[3],
        transcendentals=scores,
        bytes_accessed=read + tiles + out_bytes * q.size,
    )
