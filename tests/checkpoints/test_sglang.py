"""Eagle3 of EAGLE's kind: layouts, drafts against a plain computation, lossless decoding, and what to refuse."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints import sglang
from dspark_jax.checkpoints.drafters import read_drafter
from dspark_jax.checkpoints.hf import read_hf_config
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.drafters import interface
from dspark_jax.drafters.dspark import bind
from dspark_jax.drafters.interface import Committed
from dspark_jax.models.attention import dense_packing
from dspark_jax.models.config import TransformerConfig
from dspark_jax.models.transformer import Hidden, init_params
from tests.checkpoints.tiny_drafters import (
    HIDDEN,
    KEPT,
    SIZES,
    VOCAB,
    eagle,
    edit,
    edit_tensors,
    float32,
    read_config,
    same_params,
    truncate,
)

DRAFTER = eagle()
EXPECTED = {
    "midlayer.hidden_norm.weight": (8,),
    "midlayer.input_layernorm.weight": (8,),
    "midlayer.post_attention_layernorm.weight": (8,),
    "midlayer.self_attn.q_proj.weight": (24, 16),
    "midlayer.self_attn.k_proj.weight": (12, 16),
    "midlayer.self_attn.v_proj.weight": (12, 16),
    "midlayer.self_attn.o_proj.weight": (8, 24),
    "midlayer.mlp.gate_proj.weight": (12, 8),
    "midlayer.mlp.up_proj.weight": (12, 8),
    "midlayer.mlp.down_proj.weight": (8, 12),
    "fc.weight": (8, 24),
    "norm.weight": (8,),
    "lm_head.weight": (9, 8),
    "d2t": (9,),
    "t2d": (24,),
}


@pytest.fixture
def folder(tmp_path):
    """A drafter in SGLang's format, to be changed."""
    sglang.write_drafter(tmp_path / "drafter", *DRAFTER)
    return tmp_path / "drafter"


def test_the_written_folder(folder):
    assert {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()} == EXPECTED
    config = read_config(folder)
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert (config["draft_vocab_size"], config["vocab_size"]) == (len(KEPT), VOCAB)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},  # the draft head is another one all the same
        {"eagle_config": ...},  # layers 1, 9 // 2 - 1 and 9 - 4
        {"eagle_config__eagle_aux_hidden_state_layer_ids": None},
        {"architectures": ["LlamaForCausalLM"]},  # EAGLE's own checkpoints
        {"draft_vocab_size": None, "num_aux_hidden_states": 3, "target_hidden_size": HIDDEN},
    ],
)
def test_layouts_of_the_same_drafter(changes, folder):
    edit(folder, **changes)
    config, params = float32(folder)
    assert config == DRAFTER[0]
    same_params(DRAFTER[1], params)


def test_a_published_config_needs_its_target(folder, golden):
    """It says neither how many layers the target has nor how many tokens to draft."""
    edit(folder, num_target_layers=..., ttt_length=..., eagle_config=...)
    with pytest.raises(ValueError, match="num_target_layers is missing: .*load the drafter together with its target"):
        float32(folder)
    target = replace(read_hf_config(golden / "targets/qwen3_untied"), num_layers=12)
    config, _ = read_drafter(folder, jnp.float32, target)
    assert config == replace(DRAFTER[0], block_size=7, num_target_layers=12, target_layer_ids=(1, 5, 8))


def test_a_full_vocabulary_uses_the_targets_head_where_it_brings_none(tmp_path):
    config, params = eagle(kept=None, own=())
    sglang.write_drafter(tmp_path / "d", config, params)
    assert read_config(tmp_path / "d")["draft_vocab_size"] is None
    same_params(params, float32(tmp_path / "d")[1])


def test_a_map_that_does_nothing_may_lie_beside_a_full_vocabulary(tmp_path):
    drafter = eagle(kept=None)
    sglang.write_drafter(tmp_path / "d", *drafter)
    edit_tensors(tmp_path / "d", {"d2t": np.zeros(VOCAB, np.int64), "t2d": np.ones(VOCAB, bool)})
    same_params(drafter[1], float32(tmp_path / "d")[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2': these drafters have a Llama layer"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2: these drafters have exactly one layer"),
        ({"bias": True}, "bias True: not supported"),
        ({"norm_before_residual": True}, "norm_before_residual True: not supported"),
        ({"target_hidden_size": 16}, "target_hidden_size 16: not supported"),
        ({"num_aux_hidden_states": 5}, "num_aux_hidden_states 5: not supported"),
        ({"eagle_config__use_aux_hidden_state": False}, "eagle_config: use_aux_hidden_state False"),
        ({"eagle_config__parallel_draft_step": 2}, "eagle_config: parallel_draft_step 2: an unknown field"),
        ({"eagle_config__eagle_aux_hidden_state_layer_ids": [1, 3, 8]}, "layer 8 is the last one"),
        ({"eagle_config__eagle_aux_hidden_state_layer_ids": [-1, 3, 5]}, "Eagle3 reads layers, not the embedding"),
    ],
)
def test_config_faults_name_file_and_field(changes, message, folder):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        float32(folder)


def test_weights_that_do_not_fit_are_named(folder):
    edit_tensors(folder, {"fc.bias": np.zeros(HIDDEN, np.float32)})
    with pytest.raises(ValueError, match="unexpected tensor fc.bias"):
        float32(folder)
    edit_tensors(folder, {"fc.bias": ..., "d2t": ...})
    with pytest.raises(ValueError, match="tensor d2t is missing"):
        float32(folder)
    truncate(folder)
    with pytest.raises(ValueError, match="drafter/model.safetensors: not a readable safetensors file"):
        float32(folder)


def test_a_tied_head_beside_another_of_the_same_size_is_refused(tmp_path):
    sglang.write_drafter(tmp_path / "d", *eagle(kept=None, own=("embed", "head")))
    edit(tmp_path / "d", tie_word_embeddings=True)
    with pytest.raises(ValueError, match="tie_word_embeddings true: but model.safetensors holds an embedding and"):
        float32(tmp_path / "d")


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + SIZES["rms_norm_eps"]) * weight


def rotated(x: np.ndarray) -> np.ndarray:
    """RoPE of `[T, heads, hd]` at positions 0..T-1, halves paired."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * SIZES["rope"].theta ** (-np.arange(half) / half)  # [T, hd / 2]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


def plain_layer(t: dict[str, np.ndarray], embedded: np.ndarray, state: np.ndarray, before: bool) -> np.ndarray:
    """EAGLE's layer over a whole sequence `[T, D]`, from the named tensors."""
    t = {name.removeprefix("midlayer."): tensor for name, tensor in t.items()}
    normed = norm(state, t["hidden_norm.weight"])
    x = np.concatenate([norm(embedded, t["input_layernorm.weight"]), normed], -1)
    q, k, v = ((x @ t[f"self_attn.{n}_proj.weight"].T).reshape(len(x), -1, SIZES["head_dim"]) for n in "qkv")
    q, k = rotated(q), rotated(k)
    k, v = (np.repeat(a, q.shape[1] // a.shape[1], 1) for a in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(SIZES["head_dim"])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
    x = (normed if before else state) + mixed @ t["self_attn.o_proj.weight"].T
    y = norm(x, t["post_attention_layernorm.weight"])
    gate = y @ t["mlp.gate_proj.weight"].T
    return x + (gate / (1 + np.exp(-gate)) * (y @ t["mlp.up_proj.weight"].T)) @ t["mlp.down_proj.weight"].T


@pytest.mark.parametrize("before", [False, True])
def test_drafts_equal_a_plain_computation(before, tmp_path):
    """Whole-sequence attention, recomputed for every draft token, on what the file holds; offsets mapped by hand."""
    config, params = eagle()
    sglang.write_drafter(tmp_path / "d", config, params, storage_dtype="float32")
    stored = load_file(tmp_path / "d/model.safetensors")
    config = replace(config, norm_before_residual=before)
    rng = np.random.default_rng(11)
    features = rng.normal(size=(5, 3 * HIDDEN)).astype(np.float32)  # of the prompt's tokens 0..4
    tokens = [3, 7, 1, 20, 9, 4]  # the last one is the anchor
    embed = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)

    state, wanted = features @ stored["fc.weight"].T, []
    for _ in range(config.block_size):
        out = plain_layer(stored, embed[[*tokens[1:], *wanted]], state, before)
        best = int(np.argmax(norm(out[-1], stored["norm.weight"]) @ stored["lm_head.weight"].T))
        wanted.append(best + int(stored["d2t"][best]))
        state = np.concatenate([state, out[-1:]])

    bound = bind(jax.tree.map(jnp.asarray, params), jnp.asarray(embed), jnp.zeros((VOCAB, HIDDEN)))

    @jax.jit
    def run(following):
        memory = interface.init_memory(config, 1, 16, jnp.float32)
        hidden = Hidden(jnp.zeros((HIDDEN, 5)), jnp.asarray(features.T))
        zero = jnp.zeros((1,), jnp.int32)
        new = Committed(hidden, zero, jnp.array([tokens[0]]), following, jnp.array([4]), dense_packing(1, 5))
        memory = interface.ingest(config, bound, memory, new)

        def draw(logits, slot):
            return jnp.argmax(logits, axis=0), jnp.ones(1), jnp.zeros((0, 1))

        return interface.propose(config, bound, memory, following[:, -1], jnp.array([5]), draw).tokens

    assert run(jnp.array([tokens[1:]]))[0].tolist() == wanted
    assert all(token in KEPT for token in wanted)


def test_greedy_decoding_equals_plain_decoding(tmp_path):
    drafter = replace(DRAFTER[0], num_target_layers=4, target_layer_ids=(0, 1, 2))
    sglang.write_drafter(tmp_path / "d", drafter, DRAFTER[1])
    sizes = {name: value for name, value in SIZES.items() if name != "num_target_layers"}
    config = TransformerConfig(
        family="llama", num_layers=4, qk_norm=False, tie_embeddings=False, num_tokens=VOCAB, **sizes
    )
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(3)))
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype), params)
    target = SimpleNamespace(config=config, params=params)
    read, weights = float32(tmp_path / "d")
    request = Request("0", (1, 2, 3), SamplingParams(max_tokens=10))

    def run(drafter):
        (done,) = Generator(target, drafter, stop_ids=()).generate([request])
        return done.token_ids

    assert run(SimpleNamespace(config=read, params=weights)) == run(None)
