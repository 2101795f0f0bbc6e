"""Eagle3: an autoregressive one-layer drafter on fused features of several target layers (golden facts 37 to 45).

The layer's attention reads [RMSNorm(embedding) ; RMSNorm(state)], of size 2D; its residual stream is the state as it
is (normed in some of speculators' checkpoints). At committed positions the state is W_c [H(l1); ...; H(lm)], without a
norm; then it is the layer's own output. Logits come from the head on the normed state. DeepSpec reads five layers and
drafts from the whole vocabulary, EAGLE and SGLang read three and draft from a reduced one: both are settings here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.drafters.config import check_target_layer_ids
from dspark_jax.drafters.recurrent import Model, RecurrentConfig, dense, init_layer, unit_norm
from dspark_jax.models.layers import linear, rms_norm
from dspark_jax.models.transformer import Hidden

Array = jax.Array
Params = dict[str, Any]


@dataclass(frozen=True)
class Eagle3Config(RecurrentConfig):
    """An Eagle3 drafter; `block_size` is also the number of training-time test steps (`ttt_length` in DeepSpec).

    Attributes:
        norm_before_residual: the layer's residual stream is the normed state (speculators), not the state as it is.
    """

    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)
        if self.target_layer_ids[0] < 0:
            raise ValueError(f"target_layer_ids {list(self.target_layer_ids)}: Eagle3 reads layers, not the embedding")

    @property
    def train_steps(self) -> int:
        """Steps of the training-time test."""
        return self.block_size


def _enter(params: Params, config: Eagle3Config, hidden: Hidden) -> Array:
    return linear(params["fc"], hidden.features)


def _mix(params: Params, config: Eagle3Config, embedded: Array, state: Array) -> tuple[Array, Array]:
    layer, eps, offset = params["layers"][0], config.rms_norm_eps, config.traits.norm_offset
    normed = rms_norm(state, layer["hidden_norm"], eps, offset)
    joined = jnp.concatenate([rms_norm(embedded, layer["input_norm"], eps, offset), normed])  # [2D, B]
    return normed if config.norm_before_residual else state, joined


def _leave(params: Params, config: Eagle3Config, x: Array) -> Array:
    return x


def _read(params: Params, config: Eagle3Config, state: Array) -> Array:
    return rms_norm(state, params["norm"], config.rms_norm_eps, config.traits.norm_offset)


MODEL = Model(_enter, _mix, _leave, _read)


def init_params(config: Eagle3Config, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random trainable parameters: everything but the embedding, the head and the vocabulary map, which are frozen."""
    keys = iter(jax.random.split(key, 8))
    d = config.hidden_size
    layer = init_layer(config, keys, 2 * d, dtype) | {"hidden_norm": unit_norm(config, d, dtype)}
    fc = dense(next(keys), (d, len(config.target_layer_ids) * d), dtype)
    return {"fc": fc, "layers": (layer,), "norm": unit_norm(config, d, dtype)}
