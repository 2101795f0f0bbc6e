"""Anchors and block targets: which positions of a sequence start a training block, and what each slot must predict.

A block anchored at position a reads the token at a in slot 0 and predicts the tokens at a+1 .. a+K (paper, training
section: random anchors inside the supervised text). A position is a valid anchor when it and its successor are both
supervised and of one document. Every token has a score drawn from a key folded from (seed, epoch, sample id, position
in its document), and a row takes its best ones: so neither the split of a batch over devices, nor padding, nor what a
document is packed with, nor a restart changes a token's score.

`segments`, int32 [N, T], tells the documents of a packed row apart: 0 on padding, else the document's number in the row
from 1, each document one run of tokens. None: every row is one document from its start.

Letters: N rows of a batch, T tokens of a row, S documents of a row, A anchors of a row, K block positions.
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
        supervised: bool, True where the slot counts: the block is kept, the label lies inside the anchor's document,
            and every label of the block up to this one has loss mask 1.
    """

    prev_ids: jax.Array
    labels: jax.Array
    label_positions: jax.Array
    supervised: jax.Array

    @property
    def target_positions(self) -> jax.Array:
        """int32 [N, A, K]: the position whose target distribution belongs to the slot, one before the label."""
        return jnp.maximum(self.label_positions - 1, 0)


def document_starts(segments: jax.Array) -> jax.Array:
    """The index in its row at which each token's document starts.

    Args:
        segments: int [N, T]. A run of padding counts as a document of its own, so every token has itself to see.

    Returns:
        int32 [N, T], at most the token's own index.
    """
    new = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))  # [N, T]
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)  # [T]
    return jax.lax.cummax(jnp.where(new, index, 0), axis=1)


def document_positions(segments: jax.Array) -> jax.Array:
    """Position of each token in its document, from 0: int32 [N, T] of `segments` [N, T]."""
    return jnp.arange(segments.shape[1], dtype=jnp.int32) - document_starts(segments)


def valid_anchors(loss_mask: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """Positions that may start a block: the position and the next one are supervised and of one document.

    Args:
        loss_mask: [N, T], bool or numeric, non-zero = supervised. segments: int [N, T] or None.

    Returns:
        bool [N, T]; the last position is never valid.
    """
    supervised = loss_mask.astype(bool)  # [N, T]
    pairs = supervised[:, :-1] & supervised[:, 1:]  # [N, T - 1]
    if segments is not None:
        pairs &= segments[:, :-1] == segments[:, 1:]
    return jnp.pad(pairs, ((0, 0), (0, 1)))


def token_scores(
    sample_ids: jax.Array, seed: int | jax.Array, epoch: int | jax.Array, length: int, segments: jax.Array | None = None
) -> jax.Array:
    """Random bits of every token, from (seed, epoch, sample id, position in its document).

    Args:
        sample_ids: integers [N, S] in 0..2^32-1, a sample's number is the same in every batch. seed: of the run.
        epoch: pass over the data, from 0. length: T. segments: int [N, T], or None where S is 1.

    Returns:
        uint32 [N, T] (threefry, whatever the default generator is: others do not split alike under vmap).
    """
    rows = sample_ids.shape[0]
    if segments is None:
        names = jnp.broadcast_to(sample_ids, (rows, length))  # [N, T]
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    else:
        names = jnp.take_along_axis(sample_ids, jnp.maximum(segments - 1, 0), axis=1)  # [N, T]
        positions = document_positions(segments)
    base = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), epoch)

    def bits(name: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(base, name), position)
        return jax.random.key_data(key)[
            0
        ]  # a folded threefry key is a draw already: the hash of its parent and a count

    return jax.vmap(jax.vmap(bits))(names, positions)


def sample_anchors(
    sample_ids: jax.Array,
    loss_mask: jax.Array,
    num_anchors: int,
    seed: int | jax.Array,
    epoch: int | jax.Array,
    segments: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw anchors uniformly and without replacement from the valid ones of each row: those with the best scores.

    Args:
        sample_ids: integers [N, S] in 0..2^32-1, the number of each document of a row.
        loss_mask: [N, T], bool or numeric, non-zero = supervised.
        num_anchors: A, static; may exceed T.
        seed: of the run. epoch: pass over the data, from 0.
        segments: int [N, T]; None where every row is one document (S = 1).

    Returns:
        positions int32 [N, A], ascending, and keep bool [N, A]. Where a row has fewer than A valid anchors all of them
        are taken and the rest, at the end, have position 0 and keep False.

    Raises:
        ValueError: num_anchors below 1, sample_ids of no integer type, or shapes that do not fit.
    """
    if num_anchors < 1:
        raise ValueError(f"num_anchors {num_anchors}: must be at least 1")
    sample_ids = jnp.asarray(sample_ids)
    _check_rows(sample_ids, loss_mask, segments)
    length = loss_mask.shape[1]
    bits = token_scores(sample_ids, seed, epoch, length, segments)  # [N, T]
    score = jnp.where(valid_anchors(loss_mask, segments), bits | jnp.uint32(_REAL), jnp.uint32(0))  # [N, T]
    index = jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)  # [N, T]
    # Sorting whole rows keeps N split over devices; `top_k` would gather the scores of all rows on every device.
    worst, chosen = (part[:, :num_anchors] for part in jax.lax.sort((~score, index), dimension=1, num_keys=1))
    chosen = jnp.sort(jnp.where(~worst > 0, chosen, length), axis=1)  # [N, min(A, T)]
    chosen = jnp.pad(chosen, ((0, 0), (0, num_anchors - chosen.shape[1])), constant_values=length)  # [N, A]
    keep = chosen < length
    return jnp.where(keep, chosen, 0).astype(jnp.int32), keep


def _check_rows(sample_ids: jax.Array, loss_mask: jax.Array, segments: jax.Array | None) -> None:
    """ValueError where ids, mask and segments are not those of the same rows."""
    kind = f"sample_ids {sample_ids.dtype}{list(sample_ids.shape)}"
    if sample_ids.ndim != 2 or not jnp.issubdtype(sample_ids.dtype, jnp.integer):
        raise ValueError(f"{kind}: must be integers of shape [N, S], the documents of each row")
    if loss_mask.ndim != 2 or loss_mask.shape[0] != sample_ids.shape[0]:
        raise ValueError(f"{kind} with loss_mask {list(loss_mask.shape)}: must be [N, S] and [N, T] of the same N rows")
    if segments is None and sample_ids.shape[1] != 1:
        raise ValueError(f"{kind} without segments: rows of several documents need them, int32 [N, T]")
    if segments is not None and segments.shape != loss_mask.shape:
        raise ValueError(f"segments {list(segments.shape)}: must have the shape of loss_mask, {list(loss_mask.shape)}")


def block_targets(
    input_ids: jax.Array,
    loss_mask: jax.Array,
    anchors: jax.Array,
    keep: jax.Array,
    block_size: int,
    segments: jax.Array | None = None,
) -> BlockTargets:
    """Gather the tokens that each block reads and predicts, and mark the slots that count.

    Args:
        input_ids: int [N, T]. loss_mask: [N, T], non-zero = supervised.
        anchors: int [N, A], positions in 0..T-1. keep: bool [N, A], False for missing anchors.
        block_size: K, static.
        segments: int [N, T] or None; labels past the end of the anchor's document do not count.

    Returns:
        `BlockTargets`. Slots that are not supervised hold some token of the row, to be ignored.

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
    if segments is not None:
        counts &= gather(segments, label_positions) == gather(segments, first)[..., None]
    supervised = jnp.cumprod(counts.astype(jnp.int32), axis=-1).astype(bool)  # [N, A, K], a gap ends the block
    return BlockTargets(prev_ids, labels, label_positions, supervised)
