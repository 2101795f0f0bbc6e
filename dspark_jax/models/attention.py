"""Attention over packed rows: one request's queries against its own cache, or whole sequences causally, in chunks.

Rows arrive feature-major (`[G, Q, hd, B]`); the packing says which request and slot each row is. Scores and softmax are
float32; operands of the products have the cache's dtype.
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
from dspark_jax.models.cache import LayerCache, write
from dspark_jax.models.layers import softcap
from dspark_jax.models.platform import for_cpu, for_tpu

Array = jax.Array
_MASKED = -1e30
_FEW_ROWS = 64  # rows of a request and KV group up to which keys go left
_CHUNK = 256  # queries of whole sequences whose scores are held at once
_BANDS = 4  # lengths of context for which those are compiled
_LANES = 128  # of TPUs


class Packing(NamedTuple):
    """Where the B packed rows of a step belong.

    Attributes:
        request: int32 `[B]`, the request of each row. offset: int32 `[B]`, its slot, counted from the request's start.
        row: int32 `[R, S]`, the row that holds (request, slot); any valid row where none does.
    """

    request: Array
    offset: Array
    row: Array


def dense_packing(requests: int, slots: int) -> Packing:
    """The packing in which every request has all `slots` rows: row = request * slots + slot."""
    row = jnp.arange(requests * slots, dtype=jnp.int32).reshape(requests, slots)
    request = jnp.repeat(jnp.arange(requests, dtype=jnp.int32), slots)  # [B]
    offset = jnp.tile(jnp.arange(slots, dtype=jnp.int32), requests)  # [B]
    return Packing(request, offset, row)


def unpack(x: Array, row: Array) -> Array:
    """Rows of `x [..., B]` by (request, slot) -> `[..., R, S]`; a reshape where the packing is dense."""
    requests, slots = row.shape
    if x.shape[-1] == requests * slots:
        return x.reshape(*x.shape[:-1], requests, slots)
    return jnp.take(x, row.reshape(-1), axis=-1).reshape(*x.shape[:-1], requests, slots)


def pack(x: Array, packing: Packing) -> Array:
    """The inverse of `unpack`: `[..., R, S]` -> `[..., B]`."""
    requests, slots = packing.row.shape
    flat = x.reshape(*x.shape[:-2], requests * slots)
    if packing.request.shape[0] == requests * slots:
        return flat
    return jnp.take(flat, packing.request * slots + packing.offset, axis=-1)


def _scores(rows: Array, k: Array) -> Array:
    """`rows [Z, m, hd]` against keys `[Z, T, hd]`: float32 `[Z, m, T]`."""
    if rows.shape[1] > _FEW_ROWS or not for_cpu():
        return jnp.einsum("zmh,zth->zmt", rows, k, preferred_element_type=jnp.float32)
    # With few rows CPUs read the keys faster as the left operand; the barrier keeps the compiler from swapping them.
    by_key = jnp.einsum("zth,zhm->ztm", k, jnp.swapaxes(rows, 1, 2), preferred_element_type=jnp.float32)
    scores = jnp.swapaxes(jax.lax.optimization_barrier(by_key), 1, 2)
    return jax.lax.optimization_barrier(scores.reshape(-1)).reshape(scores.shape)


def _total(weights: Array) -> Array:
    """Sums over the last axis, which stays: on CPUs in an order that does not depend on the other axes.

    See `layers.rms_norm`: a verified token must get the same rounding as one of plain decoding.
    """
    if not for_cpu():
        return jnp.sum(weights, axis=-1, keepdims=True)
    rows = weights.reshape(-1, weights.shape[-1])
    return (rows @ jnp.ones((rows.shape[1], 2)))[:, :1].reshape(*weights.shape[:-1], 1)


def softmax_attention(q: Array, k: Array, v: Array, visible: Array, scale: float, cap: float = 0.0) -> Array:
    """Grouped-query attention.

    Args:
        q: `[R, G, Q, S, hd]` float32. k, v: `[R * G, T, hd]`.
        visible: bool `[R, S, T]` or `[S, T]`; a query that sees nothing gets zeros.
        scale: multiplies the scores. cap: soft cap on them, 0 for none.

    Returns:
        float32 `[R, G, Q, S, hd]`.
    """
    if q.shape[0] == q.shape[3] == 1 and for_cpu():  # one row rounds differently from two
        twice = jnp.repeat(q, 2, axis=3), jnp.repeat(visible, 2, axis=-2)
        return softmax_attention(twice[0], k, v, twice[1], scale, cap)[..., :1, :]
    requests, groups, per_group, slots, head_dim = q.shape
    rows = (q * scale).astype(k.dtype).reshape(requests * groups, per_group * slots, head_dim)
    scores = softcap(_scores(rows, k), cap).reshape(requests, groups, per_group, slots, -1)
    visible = visible[..., None, None, :, :]  # [R or 1, 1, 1, S, T]
    scores = jnp.where(visible, scores, _MASKED)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(scores - peak), 0.0)
    total = jnp.maximum(_total(weights), 1e-30)
    weights = weights.astype(v.dtype).reshape(requests * groups, per_group * slots, -1)
    out = jnp.einsum("zmt,zth->zmh", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(requests, groups, per_group, slots, head_dim) / total


def cached_attention(
    q: Array,
    k: Array,
    v: Array,
    cache: LayerCache,
    start: Array,
    packing: Packing,
    scale: float,
    causal: bool = True,
    window: int = 0,
    cap: float = 0.0,
) -> tuple[Array, LayerCache]:
    """Writes the rows' keys and values into the cache, then attends to everything up to them.

    Args:
        q: `[G, Q, hd, B]`. k, v: `[G, hd, B]`. start: int32 `[R]`, position of each request's slot 0.
        causal: slot j sees positions `<= start + j`; otherwise all slots of the chunk see each other (draft blocks).
        window: positions that a slot of a sliding layer sees, its own included; 0: all. cap: see `softmax_attention`.

    Returns:
        float32 `[G, Q, hd, B]`, and the cache with positions `start .. start + S - 1` overwritten.
    """
    cache = write_rows(cache, k, v, start, packing)
    queries = jnp.transpose(unpack(q, packing.row), (3, 0, 1, 4, 2))  # [R, G, Q, S, hd]
    slots = packing.row.shape[1]
    last = start[:, None] + (jnp.arange(slots) if causal else jnp.full(slots, slots - 1))  # [R, S]
    positions = jnp.arange(cache.keys.shape[1])
    visible = positions <= last[..., None]  # [R, S, T]
    if window:
        visible &= positions > last[..., None] - window
    out = softmax_attention(queries, cache.keys, cache.values, visible, scale, cap)
    return pack(jnp.transpose(out, (1, 2, 4, 0, 3)), packing), cache


def write_rows(cache: LayerCache, k: Array, v: Array, start: Array, packing: Packing) -> LayerCache:
    """Writes packed keys and values `[G, hd, B]` into the cache, each request's slots from its `start [R]` on."""
    groups, head_dim = k.shape[:2]
    slots = packing.row.shape[1]
    keys, values = (
        jnp.transpose(unpack(x, packing.row), (2, 0, 3, 1)).reshape(-1, slots, head_dim) for x in (k, v)
    )  # [R * G, S, hd]
    return write(cache, keys, values, jnp.repeat(start, groups))


def causal_attention(
    q: Array,
    k: Array,
    v: Array,
    sequences: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    segments: Array | None = None,
    dtype: DTypeLike | None = None,
) -> Array:
    """Attention in whole sequences, without a cache: a token sees itself and earlier ones of its document.

    Scores exist for a chunk of queries at a time, made again for gradients.

    Args:
        q: `[G, Q, hd, B]`. k, v: `[G, hd, B]`; the B rows are `sequences` = N times T tokens.
        scale: multiplies the scores. window: tokens that each sees, itself included; 0: all. cap: soft cap on scores.
        segments: int32 `[N, T]`, the document of each token; None: a sequence is one document.
        dtype: of the products' operands; None: the keys'. Sums and softmax are float32.

    Returns:
        float32 `[G, Q, hd, B]`.
    """
    length = q.shape[-1] // sequences
    q, k, v = (q * scale).astype(dtype or k.dtype), k.astype(dtype or k.dtype), v.astype(dtype or v.dtype)
    window = window if window < length else 0
    if for_tpu() and length > _CHUNK:
        return _splash_on_mesh(q, k, v, sequences, window, cap, segments)
    split = [x.reshape(*x.shape[:-1], sequences, length) for x in (q, k, v)]  # [..., N, T]
    queries = jnp.transpose(split[0], (3, 0, 1, 4, 2))  # [N, G, Q, T, hd]
    keys, values = (jnp.transpose(x, (2, 0, 3, 1)).reshape(-1, length, q.shape[2]) for x in split[1:])  # [N * G, T, hd]
    out = _in_chunks(_Sequences(queries, keys, values, segments), window, cap)
    return jnp.transpose(out, (1, 2, 4, 0, 3)).reshape(q.shape)


class _Sequences(NamedTuple):
    """Queries `[N, G, Q, T, hd]`, keys and values `[N * G, T, hd]`, documents int32 `[N, T]` or None."""

    queries: Array
    keys: Array
    values: Array
    segments: Array | None


def _in_chunks(inputs: _Sequences, window: int, cap: float) -> Array:
    """`[N, G, Q, T, hd]`: chunks of queries against the context up to the end of their band, or in a window's reach."""
    length = inputs.queries.shape[3]
    chunks = -(-length // _CHUNK)
    size = length if chunks == 1 else -(-length // (16 * chunks)) * 16
    inputs = inputs._replace(queries=jnp.pad(inputs.queries, [(0, 0)] * 3 + [(0, chunks * size - length), (0, 0)]))
    if window and size + window < length:
        return _in_window(inputs, chunks, window, cap)[:, :, :, :length]
    per_band = -(-chunks // _BANDS)
    firsts = range(0, chunks, per_band)
    bands = (_band(inputs, range(first, min(first + per_band, chunks)), size, window, cap) for first in firsts)
    return jnp.concatenate(list(bands), axis=3)[:, :, :, :length]


def _band(inputs: _Sequences, chunks: range, size: int, window: int, cap: float) -> Array:
    """Attention of some chunks of `size` queries to the context up to the last one's end."""
    keys, values = (x[:, : chunks.stop * size] for x in inputs[1:3])

    def chunk(index: Array | int) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(inputs.queries, index * size, size, 3)
        seen = _visible(inputs.segments, index * size, size, 0, keys.shape[1], window)
        return softmax_attention(rows, keys, values, seen, 1.0, cap)

    if inputs.queries.shape[3] == size:
        return chunk(0)
    return _mapped(chunk, chunks)


def _in_window(inputs: _Sequences, chunks: int, window: int, cap: float) -> Array:
    """Attention of all chunks to the positions in reach: their own and `window` before."""
    size = inputs.queries.shape[3] // chunks
    missing = chunks * size - inputs.keys.shape[1]
    keys, values = (jnp.pad(x, ((0, 0), (window, missing), (0, 0))) for x in inputs[1:3])

    def chunk(index: Array | int) -> Array:
        start = index * size
        rows = jax.lax.dynamic_slice_in_dim(inputs.queries, start, size, 3)
        k, v = (jax.lax.dynamic_slice_in_dim(x, start, size + window, 1) for x in (keys, values))
        seen = _visible(inputs.segments, start, size, start - window, size + window, window)
        return softmax_attention(rows, k, v, seen, 1.0, cap)

    return _mapped(chunk, range(chunks))


def _mapped(chunk: Callable[[Array], Array], chunks: range) -> Array:
    """`chunk(index)`, `[N, G, Q, S, hd]` each, one after the other: `[N, G, Q, chunks * S, hd]`."""
    out = jax.lax.map(jax.checkpoint(chunk), jnp.arange(chunks.start, chunks.stop))
    out = jnp.moveaxis(out, 0, 3)
    return out.reshape(*out.shape[:3], -1, out.shape[5])


def _visible(
    segments: Array | None, first: Array | int, size: int, first_key: Array | int, count: int, window: int
) -> Array:
    """Which of `count` positions from `first_key` on `size` queries from `first` on see: bool `[S, T]`, `[N, S, T]`."""
    queries, keys = first + jnp.arange(size)[:, None], first_key + jnp.arange(count)
    visible = (keys <= queries) & (keys >= 0)
    if window:
        visible &= keys > queries - window
    if segments is None:
        return visible
    own, others = (jnp.take(segments, x, axis=1, mode="clip") for x in (queries[:, 0], keys))
    return visible & (own[:, :, None] == others[:, None])


def _splash_on_mesh(
    q: Array, k: Array, v: Array, sequences: int, window: int, cap: float, segments: Array | None
) -> Array:
    """`splash_attention` of each device's sequences and heads; the compiler cannot cut a kernel by itself."""
    run = partial(splash_attention, window=window, cap=cap)
    length = q.shape[-1] // sequences
    if not sharding.active():
        return run(q, k, v, segments, length=length)
    sizes = jax.sharding.get_abstract_mesh().shape
    rows = sharding.spec_of(("batch",), (sequences,), sizes)[0]
    heads = sharding.spec_of(("heads",), q.shape[:1], sizes)[0]
    by_head = PartitionSpec(heads, None, None, rows)
    key_place = PartitionSpec(heads, None, rows)
    return jax.shard_map(
        partial(run, length=length),
        in_specs=(by_head, key_place, key_place, None if segments is None else PartitionSpec(rows)),
        out_specs=by_head,
        check_vma=False,  # kernels do not say over which axes their results vary
    )(q, k, v, segments)


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    *,
    length: int,
    window: int = 0,
    cap: float = 0.0,
    interpret: bool = False,
) -> Array:
    """`causal_attention` by JAX's kernel for TPUs, for scaled queries in the products' dtype and T = `length`.

    `interpret`: runs without a TPU, for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    groups, per_group, head_dim, rows = q.shape
    padded = -(-length // _LANES) * _LANES

    def by_sequence(x: Array) -> Array:  # [..., hd, N * T] -> [N, H or G, T, hd]
        x = x.reshape(-1, head_dim, rows // length, length)
        return jnp.transpose(jnp.pad(x, [(0, 0)] * 3 + [(0, padded - length)]), (2, 0, 3, 1))

    heads = [by_sequence(x) for x in (q, k, v)]
    shape = (padded, padded)
    mask = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
    block = next(size for size in (512, 384, 256, _LANES) if padded % size == 0)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    attend = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * (groups * per_group)),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        attn_logits_soft_cap=cap or None,
        interpret=interpret,
    )
    documents = None
    if segments is not None:
        ids = jnp.pad(segments, ((0, 0), (0, padded - length)), constant_values=-1)
        documents = kernels.SegmentIds(ids, ids)
    out = jax.vmap(attend)(*heads, documents)  # [N, H, T, hd]
    out = jnp.transpose(out[:, :, :length], (1, 3, 0, 2)).astype(jnp.float32)  # [H, hd, N, T]
    return out.reshape(q.shape)
