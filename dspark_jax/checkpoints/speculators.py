"""Drafters of vLLM's speculators library (`speculators_model_type` dspark, dflash or eagle3), both ways.

The layers' config is nested (`transformer_layer_config`, which leaves out what equals its class's defaults). Target
layers count from the embedding, so each id is one more than here: `aux_hidden_state_layer_ids`, in Eagle3
`eagle_aux_hidden_state_layer_ids`. `sample_from_anchor` is the slot convention (true: the anchor predicts); DFlash
files from before that field have it false, but DSpark files without it exist of both kinds and are refused. A reduced
vocabulary has `d2t` (int64 offsets) and `t2d` (bool). `verifier_norm` and `verifier_lm_head` are the target's, for
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from dspark_jax.checkpoints import deepspec, foreign, recurrent, sglang
from dspark_jax.checkpoints.fields import layer_ids, whole
from dspark_jax.checkpoints.store import read_json
from dspark_jax.checkpoints.tensors import Shape
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.interface import AnyConfig
from dspark_jax.models.config import TransformerConfig

TYPE_FIELD = "speculators_model_type"
WHO = "speculators' format"
_KINDS = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "eagle3": "Eagle3Speculator"}
_LAYER = "transformer_layer_config"
_BLOCK_IDS, _EAGLE_IDS = "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"
_TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")
_HOISTED = ("layer_types", "use_sliding_window", "sliding_window")  # may lie beside the nested config

# Defaults of the config classes of transformers, which nested configs leave out.
_DEFAULTS: dict[str, dict[str, int]] = {
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
}
_BLOCK_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash"),
    "shift_label": (None, False),
    "enable_correction_head": (None, False),
    "topk_context": (None, 0),
    "causal": (None, False),
}
_EAGLE_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "norm_before_fc": (None, False),
    "fc_norm": (None, False),
    "norm_output": (None, False),
}


def read_drafter(
    folder: Path, dtype: DTypeLike, target: TransformerConfig | None = None
) -> tuple[AnyConfig, dict[str, Any]]:
    """Reads a drafter; arguments, result and errors as `drafters.read_drafter`."""
    file = folder / deepspec.CONFIG_FILE
    raw = read_json(file)
    store = foreign.RenamedStore(folder, lambda name: None if name in _TRAINING_ONLY else name)
    shapes = store.shapes()
    with deepspec.naming(file):
        kind = raw.get(TYPE_FIELD)
        if kind not in _KINDS:
            raise ValueError(f"{TYPE_FIELD} {kind!r}: not supported, right would be one of {sorted(_KINDS)}")
        fields = _eagle_fields(raw, shapes, target) if kind == "eagle3" else _block_fields(raw, shapes, target)
        anchor_predicts = kind == "eagle3" or _samples_from_anchor(raw)
    if kind == "eagle3":
        return recurrent.assemble(file, fields, store, dtype)
    return deepspec.assemble(file, fields, store, dtype, anchor_predicts=anchor_predicts)


def _layer_fields(raw: Mapping[str, Any], target: TransformerConfig | None) -> dict[str, Any]:
    """The nested config with its class's defaults, and what both kinds of drafters have beside it."""
    layer = foreign.nested(raw, _LAYER)
    kind = str(layer.get("model_type"))
    if kind not in _DEFAULTS:
        raise ValueError(f"{_LAYER}: model_type {kind!r}: not supported, right would be one of {sorted(_DEFAULTS)}")
    layer |= {name: raw[name] for name in _HOISTED if name in raw}
    fields = _DEFAULTS[kind] | {name: value for name, value in layer.items() if value is not None}
    foreign.allow(raw, {"target_hidden_size": (None, fields["hidden_size"])})
    return fields | {"tie_word_embeddings": False, "num_target_layers": foreign.target_layers(raw, target)}


def _block_fields(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: TransformerConfig | None
) -> dict[str, Any]:
    """A DSpark or DFlash config in DeepSpec's fields. Its layers are Qwen3's, also where they call themselves llama."""
    foreign.allow(raw, _BLOCK_SUPPORTED)
    fields = _layer_fields(raw, target)
    slots = whole(raw, "block_size")
    heads = foreign.head_fields((raw,), shapes, fields["hidden_size"])
    if raw[TYPE_FIELD] == "dflash":
        heads = {"markov_rank": 0, "enable_confidence_head": False}
    return {
        **fields,
        **heads,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": slots - (not _samples_from_anchor(raw)),
        "mask_token_id": raw.get("mask_token_id"),
        "target_layer_ids": layer_ids(raw.get(_BLOCK_IDS), _BLOCK_IDS, offset=1),
        "draft_vocab_size": foreign.draft_vocabulary(raw, shapes, fields["vocab_size"]),
    }


def _samples_from_anchor(raw: Mapping[str, Any]) -> bool:
    value = raw.get("sample_from_anchor")
    if value is None and raw[TYPE_FIELD] == "dspark":
        raise ValueError(
            "sample_from_anchor is missing: DSpark files without it exist in both slot conventions; set it to true if "
            "the anchor's slot predicts the first draft token, to false if it predicts nothing"
        )
    if not isinstance(value, bool | None):
        raise ValueError(f"sample_from_anchor {value!r}: must be true or false")
    return bool(value)


def _eagle_fields(
    raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: TransformerConfig | None
) -> dict[str, Any]:
    """An Eagle3 config in DeepSpec's fields."""
    foreign.allow(raw, _EAGLE_SUPPORTED)
    fields = _layer_fields(raw, target)
    if not isinstance(raw.get("norm_before_residual"), bool):
        raise ValueError(
            f"norm_before_residual {raw.get('norm_before_residual')!r}: must be true or false, readers differ in what "
            "they take for granted"
        )
    ids = sglang.default_layer_ids(fields["num_target_layers"])
    if raw.get(_EAGLE_IDS) is not None:
        ids = layer_ids(raw[_EAGLE_IDS], _EAGLE_IDS, offset=1)
    return {
        **fields,
        "architectures": ["Qwen3Eagle3Model" if fields["model_type"] == "qwen3" else "LlamaEagle3Model"],
        "ttt_length": _speculative_tokens(raw) or sglang.DRAFT_TOKENS,
        "target_layer_ids": ids,
        "draft_vocab_size": foreign.draft_vocabulary(raw, shapes, fields["vocab_size"]),
        "norm_before_residual": raw["norm_before_residual"],
    }


def _speculative_tokens(raw: Mapping[str, Any]) -> int | None:
    """Draft tokens of one round, where the first proposal method says it."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def write_drafter(
    folder: str | Path,
    config: Any,
    params: Mapping[str, Any],
    *,
    storage_dtype: str = "bfloat16",
    verifier: Mapping[str, Any] | None = None,
) -> None:
    """Writes a drafter as a folder; arguments as `deepspec.write_drafter`.

    Args:
        verifier: the target, `{"name_or_path": str or None, "architectures": [str]}`.

    Raises:
        ValueError: what the format cannot hold, by name.
    """
    if isinstance(config, Eagle3Config):
        fields = _written_eagle(config, params)
        tensors = recurrent.named_tensors(config, params, None)
    elif not isinstance(config, DrafterConfig):
        raise ValueError(
            f"a drafter of type {type(config).__name__}: {WHO} is written for DSpark, DFlash and Eagle3 drafters only"
        )
    else:
        fields = _written_block(foreign.check_block(config, WHO), params)
        tensors = deepspec.named_tensors(config, params, None)
    kind = fields[TYPE_FIELD]
    drafts = {"proposal_type": "greedy", "speculative_tokens": config.block_size}
    fields |= {
        "architectures": [_KINDS[kind]],
        "draft_vocab_size": config.draft_vocab_size,
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [drafts],
            "verifier": dict(verifier or {"name_or_path": None, "architectures": []}),
        },
    }
    deepspec.write_folder(folder, fields, foreign.vocabulary_tensors(config, tensors), None, storage_dtype)


def _written_block(config: DrafterConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """What a DSpark or DFlash config alone says; without heads it is DFlash only where the anchor predicts nothing."""
    _need_head(config, params)
    headless = not config.markov_rank and not config.confidence and not config.anchor_predicts
    fields = {
        TYPE_FIELD: "dflash" if headless else "dspark",
        _LAYER: deepspec.size_fields(config),
        "block_size": config.block_slots,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_predicts,
        _BLOCK_IDS: [i + 1 for i in config.target_layer_ids],
    }
    if not headless:
        fields |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_kind if config.markov_rank else "vanilla",
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    return fields


def _written_eagle(config: Eagle3Config, params: Mapping[str, Any]) -> dict[str, Any]:
    """What an Eagle3 config alone says."""
    if len(config.target_layer_ids) != sglang.LAYERS_READ:
        raise ValueError(
            f"target_layer_ids {list(config.target_layer_ids)}: Eagle3 in {WHO} reads exactly {sglang.LAYERS_READ} "
            "layers"
        )
    if config.qk_norm != (config.family == "qwen3"):
        raise ValueError(f"family {config.family!r} with qk_norm {config.qk_norm}: {WHO} has norms in 'qwen3' only")
    _need_head(config, params)
    return {
        TYPE_FIELD: "eagle3",
        _LAYER: deepspec.size_fields(config),
        "norm_before_residual": config.norm_before_residual,
        _EAGLE_IDS: [i + 1 for i in config.target_layer_ids],
    }


def _need_head(config: DrafterConfig | Eagle3Config, params: Mapping[str, Any]) -> None:
    """Refuses a drafter whose head would have to be stored, but is the target's."""
    needed = config.trims_vocabulary or isinstance(config, Eagle3Config)
    if needed and "head" not in params:
        raise ValueError(
            f"draft_vocab_size {config.draft_vocab_size} without a head of the drafter's own: {WHO} stores it for "
            "Eagle3 and for reduced vocabularies; give the target (--target), whose rows are then taken"
        )
