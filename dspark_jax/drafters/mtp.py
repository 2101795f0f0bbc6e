"""MTP-1: the multi-token prediction module of DeepSeek-V3, one decoder layer behind the target (facts section 4).

h' = W [RMSNorm(h) ; RMSNorm(emb(x_next))] goes through one ordinary decoder layer and a norm to the shared head. h is
the target's final-normed state; the module is trained on that alone and drafts one token. A longer block chains it: the
module's own normed output takes the place of h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.drafters.recurrent import Model, RecurrentConfig, dense, init_layer, unit_norm
from dspark_jax.models.layers import linear, rms_norm
from dspark_jax.models.transformer import Hidden

Array = jax.Array
Params = dict[str, Any]


@dataclass(frozen=True)
class MTPConfig(RecurrentConfig):
    """An MTP-1 drafter; `target_layer_ids` is empty (it reads the target's final state)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)}: MTP reads the target's final state, must be empty"
            )

    @property
    def train_steps(self) -> int:
        """Training predicts one token per position, whatever the block size."""
        return 1


def _enter(params: Params, config: MTPConfig, hidden: Hidden) -> Array:
    return hidden.final


def _mix(params: Params, config: MTPConfig, embedded: Array, state: Array) -> tuple[Array, Array]:
    options = config.rms_norm_eps, config.traits.norm_offset
    parts = rms_norm(state, params["hidden_norm"], *options), rms_norm(embedded, params["embed_norm"], *options)
    joined = linear(params["proj"], jnp.concatenate(parts))  # h', [D, B]
    return joined, rms_norm(joined, params["layers"][0]["input_norm"], *options)


def _leave(params: Params, config: MTPConfig, x: Array) -> Array:
    return rms_norm(x, params["norm"], config.rms_norm_eps, config.traits.norm_offset)


def _read(params: Params, config: MTPConfig, state: Array) -> Array:
    return state


MODEL = Model(_enter, _mix, _leave, _read)


def init_params(config: MTPConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random trainable parameters: everything but the embedding, the head and the vocabulary map, which are frozen."""
    keys = iter(jax.random.split(key, 8))
    d = config.hidden_size
    norms = {name: unit_norm(config, d, dtype) for name in ("hidden_norm", "embed_norm", "norm")}
    layer = init_layer(config, keys, d, dtype)
    return norms | {"layers": (layer,), "proj": dense(next(keys), (d, 2 * d), dtype)}
