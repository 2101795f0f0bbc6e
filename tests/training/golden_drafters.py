"""Golden drafters as the training code takes them: trainable and frozen parts, batch, anchors and loss weights."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from dspark_jax.checkpoints.deepspec import write_drafter
from dspark_jax.checkpoints.load import load_drafter
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.training.losses import Batch, LossConfig, block_loss

FOLDER = Path(__file__).parents[1] / "golden" / "drafters"
NAMES = (
    "dspark_qwen3_vanilla",
    "dspark_qwen3_gated",
    "dspark_qwen3_rnn",
    "dspark_qwen3_tied_embed_noconf",
    "dflash_qwen3",
    "dspark_gemma4_vanilla",
    "dspark_gemma4_rnn_embed",
    "dflash_gemma4",
)


class Case(NamedTuple):
    """One golden training step; `expected` holds the arrays of its npz and `meta` its json."""

    trainable: dict[str, Any]
    frozen: dict[str, Any]
    config: DrafterConfig
    loss: LossConfig
    batch: Batch
    anchors: jax.Array
    keep: jax.Array
    expected: dict[str, np.ndarray]
    meta: dict[str, Any]


@cache
def load_case(name: str, variant: str = "train") -> Case:
    """The golden step of drafter `name`; `variant` is the npz's stem, whose missing inputs come from `train.npz`."""
    drafter = load_drafter(FOLDER / name)
    trainable = dict(drafter.params)
    frozen = {part: trainable.pop(part) for part in ("embed", "head")}
    expected = dict(np.load(FOLDER / name / f"{variant}.npz"))
    arrays = dict(np.load(FOLDER / name / "train.npz")) | expected
    args = json.loads((FOLDER / name / "train_meta.json").read_text())["model_args"]
    loss = LossConfig(
        ce=args["ce_loss_alpha"],
        tv=args["l1_loss_alpha"],
        confidence=args["confidence_head_alpha"],
        decay=args["loss_decay_gamma"],
    )
    fields = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states")
    batch = Batch(*(jnp.asarray(arrays[field]) for field in fields))
    anchors, keep = jnp.asarray(arrays["anchor_positions"]), jnp.asarray(arrays["block_keep_mask"])
    meta = json.loads((FOLDER / name / f"{variant}_meta.json").read_text())
    return Case(trainable, frozen, drafter.config, loss, batch, anchors, keep, expected, meta)


@cache
def _objective(config: DrafterConfig, loss: LossConfig, dtype: str, gradient: bool) -> Any:
    def run(trainable: Any, frozen: Any, batch: Batch, anchors: jax.Array, keep: jax.Array) -> Any:
        return block_loss(trainable, frozen, config, loss, batch, anchors, keep, jnp.dtype(dtype))

    return jax.jit(jax.value_and_grad(run, has_aux=True) if gradient else run)


def run_case(case: Case, dtype: str = "float32") -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Loss, metrics as (sum, count) pairs, and the gradient of the trainable parameters."""
    step = _objective(case.config, case.loss, dtype, True)
    (total, metrics), grads = step(case.trainable, case.frozen, case.batch, case.anchors, case.keep)
    return float(total), metrics, grads


def run_loss(case: Case) -> tuple[float, dict[str, Any]]:
    """Loss and metrics alone, which compile faster."""
    step = _objective(case.config, case.loss, "float32", False)
    total, metrics = step(case.trainable, case.frozen, case.batch, case.anchors, case.keep)
    return float(total), metrics


def named_gradients(case: Case, grads: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """A gradient pytree under the checkpoint's tensor names, through the writer of checkpoints.

    Layer scalars are no trainable parameters: their gradients must be 0, and are left out.
    """
    write_drafter(folder / "grads", case.config, grads, storage_dtype="float32", include_embeddings=False)
    named = load_file(folder / "grads" / "model.safetensors")
    scalars = [name for name in named if name.endswith("layer_scalar")]
    assert not any(named.pop(name).any() for name in scalars)
    return named
