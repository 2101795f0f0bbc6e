"""Eagle3 drafters in DeepSpec's folder format, and MTP drafters in one like it, both ways.

DeepSpec's Eagle3: class `Qwen3Eagle3Model`, the block length is `ttt_length`; tensors as a decoder layer's, with q, k
and v of 2D inputs, a `hidden_norm` per layer, `fc`, `norm`, embedding and head. Gemma's layers have their own norms,
and Gemma4's a `layer_scalar`, in drafters as in targets. A reduced draft vocabulary
adds `draft_vocab_size` and `d2t` (offsets) as in DSpark folders. MTP (`Qwen3MTPModel`): a plain decoder layer, and
`eh_proj`, `hnorm`, `enorm` named as DeepSeek-V3 names them; here `eh_proj` reads [state ; embedding] (facts section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dspark_jax.checkpoints import deepspec
from dspark_jax.checkpoints.fields import layer_ids, whole
from dspark_jax.checkpoints.store import TensorStore, read_json
from dspark_jax.checkpoints.tensors import Shape, check_tensors, layer_shapes, layer_tensors, read_layer, to_device
from dspark_jax.drafters.config import layer_fields
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.models.config import TransformerConfig
from dspark_jax.models.families import MODEL_TYPES

Config = Eagle3Config | MTPConfig
_LAYER = "layers.0."
CLASSES: dict[str, tuple[type, str]] = {
    "Qwen3Eagle3Model": (Eagle3Config, "qwen3"),
    "LlamaEagle3Model": (Eagle3Config, "llama"),
    "Gemma3Eagle3Model": (Eagle3Config, "gemma3"),
    "Gemma4Eagle3Model": (Eagle3Config, "gemma4"),
    "Qwen3MTPModel": (MTPConfig, "qwen3"),
    "LlamaMTPModel": (MTPConfig, "llama"),
    "Gemma3MTPModel": (MTPConfig, "gemma3"),
    "Gemma4MTPModel": (MTPConfig, "gemma4"),
}


def class_name(raw: Mapping[str, Any]) -> str | None:
    """The one class that a `config.json` names, or None."""
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None


def drafter_shapes(config: Config) -> dict[str, Shape]:
    """Names and shapes of all tensors that a folder may hold, embedding and head included."""
    d, eagle = config.hidden_size, isinstance(config, Eagle3Config)
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (config.vocab_size, d),
        "lm_head.weight": (config.draft_vocab_size, d),
        "norm.weight": (d,),
    } | layer_shapes(_LAYER, config, config.attention, attention_inputs=2 * d if eagle else d)
    if eagle:
        shapes |= {_LAYER + "hidden_norm.weight": (d,), "fc.weight": (d, len(config.target_layer_ids) * d)}
    else:
        shapes |= {"eh_proj.weight": (d, 2 * d), "hnorm.weight": (d,), "enorm.weight": (d,)}
    if config.trims_vocabulary:
        shapes["d2t"] = (config.draft_vocab_size,)
    return shapes


def read_drafter(folder: Path, dtype: DTypeLike) -> tuple[Config, dict[str, Any]]:
    """Reads an Eagle3 or MTP drafter; arguments, result and errors as `deepspec.read_drafter`."""
    file = folder / deepspec.CONFIG_FILE
    return assemble(file, read_json(file), TensorStore(folder), dtype)


def assemble(file: Path, raw: Mapping[str, Any], store: TensorStore, dtype: DTypeLike) -> tuple[Config, dict[str, Any]]:
    """Config and parameters from fields and tensors as above; arguments, result, errors as `deepspec.assemble`."""
    shapes = store.shapes()
    with deepspec.naming(file):
        config = _parse_config(raw, shapes)
    if config.trims_vocabulary and "d2t" not in shapes:
        raise ValueError(
            f"{store.path}: tensor d2t is missing: draft_vocab_size {config.draft_vocab_size} is smaller than "
            f"vocab_size {config.vocab_size}, and only d2t tells which target tokens the draft head covers"
        )
    optional = {"embed_tokens.weight"} if config.shares_embeddings else set()
    if config.shares_embeddings or config.trims_vocabulary:
        optional.add("lm_head.weight")
    check_tensors(
        store.path, shapes, drafter_shapes(config), optional=optional, ignored=lambda name: name in ("d2t", "t2d")
    )
    return config, _read_params(store, config, dtype)


def _parse_config(raw: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Config:
    kind, family = CLASSES[str(class_name(raw))]
    if MODEL_TYPES.get(str(raw.get("model_type"))) != family:
        raise ValueError(f"model_type {raw.get('model_type')!r}: must be {family!r} for class {class_name(raw)}")
    if raw.get("tie_word_embeddings"):
        raise ValueError("tie_word_embeddings true: a drafter holds its embedding and its head apart, must be false")
    ids = layer_ids(raw.get("target_layer_ids") or [], "target_layer_ids")
    sizes = TransformerConfig.from_hf(raw)
    if sizes.num_layers != 1:
        raise ValueError(f"num_hidden_layers {sizes.num_layers}: these drafters have exactly one layer")
    if any(sizes.pattern):
        raise ValueError(f"layer_types {raw.get('layer_types')!r}: the layer of a drafter must be full_attention")
    switches: dict[str, Any] = {}
    if kind is Eagle3Config:
        switches["norm_before_residual"] = bool(raw.get("norm_before_residual", False))
    config: Config = kind(
        **(layer_fields(sizes) | {"qk_norm": sizes.qk_norm or _LAYER + "self_attn.q_norm.weight" in shapes}),
        block_size=whole(raw, "ttt_length" if kind is Eagle3Config else "block_size"),
        target_layer_ids=tuple(ids),
        draft_vocab_size=whole(raw, "draft_vocab_size", sizes.vocab_size),
        shares_embeddings="embed_tokens.weight" not in shapes,
        num_target_layers=whole(raw, "num_target_layers"),
        **switches,
    )
    return config


def _read_params(store: TensorStore, config: Config, dtype: DTypeLike) -> dict[str, Any]:
    shapes = store.shapes()

    def array(name: str) -> jax.Array:
        return to_device(store.read(name), dtype)

    layer = read_layer(store.read, _LAYER, config, config.attention, dtype)  # "qkv": [G, Q + 2 or 1, hd, D or 2D]
    params: dict[str, Any] = {"norm": array("norm.weight")}  # [D]
    if isinstance(config, Eagle3Config):
        layer["hidden_norm"] = array(_LAYER + "hidden_norm.weight")  # [D]
        params["fc"] = array("fc.weight")  # [D, m*D]
    else:
        params |= {"proj": array("eh_proj.weight"), "hidden_norm": array("hnorm.weight")}
        params["embed_norm"] = array("enorm.weight")
    params["layers"] = (layer,)
    for ours, name in (("embed", "embed_tokens.weight"), ("head", "lm_head.weight")):
        if name in shapes:
            params[ours] = array(name)
    offsets = deepspec.read_offsets(store, config)
    if offsets is not None:
        params["d2t"] = jnp.asarray(offsets)  # int32 [Vd]
    return params


def config_fields(config: Config) -> dict[str, Any]:
    """`config.json`'s content for a drafter; `read_drafter` turns it into an equal config.

    Raises:
        ValueError: a family without a class, or a switch that its class cannot express.
    """
    names = {(kind, family): name for name, (kind, family) in CLASSES.items()}
    if (type(config), config.family) not in names:
        raise ValueError(f"family {config.family!r}: {type(config).__name__} has no class for it")
    fields = {
        "architectures": [names[type(config), config.family]],
        **deepspec.size_fields(config),
        "num_target_layers": config.num_target_layers,
    }
    if isinstance(config, Eagle3Config):
        fields |= {"ttt_length": config.block_size, "target_layer_ids": list(config.target_layer_ids)}
        fields["draft_num_hidden_layers"] = 1
        if config.norm_before_residual:
            fields["norm_before_residual"] = True
    else:
        fields["block_size"] = config.block_size
    if config.trims_vocabulary:
        fields["draft_vocab_size"] = config.draft_vocab_size
    return fields


def named_tensors(config: Config, params: Mapping[str, Any], embeddings: bool | None) -> dict[str, np.ndarray]:
    """All tensors of a drafter by name; arguments and errors as `deepspec.named_tensors`."""
    layer = params["layers"][0]
    named: dict[str, Any] = {"norm.weight": params["norm"], **layer_tensors(layer, _LAYER, config, config.attention)}
    if "hidden_norm" in layer:
        named[_LAYER + "hidden_norm.weight"] = layer["hidden_norm"]
    others = {"fc": "fc", "proj": "eh_proj", "hidden_norm": "hnorm", "embed_norm": "enorm"}
    named |= {f"{name}.weight": params[ours] for ours, name in others.items() if ours in params}
    named |= deepspec.embedding_tensors(params, embeddings)
    if "d2t" in params:
        named["d2t"] = params["d2t"]
    tensors = {name: np.asarray(value) for name, value in named.items()}
    optional = () if embeddings else ("embed_tokens.weight", "lm_head.weight")
    found = {name: value.shape for name, value in tensors.items()}
    check_tensors(Path("drafter parameters"), found, drafter_shapes(config), optional=optional)
    if config.trims_vocabulary:
        deepspec.check_offsets(tensors["d2t"], config)
    return tensors


def write_drafter(
    folder: str | Path,
    config: Config,
    params: Mapping[str, Any],
    *,
    extra: Mapping[str, Any] | None = None,
    storage_dtype: str = "bfloat16",
    include_embeddings: bool | None = True,
) -> None:
    """Writes an Eagle3 or MTP drafter as a folder; arguments and errors as `deepspec.write_drafter`."""
    tensors = named_tensors(config, params, include_embeddings)
    deepspec.write_folder(folder, config_fields(config), tensors, extra, storage_dtype)
