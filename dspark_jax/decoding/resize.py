"""A batch in other sizes: more or fewer slots, longer or shorter caches, so that memory and time follow what is used.

Each change copies the caches, array by array: the old and the new batch never lie in memory together.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.placement import placed
from dspark_jax.decoding.state import DecodeState, Program, init_caches

Array = jax.Array


@partial(jax.jit, static_argnames=("shape", "requests"))
def _resized(x: Array, shape: tuple[int, ...], requests: int) -> Array:
    kept = x[tuple(slice(size) for size in shape)]
    new = jnp.pad(kept, [(0, size - old) for size, old in zip(shape, kept.shape, strict=True)])
    return placed(new, requests)


@partial(jax.jit, static_argnames=("requests",))
def _taken(x: Array, order: Array, requests: int) -> Array:
    each = x.shape[0] // requests
    rows = x.reshape(requests, each, *x.shape[1:])
    new = jnp.take(rows, order, axis=0, mode="fill", fill_value=0)
    return placed(new.reshape(order.shape[0] * each, *x.shape[1:]), order.shape[0])


def with_capacity(state: DecodeState, capacity: int, program: Program) -> DecodeState:
    """The state with caches of `capacity` positions: zeros are added, or the positions beyond are dropped."""
    requests = state.anchor.shape[0]

    def resize(old: Array, wanted: jax.ShapeDtypeStruct) -> Array:
        if old.shape == wanted.shape:
            return old
        new = _resized(old, wanted.shape, requests)
        old.delete()
        return new

    shapes = jax.eval_shape(partial(init_caches, program, requests, capacity))
    target, draft = jax.tree.map(resize, (state.target_cache, state.draft_cache), shapes)
    width = (requests, capacity + program.slots)
    tokens = resize(state.tokens, jax.ShapeDtypeStruct(width, state.tokens.dtype))
    return state._replace(target_cache=target, draft_cache=draft, tokens=tokens)


def with_slots(state: DecodeState, order: np.ndarray) -> DecodeState:
    """The state with other slots: int32 `order` names, for each new slot, the old one (R and above: an empty one)."""
    requests = state.anchor.shape[0]

    def take(old: Array) -> Array:
        new = _taken(old, order, requests)
        old.delete()
        return new

    shared = {name: getattr(state.past, name) for name in ("mean", "idle", "promised", "kept")}
    past = state.past._replace(**dict.fromkeys(shared, ()))  # type: ignore[arg-type]
    new: DecodeState = jax.tree.map(take, state._replace(threshold=(), past=past))  # type: ignore[arg-type]
    return new._replace(threshold=state.threshold, past=new.past._replace(**shared))
