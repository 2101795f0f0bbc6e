"""Writes small GGUF files for the tests: random targets of arch llama and qwen3 with a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, TokenType
from tokenizers.pre_tokenizers import ByteLevel

from dspark_jax.checkpoints.gguf import gguf_name
from dspark_jax.checkpoints.tensors import target_shapes
from dspark_jax.models.config import RopeConfig, TransformerConfig
from dspark_jax.models.families import FAMILIES

MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ċ Ċ", "Ġ Ġ", "e r"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small_config(arch: str, *, tied: bool = False, **changes: Any) -> TransformerConfig:
    """Two layers, three query heads per KV head for llama, two for qwen3; every row is a multiple of 32."""
    sizes: dict[str, Any] = {
        "family": arch,
        "vocab_size": 300,
        "hidden_size": 96 if arch == "llama" else 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 6 if arch == "llama" else 4,
        "num_kv_heads": 2,
        "head_dim": 16 if arch == "llama" else 24,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0),
        "qk_norm": FAMILIES[arch].qk_norm,
        "tie_embeddings": tied,
        "max_positions": 512,
        "num_tokens": len(token_list()),
    }
    return TransformerConfig(**{**sizes, **changes})


def random_tensors(config: TransformerConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of a target, by Hugging Face name."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in target_shapes(config).items()}


def token_list() -> list[str]:
    """Specials, the 256 byte tokens, and what the merges make."""
    return SPECIALS + sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]


def halves_to_pairs(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row i and row i + hd/2 of a head become neighbours."""
    out = np.empty_like(weight)
    for start in range(0, weight.shape[0], head_dim):
        for i in range(head_dim // 2):
            out[start + 2 * i] = weight[start + i]
            out[start + 2 * i + 1] = weight[start + head_dim // 2 + i]
    return out


@dataclass
class Recipe:
    """What goes into a file; tests change it to make faulty ones.

    Attributes:
        keys: metadata by key. tensors: float32 arrays by GGUF name, matrices stored as `kind`.
        tokens, token_types, tokenizer: the token list, its types, and the tokenizer's other keys.
        raw: further tensors, given as stored bytes and their type.
    """

    arch: str
    keys: dict[str, Any]
    tensors: dict[str, np.ndarray]
    tokens: list[str]
    token_types: list[int]
    tokenizer: dict[str, Any] = field(default_factory=dict)
    kind: GGMLQuantizationType = GGMLQuantizationType.F32
    raw: dict[str, tuple[np.ndarray, GGMLQuantizationType]] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Writes the file, matrices quantised as `kind`, vectors as float32."""
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in {**self.keys, **self.tokenizer}.items():
            add_value(writer, key, value)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.token_types)
        for name, array in self.tensors.items():
            kind = self.kind if array.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        for name, (data, raw_kind) in self.raw.items():
            writer.add_tensor(name, data, raw_dtype=raw_kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a metadata value under the type that fits it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def recipe(config: TransformerConfig, tensors: Mapping[str, np.ndarray], *, unused: int = 0) -> Recipe:
    """A sound file for a target given by Hugging Face tensors; `unused` padding entries end the token list."""
    arch = config.family
    keys = {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_positions,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope.theta,
    }
    permuted = ("q_proj.weight", "k_proj.weight")
    stored = {
        gguf_name(name, arch): halves_to_pairs(array, config.head_dim)
        if arch == "llama" and name.endswith(permuted)
        else array
        for name, array in tensors.items()
    }
    tokens = token_list()
    types = [int(TokenType.CONTROL)] * len(SPECIALS) + [int(TokenType.NORMAL)] * (len(tokens) - len(SPECIALS))
    return Recipe(
        arch=arch,
        keys=keys,
        tensors=stored,
        tokens=tokens + [f"[PAD{i}]" for i in range(unused)],
        token_types=types + [int(TokenType.UNUSED)] * unused,
        tokenizer=tokenizer_keys(),
    )


def tokenizer_keys(pre: str = "smollm", merges: Sequence[str] = tuple(MERGES)) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer, without its token list."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
