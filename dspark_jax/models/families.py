"""The model families: what each one's code does without its config file saying so, and what its files may leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OFF = (None, False, 0)
_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", None)


@dataclass(frozen=True)
class Family:
    """Switches that all models of a family share.

    Attributes:
        qk_norm: RMSNorm on each query and key head. value_norm: on each value head, without a weight.
        norm_offset: RMSNorm multiplies by `norm_offset + weight`.
        sandwich_norms: attention and MLP outputs are normed before they are added to the residual stream.
        activation: of the MLP's gate, `silu` or `gelu` (tanh form).
        scales_embeddings: embeddings are multiplied by sqrt(D), rounded to the table's dtype.
        layer_scalar: a scalar multiplies each layer's output.
        attention_scale: of the scores; None: 1 / sqrt(head size), unless the config says otherwise.
        defaults: config fields that files may leave out, with the values that then hold.
        supported: config fields that change the computation, with the values under which this project's forward pass
            is the right one.
    """

    qk_norm: bool
    value_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    activation: str = "silu"
    scales_embeddings: bool = False
    layer_scalar: bool = False
    attention_scale: float | None = None
    defaults: tuple[tuple[str, Any], ...] = ()
    supported: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def with_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config dict with the family's defaults where it has no value."""
        return {**dict(self.defaults), **{name: value for name, value in config.items() if value is not None}}


_SILU_ONLY = (
    ("hidden_act", _SILU),
    ("hidden_activation", (*_SILU, None)),
    ("use_sliding_window", (False, None)),
    ("attn_logit_softcapping", (None,)),
    ("final_logit_softcapping", (None,)),
)
_GEMMA = (("hidden_act", _GELU_TANH), ("hidden_activation", _GELU_TANH))
_GEMMA_SIZES = (
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("max_position_embeddings", 131072),
    ("tie_word_embeddings", True),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(qk_norm=False, supported=_SILU_ONLY),
    "qwen3": Family(qk_norm=True, supported=_SILU_ONLY),
    "gemma3": Family(
        qk_norm=True,
        norm_offset=1.0,
        sandwich_norms=True,
        activation="gelu",
        scales_embeddings=True,
        defaults=(
            *_GEMMA_SIZES,
            ("vocab_size", 262208),
            ("query_pre_attn_scalar", 256),
            ("sliding_window", 4096),
            ("rope_theta", 1e6),
            ("rope_local_base_freq", 1e4),
        ),
        supported=(*_GEMMA, ("use_bidirectional_attention", _OFF)),
    ),
    "gemma4": Family(
        qk_norm=True,
        value_norm=True,
        sandwich_norms=True,
        activation="gelu",
        scales_embeddings=True,
        layer_scalar=True,
        attention_scale=1.0,
        defaults=(
            *_GEMMA_SIZES,
            ("vocab_size", 262144),
            ("sliding_window", 512),
            ("global_head_dim", 512),
            ("rope_theta", 1e6),
            ("rope_local_base_freq", 1e4),
        ),
        supported=(
            *_GEMMA,
            ("use_bidirectional_attention", (*_OFF, "vision")),  # text is causal then
            ("hidden_size_per_layer_input", _OFF),
            ("enable_moe_block", _OFF),
            ("num_kv_shared_layers", _OFF),
            ("use_double_wide_mlp", _OFF),
            ("attn_logit_softcapping", (None,)),
        ),
    ),
}

MODEL_TYPES: dict[str, str] = {
    "llama": "llama",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4",
}

# Fields that a model type switches on where its file leaves them out.
IMPLIED: dict[str, dict[str, Any]] = {"gemma4_text": {"hidden_size_per_layer_input": 256}}

# Supported values of fields that mean the same in every family.
COMMON: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "no_rope_layers": (None, []),
    "partial_rotary_factor": (1.0, 1, None),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "rope_interleaved": (False, None),
    "quantization_config": (None,),
}
