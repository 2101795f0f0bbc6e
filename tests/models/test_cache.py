"""The cache against a numpy array that is written position by position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.models.cache import LayerCache, init_cache, insert, write

GROUPS, CAPACITY, HEAD = 2, 12, 4


def random_cache(requests: int, capacity: int = CAPACITY, layers: int = 2, seed: int = 0) -> tuple[LayerCache, ...]:
    """A cache full of random numbers, float32."""
    arrays = np.random.default_rng(seed).normal(size=(layers, 2, requests * GROUPS, capacity, HEAD))
    return tuple(LayerCache(*(jnp.asarray(leaf, jnp.float32) for leaf in layer)) for layer in arrays)


def assert_equal(ours, want) -> None:
    """Two caches are equal to the bit, in structure too."""
    assert jax.tree.structure(ours) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, ours, want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_empty_cache(dtype):
    cache = init_cache(3, 5, GROUPS, CAPACITY, HEAD, dtype)
    assert len(cache) == 3
    for leaf in jax.tree.leaves(cache):
        assert (leaf.shape, leaf.dtype) == ((5 * GROUPS, CAPACITY, HEAD), dtype)
        assert not leaf.any()


def by_request(leaf: np.ndarray) -> np.ndarray:
    """A view [R, G, T, hd] of a cache array."""
    return leaf.reshape(-1, GROUPS, *leaf.shape[1:])


@given(data=st.data(), requests=st.sampled_from([1, 3]), slots=st.sampled_from([1, 5, CAPACITY]))
def test_writing_changes_the_chunks_positions_and_nothing_else(data, requests, slots):
    starts = data.draw(st.lists(st.integers(0, CAPACITY - slots), min_size=requests, max_size=requests))
    cache, chunk = random_cache(requests)[0], random_cache(requests, slots, seed=1)[0]
    want, new = ([np.array(leaf) for leaf in tree] for tree in (cache, chunk))
    for request, start in enumerate(starts):
        for slot in range(slots):
            for into, source in zip(want, new, strict=True):
                by_request(into)[request, :, start + slot] = by_request(source)[request, :, slot]
    rows = jnp.repeat(jnp.asarray(starts, jnp.int32), GROUPS)
    ours = jax.jit(write)(cache, chunk.keys, chunk.values, rows)
    assert_equal(ours, LayerCache(*want))


@pytest.mark.parametrize("requests", [1, 2])
def test_chunks_take_the_caches_dtype(requests):
    cache = init_cache(1, requests, GROUPS, CAPACITY, HEAD, jnp.bfloat16)[0]
    chunk = random_cache(requests, 3)[0]
    ours = write(cache, chunk.keys, chunk.values, jnp.zeros(requests * GROUPS, jnp.int32))
    assert ours.keys.dtype == ours.values.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours.keys[:, :3], chunk.keys.astype(jnp.bfloat16))


@given(
    slots=st.permutations(range(4)).flatmap(lambda order: st.integers(1, 4).map(lambda count: order[:count])),
    capacity=st.sampled_from([3, CAPACITY]),
    drop=st.booleans(),
)
def test_inserting_replaces_the_first_positions_of_the_named_slots(slots, capacity, drop):
    cache, other = random_cache(4), random_cache(len(slots), capacity, seed=1)
    if drop:
        slots = [4, *slots[1:]]  # no such slot
    want = jax.tree.map(np.array, cache)
    for layer, new in zip(want, jax.tree.map(np.array, other), strict=True):
        for request, slot in enumerate(slots):
            if slot < 4:
                by_request(layer.keys)[slot, :, :capacity] = by_request(new.keys)[request]
                by_request(layer.values)[slot, :, :capacity] = by_request(new.values)[request]
    assert_equal(jax.jit(insert)(cache, other, jnp.asarray(slots, jnp.int32)), want)


def test_inserting_takes_the_caches_dtype():
    cache = init_cache(1, 2, GROUPS, CAPACITY, HEAD, jnp.bfloat16)
    ours = insert(cache, random_cache(1, layers=1), jnp.array([1]))
    assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {jnp.dtype("bfloat16")}
