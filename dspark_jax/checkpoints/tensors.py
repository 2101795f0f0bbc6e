"""Between named checkpoint tensors and the parameter pytree: fused layouts, expected shapes, one check for all formats.

Checkpoints hold one matrix per projection, heads flattened; the pytree fuses q, k and v per KV head and gate with up
(one matrix product each). Both directions live here, for targets and drafters alike, because their layers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.recurrent import RecurrentConfig
from dspark_jax.models.config import AttentionConfig, TransformerConfig
from dspark_jax.models.families import FAMILIES

Shape = tuple[int, ...]
Sizes = TransformerConfig | DrafterConfig | RecurrentConfig
Read = Callable[[str], np.ndarray]

_NAMED_AT_MOST = 4  # names that an error lists before it only counts


# Tensors of the norms, by parameter name; with sandwich norms (Gemma) `post_attention_layernorm` is another one.
_NORMS = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}
_SANDWICH_NORMS = {
    "input_norm": "input_layernorm.weight",
    "attn_out_norm": "post_attention_layernorm.weight",
    "post_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}


def _norm_names(sandwich: bool) -> dict[str, str]:
    return _SANDWICH_NORMS if sandwich else _NORMS


def layer_shapes(prefix: str, sizes: Sizes, kind: AttentionConfig, *, attention_inputs: int = 0) -> dict[str, Shape]:
    """Names and shapes of one decoder layer's tensors in Hugging Face form; `prefix` ends with a dot.

    `attention_inputs`: what q, k and v read, where that is not the hidden size (Eagle3).
    """
    d, f, hd, traits = sizes.hidden_size, sizes.intermediate_size, kind.head_dim, FAMILIES[sizes.family]
    width = attention_inputs or d
    queries, keys = sizes.num_heads * hd, kind.num_kv_heads * hd
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (d, queries),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
    }
    shapes |= {name: (d,) for name in _norm_names(traits.sandwich_norms).values()}
    if kind.shared_kv:
        del shapes["self_attn.v_proj.weight"]
    if sizes.qk_norm:
        shapes["self_attn.q_norm.weight"] = (hd,)
        shapes["self_attn.k_norm.weight"] = (hd,)
    if traits.layer_scalar:
        shapes["layer_scalar"] = (1,)
    return {prefix + name: shape for name, shape in shapes.items()}


def target_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Names and shapes of all tensors of a target, in Hugging Face form."""
    d, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    for i in range(config.num_layers):
        shapes |= layer_shapes(f"model.layers.{i}.", config, config.attention(i))
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (vocab, d)
    return shapes


def read_target_params(read: Read, config: TransformerConfig, dtype: DTypeLike) -> dict[str, Any]:
    """Builds a target's parameters; `read` gives a tensor by its Hugging Face name, shaped as `target_shapes` says."""
    params: dict[str, Any] = {
        "embed": to_device(read("model.embed_tokens.weight"), dtype),  # [V, D]
        "layers": tuple(
            read_layer(read, f"model.layers.{i}.", config, config.attention(i), dtype) for i in range(config.num_layers)
        ),
        "final_norm": to_device(read("model.norm.weight"), dtype),  # [D]
    }
    if not config.tie_embeddings:
        params["head"] = to_device(read("lm_head.weight"), dtype)  # [V, D]
    return params


def read_layer(
    read: Read,
    prefix: str,
    sizes: Sizes,
    kind: AttentionConfig,
    dtype: DTypeLike,
    *,
    separate_queries: bool = False,
) -> dict[str, jax.Array]:
    """Builds one layer's parameters; `read` gives a tensor by its Hugging Face name, shaped as `layer_shapes` says.

    With `separate_queries` (block drafters, whose context has keys and values only) `qkv` comes as `q` and `kv`.
    """
    d, hd, groups, traits = sizes.hidden_size, kind.head_dim, kind.num_kv_heads, FAMILIES[sizes.family]

    def heads(name: str, count: int) -> np.ndarray:
        weight = read(f"{prefix}self_attn.{name}_proj.weight")
        return weight.reshape(groups, count, hd, weight.shape[-1])

    names = ("k",) if kind.shared_kv else ("k", "v")
    q, kv = heads("q", sizes.num_heads // groups), [heads(name, 1) for name in names]  # [G, Q, hd, D], [G, 1, hd, D]
    layer = {
        "o": read(prefix + "self_attn.o_proj.weight").reshape(d, groups, -1, hd),  # [D, G, Q, hd]
        "gate_up": np.stack([read(prefix + f"mlp.{name}_proj.weight") for name in ("gate", "up")]),  # [2, F, D]
        "down": read(prefix + "mlp.down_proj.weight"),  # [D, F]
    }
    layer |= {ours: read(prefix + name) for ours, name in _norm_names(traits.sandwich_norms).items()}  # [D] each
    if separate_queries:
        layer |= {"q": q, "kv": np.concatenate(kv, axis=1)}  # [G, Q, hd, D], [G, 2 or 1, hd, D]
    else:
        layer["qkv"] = np.concatenate([q, *kv], axis=1)  # [G, Q + 2 or 1, hd, D]
    if sizes.qk_norm:
        layer["q_norm"] = read(prefix + "self_attn.q_norm.weight")  # [hd]
        layer["k_norm"] = read(prefix + "self_attn.k_norm.weight")  # [hd]
    if traits.layer_scalar:
        layer["scalar"] = read(prefix + "layer_scalar")[0]  # []
    return {name: to_device(array, dtype) for name, array in layer.items()}


def layer_tensors(layer: Mapping[str, Any], prefix: str, sizes: Sizes, kind: AttentionConfig) -> dict[str, np.ndarray]:
    """The inverse of `read_layer`: one layer's parameters as named tensors, in the dtype that they have."""
    traits = FAMILIES[sizes.family]
    parts = ("qkv",) if "qkv" in layer else ("q", "kv")
    qkv = np.concatenate([np.asarray(layer[name]) for name in parts], axis=1)  # [G, Q + 2 or 1, hd, D]
    width, queries = qkv.shape[-1], sizes.num_heads // kind.num_kv_heads
    gate_up = np.asarray(layer["gate_up"])  # [2, F, D]
    tensors = {
        "self_attn.q_proj.weight": qkv[:, :queries].reshape(-1, width),  # [H*hd, D]
        "self_attn.k_proj.weight": qkv[:, queries].reshape(-1, width),  # [G*hd, D]
        "self_attn.o_proj.weight": np.asarray(layer["o"]).reshape(sizes.hidden_size, -1),  # [D, H*hd]
        "mlp.gate_proj.weight": gate_up[0],
        "mlp.up_proj.weight": gate_up[1],
        "mlp.down_proj.weight": layer["down"],
    }
    tensors |= {name: layer[ours] for ours, name in _norm_names(traits.sandwich_norms).items() if ours in layer}
    if not kind.shared_kv:
        tensors["self_attn.v_proj.weight"] = qkv[:, queries + 1].reshape(-1, width)  # [G*hd, D]
    if "q_norm" in layer:
        tensors["self_attn.q_norm.weight"] = layer["q_norm"]
        tensors["self_attn.k_norm.weight"] = layer["k_norm"]
    if traits.layer_scalar:
        tensors["layer_scalar"] = np.asarray(layer.get("scalar", np.ones((), np.float32))).reshape(1)
    return {prefix + name: np.asarray(array) for name, array in tensors.items()}


def to_device(array: np.ndarray, dtype: DTypeLike) -> jax.Array:
    """Copies a host array to the default device as `dtype`, cast on the host, so that the device holds one copy."""
    return jnp.array(np.asarray(array, dtype=np.dtype(dtype)), copy=True)


def check_tensors(
    file: Path,
    found: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    *,
    optional: Iterable[str] = (),
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Compares a checkpoint's table of contents with what its config asks for, before any tensor is read.

    Args:
        file: named in the errors.
        found: shapes by name, as the checkpoint has them. expected: as they must be.
        optional: names of `expected` that may be absent. ignored: tells names that carry no weights.

    Raises:
        ValueError: missing, unexpected or mis-shaped tensors, by name.
    """
    missing = sorted(set(expected) - set(found) - set(optional))
    if missing:
        raise ValueError(f"{file}: {_listing('missing tensor', missing)}; config and weights do not belong together")
    unexpected = sorted(name for name in set(found) - set(expected) if not ignored(name))
    if unexpected:
        raise ValueError(
            f"{file}: {_listing('unexpected tensor', unexpected)}; the config knows no use for it, and leaving it out "
            "would change the computation"
        )
    for name, shape in expected.items():
        if name in found and tuple(found[name]) != tuple(shape):
            raise ValueError(f"{file}: tensor {name} has shape {list(found[name])}, the config asks for {list(shape)}")


def _listing(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return f"{kind}{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED_AT_MOST])}{more}"
