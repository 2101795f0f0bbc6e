"""Anchors and block targets: which positions of a sequence start a training block, and what each slot must predict.

A block anchored at position a reads the token at a in slot 0 and predicts the tokens at a+1 .. a+K (paper, training
section: random anchors inside the supervised text). A position is a valid anchor when it and its successor are both
supervised. Anchors are drawn with one random key per sample, folded from (seed, epoch, sample id), so they do not
depend on how a batch is split over devices, on padding, or on a restart.

Letters: N samples, T tokens of a sequence, A anchors of a sequence, K block positions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_REAL = 1 << 31  # top bit of a score: set on valid positions, so that they sort before all others


class BlockTargets(NamedTuple):
    """What the slots of every block read and predict; each field has shape [N, A, K].

    Attributes:
        prev_ids: int32, the token before the predicted one (teacher forcing): the anchor token in slot 0, then labels.
        labels: int32, the token to predict.
        label_positions: int32, where the label stands: anchor + 1 + k, clamped to T - 1; 0 in dropped blocks.
        supervised: bool, True where the slot counts: the block is kept, the label lies inside the sequence, and every
            label of the block up to this one has loss mask 1.
    """

    prev_ids: jax.Array
    labels: jax.Array
    label_positions: jax.Array
    supervised: jax.Array

    @property
    def target_positions(self) -> jax.Array:
        """int32 [N, A, K]: the position whose target distribution belongs to the slot, one before the label."""
        return jnp.maximum(self.label_positions - 1, 0)


def sample_keys(seed: int | jax.Array, epoch: int | jax.Array, sample_ids: jax.Array) -> jax.Array:
    """One random key per sample, folded from (seed, epoch, sample id).

    Args:
        seed: run seed, an integer.
        epoch: 0-based pass over the data, an integer >= 0.
        sample_ids: integers [N] in 0..2^32-1, the sample's number in the whole data set (not in the batch).

    Returns:
        key array [N] (threefry, whatever the default generator is: others do not split alike under vmap).

    Raises:
        ValueError: sample_ids is not one-dimensional or not of an integer type.
    """
    sample_ids = jnp.asarray(sample_ids)
    if sample_ids.ndim != 1 or not jnp.issubdtype(sample_ids.dtype, jnp.integer):
        raise ValueError(f"sample_ids {sample_ids.dtype}{list(sample_ids.shape)}: must be integers of shape [N]")
    base = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), epoch)
    return jax.vmap(lambda sample_id: jax.random.fold_in(base, sample_id))(sample_ids)  # [N]


def valid_anchors(loss_mask: jax.Array) -> jax.Array:
    """Positions that may start a block: the position and the next one are both supervised.

    Args:
        loss_mask: [N, T], bool or numeric, non-zero = supervised.

    Returns:
        bool [N, T]; the last position is never valid.
    """
    supervised = loss_mask.astype(bool)  # [N, T]
    following = jnp.pad(supervised[:, 1:], ((0, 0), (0, 1)))  # [N, T]
    return supervised & following


def sample_anchors(key: jax.Array, loss_mask: jax.Array, num_anchors: int) -> tuple[jax.Array, jax.Array]:
    """Draw anchors uniformly and without replacement from the valid ones of each sample.

    Args:
        key: key array [N], one per sample (`sample_keys`).
        loss_mask: [N, T], bool or numeric, non-zero = supervised.
        num_anchors: A, static; may exceed T.

    Returns:
        positions int32 [N, A], ascending, and keep bool [N, A]. Where a sample has fewer than A valid anchors all of
        them are taken and the rest, at the end, have position 0 and keep False.

    Raises:
        ValueError: num_anchors below 1, or shapes that do not fit.
    """
    if num_anchors < 1:
        raise ValueError(f"num_anchors {num_anchors}: must be at least 1")
    if loss_mask.ndim != 2 or key.shape != loss_mask.shape[:1]:
        raise ValueError(
            f"key {list(key.shape)} with loss_mask {list(loss_mask.shape)}: must be [N] and [N, T], one key per sample"
        )
    length = loss_mask.shape[1]
    bits = jax.vmap(lambda one: jax.random.bits(one, (length,), jnp.uint32))(key)  # [N, T]
    score = jnp.where(valid_anchors(loss_mask), bits | jnp.uint32(_REAL), jnp.uint32(0))  # [N, T]
    best, chosen = jax.lax.top_k(score, min(num_anchors, length))  # [N, min(A, T)]
    chosen = jnp.sort(jnp.where(best > 0, chosen, length), axis=1)
    chosen = jnp.pad(chosen, ((0, 0), (0, num_anchors - chosen.shape[1])), constant_values=length)  # [N, A]
    keep = chosen < length
    return jnp.where(keep, chosen, 0).astype(jnp.int32), keep


def block_targets(
    input_ids: jax.Array, loss_mask: jax.Array, anchors: jax.Array, keep: jax.Array, block_size: int
) -> BlockTargets:
    """Gather the tokens that each block reads and predicts, and mark the slots that count.

    Args:
        input_ids: int [N, T]. loss_mask: [N, T], non-zero = supervised.
        anchors: int [N, A], positions in 0..T-1. keep: bool [N, A], False for missing anchors.
        block_size: K, static.

    Returns:
        `BlockTargets`. Slots that are not supervised hold some token of the sequence, to be ignored.

    Raises:
        ValueError: block_size below 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size {block_size}: must be at least 1")
    batch, length = input_ids.shape
    wanted = anchors[..., None].astype(jnp.int32) + 1 + jnp.arange(block_size, dtype=jnp.int32)  # [N, A, K]
    inside = wanted < length
    label_positions = jnp.where(keep[..., None], jnp.minimum(wanted, length - 1), 0)  # [N, A, K]
    first = jnp.where(keep, anchors, 0).astype(jnp.int32)  # [N, A]

    def gather(table: jax.Array, positions: jax.Array) -> jax.Array:
        flat = jnp.take_along_axis(table, positions.reshape(batch, -1), axis=1)  # [N, A * K]
        return flat.reshape(positions.shape)

    labels = gather(input_ids.astype(jnp.int32), label_positions)  # [N, A, K]
    anchor_ids = gather(input_ids.astype(jnp.int32), first)  # [N, A]
    prev_ids = jnp.concatenate([anchor_ids[..., None], labels[..., :-1]], axis=-1)  # [N, A, K]
    counts = gather(loss_mask.astype(bool), label_positions) & inside & keep[..., None]  # [N, A, K]
    supervised = jnp.cumprod(counts.astype(jnp.int32), axis=-1).astype(bool)  # [N, A, K], a gap ends the block
    return BlockTargets(prev_ids, labels, label_positions, supervised)
