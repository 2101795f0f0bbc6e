"""Which prefix of each block is verified (section 3), and how the admitted tokens are packed into a bucket.

Every schedule is non-anticipating: whether draft token k is verified depends on the confidences c_1..c_k only, and c_k
reads x_{k-1} at the latest, never token k or anything drawn after it. `causal` and `async` share a budget of rows among
the requests: see `decoding.budget`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dspark_jax.decoding.verify import leading_run
from dspark_jax.models.attention import Packing, dense_packing

Array = jax.Array
Schedule = Literal["fixed", "threshold", "causal", "async"]
SCHEDULES: tuple[Schedule, ...] = ("fixed", "threshold", "causal", "async")
BUDGETED: tuple[Schedule, ...] = ("causal", "async")  # those with a budget from the throughput curve
_STEPS = (1.0, 1.25, 1.5)  # fine buckets between R and 2 R, then doublings with one between: 3, 4, 6, 8, 12 ... times R
_TILE = 8  # fine buckets are multiples of so many rows (small ones powers of two): others take longer than the next one


def verify_lengths(schedule: Schedule, confidence: Array, threshold: Array, room: Array) -> Array:
    """Draft tokens to verify for each request, int32 `[R]`.

    Args:
        schedule: `fixed` admits the whole block, `threshold` the leading slots whose confidence reaches `threshold`.
        confidence: conditional survival probabilities `[R, K]`.
        room: int32 `[R]`, most draft tokens that may be verified (token and position limits); below 0 counts as 0.
    """
    block = confidence.shape[1]
    if schedule == "fixed":
        lengths = jnp.full(confidence.shape[0], block, jnp.int32)
    else:
        lengths = leading_run(confidence >= threshold, jnp.full(confidence.shape[0], block))
    return jnp.clip(lengths, 0, jnp.maximum(room, 0)).astype(jnp.int32)


def check_confidence(drafter: Any, schedule: Schedule) -> None:
    """Refuses a schedule that reads confidences of a drafter's config without any; ValueError."""
    if schedule != "fixed" and not drafter.confidence:
        raise ValueError(f"schedule {schedule}: this drafter has no confidence head; use fixed")


def cap_to_bucket(lengths: Array, active: Array, bucket: int) -> Array:
    """Shortens `lengths [R]` so that anchors and drafts of the active requests fit into `bucket` rows.

    Later slots lose their drafts first. A bucket has at least one row a request, so every active request advances.
    """
    spare = bucket - jnp.sum(active)
    lengths = jnp.where(active, lengths, 0)
    before = jnp.cumsum(lengths) - lengths
    return jnp.clip(spare - before, 0, lengths).astype(jnp.int32)


def pack_rows(lengths: Array, active: Array, slots: int, bucket: int) -> Packing:
    """Packs `1 + lengths[r]` rows of each active request, one after another, into `bucket` rows.

    Args:
        lengths: int32 `[R]`, at most `slots - 1`. slots: S, rows that a request can have.
        bucket: static row count; where it equals R * S the packing is the dense one and nothing has to move.

    Rows past the last admitted one repeat the last request's final slot; nobody reads them.
    """
    requests = lengths.shape[0]
    if bucket == requests * slots:
        return dense_packing(requests, slots)
    counts = jnp.where(active, lengths + 1, 0)
    ends = jnp.cumsum(counts)
    index = jnp.arange(bucket, dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1), requests - 1).astype(jnp.int32)
    begins = ends - counts
    offset = jnp.clip(index - begins[request], 0, slots - 1).astype(jnp.int32)
    row = begins[:, None] + jnp.minimum(jnp.arange(slots), jnp.maximum(counts - 1, 0)[:, None])
    return Packing(request, offset, jnp.minimum(row, bucket - 1).astype(jnp.int32))


def buckets_for(requests: int, block: int, fine: bool = False) -> tuple[int, ...]:
    """Row counts to compile for `requests` slots and blocks of `block` drafts: R to R * (block + 1), doubling.

    Args:
        fine: also about 1.25, 1.5, 3 and 6 times R, and so on, for schedules that choose among them (`BUDGETED`).
    """
    full = requests * (block + 1)
    factors = list(_STEPS) if fine else [1.0]
    size = 2.0
    while size < block + 1:
        factors += [size, size * 1.5] if fine else [size]
        size *= 2
    sizes = {math.ceil(f * requests) for f in factors}
    if fine:
        sizes = {1 << (n - 1).bit_length() if n < _TILE else -(-n // _TILE) * _TILE for n in sizes}
    return tuple(sorted({min(n, full) for n in sizes} | {requests, full}))


def slots_for(requests: int, block: int, bucket: int) -> int:
    """S, rows that one request can have in a bucket of a budgeted schedule: 1 in the smallest, then up to block + 1.

    Attention computes S rows of every request, so small buckets leave out slots that hardly ever get there.
    """
    return max(1, min(block + 1, bucket - requests + 1, 2 * -(-bucket // requests)))
