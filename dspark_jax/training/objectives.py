"""Which loss trains which kind of drafter; the counterpart of `drafters.interface` in training.

Block drafters draw anchors for each update; Eagle3 and MTP train on every position and draw nothing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.typing import DTypeLike

from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.training.anchors import sample_anchors
from dspark_jax.training.losses import Batch, Counts, LossConfig, Metrics, block_counts, block_loss
from dspark_jax.training.recurrent import check_loss as check_recurrent_loss
from dspark_jax.training.recurrent import eagle3_counts, eagle3_loss, mtp_counts, mtp_loss

Array = jax.Array
Params = dict[str, Any]
TrainableConfig = DrafterConfig | Eagle3Config | MTPConfig


def check_loss(config: TrainableConfig, loss: LossConfig) -> None:
    """Refuses loss weights of terms that this kind of drafter does not have (ValueError)."""
    if not isinstance(config, DrafterConfig):
        check_recurrent_loss(config, loss)


def draw(
    config: TrainableConfig,
    seed: int,
    epoch: Array,
    sample_ids: Array,
    loss_mask: Array,
    num_anchors: int,
    segments: Array | None = None,
) -> tuple[Array, ...]:
    """What an update draws at random: anchors int32 `[N, A]` and keep bool `[N, A]` of block drafters, else nothing.

    Arguments as `anchors.sample_anchors` takes them.
    """
    if isinstance(config, DrafterConfig):
        return sample_anchors(sample_ids, loss_mask, num_anchors, seed, epoch, segments)
    return ()


def loss_counts(
    frozen: Params,
    config: TrainableConfig,
    loss: LossConfig,
    input_ids: Array,
    loss_mask: Array,
    drawn: tuple[Array, ...],
    segments: Array | None = None,
) -> Counts:
    """Denominators of the loss terms of some sequences; those of all parts of a batch are to be added up.

    Args:
        frozen: as `losses.block_loss` takes it. drawn: from `draw`.
    """
    if isinstance(config, DrafterConfig):
        anchors, keep = drawn
        return block_counts(frozen, loss, config.block_size, input_ids, loss_mask, anchors, keep, segments)
    if isinstance(config, Eagle3Config):
        return eagle3_counts(input_ids)
    return mtp_counts(frozen, input_ids, loss_mask, segments)


def drafter_loss(
    trainable: Params,
    frozen: Params,
    config: TrainableConfig,
    loss: LossConfig,
    batch: Batch,
    drawn: tuple[Array, ...],
    compute_dtype: DTypeLike,
    counts: Counts | None = None,
    remat: bool = False,
) -> tuple[Array, Metrics]:
    """Loss of a batch, float32 `[]`, and metrics as (sum, count) pairs; `frozen` as `losses.block_loss` takes it.

    Args:
        drawn: from `draw`. counts: from `loss_counts` where the batch is a part of a larger one.
        remat: compute the layers' inner values again in the backward pass (Eagle3 and MTP always do).
    """
    if isinstance(config, DrafterConfig):
        anchors, keep = drawn
        return block_loss(trainable, frozen, config, loss, batch, anchors, keep, compute_dtype, counts, remat)
    if isinstance(config, Eagle3Config):
        return eagle3_loss(trainable, frozen, config, loss, batch, compute_dtype, counts)
    return mtp_loss(trainable, frozen, config, loss, batch, compute_dtype, counts)


def recorded_fields(config: TrainableConfig, loss: LossConfig, num_anchors: int) -> dict[str, Any]:
    """What DeepSpec's `config.json` says about how a drafter was trained."""
    if isinstance(config, DrafterConfig):
        return {"num_anchors": num_anchors}
    if isinstance(config, Eagle3Config):
        return {"step_loss_decay": math.exp(-1 / loss.decay) if loss.decay > 0 else 1.0}
    return {}
