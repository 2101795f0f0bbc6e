"""Eagle3 drafters of EAGLE, SGLang and SpecForge (`LlamaForCausalLMEagle3`), both ways.

A Llama config with `draft_vocab_size`; tensors `midlayer.*` (one Llama layer of 2D inputs, no q and k norms), `fc` on
three target layers, `norm`, `lm_head` of the draft vocabulary, its map `d2t` (offsets) and `t2d`; the embedding is
mostly the target's. The layers read are `eagle_config.eagle_aux_hidden_state_layer_ids`, numbered as here (SGLang adds
one, since it captures a layer's input), or else the outputs of layers 1, L/2 - 1 and L - 4.

How many tokens to draft is a serving option there and not in the config: `ttt_length` says it in files written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from dspark_jax.checkpoints import deepspec, foreign, recurrent
from dspark_jax.checkpoints.fields import layer_ids, whole
from dspark_jax.checkpoints.store import read_json
from dspark_jax.checkpoints.tensors import Shape
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.models.config import TransformerConfig

CLASS = "LlamaForCausalLMEagle3"
PLAIN_CLASS = "LlamaForCausalLM"  # what EAGLE's own checkpoints say; they have a draft_vocab_size
WHO = "SGLang's Eagle3 format"
DRAFT_TOKENS = 7  # where a config does not say: the steps that SpecForge and DeepSpec train
LAYERS_READ = 3
_IDS = "eagle_aux_hidden_state_layer_ids"
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": (None, False),
    "norm_before_residual": (None, False),
    "norm_before_fc": (None, False),
    "fc_norm": (None, False),
    "norm_output": (None, False),
}


def default_layer_ids(num_layers: int) -> list[int]:
    """The layers that EAGLE reads of a target of `num_layers` layers, where nothing else is said."""
    return [1, num_layers // 2 - 1, num_layers - 4]


def read_drafter(
    folder: Path, dtype: DTypeLike, target: TransformerConfig | None = None
) -> tuple[recurrent.Config, dict[str, Any]]:
    """Reads a drafter; arguments, result and errors as `drafters.read_drafter`."""
    file = folder / deepspec.CONFIG_FILE
    raw = read_json(file)
    store = foreign.RenamedStore(folder, _to_deepspec)
    with deepspec.naming(file):
        fields = _fields(raw, store.shapes(), target)
    config, params = recurrent.assemble(file, fields, store, dtype)
    both = "embed" in params and "head" in params and not config.trims_vocabulary
    if raw.get("tie_word_embeddings") and both and (params["head"] != params["embed"]).any():
        raise ValueError(
            f"{file}: tie_word_embeddings true: but {store.path.name} holds an embedding and another head of the same "
            "size; say which by setting it to false, or leave one of the tensors out"
        )
    return config, params


def _to_deepspec(name: str) -> str:
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _fields(raw: Mapping[str, Any], shapes: Mapping[str, Shape], target: TransformerConfig | None) -> dict[str, Any]:
    """The config in DeepSpec's fields."""
    if raw.get("model_type") != "llama":
        raise ValueError(f"model_type {raw.get('model_type')!r}: these drafters have a Llama layer, must be 'llama'")
    foreign.allow(raw, _SUPPORTED)
    hidden = whole(raw, "hidden_size")
    foreign.allow(raw, {"target_hidden_size": (None, hidden)})
    layers = foreign.target_layers(raw, target)
    vocabulary = whole(raw, "vocab_size")
    ids = _layer_ids(raw, layers)
    foreign.allow(raw, {"num_aux_hidden_states": (None, len(ids))})
    return {
        **{name: value for name, value in raw.items() if value is not None},
        "architectures": ["LlamaEagle3Model"],
        "tie_word_embeddings": False,
        "target_layer_ids": ids,
        "num_target_layers": layers,
        "draft_vocab_size": foreign.draft_vocabulary(raw, shapes, vocabulary),
        "ttt_length": raw.get("ttt_length") or DRAFT_TOKENS,
    }


def _layer_ids(raw: Mapping[str, Any], layers: int) -> list[int]:
    if raw.get("eagle_config") is None:
        return default_layer_ids(layers)
    group = foreign.nested(raw, "eagle_config")
    foreign.refuse_unknown(group, {_IDS, "use_aux_hidden_state"}, "eagle_config: ")
    foreign.allow(group, {"use_aux_hidden_state": (None, True)}, "eagle_config: ")
    if group.get(_IDS) is None:
        return default_layer_ids(layers)
    return layer_ids(group[_IDS], f"eagle_config: {_IDS}")


def write_drafter(
    folder: str | Path, config: Any, params: Mapping[str, Any], *, storage_dtype: str = "bfloat16"
) -> None:
    """Writes a drafter as a folder; arguments as `deepspec.write_drafter`.

    Raises:
        ValueError: what the format cannot hold, by name.
    """
    if not isinstance(config, Eagle3Config):
        raise ValueError(f"a drafter of type {type(config).__name__}: {WHO} holds Eagle3 drafters only")
    if config.family != "llama" or config.qk_norm:
        raise ValueError(
            f"family {config.family!r} with qk_norm {config.qk_norm}: {WHO} has one Llama layer without q and k norms"
        )
    if len(config.target_layer_ids) != LAYERS_READ:
        raise ValueError(f"target_layer_ids {list(config.target_layer_ids)}: {WHO} reads exactly {LAYERS_READ} layers")
    if config.norm_before_residual:
        raise ValueError(f"norm_before_residual true: {WHO} has the state as it is on the residual stream")
    if "head" not in params and config.trims_vocabulary:
        raise ValueError(
            f"draft_vocab_size {config.draft_vocab_size} without a head of the drafter's own: {WHO} stores it; give "
            "the target (--target), whose rows are then taken"
        )
    fields = {
        "architectures": [CLASS],
        **deepspec.size_fields(config),
        "num_target_layers": config.num_target_layers,
        "draft_vocab_size": config.draft_vocab_size if "head" in params else None,  # null: the target's head
        "ttt_length": config.block_size,
        "eagle_config": {_IDS: list(config.target_layer_ids), "use_aux_hidden_state": True},
    }
    tensors = foreign.vocabulary_tensors(config, recurrent.named_tensors(config, params, None))
    tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    deepspec.write_folder(folder, fields, tensors, None, storage_dtype)
