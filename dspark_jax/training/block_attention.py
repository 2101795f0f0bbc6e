"""Attention of draft blocks to the context before their anchors and to themselves (section 3, training).

A block anchored at position a sees the context features from its document's start to a - 1, and its own slots; both
share one softmax. Blocks are taken a chunk at a time and context a tile at a time, with running maximum and sum
(FlashAttention, Dao et al. 2022): scores exist for one chunk and tile, masks are comparisons of positions inside them,
and as anchors ascend, tiles that no block of a chunk sees are never visited. The backward pass makes the scores again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from dspark_jax import sharding
from dspark_jax.models.layers import row_major
from dspark_jax.models.platform import for_cpu, for_tpu
from dspark_jax.training import block_kernel

Array = jax.Array
_MASKED = -1e30
_GROUP = 8  # blocks whose slots share a product
_FAR = jnp.iinfo(jnp.int32).max


class Form(NamedTuple):
    """How the work is cut up; static.

    Attributes:
        scale: multiplies the scores. dtype: of the products' operands.
        size: b, blocks of a group: their slots share a product, each query masked to its own block.
        groups: P, groups of a chunk. tile: S, context positions taken at once.
        kernel: by the Pallas kernel (one group a chunk) in place of the plain loops. interpret: it, for tests.
    """

    scale: float
    dtype: jnp.dtype
    size: int
    groups: int
    tile: int
    kernel: bool = False
    interpret: bool = False


class Inputs(NamedTuple):
    """What is given, sequences apart: `N` is the last axis but one, and missing for a single sequence.

    Attributes:
        q: `[G, Q, hd, N, A * K]`. k, v: `[G, hd, N, A * K]`. context_k, context_v: `[G, hd, N, T]`.
        first, anchors: int32 `[N, A]`. keep: bool `[N, A]`.
    """

    q: Array
    k: Array
    v: Array
    context_k: Array
    context_v: Array
    first: Array
    anchors: Array
    keep: Array


class Parts(NamedTuple):
    """A sequence cut up: C chunks of P groups of b blocks of K slots, and tiles of S context positions.

    Attributes:
        q: `[C, G, hd, R]`; R = P * Q * b * K queries of a chunk, in this order.
        k, v: `[C, G, P, b * K, hd]`, the slots' own. context_k, context_v: `[T / S, G, S, hd]`. All of one dtype.
        bounds: int32 `[C, 2, R]`: first context position that each query sees, and the one after the last.
    """

    q: Array
    k: Array
    v: Array
    context_k: Array
    context_v: Array
    bounds: Array


def block_attention(
    q: Array,
    k: Array,
    v: Array,
    context_k: Array,
    context_v: Array,
    first: Array,
    anchors: Array,
    keep: Array,
    scale: float,
    dtype: DTypeLike,
    form: Form | None = None,
) -> Array:
    """Attention of N x A blocks of K slots to their sequence's context and to themselves.

    Memory beyond inputs, results and copies of them depends on neither A nor T; time is linear in A, and in the context
    that blocks see.

    Args:
        q: `[G, Q, hd, N * A * K]`. k, v: `[G, hd, N * A * K]`. context_k, context_v: `[G, hd, N * T]`.
        first: int32 `[N, A]`, where each block's document starts. anchors: int32 `[N, A]`, best ascending in a row:
            the block sees context from `first` to before its anchor.
        keep: bool `[N, A]`; dropped blocks get zeros.
        scale: multiplies the scores. dtype: of the products' operands; sums and softmax are float32.
        form: how the work is cut up; None: as suits the platform that is traced for.

    Returns:
        float32 `[G, Q, hd, N * A * K]`.
    """
    length = context_k.shape[-1] // anchors.shape[0]
    form = form or choose_form(q.shape, length, anchors.shape, scale, dtype)
    run = partial(_local_attention, form)
    arguments = (q, k, v, context_k, context_v, first, anchors, keep)
    if not (form.kernel and sharding.active()):
        return run(*arguments)
    sizes = jax.sharding.get_abstract_mesh().shape  # the compiler cannot cut a kernel by itself
    rows = sharding.spec_of(("batch",), anchors.shape[:1], sizes)[0]
    heads = sharding.spec_of(("heads",), q.shape[:1], sizes)[0]
    places = [PartitionSpec(heads, *[None] * (x.ndim - 2), rows) for x in arguments[:5]]
    return jax.shard_map(
        run,
        in_specs=(*places, *[PartitionSpec(rows)] * 3),
        out_specs=places[0],
        check_vma=False,  # kernels do not say over which axes their results vary
    )(*arguments)


def choose_form(queries: tuple[int, ...], length: int, blocks: tuple[int, ...], scale: float, dtype: DTypeLike) -> Form:
    """The cut for queries `[G, Q, hd, N * A * K]`, T = `length` and blocks `(N, A)` on the platform traced for."""
    sequences, count = blocks
    slots = queries[-1] // (sequences * count)
    dtype = jnp.dtype(dtype)
    if for_tpu() and length >= block_kernel.FEWEST:
        size, tile = block_kernel.cut(queries[1] * slots, queries[2], count, length)
        return Form(scale, dtype, size, 1, tile, True)
    size = min(_GROUP, count)
    most, tile = (32, 128) if for_cpu() else (64, 512)
    chunks = -(-count // max(most, size))
    return Form(scale, dtype, size, -(-count // (chunks * size)), min(tile, -(-length // 8) * 8))


def _local_attention(
    form: Form,
    q: Array,
    k: Array,
    v: Array,
    context_k: Array,
    context_v: Array,
    first: Array,
    anchors: Array,
    keep: Array,
) -> Array:
    """`block_attention` of one device's sequences and heads, or of all where the compiler spreads them out."""

    def apart(x: Array) -> Array:  # [..., N * X] -> [..., N, X]
        # What is kept for the backward pass. CPUs convert what they move, and move float32 as well.
        x = x if for_cpu() else x.astype(form.dtype)
        return x.reshape(*x.shape[:-1], anchors.shape[0], -1)

    arrays = [apart(x) for x in (q, k, v, context_k, context_v)]
    return _attention(form, Inputs._make([*arrays, first, anchors, keep])).reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(form: Form, inputs: Inputs) -> Array:
    """Attention of all blocks: float32 `[G, Q, hd, N, A * K]`."""
    return _attention_forward(form, inputs)[0]


def _attention_forward(form: Form, inputs: Inputs) -> tuple[Array, tuple[Inputs, Array, Array]]:
    """The result, and as residuals the inputs, the result and each query's log-sum-exp `[C, G, N, R]`."""
    tiles = _tiles(form, inputs)
    if form.kernel:
        out, normalizer = _forward_kernel(form, inputs, tiles)
    else:
        out, normalizer = _each_sequence(partial(_forward_sequence, form), (inputs,), tiles)
    kept = out if for_cpu() else out.astype(form.dtype)  # as the layer's next product keeps it anyway
    return out, (inputs, kept, normalizer)


def _attention_backward(form: Form, saved: tuple[Inputs, Array, Array], cotangent: Array) -> tuple[Inputs]:
    inputs, tiles = saved[0], _tiles(form, saved[0])
    if form.kernel:
        parts = _backward_kernel(form, *saved, cotangent, tiles)
    else:
        parts = _each_sequence(partial(_backward_sequence, form), (*saved, cotangent), tiles)
    grads = [x.astype(y.dtype) for x, y in zip(parts, inputs[:5], strict=True)]
    return (Inputs._make([*grads, None, None, None]),)


_attention.defvjp(_attention_forward, _attention_backward)


def _tiles(form: Form, inputs: Inputs) -> Array:
    """First tile that each chunk sees, and the one after the last: int32 `[2, N, C]`."""
    chunk = form.size * form.groups
    low, high = (
        _padded(jnp.where(inputs.keep, x, nothing), chunk, nothing).reshape(x.shape[0], -1, chunk)
        for x, nothing in ((inputs.first, _FAR), (inputs.anchors, 0))
    )
    end = -(-jnp.max(high, axis=-1) // form.tile)
    return jnp.stack([jnp.minimum(jnp.min(low, axis=-1) // form.tile, end), end])


def _each_sequence(attend: Callable, arrays: tuple, tiles: Array) -> tuple[Array, ...]:
    """`attend(*arrays, tiles [2, C])` of each sequence; in arguments and results N is the last axis but one.

    On one CPU they come one after the other, so that scores stay in its caches. Otherwise they run together, in loops
    over the tiles that any of them needs: sequences may lie on different devices.
    """
    if not for_cpu() or sharding.active():
        shared = jnp.stack([jnp.min(tiles[0], axis=0), jnp.max(tiles[1], axis=0)])  # [2, C]
        return jax.vmap(lambda *x: attend(*x, shared), in_axes=_ends(arrays), out_axes=-2)(*arrays)

    def pick(index: Array) -> tuple:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, x.ndim - 2, False), (*arrays, tiles))

    def step(index: Array, results: list[Array]) -> list[Array]:
        parts = attend(*pick(index))
        update = jax.lax.dynamic_update_index_in_dim
        return [update(x, part, index, part.ndim - 1) for x, part in zip(results, parts, strict=True)]

    shapes = jax.eval_shape(lambda: attend(*pick(jnp.int32(0))))
    count = tiles.shape[1]
    empty = [jnp.zeros((*x.shape[:-1], count, x.shape[-1]), x.dtype) for x in shapes]
    return tuple(jax.lax.fori_loop(0, count, step, empty))


def _cut(form: Form, one: Inputs) -> Parts:
    """One sequence's inputs as its chunks and tiles."""
    slots = one.q.shape[-1] // one.keep.shape[-1]
    chunk = form.size * form.groups

    def by_group(x: Array) -> Array:  # [G, hd, A * K] -> [C, G, P, b * K, hd]
        x = _padded(x.astype(form.dtype), chunk * slots)
        return jnp.transpose(x.reshape(*x.shape[:2], -1, form.groups, form.size * slots), (2, 0, 3, 4, 1))

    def by_tile(x: Array) -> Array:  # [G, hd, T] -> [T / S, G, S, hd]
        x = _padded(x.astype(form.dtype), form.tile)
        return jnp.transpose(x.reshape(*x.shape[:-1], -1, form.tile), (2, 0, 3, 1))

    bounds = jnp.stack([jnp.where(one.keep, one.first, _FAR), jnp.where(one.keep, one.anchors, 0)])  # [2, A]
    bounds = _padded(bounds, chunk).reshape(2, -1, form.groups, 1, form.size, 1)
    bounds = jnp.broadcast_to(bounds, (*bounds.shape[:3], one.q.shape[1], form.size, slots))
    return Parts(
        q=_by_chunk(form, one.q.astype(form.dtype), slots),
        k=by_group(one.k),
        v=by_group(one.v),
        context_k=by_tile(one.context_k),
        context_v=by_tile(one.context_v),
        bounds=jnp.swapaxes(bounds.reshape(2, bounds.shape[1], -1), 0, 1),
    )


def _by_chunk(form: Form, x: Array, slots: int) -> Array:
    """`[G, Q, D, A * K]` -> `[C, G, D, R]`."""
    x = _padded(x, form.size * form.groups * slots)
    x = x.reshape(*x.shape[:-1], -1, form.groups, form.size * slots)  # [G, Q, D, C, P, b * K]
    x = jnp.transpose(x, (3, 0, 2, 4, 1, 5))
    return x.reshape(*x.shape[:3], -1)


def _from_chunks(form: Form, x: Array, like: Array) -> Array:
    """`[C, G, D, R]` -> `[G, Q, D, A * K]`, where `like` is `[G, Q, ..., A * K]`."""
    x = x.reshape(*x.shape[:3], form.groups, like.shape[1], -1)  # [C, G, D, P, Q, b * K]
    x = jnp.transpose(x, (1, 4, 2, 0, 3, 5))
    return x.reshape(*x.shape[:3], -1)[..., : like.shape[-1]]


def _padded(x: Array, multiple: int, value: int = 0) -> Array:
    """`x` with its last axis filled up to a multiple."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % multiple)], constant_values=value)


def _forward_sequence(form: Form, one: Inputs, tiles: Array) -> tuple[Array, Array]:
    """Output `[G, Q, hd, A * K]` and log-sum-exp `[C, G, R]` of one sequence."""
    parts = _cut(form, one)
    values = _with_ones(_transposed(parts.context_v))  # [T / S, G, hd + 1, S]

    def chunk(_: None, inputs: tuple) -> tuple[None, tuple[Array, Array]]:
        q, k, v, bounds, (begin, end) = inputs
        near = _near_scores(form, q, k)  # [G, P, b * K, R / P]
        peak = jnp.max(near, axis=-2, keepdims=True)  # [G, P, 1, R / P]
        weights = jnp.exp(near - peak).astype(q.dtype)
        total = _join(_product(_with_ones(_transposed(v)), weights, -2))  # [G, hd + 1, R]; the last row sums weights

        def tile(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            peak, total = carry
            far = _far_scores(form, q, parts.context_k[index], bounds, index)  # [G, S, R]
            higher = jnp.maximum(peak, jnp.max(far, axis=-2, keepdims=True))
            weights = jnp.exp(far - higher).astype(q.dtype)
            return higher, total * jnp.exp(peak - higher) + _product(values[index], weights, -2)

        peak, total = jax.lax.fori_loop(begin, end, tile, (_join(peak), total))
        return None, (total[:, :-1] / total[:, -1:], (peak + jnp.log(total[:, -1:]))[:, 0])

    chunks = (parts.q, parts.k, parts.v, parts.bounds, tiles.T)
    out, normalizer = jax.lax.scan(chunk, None, chunks)[1]
    return _kept(_from_chunks(form, out, one.q), one.keep), normalizer


def _backward_sequence(
    form: Form, one: Inputs, out: Array, normalizer: Array, cotangent: Array, tiles: Array
) -> tuple[Array, ...]:
    """Gradients of q, k, v, context_k and context_v of one sequence, as these are; sums are float32."""
    parts = _cut(form, one)
    mean, cotangent = _cut_cotangent(form, one, out, cotangent)
    keys_t = row_major(_transposed(parts.context_k))  # [T / S, G, hd, S]
    groups, dtype = form.groups, form.dtype

    def chunk(sums: tuple[Array, Array], inputs: tuple) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        q, k, v, bounds, (begin, end), normalizer, mean, cotangent = inputs
        own_q, own_cotangent = _split(q, groups), _split(cotangent, groups)  # [G, P, hd, R / P]
        near = jnp.exp(_near_scores(form, q, k) - _split(normalizer, groups)).astype(dtype)
        dnear = form.scale * near * (_product(v, own_cotangent, -2) - _split(mean, groups))
        dnear = dnear.astype(dtype)
        dq = _join(_product(_transposed(k), dnear, -2))  # [G, hd, R]
        dk, dv = _product(own_q, dnear, -1), _product(own_cotangent, near, -1)  # [G, P, hd, b * K]

        def tile(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dkeys, dvalues = carry
            far = jnp.exp(_far_scores(form, q, parts.context_k[index], bounds, index) - normalizer).astype(dtype)
            dfar = form.scale * far * (_product(parts.context_v[index], cotangent, -2) - mean)
            dfar = dfar.astype(dtype)
            dkeys = dkeys.at[index].add(_product(q, dfar, -1))
            dvalues = dvalues.at[index].add(_product(cotangent, far, -1))
            return dq + _product(keys_t[index], dfar, -2), dkeys, dvalues

        dq, dkeys, dvalues = jax.lax.fori_loop(begin, end, tile, (dq, *sums))
        return (dkeys, dvalues), (dq, _transposed(dk), _transposed(dv))

    zeros = jnp.zeros(keys_t.shape)
    chunks = (parts.q, parts.k, parts.v, parts.bounds, tiles.T, normalizer[:, :, None], mean, cotangent)
    sums, own = jax.lax.scan(chunk, (zeros, zeros), chunks)
    return _joined_gradients(form, one, *own, *map(_transposed, sums))


def _forward_kernel(form: Form, inputs: Inputs, tiles: Array) -> tuple[Array, Array]:
    """As `_forward_sequence`, for all sequences: `[G, Q, hd, N, A * K]`, and `[N, C, G, 1, R]`."""
    parts = _of_all(partial(_cut, form), inputs)
    out, normalizer = block_kernel.forward(parts, tiles, form.scale, form.size, form.interpret)

    def join(one: Inputs, out: Array) -> Array:
        return _kept(_from_chunks(form, out, one.q), one.keep)

    return jax.vmap(join, in_axes=(_ends(inputs), 0), out_axes=-2)(inputs, out), normalizer


def _backward_kernel(
    form: Form, inputs: Inputs, out: Array, normalizer: Array, cotangent: Array, tiles: Array
) -> tuple[Array, ...]:
    """As `_backward_sequence`, for all sequences."""
    parts = _of_all(partial(_cut, form), inputs)
    mean, cotangent = _of_all(partial(_cut_cotangent, form), inputs, out, cotangent)
    grads = block_kernel.backward(parts, tiles, normalizer, mean, cotangent, form.scale, form.size, form.interpret)
    join = partial(_joined_gradients, form)
    return jax.vmap(join, in_axes=(_ends(inputs), *[0] * 5), out_axes=-2)(inputs, *grads)


def _of_all(function: Callable, *arrays: Inputs | Array) -> tuple:
    """`function` of every sequence of arrays as `Inputs` has them; in the results N is the first axis."""
    return jax.vmap(function, in_axes=_ends(arrays))(*arrays)


def _ends(arrays: tuple) -> tuple:
    """The last axis but one of each array."""
    return jax.tree.map(lambda x: x.ndim - 2, arrays)


def _cut_cotangent(form: Form, one: Inputs, out: Array, cotangent: Array) -> tuple[Array, Array]:
    """Mean of the weights' cotangents, float32 `[C, G, 1, R]`, and the output's cotangent `[C, G, hd, R]`."""
    slots = one.q.shape[-1] // one.keep.shape[-1]
    mean = jnp.sum(out * cotangent, axis=2, keepdims=True)
    cotangent = _kept(cotangent, one.keep).astype(form.dtype)
    return _by_chunk(form, mean, slots), _by_chunk(form, cotangent, slots)


def _joined_gradients(
    form: Form, one: Inputs, dq: Array, dk: Array, dv: Array, dcontext_k: Array, dcontext_v: Array
) -> tuple[Array, ...]:
    """Gradients in the form of `Parts`, as those of the sequence's inputs."""
    own = (jnp.transpose(x, (1, 4, 0, 2, 3)) for x in (dk, dv))  # [G, hd, C, P, b * K]
    context = (jnp.transpose(x, (1, 3, 0, 2)) for x in (dcontext_k, dcontext_v))  # [G, hd, T / S, S]
    own = (x.reshape(*x.shape[:2], -1)[..., : one.k.shape[-1]] for x in own)
    context = (x.reshape(*x.shape[:2], -1)[..., : one.context_k.shape[-1]] for x in context)
    return (_from_chunks(form, dq, one.q), *own, *context)


def _kept(x: Array, keep: Array) -> Array:
    """`x [..., A * K]` with zeros in dropped blocks; `keep [A]`."""
    return jnp.where(jnp.repeat(keep, x.shape[-1] // keep.shape[0]), x, 0.0)


def _near_scores(form: Form, q: Array, k: Array) -> Array:
    """Masked scores of a chunk's own slots: float32 `[G, P, b * K, R / P]`."""
    near = form.scale * _product(k, _split(q, form.groups), -2)
    block = jnp.arange(k.shape[2]) // (k.shape[2] // form.size)  # of each slot
    same = jnp.tile(block[:, None] == block, (1, near.shape[-1] // block.size))  # [b * K, R / P]
    return jnp.where(same, near, _MASKED)


def _far_scores(form: Form, q: Array, keys: Array, bounds: Array, index: Array) -> Array:
    """Masked scores of a chunk's queries and tile number `index` of the context: float32 `[G, S, R]`."""
    positions = index * form.tile + jnp.arange(form.tile, dtype=jnp.int32)[:, None]  # [S, 1]
    seen = (positions >= bounds[0]) & (positions < bounds[1])  # [S, R]
    return jnp.where(seen, form.scale * _product(keys, q, -2), _MASKED)


def _product(a: Array, b: Array, axis: int) -> Array:
    """Batched `a [..., m, k]` with axis `axis` of `b`, operands of one dtype, float32 out."""
    batch = tuple(range(a.ndim - 2))
    contracted = ((a.ndim - 1,), (b.ndim + axis,))
    return jax.lax.dot_general(row_major(a), b, (contracted, (batch, batch)), preferred_element_type=jnp.float32)


def _split(x: Array, groups: int) -> Array:
    """`[G, D, P * R]` -> `[G, P, D, R]`."""
    return row_major(jnp.swapaxes(x.reshape(*x.shape[:2], groups, -1), 1, 2))


def _join(x: Array) -> Array:
    """`[G, P, D, R]` -> `[G, D, P * R]`."""
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


def _transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _with_ones(values: Array) -> Array:
    """`[..., hd, S]` with a row of ones, whose product with the weights is their sum: `[..., hd + 1, S]`."""
    return jnp.concatenate([values, jnp.ones_like(values[..., :1, :])], axis=-2)
