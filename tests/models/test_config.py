"""Reading target configs: what is understood, where RoPE settings may sit, and what is refused with a clear error."""

from __future__ import annotations

import math

import pytest

from dspark_jax.models.config import RopeConfig, TransformerConfig

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_bias": False,
    "hidden_act": "silu",
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def read(base: dict, **changes) -> TransformerConfig:
    """The config of `base` with some fields changed; `...` removes a field."""
    fields = {name: value for name, value in {**base, **changes}.items() if value is not ...}
    return TransformerConfig.from_hf(fields)


def test_qwen3():
    config = read(QWEN3)
    assert (config.family, config.qk_norm, config.tie_embeddings) == ("qwen3", True, True)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.queries_per_group) == (36, 32, 8, 4)
    assert (config.head_dim, config.max_positions, config.rms_norm_eps) == (128, 40960, 1e-6)
    assert (config.vocab_size, config.num_tokens) == (151936, 151936)
    assert config.rope == RopeConfig(theta=1e6)
    assert hash(config) == hash(read(QWEN3))  # a static argument of jitted functions


def test_llama_and_what_a_config_may_leave_out():
    config = read(LLAMA)
    assert (config.family, config.qk_norm, config.tie_embeddings) == ("llama", False, False)
    assert (config.head_dim, config.queries_per_group, config.rope) == (64, 3, RopeConfig(theta=10000.0))
    assert read(LLAMA, num_key_value_heads=...).num_kv_heads == 9
    assert read(LLAMA, head_dim=None).head_dim == 64


def test_rows_beyond_the_tokens_are_padding():
    assert read(QWEN3, num_tokens=151669).num_tokens == 151669
    for tokens in (151937, 200000, -1):
        with pytest.raises(ValueError, match=rf"num_tokens {tokens}: must lie in 1..vocab_size \(151936\)"):
            read(QWEN3, num_tokens=tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": ...},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": 500000, "rope_scaling": {}},
    ],
    ids=str,
)
def test_rope_theta_at_either_level(changes):
    assert read(QWEN3, **changes).rope == RopeConfig(theta=5e5)


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("level", ["rope_scaling", "rope_parameters"])
def test_rope_scalings_at_either_level(level, name):
    linear = read(LLAMA, **{level: {name: "linear", "factor": 4}}).rope
    assert (linear.kind, linear.factor, linear.attention_factor) == ("linear", 4.0, 1.0)
    llama3 = read(LLAMA, rope_theta=5e5, **{level: {name: "llama3", **LLAMA3}}).rope
    assert llama3 == RopeConfig(theta=5e5, kind="llama3", factor=32.0, original_max_position=8192)
    yarn = read(QWEN3, **{level: {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}).rope
    want = RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=32768)
    assert (yarn.kind, yarn.factor, yarn.original_max_position) == (want.kind, want.factor, want.original_max_position)
    assert (yarn.beta_fast, yarn.beta_slow) == (32.0, 1.0)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_details():
    def yarn(**fields) -> RopeConfig:
        return read(QWEN3, rope_scaling={"rope_type": "yarn", "factor": 4.0, **fields}).rope

    assert yarn().original_max_position == 40960  # without a value of its own: the config's
    assert yarn(attention_factor=0.7).attention_factor == 0.7
    assert yarn(factor=1.0).attention_factor == 1.0
    assert (yarn(beta_fast=16, beta_slow=2).beta_fast, yarn(beta_fast=16, beta_slow=2).beta_slow) == (16.0, 2.0)
    ratio = (0.1 * 0.7 * math.log(4) + 1) / (0.1 * 0.9 * math.log(4) + 1)
    assert yarn(mscale=0.7, mscale_all_dim=0.9).attention_factor == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling type 'dynamic'"),
        ({"type": "longrope", "factor": 2.0}, "rope_scaling type 'longrope'"),
        ({"rope_type": "su"}, "rope_scaling type 'su'"),
        ({"rope_type": "linear"}, "type linear has no factor"),
        ({"rope_type": "yarn", "factor": None}, "type yarn has no factor"),
        ({"rope_type": "llama3", "original_max_position_embeddings": 8192}, "type llama3 has no factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "llama3 has no original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": False}, "truncate false"),
    ],
    ids=str,
)
def test_unknown_or_incomplete_rope_scalings_are_refused(scaling, message):
    for level in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=message):
            read(QWEN3, **{level: scaling})


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen2", "qwen3_moe", "Llama", "", None])
def test_unknown_families_are_refused(family):
    with pytest.raises(ValueError, match=rf"model_type {family!r}: unknown family, supported are .*llama"):
        read(LLAMA, model_type=family)
    with pytest.raises(ValueError, match="model_type None"):
        read(LLAMA, model_type=...)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("hidden_act", ["gelu", "gelu_pytorch_tanh", "relu"]),
        ("attention_bias", [True]),
        ("mlp_bias", [True]),
        ("use_sliding_window", [True]),
        ("no_rope_layers", [[1, 1, 1, 0]]),
        ("partial_rotary_factor", [0.5, 0.25]),
        ("attn_logit_softcapping", [50.0]),
        ("final_logit_softcapping", [30.0]),
        ("attention_multiplier", [0.0078125]),
        ("embedding_multiplier", [12.0]),
        ("residual_multiplier", [0.22]),
        ("logits_scaling", [8.0]),
        ("rope_interleaved", [True]),
        ("quantization_config", [{"quant_method": "fp8"}, {"bits": 4}]),
    ],
)
@pytest.mark.parametrize("base", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_fields_that_change_the_computation_are_refused(base, field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{field} .*not supported for {base['model_type']}"):
            read(base, **{field: value})


def test_the_same_fields_with_harmless_values_are_accepted():
    harmless = {"attention_bias": False, "mlp_bias": None, "logits_scaling": 1.0, "quantization_config": None}
    assert read(QWEN3, **harmless, partial_rotary_factor=1.0, no_rope_layers=[], hidden_act="swish") == read(QWEN3)
    assert read(QWEN3, attention_dropout=0.1, torch_dtype="bfloat16", sliding_window=4096) == read(QWEN3)


@pytest.mark.parametrize(
    "kinds", [["sliding_attention"] * 36, ["full_attention", "sliding_attention"] * 18, ["linear_attention"]]
)
def test_other_layer_types_are_refused(kinds):
    assert read(QWEN3, layer_types=["full_attention"] * 36) == read(QWEN3)
    with pytest.raises(ValueError, match="layer_types .*only full_attention"):
        read(QWEN3, layer_types=kinds)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
@pytest.mark.parametrize("value", [..., None], ids=["absent", "null"])
def test_missing_sizes_are_named(field, value):
    with pytest.raises(ValueError, match=f"config field {field} is missing"):
        read(QWEN3, **{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0, "num_tokens": 1}, "vocab_size 0: must be positive"),
        ({"hidden_size": -64}, "hidden_size -64: must be positive"),
        ({"intermediate_size": 0}, "intermediate_size 0: must be positive"),
        ({"num_hidden_layers": 0}, "num_layers 0: must be positive"),
        ({"num_attention_heads": -8}, "num_attention_heads -8: must be positive"),
        ({"num_key_value_heads": -1}, "num_kv_heads -1: must be positive"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32: must be a multiple of num_key_value_heads 5"),
        ({"num_key_value_heads": 64}, "num_attention_heads 32: must be a multiple of num_key_value_heads 64"),
        ({"head_dim": 127}, "head_dim 127: RoPE rotates pairs, so it must be even"),
        ({"head_dim": ..., "hidden_size": 96}, "head_dim 3: RoPE rotates pairs"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read(QWEN3, **changes)
