"""DFlash drafters of z-lab (`DFlashDraftModel`), both ways; SpecForge writes its DFlash drafters in the same format.

A Qwen3 config with `dflash_config: {mask_token_id, target_layer_ids}`, and `block_size` at the top or in there. Layers
are numbered as in DeepSpec, embedding and head are the target's. Slot 0 is the anchor and predicts nothing: B slots
give B - 1 drafts. Such weights run here with `anchor_predicts` false, and are never turned into the other convention.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from dspark_jax.checkpoints import deepspec, foreign
from dspark_jax.checkpoints.fields import layer_ids, whole
from dspark_jax.checkpoints.store import read_json
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.models.config import TransformerConfig

CLASS = "DFlashDraftModel"
WHO = "z-lab's DFlash format"
_GROUP = "dflash_config"
_IN = f"{_GROUP}: "  # begins errors about a field in there
_OWN = ("mask_token_id", "target_layer_ids", "block_size")

# Fields that change the computation, with the values under which it is the one that runs here.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, False),
    "causal": (None, False),
    "attention_mode": (None, "gqa", "mha"),  # one computation: mha is gqa with as many key heads as query heads
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "pure_draft_prefix_len": (None, 0),
    "rope_is_neox_style": (None, True),
}
_SUPPORTED = SUPPORTED | {"projector_type": (None, "dflash"), "shift_label": (None, False)}
# Of training only.
TRAINING = ("num_anchors", "loss_decay_gamma", "loss_type", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")


def read_drafter(
    folder: Path, dtype: DTypeLike, target: TransformerConfig | None = None
) -> tuple[DrafterConfig, dict[str, Any]]:
    """Reads a drafter; arguments, result and errors as `drafters.read_drafter`."""
    file = folder / deepspec.CONFIG_FILE
    raw = read_json(file)
    with deepspec.naming(file):
        fields = _fields(raw, target)
    return deepspec.assemble(file, fields, foreign.RenamedStore(folder), dtype, anchor_predicts=False)


def _fields(raw: Mapping[str, Any], target: TransformerConfig | None) -> dict[str, Any]:
    """The config in DeepSpec's fields."""
    group = dflash_fields(raw, CLASS)
    foreign.refuse_unknown(group, {*_OWN, *_SUPPORTED, *TRAINING}, _IN)
    foreign.allow(raw, _SUPPORTED)
    foreign.allow(group, _SUPPORTED, _IN)
    fields = backbone_fields(raw, group, target)
    if fields["block_size"] < 2:
        raise ValueError(f"block_size {fields['block_size']}: slot 0 predicts nothing, so there must be at least 2")
    return fields | {"block_size": fields["block_size"] - 1, "markov_rank": 0, "enable_confidence_head": False}


def dflash_fields(raw: Mapping[str, Any], *classes: str) -> dict[str, Any]:
    """`dflash_config` of a config of one of `classes`.

    Raises:
        ValueError: another class, or no such object.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in classes:
        right = [[name] for name in classes]
        raise ValueError(f"architectures {names!r}: not supported, right would be one of {right}")
    return foreign.nested(raw, _GROUP)


def backbone_fields(
    raw: Mapping[str, Any], group: Mapping[str, Any], target: TransformerConfig | None
) -> dict[str, Any]:
    """DeepSpec's fields of a backbone; `block_size` still counts slots.

    Raises:
        ValueError: no Qwen3 layers, or a field that is missing.
    """
    if raw.get("model_type") != "qwen3":
        raise ValueError(f"model_type {raw.get('model_type')!r}: these drafters have Qwen3 layers, must be 'qwen3'")
    sizes = [size for size in (raw.get("block_size"), group.get("block_size")) if size is not None]
    if not sizes or any(size != sizes[0] for size in sizes):
        raise ValueError(f"block_size {sizes}: must be given once, at the top or in {_GROUP}")
    return {
        **{name: value for name, value in raw.items() if name != _GROUP and value is not None},
        "architectures": ["Qwen3DSparkModel"],
        "tie_word_embeddings": False,
        "block_size": whole({"block_size": sizes[0]}, "block_size"),
        "mask_token_id": group.get("mask_token_id"),
        "target_layer_ids": layer_ids(group.get("target_layer_ids"), f"{_IN}target_layer_ids"),
        "num_target_layers": foreign.target_layers(raw, target),
    }


def write_drafter(
    folder: str | Path, config: Any, params: Mapping[str, Any], *, storage_dtype: str = "bfloat16"
) -> None:
    """Writes a drafter as a folder; arguments as `deepspec.write_drafter`.

    Raises:
        ValueError: what the format cannot hold, by name.
    """
    config = foreign.check_block(config, WHO)
    if config.anchor_predicts:
        raise ValueError(
            f"anchor_predicts true: in {WHO} slot 0 predicts nothing; weights of the two slot conventions are not "
            "interchangeable, so the drafter would have to be trained anew"
        )
    if config.markov_rank:
        raise ValueError(f"markov_rank {config.markov_rank}: {WHO} has no Markov head")
    if config.confidence:
        raise ValueError(f"enable_confidence_head true: {WHO} has no confidence head")
    if config.trims_vocabulary:
        raise ValueError(f"draft_vocab_size {config.draft_vocab_size}: {WHO} has no reduced vocabulary")
    foreign.refuse_embeddings(params, WHO)
    fields = {"architectures": [CLASS], **top_fields(config), _GROUP: group_fields(config)}
    deepspec.write_folder(folder, fields, deepspec.named_tensors(config, params, False), None, storage_dtype)


def top_fields(config: DrafterConfig) -> dict[str, Any]:
    """The fields outside of `dflash_config`, without the class."""
    sizes = {"block_size": config.block_slots, "num_target_layers": config.num_target_layers}
    return deepspec.size_fields(config) | sizes


def group_fields(config: DrafterConfig) -> dict[str, Any]:
    """The fields of `dflash_config` that every drafter has."""
    return {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
