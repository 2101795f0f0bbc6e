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
from dspark_jax.training.anchors import sample_anchors, sample_keys
from dspark_jax.training.losses import Batch, LossConfig, Metrics, block_loss
from dspark_jax.training.recurrent import check_loss as check_recurrent_loss
from dspark_jax.training.recurrent import eagle3_loss, mtp_loss

Array = jax.Array
Params = dict[str, Any]
TrainableConfig = DrafterConfig | Eagle3Config | MTPConfig


def check_loss(config: TrainableConfig, loss: LossConfig) -> None:
    """Refuses loss weights of terms that this kind of drafter does not have (ValueError)."""
    if not isinstance(config, DrafterConfig):
        check_recurrent_loss(config, loss)


def draw(
    config: TrainableConfig, seed: int, epoch: Array, sample_ids: Array, loss_mask: Array, num_anchors: int
) -> tuple[Array, ...]:
    """What an update draws at random: anchors int32 `[N, A]` and keep bool `[N, A]` of block drafters, else nothing."""
    if isinstance(config, DrafterConfig):
        return sample_anchors(sample_keys(seed, epoch, sample_ids), loss_mask, num_anchors)
    return ()


def drafter_loss(
    trainable: Params,
    frozen: Params,
    config: TrainableConfig,
    loss: LossConfig,
    batch: Batch,
    drawn: tuple[Array, ...],
    compute_dtype: DTypeLike,
) -> tuple[Array, Metrics]:
    """Loss of a batch, float32 `[]`, and metrics as (sum, count) pairs; `frozen` as `losses.block_loss` takes it.

    Args:
        drawn: from `draw`.
    """
    if isinstance(config, DrafterConfig):
        anchors, keep = drawn
        return block_loss(trainable, frozen, config, loss, batch, anchors, keep, compute_dtype)
    if isinstance(config, Eagle3Config):
        return eagle3_loss(trainable, frozen, config, loss, batch, compute_dtype)
    return mtp_loss(trainable, frozen, config, loss, batch, compute_dtype)


def recorded_fields(config: TrainableConfig, loss: LossConfig, num_anchors: int) -> dict[str, Any]:
    """What DeepSpec's `config.json` says about how a drafter was trained."""
    if isinstance(config, DrafterConfig):
        return {"num_anchors": num_anchors}
    if isinstance(config, Eagle3Config):
        return {"step_loss_decay": math.exp(-1 / loss.decay) if loss.decay > 0 else 1.0}
    return {}
