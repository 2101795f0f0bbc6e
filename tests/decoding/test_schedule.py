"""Verify lengths never anticipate, and packing puts every admitted row where the step looks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.schedule import buckets_for, cap_to_bucket, pack_rows, verify_lengths

REQUESTS, BLOCK = 5, 4
run_lengths = jax.jit(verify_lengths, static_argnames=("schedule",))
run_cap = jax.jit(cap_to_bucket, static_argnames=("bucket",))
run_pack = jax.jit(pack_rows, static_argnames=("slots", "bucket"))
lengths_of = st.lists(st.integers(0, BLOCK), min_size=REQUESTS, max_size=REQUESTS)
flags = st.lists(st.booleans(), min_size=REQUESTS, max_size=REQUESTS)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**31), k=st.integers(1, BLOCK), room=st.integers(-1, BLOCK + 1))
def test_later_confidences_do_not_matter(seed: int, k: int, room: int) -> None:
    """Whether token k is verified depends on c_1..c_k alone."""
    rng = np.random.default_rng(seed)
    first = rng.random((REQUESTS, BLOCK)).astype(np.float32)
    second = np.where(np.arange(BLOCK) < k, first, rng.random((REQUESTS, BLOCK))).astype(np.float32)
    rooms = jnp.full(REQUESTS, room)
    for schedule in ("fixed", "threshold"):
        a, b = (np.asarray(run_lengths(schedule, jnp.asarray(c), 0.4, rooms)) for c in (first, second))
        np.testing.assert_array_equal(a >= k, b >= k)
        assert a.min() >= 0 and a.max() <= max(room, 0)


def test_threshold_counts_the_leading_run() -> None:
    confidence = jnp.asarray([[0.9, 0.5, 0.2, 0.9], [0.4, 1, 1, 1], [1, 1, 1, 1]])
    room = jnp.asarray([9, 9, 3])
    np.testing.assert_array_equal(verify_lengths("threshold", confidence, jnp.float32(0.5), room), [2, 0, 3])
    np.testing.assert_array_equal(verify_lengths("fixed", confidence, jnp.float32(0.5), room), [4, 4, 3])


@settings(max_examples=80)
@given(lengths=lengths_of, active=flags, bucket=st.sampled_from([5, 8, 13, 25]))
def test_packing(lengths: list[int], active: list[bool], bucket: int) -> None:
    on = jnp.asarray(active)
    capped = np.asarray(run_cap(jnp.asarray(lengths), on, bucket))
    assert np.all(capped >= 0) and np.all(capped <= lengths)
    rows = np.sum((capped + 1) * np.asarray(active))
    assert rows <= bucket
    if np.sum((np.asarray(lengths) + 1) * active) <= bucket:
        np.testing.assert_array_equal(capped[np.asarray(active)], np.asarray(lengths)[np.asarray(active)])
    packing = jax.tree.map(np.asarray, run_pack(jnp.asarray(capped), on, BLOCK + 1, bucket))
    assert packing.request.shape == packing.offset.shape == (bucket,)
    assert packing.row.min() >= 0 and packing.row.max() < bucket
    for r in np.flatnonzero(active):
        for j in range(capped[r] + 1):
            row = packing.row[r, j]
            assert (packing.request[row], packing.offset[row]) == (r, j)


def test_buckets_double_up_to_everything() -> None:
    assert buckets_for(1, 0) == (1,)
    assert buckets_for(3, 7) == (3, 6, 12, 24)
    assert buckets_for(4, 2) == (4, 8, 12)
