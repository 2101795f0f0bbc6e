"""A key/value cache of static shape whose length moves.

Each layer owns two arrays `[R * G, T, hd]`, request-major: with one leading axis the attention product reads the very
buffer that was written, and XLA keeps the update in place (a `[R, G, T, hd]` cache was copied eight times a step).
G and hd may differ by layer. Sliding layers hold all positions too: their window is a mask.
Writing puts a chunk of S consecutive positions at each request's start; nothing is ever copied or cropped: a request's
length says which positions count, and later writes overwrite what was rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Array = jax.Array


class LayerCache(NamedTuple):
    """Keys and values of one layer, `[R * G, T, hd]` each."""

    keys: Array
    values: Array


def init_cache(
    num_layers: int, requests: int, kv_heads: int, capacity: int, head_dim: int, dtype: DTypeLike
) -> tuple[LayerCache, ...]:
    """An empty cache: `num_layers` pairs of zero arrays `[R * G, capacity, hd]`; capacity in tokens."""
    return init_layer_caches([(kv_heads, head_dim)] * num_layers, requests, capacity, dtype)


def init_layer_caches(
    heads: Sequence[tuple[int, int]], requests: int, capacity: int, dtype: DTypeLike
) -> tuple[LayerCache, ...]:
    """An empty cache of layers with `heads` (G, hd) each: pairs of zero arrays `[R * G, capacity, hd]`."""
    shapes = [(requests * groups, capacity, head_dim) for groups, head_dim in heads]
    return tuple(LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes)


def write(cache: LayerCache, keys: Array, values: Array, start: Array) -> LayerCache:
    """Writes chunks `[R * G, S, hd]` at positions `start [R * G] .. start + S - 1` of each row.

    The caller keeps `start + S <= T`: beyond it XLA would shift the chunk back over older positions.
    """
    update = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (at, 0)))
    return LayerCache(update(cache.keys, keys, start), update(cache.values, values, start))


def insert(cache: tuple[LayerCache, ...], other: tuple[LayerCache, ...], slots: Array) -> tuple[LayerCache, ...]:
    """Puts the requests of `other` (P of them, at most this capacity) into `slots [P]` of `cache`.

    A slot number of R or more drops that request; negative ones count from the end, as in numpy.
    """

    def put(into: Array, new: Array) -> Array:
        groups = new.shape[0] // slots.shape[0]
        rows = (slots[:, None] * groups + jnp.arange(groups)).reshape(-1)  # [P * G]
        return into.at[rows, : new.shape[1]].set(new.astype(into.dtype), mode="drop")

    return jax.tree.map(put, cache, other)
