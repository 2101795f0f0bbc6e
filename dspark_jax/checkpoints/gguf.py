"""Targets from GGUF files (llama.cpp's format), dequantised to plain arrays.

Three things differ from a Hugging Face checkpoint. Weights may be quantised in blocks. For the arch `llama` the rows of
the q and k projections are permuted, because llama.cpp rotates neighbouring pairs (2i, 2i+1) where Hugging Face rotates
halves (i, i + hd/2); the permutation is undone here, the other archs are stored unpermuted. And the norm weights of
`gemma3` are stored with the 1 that its RMSNorm adds to them, which is taken off again.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.constants import TokenType
from gguf.quants import QuantError, dequantize
from jax.typing import DTypeLike

from dspark_jax.checkpoints.tensors import Shape, check_tensors, read_target_params, target_shapes
from dspark_jax.models.config import AttentionConfig, RopeConfig, TransformerConfig
from dspark_jax.models.families import FAMILIES

# GGUF names by the part of a Hugging Face name between "model.layers.{i}." and ".weight".
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ARCHS = ("gemma3", "llama", "qwen3")
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PERMUTED_FAMILIES = {"llama"}

# Keys under "{arch}." whose meaning is covered; any other one must be empty, because it may change the computation.
_KNOWN_KEYS = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
_GEMMA_KEYS = {
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping",
    "attn_logit_softcapping",
}  # fmt: skip
_LAYERS_OF_27B = 62  # the size whose scores are scaled by its hidden size over its heads, which no key says


class _PlainReader(GGUFReader):
    """A reader whose arrays are plain views of the mapped file: reads a vocabulary three times faster than memmaps."""

    def _get(self, *args: Any, **options: Any) -> Any:
        self.data: Any = np.asarray(self.data)
        return super()._get(*args, **options)


class GGUFFile:
    """An opened GGUF file: metadata values by key and tensors by name. Data stay on disk until a tensor is read."""

    def __init__(self, path: str | Path) -> None:
        """Opens `path` and reads the metadata.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a GGUF file, truncated, corrupt, of the other byte order, or one part of a split model.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{path}: no such GGUF file")
        try:
            self._reader = _PlainReader(self.path)
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, OSError) as error:
            raise ValueError(f"{path}: not a readable GGUF file, truncated or corrupt ({error})") from error
        if self._reader.byte_order != "I":
            raise ValueError(f"{path}: written for the other byte order; convert it to this machine's")
        parts = self.get("split.count") or 1
        if parts > 1:
            raise ValueError(f"{path}: one of {parts} parts; merge them with llama-gguf-split --merge")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key (str, int, float, bool, or a list of these), or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """The value of a metadata key that must be there.

        Raises:
            ValueError: it is absent.
        """
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.path}: metadata key {key} is missing")
        return value

    def keys(self) -> list[str]:
        """All metadata keys."""
        return list(self._reader.fields)

    def shapes(self) -> dict[str, Shape]:
        """Shapes of all tensors, slowest axis first (GGUF stores them the other way round)."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32.

        Raises:
            ValueError: its quantisation has no decoder.
        """
        tensor = self._tensors[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, QuantError) as error:
            raise ValueError(f"{self.path}: tensor {name} of type {tensor.tensor_type.name}: {error}") from error

    def num_tokens(self) -> int:
        """Tokens that the tokenizer knows: the token list without the unused entries that pad it at the end.

        Raises:
            ValueError: no token list.
        """
        kinds = self.get("tokenizer.ggml.token_type")
        count = len(self.need("tokenizer.ggml.tokens"))
        while kinds and count > 1 and kinds[count - 1] == TokenType.UNUSED:
            count -= 1
        return count


def read_gguf_target(path: str | Path, dtype: DTypeLike) -> tuple[TransformerConfig, dict[str, Any]]:
    """Reads a target model from a GGUF file.

    Args:
        path: a file of arch llama, qwen3 or gemma3; any quantisation that the `gguf` package can decode.
        dtype: dtype of every parameter array.

    Returns:
        The config and the parameter pytree (weights [out, in], q, k, v and gate, up fused).

    Raises:
        FileNotFoundError: no such file.
        ValueError: unreadable file, unsupported arch or setting, missing, unexpected or mis-shaped tensors.
    """
    file = GGUFFile(path)
    shapes = file.shapes()
    config = gguf_config(file)
    expected = {gguf_name(name, config.family): shape for name, shape in target_shapes(config).items()}
    check_tensors(file.path, shapes, expected, ignored=lambda name: name == "rope_freqs.weight")

    def read(name: str) -> np.ndarray:
        array = file.read(gguf_name(name, config.family))
        if config.traits.norm_offset and name.endswith("norm.weight"):
            array = array - np.float32(config.traits.norm_offset)
        if config.family in _PERMUTED_FAMILIES and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = pairs_to_halves(array, config.head_dim)
        return array

    return config, read_target_params(read, config, dtype)


def gguf_name(name: str, family: str = "llama") -> str:
    """GGUF's name of a Hugging Face tensor name (ending in `.weight`)."""
    layer_names = _GEMMA_NAMES if family == "gemma3" else _LAYER_NAMES
    stem = name.removesuffix(".weight")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if layer:
        return f"blk.{layer[1]}.{layer_names[layer[2]]}.weight"
    return f"{_TOP_NAMES[stem]}.weight"


def pairs_to_halves(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders each head's rows of a projection [heads*hd, D] from rotated pairs (2i, 2i+1) to halves (i, i + hd/2)."""
    columns = weight.shape[-1]
    pairs = weight.reshape(-1, head_dim // 2, 2, columns)  # [heads, hd/2, 2, D]
    return pairs.swapaxes(1, 2).reshape(-1, columns)


def gguf_config(file: GGUFFile) -> TransformerConfig:
    """The target's config from a GGUF file's metadata.

    Raises:
        ValueError: an unsupported arch, a missing key, or a setting that the forward pass does not cover.
    """
    arch = file.need("general.architecture")
    if arch not in _ARCHS:
        raise ValueError(f"{file.path}: general.architecture {arch!r}: supported are {list(_ARCHS)}")
    _refuse_unknown_keys(file, arch)

    def size(key: str, default: int | None = None) -> int:
        value = file.need(f"{arch}.{key}") if default is None else file.get(f"{arch}.{key}", default)
        if not isinstance(value, int):
            raise ValueError(f"{file.path}: {arch}.{key} {value!r}: only one number for all layers is supported")
        return value

    shapes = file.shapes()
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{file.path}: missing tensor token_embd.weight")
    heads, hidden, positions = size("attention.head_count"), size("embedding_length"), size("context_length")
    head_dim = size("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if size(key, head_dim) != head_dim:
            raise ValueError(f"{file.path}: {arch}.{key} {size(key)}: must equal the head size {head_dim}")
    vocab = shapes["token_embd.weight"][0]
    tokens = file.num_tokens()
    if tokens > vocab:
        raise ValueError(f"{file.path}: the tokenizer has {tokens} tokens, token_embd.weight only {vocab} rows")
    groups, layers = size("attention.head_count_kv", heads), size("block_count")
    full = AttentionConfig(groups, head_dim, RopeConfig())
    extra = _gemma_fields(file, hidden // heads, layers, full) if arch == "gemma3" else {}
    return TransformerConfig(
        family=arch,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=size("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=_short_float(file.need(f"{arch}.attention.layer_norm_rms_epsilon")),
        rope=_gguf_rope(file, arch, head_dim, positions),
        qk_norm=FAMILIES[arch].qk_norm,
        tie_embeddings="output.weight" not in shapes,
        max_positions=positions,
        num_tokens=tokens,
        **extra,
    )


def _gemma_fields(file: GGUFFile, width: int, layers: int, full: AttentionConfig) -> dict[str, Any]:
    """What Gemma3 adds: sliding layers (five of six, unless a key says otherwise), soft caps, the score scale.

    `width`: hidden size over heads. `full`: sizes of the attention layers.
    """

    def number(key: str, default: float) -> float:
        return _short_float(file.get(f"gemma3.{key}", default))

    every = file.get("gemma3.attention.sliding_window_pattern", 6)
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"{file.path}: gemma3.attention.sliding_window_pattern {every!r}: must be one positive number")
    rope = RopeConfig(theta=number("rope.freq_base_swa", 10000.0))
    return {
        "attention_scale": float(width if layers == _LAYERS_OF_27B else full.head_dim) ** -0.5,
        "attention_softcap": number("attn_logit_softcapping", 0.0),
        "final_softcap": number("final_logit_softcapping", 0.0),
        "sliding": replace(full, rope=rope, window=int(file.need("gemma3.attention.sliding_window"))),
        "pattern": tuple(bool((i + 1) % every) for i in range(layers)),
    }


def _refuse_unknown_keys(file: GGUFFile, arch: str) -> None:
    """Refuses keys under "{arch}." that may change the computation, unless they are zero, false or empty."""
    for key in file.keys():
        name = key.removeprefix(f"{arch}.")
        if not key.startswith(f"{arch}.") or name in _KNOWN_KEYS or (arch == "gemma3" and name in _GEMMA_KEYS):
            continue
        value = file.get(key)
        if key == f"{arch}.attention.causal":
            value = not value
        if value:
            raise ValueError(f"{file.path}: {key} = {file.get(key)!r}: not supported, may change the computation")


def _short_float(value: float) -> float:
    """The shortest decimal that is the same float32 (GGUF stores 1e-5 as 9.999999747e-06)."""
    return float(str(np.float32(value)))


def _gguf_rope(file: GGUFFile, arch: str, head_dim: int, positions: int) -> RopeConfig:
    """RoPE settings from `{arch}.rope.*`, and llama3's scaling from the `rope_freqs.weight` tensor."""

    def number(key: str, default: float) -> float:
        return _short_float(file.get(f"{arch}.rope.{key}", default))

    theta = number("freq_base", 10000.0)
    kind = file.get(f"{arch}.rope.scaling.type", "none")
    factor = number("scaling.factor", number("scale_linear", 1.0))
    if "rope_freqs.weight" in file.shapes():
        if kind != "none":
            raise ValueError(f"{file.path}: rope_freqs.weight together with rope scaling {kind!r} is not supported")
        return _llama3_rope(file, theta, head_dim)
    if kind == "none" and factor in (0.0, 1.0):
        return RopeConfig(theta=theta)
    if kind in ("none", "linear"):
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        raise ValueError(f"{file.path}: {arch}.rope.scaling.type {kind!r}: supported are none, linear, yarn")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=int(file.get(f"{arch}.rope.scaling.original_context_length") or positions),
        beta_fast=number("scaling.yarn_beta_fast", 32.0),
        beta_slow=number("scaling.yarn_beta_slow", 1.0),
        attention_factor=number("scaling.attn_factor", 1.0) * (1.0 + 0.1 * math.log(max(factor, 1.0))),
    )


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> RopeConfig:
    """Recovers llama3's scaling from the divisors of the frequencies, the only trace that a GGUF file keeps of it.

    Low frequencies are divided by the factor, high ones by 1, those between by a blend that depends on the original
    context length. Llama 3 always uses the band edges 1 and 4, so the length is found by trying powers of two.
    """
    divisors = file.read("rope_freqs.weight").reshape(-1)  # [hd/2]
    if divisors.shape != (head_dim // 2,):
        raise ValueError(f"{file.path}: rope_freqs.weight has shape {list(divisors.shape)}, must be [{head_dim // 2}]")
    if np.allclose(divisors, 1.0):
        return RopeConfig(theta=theta)
    factor = float(divisors.max())
    turns_per_token = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)  # [hd/2]
    for original in (2**n for n in range(10, 21)):
        blend = np.clip((original * turns_per_token - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(1.0 / ((1.0 - blend) / factor + blend), divisors, rtol=1e-4):
            return RopeConfig(theta=theta, kind="llama3", factor=factor, original_max_position=original)
    raise ValueError(f"{file.path}: rope_freqs.weight holds divisors that are not a llama3 scaling; not supported")
