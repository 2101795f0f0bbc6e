"""A key/value cache of static shape whose length moves.

Each layer owns two arrays `[R, G, T, hd]`. Writing puts a chunk of S consecutive positions at each request's start;
nothing is ever copied or cropped: a request's length says which positions count, and later writes overwrite what was
rejected.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Array = jax.Array


class LayerCache(NamedTuple):
    """Keys and values of one layer, `[R, G, T, hd]` each."""

    keys: Array
    values: Array


def init_cache(
    num_layers: int, requests: int, kv_heads: int, capacity: int, head_dim: int, dtype: DTypeLike
) -> tuple[LayerCache, ...]:
    """An empty cache: `num_layers` pairs of zero arrays `[R, G, capacity, hd]`; capacity in tokens."""
    shape = (requests, kv_heads, capacity, head_dim)
    return tuple(LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers))


def write(cache: LayerCache, keys: Array, values: Array, start: Array) -> LayerCache:
    """Writes chunks `[R, G, S, hd]` at positions `start [R] .. start + S - 1` of each request.

    The caller keeps `start + S <= T`: beyond it XLA would shift the chunk back over older positions.
    """
    return LayerCache(_write(cache.keys, keys, start), _write(cache.values, values, start))


def _write(array: Array, chunk: Array, start: Array) -> Array:
    chunk = chunk.astype(array.dtype)
    if array.shape[0] == 1:
        return jax.lax.dynamic_update_slice(array, chunk, (0, 0, start[0], 0))
    update = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice(old, new, (0, at, 0)))
    return update(array, chunk, start)


def grow(cache: tuple[LayerCache, ...], capacity: int) -> tuple[LayerCache, ...]:
    """The same cache with room for `capacity` tokens (at least as many as now)."""
    extra = capacity - cache[0].keys.shape[2]
    return jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, extra), (0, 0))), cache)


def insert(cache: tuple[LayerCache, ...], other: tuple[LayerCache, ...], slots: Array) -> tuple[LayerCache, ...]:
    """Puts the requests of `other` (P of them, at most this capacity) into `slots [P]` of `cache`.

    A slot number outside `0..R-1` drops that request.
    """

    def put(into: Array, new: Array) -> Array:
        return into.at[slots, :, : new.shape[2]].set(new.astype(into.dtype), mode="drop")

    return jax.tree.map(put, cache, other)
