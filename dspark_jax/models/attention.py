"""Attention over packed rows: one request's queries against its own cache, or whole sequences causally.

Rows arrive feature-major (`[G, Q, hd, B]`); the packing says which request and slot each row is. Scores and softmax are
float32; operands of the products have the cache's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.models.cache import LayerCache, write
from dspark_jax.models.layers import softcap
from dspark_jax.models.platform import for_cpu

Array = jax.Array
_MASKED = -1e30
_FEW_ROWS = 64  # rows of a request and KV group up to which keys go left


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
    q: Array, k: Array, v: Array, sequences: int, scale: float, window: int = 0, cap: float = 0.0
) -> Array:
    """Whole sequences without a cache: rows are `sequences` x T tokens; float32 `[G, Q, hd, B]`."""
    split = [x.reshape(*x.shape[:-1], sequences, -1) for x in (q, k, v)]  # [..., N, T]
    length = split[0].shape[-1]
    queries = jnp.transpose(split[0], (3, 0, 1, 4, 2))  # [N, G, Q, T, hd]
    keys, values = (jnp.transpose(x, (2, 0, 3, 1)).reshape(-1, length, q.shape[2]) for x in split[1:])  # [N * G, T, hd]
    visible = jnp.tril(jnp.ones((length, length), bool))
    if window:
        visible &= ~jnp.tril(visible, -window)
    out = softmax_attention(queries, keys, values, visible, scale, cap)
    return jnp.transpose(out, (1, 2, 4, 0, 3)).reshape(q.shape)
