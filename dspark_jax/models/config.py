"""What a decoder-only target is: sizes, norms, RoPE and the switches that tell one family from another.

A family (Llama, Qwen3, ...) is a row in `families.FAMILIES`: the values that its Hugging Face config leaves implicit.
Everything else is read from the config file, and a field that would change the computation but is not understood is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark_jax.models.families import COMMON, FAMILIES, IMPLIED, MODEL_TYPES, Family


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base, and one of the scalings `default`, `linear`, `llama3`, `yarn`, `proportional`.

    Attributes:
        theta: base of the geometric frequencies.
        kind: the scaling's name.
        factor: context extension factor (linear, llama3, yarn, proportional).
        original_max_position: context length before the extension, in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band edges, in turns over the original context.
        beta_fast, beta_slow: yarn's band edges, in turns over the original context.
        attention_factor: yarn multiplies cos and sin by this.
        rotary_fraction: proportional (Gemma4) rotates this share of each head's pairs, and leaves the others alone.
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
    rotary_fraction: float = 1.0


@dataclass(frozen=True)
class AttentionConfig:
    """One kind of attention layer.

    Attributes:
        num_kv_heads: G. head_dim: size of one head. rope: rotary settings.
        shared_kv: keys and values come from one projection.
        window: a query sees itself and the `window - 1` tokens before; 0: everything before.
    """

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    shared_kv: bool = False
    window: int = 0


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
        shared_kv: keys and values of full layers come from one projection.
        attention_scale: of the scores; None: 1 / sqrt(head_dim).
        attention_softcap, final_softcap: c of `c * tanh(x / c)` on scores and on logits; 0: none.
        sliding: the sliding-window layers; num_kv_heads, head_dim, rope and shared_kv above are the full layers'.
        pattern: for each layer whether it is a sliding one; empty: none is.
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
    shared_kv: bool = False
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    sliding: AttentionConfig | None = None
    pattern: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        heads = ("num_heads", "num_kv_heads", "head_dim", "max_positions")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", *heads):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} {getattr(self, name)}: must be positive")
        for kind in (self.full, *([self.sliding] if self.sliding else [])):
            if self.num_heads % kind.num_kv_heads:
                raise ValueError(
                    f"num_attention_heads {self.num_heads}: must be a multiple of num_key_value_heads "
                    f"{kind.num_kv_heads}"
                )
            if kind.head_dim % 2:
                raise ValueError(f"head_dim {kind.head_dim}: RoPE rotates pairs, so it must be even")
        if any(self.pattern) and (self.sliding is None or self.sliding.window < 1):
            window = self.sliding.window if self.sliding else None
            raise ValueError(f"sliding_window {window}: sliding layers need a window of at least one token")
        if self.pattern and len(self.pattern) != self.num_layers:
            raise ValueError(f"layer_types names {len(self.pattern)} layers, num_hidden_layers is {self.num_layers}")
        if not 0 < self.num_tokens <= self.vocab_size:
            raise ValueError(f"num_tokens {self.num_tokens}: must lie in 1..vocab_size ({self.vocab_size})")

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one KV head (H / G) in full layers."""
        return self.num_heads // self.num_kv_heads

    @property
    def traits(self) -> Family:
        """The family's switches."""
        return FAMILIES[self.family]

    @property
    def full(self) -> AttentionConfig:
        """The full-attention layers."""
        return AttentionConfig(self.num_kv_heads, self.head_dim, self.rope, self.shared_kv)

    def attention(self, layer: int) -> AttentionConfig:
        """The attention of layer `layer`."""
        return self.sliding if self.sliding and self.pattern and self.pattern[layer] else self.full

    def score_scale(self, layer: int) -> float:
        """What multiplies the attention scores of layer `layer`."""
        own = self.attention(layer).head_dim ** -0.5
        return own if self.attention_scale is None else self.attention_scale

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> TransformerConfig:
        """Reads a Hugging Face `config.json` (a dict).

        Raises:
            ValueError: unknown family or RoPE scaling, a missing size, or a field that changes the computation in a
                way that is not supported.
        """
        return _from_hf(config)


def _need(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"config field {name} is missing: a target's config.json must hold it")
    return config[name]


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's fields of a config: those of `text_config` where the model has other parts beside it.

    Fields at the top, such as a quantization, hold for the language model where `text_config` does not name them.
    """
    nested = config.get("text_config")
    if nested is None:
        return dict(config)
    if not isinstance(nested, Mapping):
        raise ValueError(f"text_config {nested!r}: must be an object")
    above = ("quantization_config", "tie_word_embeddings", "num_tokens")
    kept = {name: config[name] for name in above if config.get(name) is not None}
    return {"model_type": config.get("model_type"), **kept, **nested}


def _from_hf(outer: Mapping[str, Any]) -> TransformerConfig:
    raw = text_fields(outer)
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type {model_type!r}: unknown family, supported are {sorted(MODEL_TYPES)}")
    family = MODEL_TYPES[model_type]
    traits = FAMILIES[family]
    _refuse_unsupported({**IMPLIED.get(model_type, {}), **raw}, family)
    config = traits.with_defaults(raw)
    heads = _need(config, "num_attention_heads")
    if heads < 1:
        raise ValueError(f"num_attention_heads {heads}: must be positive")
    vocab = _need(config, "vocab_size")
    max_positions = config.get("max_position_embeddings", 2048)
    if family == "gemma4" and "per_layer_config" in config:
        config |= _global_sizes(config, _layer_pattern(config, family))
    full, sliding = _attention_kinds(config, family, heads, max_positions)
    return TransformerConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=_need(config, "hidden_size"),
        intermediate_size=_need(config, "intermediate_size"),
        num_layers=_need(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=full.num_kv_heads,
        head_dim=full.head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=full.rope,
        qk_norm=traits.qk_norm,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=max_positions,
        num_tokens=config.get("num_tokens") or vocab,
        shared_kv=full.shared_kv,
        attention_scale=_attention_scale(config, traits),
        attention_softcap=_softcap(config, "attn_logit_softcapping"),
        final_softcap=_softcap(config, "final_logit_softcapping"),
        sliding=sliding,
        pattern=_layer_pattern(config, family) if sliding else (),
    )


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    for name, allowed in {**COMMON, **dict(FAMILIES[family].supported)}.items():
        if name in config and config[name] not in allowed:
            raise ValueError(
                f"{name} {config[name]!r}: not supported for {family}, right would be one of {list(allowed)}"
            )
    known = {"full_attention", "sliding_attention"} if family.startswith("gemma") else {"full_attention"}
    kinds = set(config.get("layer_types") or ["full_attention"])
    if not kinds <= known:
        raise ValueError(f"layer_types {sorted(kinds)}: only {' and '.join(sorted(known))} is supported for {family}")


def _attention_scale(config: Mapping[str, Any], traits: Family) -> float | None:
    scalar = config.get("query_pre_attn_scalar")
    if scalar is None:
        return traits.attention_scale
    if not scalar > 0:
        raise ValueError(f"query_pre_attn_scalar {scalar}: must be positive")
    return float(scalar) ** -0.5


def _softcap(config: Mapping[str, Any], name: str) -> float:
    value = config.get(name) or 0.0
    if not value >= 0:
        raise ValueError(f"{name} {value}: must be positive, or null for none")
    return float(value)


def _layer_pattern(config: Mapping[str, Any], family: str) -> tuple[bool, ...]:
    """Which layers slide: from `layer_types`, or every `sliding_window_pattern`-th (the 6th) being a full one."""
    layers = _need(config, "num_hidden_layers")
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    kinds = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]
    if family == "gemma4" and kinds[-1] != "full_attention":
        raise ValueError(f"layer_types: the last layer is {kinds[-1]}, must be full_attention for {family}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _global_sizes(config: Mapping[str, Any], pattern: tuple[bool, ...]) -> dict[str, Any]:
    """Sizes of the full layers from `per_layer_config`, where transformers 5.24 writes what had two fields before."""
    given = {int(layer): dict(sizes) for layer, sizes in config["per_layer_config"].items()}
    full = [i for i, slides in enumerate(pattern) if not slides]
    same = given.get(full[0], {})
    groups = same.get("num_key_value_heads", config["num_key_value_heads"])
    known = set(same) <= {"head_dim", "num_key_value_heads"}
    own_values = not config.get("attention_k_eq_v") and groups != config["num_key_value_heads"]
    if not known or own_values or given != ({i: same for i in full} if same else {}):
        raise ValueError(
            f"per_layer_config {config['per_layer_config']!r}: only one head_dim and one num_key_value_heads (the "
            f"latter with attention_k_eq_v) for all full_attention layers {full} is supported"
        )
    return {"global_head_dim": same.get("head_dim", config["head_dim"]), "num_global_key_value_heads": groups}


def _attention_kinds(
    config: Mapping[str, Any], family: str, heads: int, max_positions: int
) -> tuple[AttentionConfig, AttentionConfig | None]:
    """Full layers, and sliding ones where the family has them."""
    groups = config.get("num_key_value_heads") or heads
    if not family.startswith("gemma"):
        head_dim = config.get("head_dim") or _need(config, "hidden_size") // heads
        return AttentionConfig(groups, head_dim, rope_from_hf(config, max_positions)), None
    by_kind = config.get("rope_parameters") or {}
    if by_kind and not any(isinstance(value, Mapping) for value in by_kind.values()):
        raise ValueError(f"rope_parameters {sorted(by_kind)}: {family} needs full_attention and sliding_attention")
    full_rope = by_kind.get("full_attention") or config.get("rope_scaling") or _full_rope(family)
    theta = {"rope_theta": config["rope_theta"]}
    rope = rope_from_hf({**theta, "rope_parameters": {**theta, **full_rope}}, max_positions)
    local = {"rope_theta": config["rope_local_base_freq"], **(by_kind.get("sliding_attention") or {})}
    shared = bool(config.get("attention_k_eq_v"))
    full_groups = config.get("num_global_key_value_heads") if shared else None
    full = AttentionConfig(full_groups or groups, config.get("global_head_dim") or config["head_dim"], rope, shared)
    window = int(config["sliding_window"])
    local_rope = rope_from_hf({"rope_parameters": local}, max_positions)
    return full, AttentionConfig(groups, config["head_dim"], local_rope, window=window)


def _full_rope(family: str) -> dict[str, Any]:
    return {"rope_type": "proportional", "partial_rotary_factor": 0.25} if family == "gemma4" else {}


def rope_from_hf(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Reads RoPE settings from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`.

    Raises:
        ValueError: a scaling other than default, linear, llama3, yarn, proportional, or one whose numbers are missing.
    """
    scaling = dict(config.get("rope_scaling") or {})
    scaling.update(config.get("rope_parameters") or {})
    nested = sorted(name for name, value in scaling.items() if isinstance(value, Mapping))
    if nested:
        raise ValueError(f"rope_parameters {nested}: settings by layer type are not supported, give one for all")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    fraction = scaling.get("partial_rotary_factor")
    if kind != "proportional" and fraction not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {fraction}: only 1 (whole heads) is supported")
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind == "proportional":
        fraction = 1.0 if fraction is None else float(fraction)
        if not 0 < fraction <= 1:
            raise ValueError(f"partial_rotary_factor {fraction}: a share of each head, must lie in (0, 1]")
        factor = float(scaling.get("factor") or 1.0)
        return RopeConfig(theta=float(theta), kind=kind, factor=factor, rotary_fraction=fraction)
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
