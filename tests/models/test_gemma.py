"""Gemma: its config files, what they switch on, and Gemma3's forward pass against its formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.attention import dense_packing
from dspark_jax.models.config import AttentionConfig, RopeConfig, TransformerConfig
from dspark_jax.models.layers import rope_frequencies
from dspark_jax.models.transformer import extend, forward, init_params, init_target_cache, logits
from tests.models.test_extend import ragged_packing

run_forward = jax.jit(forward, static_argnames=("config",))
run_extend = jax.jit(extend, static_argnames=("config",))

GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 10,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
}
GEMMA4 = {
    "model_type": "gemma4_unified_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
}
GEMMA3_4B = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}


def read(base: dict, **changes: Any) -> TransformerConfig:
    """The config of `base` with some fields changed; `...` removes a field."""
    fields = {name: value for name, value in {**base, **changes}.items() if value is not ...}
    return TransformerConfig.from_hf(fields)


def test_gemma4_full_and_sliding_layers():
    config = read(GEMMA4)
    proportional = RopeConfig(theta=1e6, kind="proportional", rotary_fraction=0.25)
    assert config.attention(5) == config.full == AttentionConfig(1, 512, proportional, shared_kv=True)
    assert config.attention(4) == AttentionConfig(8, 256, RopeConfig(theta=1e4), window=1024)
    assert [i for i in range(48) if config.attention(i) == config.full] == [5, 11, 17, 23, 29, 35, 41, 47]
    assert (config.score_scale(0), config.score_scale(5), config.final_softcap) == (1.0, 1.0, 30.0)
    assert (config.vocab_size, config.tie_embeddings, config.max_positions) == (262144, True, 131072)
    by_layer = {str(i): {"head_dim": 512, "num_key_value_heads": 1} for i in (5, 11, 17, 23, 29, 35, 41, 47)}
    assert read(GEMMA4, num_global_key_value_heads=..., per_layer_config=by_layer) == config
    own_values = read(GEMMA4, attention_k_eq_v=False).full
    assert (own_values.num_kv_heads, own_values.head_dim, own_values.shared_kv) == (8, 512, False)


def test_gemma3_with_most_fields_left_out_inside_a_larger_model():
    text = GEMMA3_4B | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = read({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert (config.num_heads, config.vocab_size, config.tie_embeddings) == (8, 262208, True)
    linear = RopeConfig(theta=1e6, kind="linear", factor=8.0, original_max_position=131072)
    assert config.full == AttentionConfig(4, 256, linear)
    assert config.attention(0) == AttentionConfig(4, 256, RopeConfig(theta=1e4), window=1024)
    assert [config.pattern[i] for i in (4, 5, 6, 11)] == [True, False, True, False]
    assert (config.score_scale(0), config.final_softcap, config.attention_softcap) == (256**-0.5, 0.0, 0.0)
    assert read(text, sliding_window_pattern=2).pattern[:4] == (True, False, True, False)
    named = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    again = read(text, rope_scaling=..., rope_parameters=named)
    assert (again.rope, again.sliding) == (config.rope, config.sliding)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (GEMMA4, {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256: not supported for gemma4"),
        (GEMMA4, {"model_type": "gemma4_text"}, "hidden_size_per_layer_input 256"),  # on where it is left out
        (GEMMA4, {"enable_moe_block": True}, "enable_moe_block True: not supported for gemma4"),
        (GEMMA4, {"num_kv_shared_layers": 20}, "num_kv_shared_layers 20: not supported for gemma4"),
        (GEMMA4, {"use_double_wide_mlp": True}, "use_double_wide_mlp True: not supported for gemma4"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        (GEMMA4, {"per_layer_config": {"0": {"head_dim": 64}}}, "per_layer_config .*full_attention layers .5, 11, "),
        (GEMMA4, {"per_layer_config": {"5": {"head_dim": 64}}}, "per_layer_config .*full_attention layers .5, 11, "),
        (GEMMA4, {"hidden_activation": "silu"}, "hidden_activation 'silu'.*gelu_pytorch_tanh"),
        (GEMMA4, {"layer_types": ["sliding_attention"] * 48}, "the last layer is sliding_attention"),
        (GEMMA4, {"layer_types": ["chunked_attention"] * 48}, "layer_types.*chunked_attention"),
        (GEMMA4, {"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers, num_hidden_layers is 48"),
        (GEMMA4, {"sliding_window": 0}, "sliding_window 0"),
        (GEMMA4, {"final_logit_softcapping": -1.0}, "final_logit_softcapping -1.0: must be positive"),
        (GEMMA4, {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.*full_attention"),
        (GEMMA4, {"attention_bias": True}, "attention_bias True"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention True: not supported for gemma3"),
        (GEMMA3, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar -1: must be positive"),
        (GEMMA3, {"num_key_value_heads": 3}, "num_attention_heads 4: must be a multiple of num_key_value_heads 3"),
        (GEMMA3, {"model_type": "gemma2"}, "model_type 'gemma2': unknown family"),
        ({"model_type": "gemma4"}, {"text_config": 3}, "text_config 3: must be an object"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name_and_value(base, changes, message):
    with pytest.raises(ValueError, match=message):
        read(base, **changes)


def test_proportional_rope_rotates_the_first_pairs_only():
    rope = RopeConfig(theta=1e6, kind="proportional", rotary_fraction=0.25)
    got = np.asarray(rope_frequencies(rope, 32))
    np.testing.assert_allclose(got[:4], [1e6 ** (-2 * i / 32) for i in range(4)], rtol=1e-6)
    assert not got[4:].any()


def formula(params: Any, ids: np.ndarray) -> np.ndarray:
    """Gemma3's logits `[T, V]` for `ids [T]`, written out in float64; sizes and switches are those of `GEMMA3`."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    heads, groups, hd, window, length = 4, 2, 8, 3, len(ids)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + weight)

    def rotated(x, theta, factor):
        angles = np.arange(length)[:, None] / factor * theta ** (-np.arange(0, hd, 2) / hd)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]  # [T, 1, hd/2]
        first, second = x[..., : hd // 2], x[..., hd // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = params["embed"][ids] * math.sqrt(16)
    for i, layer in enumerate(params["layers"]):
        rope = (1e6, 8.0) if i == 1 else (1e4, 1.0)
        qkv = np.einsum("gqhd,td->gqth", layer["qkv"], norm(x, layer["input_norm"]))  # [G, Q+2, T, hd]
        mixed = np.zeros((length, heads, hd))
        for head in range(heads):
            group, slot = divmod(head, heads // groups)
            q = rotated(norm(qkv[group, slot], layer["q_norm"])[:, None], *rope)[:, 0]
            k = rotated(norm(qkv[group, -2], layer["k_norm"])[:, None], *rope)[:, 0]
            scores = 5.0 * np.tanh(q @ k.T * 10**-0.5 / 5.0)
            back = np.arange(length)[:, None] - np.arange(length)
            seen = (back >= 0) & ((back < window) | (i == 1))
            weights = np.where(seen, np.exp(scores), 0.0)
            mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ qkv[group, -1]
        out = np.einsum("dgqh,tgqh->td", layer["o"], mixed.reshape(length, groups, -1, hd))
        x = x + norm(out, layer["attn_out_norm"])
        gate, up = np.einsum("sfd,td->stf", layer["gate_up"], norm(x, layer["post_norm"]))
        x = x + norm(gelu(gate) * up @ layer["down"].T, layer["mlp_out_norm"])
    return 3.0 * np.tanh(norm(x, params["final_norm"]) @ params["embed"].T / 3.0)


def noisy(config: TransformerConfig) -> Any:
    """Parameters whose norms and scores are far from neutral."""
    params = init_params(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    lively = [leaf + 0.5 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, lively)


@pytest.fixture(scope="module")
def tiny() -> tuple[TransformerConfig, Any]:
    config = read(GEMMA3)
    return config, noisy(config)


def test_gemma3_follows_its_formulas_whole_and_in_chunks(tiny):
    config, params = tiny
    ids = np.random.default_rng(0).integers(0, 64, 12).astype(np.int32)
    want = formula(params, ids)
    hidden = run_forward(params, config, jnp.asarray(ids[None]))
    np.testing.assert_allclose(logits(params, hidden.final, config.final_softcap).T, want, atol=2e-4)
    cache, start, got = init_target_cache(config, 1, 16, jnp.float32), 0, []
    for size in (5, 1, 6):
        chunk = jnp.asarray(ids[start : start + size])
        hidden, cache = run_extend(params, config, cache, chunk, jnp.asarray([start]), dense_packing(1, size))
        got.append(logits(params, hidden.final, config.final_softcap).T)
        start += size
    np.testing.assert_allclose(np.concatenate(got), want, atol=2e-4)


# (rows of each request, how many of them stay): requests part at once, wait, and have rows rejected.
STEPS = [((3, 1, 2), (3, 1, 2)), ((0, 4, 3), (0, 3, 1)), ((2, 4, 1), (2, 2, 1)), ((4, 1, 4), (1, 1, 4))] * 3


def packed_steps(params: Any, config: TransformerConfig, ids: np.ndarray) -> list[list[np.ndarray]]:
    """Logits by position and request of `ids [R, T]`, taken in by `STEPS`; what is rejected are wrong tokens."""
    cache, start, got = init_target_cache(config, 3, 40, jnp.float32), np.zeros(3, np.int32), [[], [], []]
    for lengths, kept in STEPS:
        packing = ragged_packing(list(lengths), 4, 9)
        request, offset = np.asarray(packing.request), np.asarray(packing.offset)
        rows = ids[request, start[request] + offset]
        rows = np.where(offset < np.array(kept)[request], rows, (rows + 7) % config.vocab_size)
        hidden, cache = run_extend(params, config, cache, jnp.asarray(rows), jnp.asarray(start), packing)
        found = np.asarray(logits(params, hidden.final, config.final_softcap)).T
        for r, count in enumerate(kept):
            got[r].extend(found[packing.row[r, :count]])
        start += np.array(kept, np.int32)
    return got


@pytest.mark.parametrize("window", [3, 6])
@pytest.mark.parametrize("base", [GEMMA3, GEMMA4], ids=["gemma3", "gemma4"])
def test_packed_rows_of_several_requests_see_their_own_windows(base, window):
    """Requests at different positions in one pass: each has the logits of itself alone, read whole.

    Blocks of up to four rows: the window's edge lies before a block, and inside it where the window is shorter.
    """
    small = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "vocab_size": 64, "num_key_value_heads": 2}
    if base is GEMMA4:  # whose last layer is a full one, and full layers have other sizes
        kinds = [*GEMMA3["layer_types"], "full_attention"]
        small |= {"num_hidden_layers": 4, "layer_types": kinds, "global_head_dim": 16, "num_attention_heads": 4}
    config = read(base, **small, sliding_window=window)
    params, ids = noisy(config), np.random.default_rng(2).integers(0, 64, (3, 40)).astype(np.int32)
    for r, rows in enumerate(packed_steps(params, config, ids)):
        assert len(rows) == sum(kept[r] for _, kept in STEPS) > 2 * window
        alone = jnp.asarray(ids[r : r + 1, : len(rows)])
        want = logits(params, run_forward(params, config, alone).final, config.final_softcap).T
        np.testing.assert_allclose(rows, want, atol=5e-4)
        if base is GEMMA3 and window == 3:
            np.testing.assert_allclose(rows, formula(params, ids[r, : len(rows)]), atol=5e-4)


@pytest.mark.parametrize("base", [GEMMA3, GEMMA4], ids=["gemma3", "gemma4"])
def test_bf16_rows_give_the_same_bits_however_many_there_are(base):
    """A verified token must equal that of plain decoding, so rows may not depend on their number."""
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 64}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32, "sliding_window": 8}
    config = read(base, **small, **kinds, num_attention_heads=4, num_key_value_heads=2)
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    ids = np.random.default_rng(1).integers(0, 64, 16).astype(np.int32)

    def final(sizes: tuple[int, ...]) -> np.ndarray:
        cache, start, rows = init_target_cache(config, 1, 24, jnp.bfloat16), 0, []
        for size in sizes:
            chunk = jnp.asarray(ids[start : start + size])
            hidden, cache = run_extend(params, config, cache, chunk, jnp.asarray([start]), dense_packing(1, size))
            rows.append(np.asarray(logits(params, hidden.final, config.final_softcap)).T)
            start += size
        return np.concatenate(rows[1:])

    one_by_one = final((8,) + (1,) * 8)
    np.testing.assert_array_equal(final((8, 8)), one_by_one)
    np.testing.assert_array_equal(final((8, 5, 3)), one_by_one)
