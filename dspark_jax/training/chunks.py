"""Rows of a batch in chunks: what has the size of the vocabulary exists for one chunk at a time.

A chunk takes some rows of every sequence, so that on a mesh each device has its share of every chunk. Letters: N
sequences of R rows each (sequence-major), C chunks of c rows of each sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.sharding import RULES, axis_size

CHUNK = 512  # rows of a device whose vocabulary-sized tensors are held at once
_TILE = 8  # rows of a sequence come in multiples of this


def chunk_size(sequences: int, rows: int) -> int:
    """c: rows of each sequence in a chunk, such that a device holds about `CHUNK` rows of it."""
    local = max(sequences // axis_size(*RULES["batch"]), 1)
    wanted = max(CHUNK // local, 1)
    chunks = -(-rows // wanted)
    even = -(-rows // chunks)
    return min(-(-even // _TILE) * _TILE, rows)


def split_rows(x: jax.Array, sequences: int, axis: int = -1, value: float = 0) -> jax.Array:
    """`[..., N * R, ...]`, rows at `axis` (the first or the last) -> `[C, ..., N * c, ...]`, padded by `value`."""
    rows = x.shape[axis] // sequences
    size = chunk_size(sequences, rows)
    padding = -rows % size
    first = axis == 0
    before, after = ((), x.shape[1:]) if first else (x.shape[:-1], ())
    x = x.reshape(*before, sequences, rows, *after)
    where = len(before) + 1
    x = jnp.pad(x, [(0, padding if i == where else 0) for i in range(x.ndim)], constant_values=value)
    x = x.reshape(*before, sequences, (rows + padding) // size, size, *after)
    x = jnp.moveaxis(x, where, 0)  # [C, ..., N, c, ...]
    return x.reshape(x.shape[0], *before, sequences * size, *after)


def join_rows(x: jax.Array, sequences: int, rows: int) -> jax.Array:
    """Values of rows in chunks `[C, N * c]` -> `[N * R]`, the padding left out."""
    chunks = x.shape[0]
    return jnp.moveaxis(x.reshape(chunks, sequences, -1), 0, 1).reshape(sequences, -1)[:, :rows].reshape(-1)
