"""Folders of any kind of drafter, this project's and those of others: `config.json` says which format it is.

deepspec      DeepSpec's DSpark, DFlash and Eagle3; this project writes its own drafters so, MTP included
zlab          z-lab's DFlash, SpecForge's DFlash
specforge     SpecForge's DSpark
speculators   vLLM's library: DSpark, DFlash, Eagle3
sglang        Eagle3 of EAGLE, SGLang and SpecForge
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from dspark_jax.checkpoints import deepspec, recurrent, sglang, specforge, speculators, zlab
from dspark_jax.checkpoints.store import read_json
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.interface import AnyConfig
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.models.config import TransformerConfig

logger = logging.getLogger(__name__)
TITLES = {
    "deepspec": "DeepSpec",
    "zlab": "z-lab",
    "specforge": "SpecForge",
    "speculators": "speculators",
    "sglang": "SGLang/EAGLE",
}
_OTHERS = {"zlab": zlab, "specforge": specforge, "speculators": speculators, "sglang": sglang}


def format_of(raw: Mapping[str, Any]) -> str:
    """The format, a key of `TITLES`, that a `config.json` belongs to; `deepspec` (whose reader refuses) if none."""
    name = recurrent.class_name(raw)
    group = raw.get("dflash_config")
    if speculators.TYPE_FIELD in raw:
        return "speculators"
    if name == specforge.CLASS or (isinstance(group, Mapping) and group.get("projector_type") == specforge.PROJECTOR):
        return "specforge"
    if name == zlab.CLASS or group is not None:
        return "zlab"
    if name == sglang.CLASS or (name == sglang.PLAIN_CLASS and "draft_vocab_size" in raw):
        return "sglang"
    return "deepspec"


def describe(config: AnyConfig, format_name: str) -> str:
    """One line for a log: what was recognised, and what was taken for granted."""
    if isinstance(config, DrafterConfig):
        kind = "DSpark" if config.markov_rank or config.confidence else "DFlash"
        anchor = "the anchor predicts" if config.anchor_predicts else "slot 0 is the anchor and predicts nothing"
        slots = f"{anchor}: {config.block_slots} slots give {config.block_size} drafts"
    else:
        kind = type(config).__name__.removesuffix("Config")
        slots = f"{config.block_size} drafts"
    layers = ", ".join(map(str, getattr(config, "target_layer_ids", ()))) or "none"
    return f"{kind} drafter in {TITLES[format_name]} format; {slots}; outputs of target layers {layers} (from 0)"


def read_drafter(
    folder: str | Path, dtype: DTypeLike, target: TransformerConfig | None = None
) -> tuple[AnyConfig, dict[str, Any]]:
    """Reads a drafter's config and parameters, and logs what it was recognised as.

    Args:
        folder, dtype: as `deepspec.read_drafter`, which also tells result and errors.
        target: its config, for formats that do not say how many layers the target has.

    Raises:
        ValueError: also a format that leaves open what it must say, and no `target` to fill it in.
    """
    folder = Path(folder)
    raw = read_json(folder / deepspec.CONFIG_FILE)
    name = format_of(raw)
    config: AnyConfig
    if name in _OTHERS:
        config, params = _OTHERS[name].read_drafter(folder, dtype, target)
    elif recurrent.class_name(raw) in recurrent.CLASSES:
        config, params = recurrent.read_drafter(folder, dtype)
    else:
        config, params = deepspec.read_drafter(folder, dtype)
    logger.info("%s: %s", folder, describe(config, name))
    return config, params


def write_drafter(folder: str | Path, config: AnyConfig, params: Mapping[str, Any], **options: Any) -> None:
    """Writes a drafter as a folder in this project's own format; options and errors as `deepspec.write_drafter`.

    It is DeepSpec's, with more than DeepSpec itself reads: reduced vocabularies, MTP, Llama and Gemma3 layers.

    Raises:
        ValueError: also for a drafter without weights.
    """
    if isinstance(config, DrafterConfig):
        deepspec.write_drafter(folder, config, params, **options)
    elif isinstance(config, Eagle3Config | MTPConfig):
        recurrent.write_drafter(folder, config, params, **options)
    else:
        raise ValueError(f"{folder}: a drafter of type {type(config).__name__} has no weights to write")
