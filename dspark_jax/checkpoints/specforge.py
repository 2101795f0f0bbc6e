"""DSpark drafters of SpecForge (`DSparkDraftModel`), both ways.

z-lab's layout with the heads' settings in `dflash_config` too, under `projector_type: "dspark"` (older configs name the
class `DFlashDraftModel`, and oldest files have the heads' tensors under `logit_head.`). The slot convention is
DeepSpec's: the anchor predicts, B slots give B drafts. Embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from dspark_jax.checkpoints import deepspec, foreign, zlab
from dspark_jax.checkpoints.fields import whole
from dspark_jax.checkpoints.store import read_json
from dspark_jax.checkpoints.tensors import Shape
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.models.config import TransformerConfig

CLASS = "DSparkDraftModel"
PROJECTOR = "dspark"
WHO = "SpecForge's DSpark format"
_SUPPORTED = zlab.SUPPORTED | {"shift_label": (None, True)}
_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_WRAPPED = ("logit_head.markov_head.", "logit_head.confidence_head.")


def read_drafter(
    folder: Path, dtype: DTypeLike, target: TransformerConfig | None = None
) -> tuple[DrafterConfig, dict[str, Any]]:
    """Reads a drafter; arguments, result and errors as `drafters.read_drafter`."""
    file = folder / deepspec.CONFIG_FILE
    raw = read_json(file)
    store = foreign.RenamedStore(folder, _unwrapped)
    with deepspec.naming(file):
        fields = _fields(raw, store.shapes(), target)
    return deepspec.assemble(file, fields, store, dtype)


def _unwrapped(name: str) -> str:
    return name.removeprefix("logit_head.") if name.startswith(_WRAPPED) else name


def _fields(raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: TransformerConfig | None) -> dict[str, Any]:
    """The config in DeepSpec's fields."""
    group, where = zlab.dflash_fields(raw, CLASS, zlab.CLASS), "dflash_config: "
    if group.get("projector_type") != PROJECTOR:
        raise ValueError(
            f"{where}projector_type {group.get('projector_type')!r}: must be {PROJECTOR!r} for a DSpark drafter"
        )
    known = {"mask_token_id", "target_layer_ids", "block_size", "projector_type", *_HEADS}
    foreign.refuse_unknown(group, known | {*_SUPPORTED, *zlab.TRAINING}, where)
    foreign.allow(raw, _SUPPORTED)
    foreign.allow(group, _SUPPORTED, where)
    fields = zlab.backbone_fields(raw, group, target)
    vocabulary = foreign.draft_vocabulary(raw, shapes, whole(raw, "vocab_size"))
    heads = foreign.head_fields((group, raw), shapes, whole(raw, "hidden_size"))
    return fields | heads | {"draft_vocab_size": vocabulary}


def write_drafter(
    folder: str | Path, config: Any, params: Mapping[str, Any], *, storage_dtype: str = "bfloat16"
) -> None:
    """Writes a drafter as a folder; arguments as `deepspec.write_drafter`.

    Raises:
        ValueError: what the format cannot hold, by name.
    """
    config = foreign.check_block(config, WHO)
    if not config.anchor_predicts:
        raise ValueError(
            f"anchor_predicts false: in {WHO} the anchor is the first prediction slot; weights of the two slot "
            "conventions are not interchangeable, so the drafter would have to be trained anew"
        )
    if config.trims_vocabulary:
        raise ValueError(
            f"draft_vocab_size {config.draft_vocab_size}: what W2 spans in {WHO} with a reduced vocabulary is not known"
        )
    foreign.refuse_embeddings(params, WHO)
    group = {
        **zlab.group_fields(config),
        "projector_type": PROJECTOR,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind if config.markov_rank else "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    fields = {"architectures": [CLASS], **zlab.top_fields(config), "dflash_config": group}
    deepspec.write_folder(folder, fields, deepspec.named_tensors(config, params, False), None, storage_dtype)
