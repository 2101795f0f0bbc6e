"""What a decoder-only target is: sizes, norms, RoPE and the switches that tell one family from another.

A family (Llama, Qwen3, ...) is a row in `FAMILIES`: the values that its Hugging Face config leaves implicit. Everything
else is read from the config file, and a field that would change the computation but is not understood is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base, and one of the scalings `default`, `linear`, `llama3`, `yarn`.

    Attributes:
        theta: base of the geometric frequencies.
        kind: the scaling's name.
        factor: context extension factor (linear, llama3, yarn).
        original_max_position: context length before the extension, in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band edges, in turns over the original context.
        beta_fast, beta_slow: yarn's band edges, in turns over the original context.
        attention_factor: yarn multiplies cos and sin by this.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and switches of a decoder-only transformer. Letters: V, D, F, L, H, G as in the whole project.

    Attributes:
        family: a key of `FAMILIES`.
        vocab_size: V, rows of the embedding, padding rows included.
        hidden_size: D. intermediate_size: F. num_layers: L. num_heads: H. num_kv_heads: G. head_dim: size of one head.
        rms_norm_eps: added to the mean square.
        rope: rotary settings. qk_norm: RMSNorm on each query and key head. tie_embeddings: the head is the embedding.
        max_positions: positions the model was made for, in tokens.
        num_tokens: tokens the tokenizer knows; rows from here to V are padding and are never produced.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    tie_embeddings: bool
    max_positions: int
    num_tokens: int

    def __post_init__(self) -> None:
        heads = ("num_heads", "num_kv_heads", "head_dim", "max_positions")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", *heads):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} {getattr(self, name)}: must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads}: must be a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: RoPE rotates pairs, so it must be even")
        if not 0 < self.num_tokens <= self.vocab_size:
            raise ValueError(f"num_tokens {self.num_tokens}: must lie in 1..vocab_size ({self.vocab_size})")

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one KV head (H / G)."""
        return self.num_heads // self.num_kv_heads

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> TransformerConfig:
        """Reads a Hugging Face `config.json` (a dict).

        Raises:
            ValueError: unknown family or RoPE scaling, a missing size, or a field that changes the computation in a
                way that is not supported.
        """
        return _from_hf(config)


# What each family's code does without saying so in its config file.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": False},
    "qwen3": {"qk_norm": True},
}

# Config fields that change the computation, with the values under which our forward pass is the right one.
_ONLY_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "no_rope_layers": (None, []),
    "partial_rotary_factor": (1.0, 1, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "rope_interleaved": (False, None),
    "quantization_config": (None,),
}
_MODEL_TYPES = {"llama": "llama", "qwen3": "qwen3"}


def _need(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"config field {name} is missing: a target's config.json must hold it")
    return config[name]


def _from_hf(config: Mapping[str, Any]) -> TransformerConfig:
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"model_type {model_type!r}: unknown family, supported are {sorted(_MODEL_TYPES)}")
    family = _MODEL_TYPES[model_type]
    for name, allowed in _ONLY_SUPPORTED.items():
        if name in config and config[name] not in allowed:
            raise ValueError(
                f"{name} {config[name]!r}: not supported for {family}, right would be one of {list(allowed)}"
            )
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"layer_types {sorted(kinds)}: only full_attention is supported for {family}")
    heads = _need(config, "num_attention_heads")
    if heads < 1:
        raise ValueError(f"num_attention_heads {heads}: must be positive")
    hidden = _need(config, "hidden_size")
    vocab = _need(config, "vocab_size")
    max_positions = config.get("max_position_embeddings", 2048)
    return TransformerConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_need(config, "intermediate_size"),
        num_layers=_need(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope_from_hf(config, max_positions),
        qk_norm=FAMILIES[family]["qk_norm"],
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=max_positions,
        num_tokens=config.get("num_tokens") or vocab,
    )


def rope_from_hf(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Reads RoPE settings from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`.

    Raises:
        ValueError: a scaling other than default, linear, llama3, yarn, or one whose numbers are missing.
    """
    scaling = dict(config.get("rope_scaling") or {})
    scaling.update(config.get("rope_parameters") or {})
    nested = sorted(name for name, value in scaling.items() if isinstance(value, Mapping))
    if nested:
        raise ValueError(f"rope_parameters {nested}: settings by layer type are not supported, give one for all")
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {scaling['partial_rotary_factor']}: only 1 (whole heads) is supported")
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"rope_scaling type {kind!r}: supported are default, linear, llama3, yarn")
    if scaling.get("factor") is None:
        raise ValueError(f"rope_scaling of type {kind} has no factor: it must name the context extension factor")
    factor = float(scaling["factor"])
    if not factor > 0:
        raise ValueError(f"rope_scaling factor {factor}: must be positive")
    original = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind == "llama3" and original is None:
        raise ValueError("rope_scaling of type llama3 has no original_max_position_embeddings")
    attention = scaling.get("attention_factor") if kind == "yarn" else 1.0
    if attention is None:
        attention = _yarn_attention_factor(scaling, factor)
    if kind == "yarn" and scaling.get("truncate") is False:
        raise ValueError("rope_scaling truncate false: only the rounded yarn band edges are supported")
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=factor,
        original_max_position=int(original or max_positions),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=float(attention),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """Yarn's temperature on attention, 0.1 ln(factor) + 1, or the ratio of the two `mscale` forms (DeepSeek)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(float(scaling["mscale"])) / scale(float(scaling["mscale_all_dim"]))
    return scale(1.0)
