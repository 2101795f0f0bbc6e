"""DSpark and DFlash drafters in the folder format of DeepSpec: `config.json` + `model.safetensors`, both ways.

The config is the target's config with some fields replaced and the drafter's own added. The class name in
`architectures` fixes the slot convention, which no tensor shows: in `*DSparkModel` (DFlash of this project and of
DeepSpec included) slot 0, the anchor, is the first prediction slot. Where it predicts nothing, as in z-lab's
`DFlashDraftModel`, the same weights would draft at acceptance near zero, so every other class is refused.

A reduced draft vocabulary adds `draft_vocab_size` and the tensor `d2t`, offsets: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from dspark_jax.checkpoints.fields import layer_ids, whole
from dspark_jax.checkpoints.store import SINGLE_FILE, TensorStore, read_json
from dspark_jax.checkpoints.tensors import Shape, check_tensors, layer_shapes, layer_tensors, read_layer, to_device
from dspark_jax.drafters.config import CALIBRATION, DrafterConfig, check_calibration, layer_fields
from dspark_jax.drafters.recurrent import RecurrentConfig
from dspark_jax.models.config import RopeConfig, TransformerConfig
from dspark_jax.models.families import FAMILIES, MODEL_TYPES

_CLASSES = {
    "Qwen3DSparkModel": "qwen3",
    "LlamaDSparkModel": "llama",
    "Gemma3DSparkModel": "gemma3",
    "Gemma4DSparkModel": "gemma4",
}
_WRITTEN_TYPES = {"gemma3": "gemma3_text", "gemma4": "gemma4_unified_text"}  # model_type, where it is not the family
_OTHER_CLASSES = {
    "DFlashDraftModel": "z-lab's slot convention: the anchor slot predicts nothing, B slots give B - 1 drafts",
    "DSparkDraftModel": "SpecForge's layout: everything under dflash_config",
    "Qwen3Eagle3Model": "an Eagle3 drafter, read it by `load_drafter`",
    "Gemma4Eagle3Model": "an Eagle3 drafter, read it by `load_drafter`",
    "LlamaForCausalLMEagle3": "an Eagle3 drafter in SGLang's format, read it by `load_drafter`",
}
_STORAGE = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_STORED_AS = {"d2t": np.dtype(np.int64), "t2d": np.dtype(np.bool_)}  # the vocabulary map, whatever the others' dtype
CONFIG_FILE = "config.json"

# Parameter names of the sequential heads, and their tensors.
_MARKOV_TENSORS = {
    "w1": "markov_head.markov_w1.weight",
    "w2": "markov_head.markov_w2.weight",
    "gate_w": "markov_head.gate_proj.weight",
    "gate_b": "markov_head.gate_proj.bias",
    "joint_w": "markov_head.joint_proj.weight",
    "joint_b": "markov_head.joint_proj.bias",
}
_MARKOV_PARAMS = {
    "none": (),
    "vanilla": ("w1", "w2"),
    "gated": ("w1", "w2", "gate_w", "gate_b"),
    "rnn": ("w1", "w2", "joint_w", "joint_b"),
}


def read_drafter(folder: str | Path, dtype: DTypeLike) -> tuple[DrafterConfig, dict[str, Any]]:
    """Reads a drafter from a DeepSpec folder.

    Args:
        folder: holds `config.json` and `model.safetensors` (or an index and shards).
        dtype: dtype of every parameter array but `d2t`, which is int32.

    Returns:
        The config and the parameter pytree. `embed` and `head` are in it where the file has them;
        `config.shares_embeddings` tells that `embed` is not.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another class or format, a config that contradicts itself, damaged files, tensors that do not fit.
    """
    folder = Path(folder)
    raw = read_json(folder / CONFIG_FILE)
    with naming(folder / CONFIG_FILE):
        _family(raw)
    return assemble(folder / CONFIG_FILE, raw, TensorStore(folder), dtype)


def assemble(
    file: Path, raw: Mapping[str, Any], store: TensorStore, dtype: DTypeLike, *, anchor_predicts: bool = True
) -> tuple[DrafterConfig, dict[str, Any]]:
    """Config and parameters from DeepSpec's fields and tensors, which may be those of another format translated.

    Args:
        file: named in errors about `raw`. raw: `config.json`'s content. store: tensors by DeepSpec's names.
        dtype, result and errors: as `read_drafter`. anchor_predicts: the slot convention (`DrafterConfig`).
    """
    shapes = store.shapes()
    with naming(file):
        config = _parse_config(raw, _family(raw), shapes, anchor_predicts)
    if config.trims_vocabulary and "d2t" not in shapes:
        raise ValueError(
            f"{store.path}: tensor d2t is missing: draft_vocab_size {config.draft_vocab_size} is smaller than "
            f"vocab_size {config.vocab_size}, and only d2t tells which target tokens the draft head covers"
        )
    optional = {"embed_tokens.weight"} if config.shares_embeddings else set()
    if config.shares_embeddings or config.trims_vocabulary:
        optional.add("lm_head.weight")  # the target's head takes its place, row by row through d2t
    expected = drafter_shapes(config)
    check_tensors(store.path, shapes, expected, optional=optional, ignored=lambda name: name in ("d2t", "t2d"))
    return config, _read_params(store, config, dtype)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Puts the file's name before the message of an error about its content."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


def drafter_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """Names and shapes of all tensors that a drafter's folder may hold, embedding and head included."""
    d, vocab, drafts, rank = config.hidden_size, config.vocab_size, config.draft_vocab_size, config.markov_rank
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (vocab, d),
        "lm_head.weight": (drafts, d),
        "fc.weight": (d, len(config.target_layer_ids) * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for i in range(config.num_layers):
        shapes |= layer_shapes(f"layers.{i}.", config, config.attention)
    markov = {
        "w1": (vocab, rank),
        "w2": (drafts, rank),
        "gate_w": (rank, d + rank),
        "gate_b": (rank,),
        "joint_w": (3 * rank, 2 * rank + d),
        "joint_b": (3 * rank,),
    }
    shapes |= {_MARKOV_TENSORS[name]: markov[name] for name in _MARKOV_PARAMS[config.markov_kind]}
    if config.confidence:
        shapes["confidence_head.proj.weight"] = (1, d + rank * config.confidence_with_markov)
        shapes["confidence_head.proj.bias"] = (1,)
    if config.trims_vocabulary:
        shapes["d2t"] = (drafts,)
    return shapes


def _family(raw: Mapping[str, Any]) -> str:
    """The family behind `architectures`; any class but ours is refused, with what is known about it."""
    if "speculators_model_type" in raw or "dflash_config" in raw:
        key = "speculators_model_type" if "speculators_model_type" in raw else "dflash_config"
        raise ValueError(
            f"{key} {raw[key]!r}: another project's format, whose slot convention and layer numbering may differ; only "
            f"DeepSpec folders of class {sorted(_CLASSES)} are read"
        )
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name not in _CLASSES:
        reason = _OTHER_CLASSES.get(str(name), "its slot convention is unknown")
        raise ValueError(
            f"architectures {names!r}: {reason}; supported are {sorted(_CLASSES)}, where the anchor slot predicts the "
            "first draft token"
        )
    family = _CLASSES[name]
    if MODEL_TYPES.get(str(raw.get("model_type"))) != family:
        written = _WRITTEN_TYPES.get(family, family)
        raise ValueError(f"model_type {raw.get('model_type')!r}: must be {written!r} for class {name}")
    return family


def _parse_config(
    raw: Mapping[str, Any], family: str, shapes: Mapping[str, Shape], anchor_predicts: bool
) -> DrafterConfig:
    def flag(name: str, default: bool = False) -> bool:
        value = raw.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"config field {name} {value!r}: must be true or false")
        return value

    if flag("tie_word_embeddings"):
        raise ValueError("tie_word_embeddings true: a drafter holds its embedding and its head apart, must be false")
    ids = layer_ids(raw.get("target_layer_ids") or [], "target_layer_ids")
    for name in ("num_target_layers", "block_size", "mask_token_id"):
        if raw.get(name) is None:
            raise ValueError(f"config field {name} is missing: a drafter's config.json must hold it")
    sizes = TransformerConfig.from_hf(raw)
    rank = whole(raw, "markov_rank", 0)
    if any(sizes.pattern):
        raise ValueError(f"layer_types {raw.get('layer_types')!r}: every layer of a drafter must be full_attention")
    qk_norm = FAMILIES[family].qk_norm or flag("qk_norm", "layers.0.self_attn.q_norm.weight" in shapes)
    return DrafterConfig(
        **(layer_fields(sizes) | {"qk_norm": qk_norm, "family": family}),
        block_size=whole(raw, "block_size"),
        num_layers=sizes.num_layers,
        target_layer_ids=tuple(ids),
        mask_token_id=whole(raw, "mask_token_id"),
        draft_vocab_size=whole(raw, "draft_vocab_size", sizes.vocab_size),
        markov_rank=rank,
        markov_kind=raw.get("markov_head_type", "vanilla") if rank else "none",
        confidence=flag("enable_confidence_head"),
        confidence_with_markov=flag("confidence_head_with_markov"),
        shares_embeddings="embed_tokens.weight" not in shapes,
        num_target_layers=whole(raw, "num_target_layers"),
        anchor_predicts=anchor_predicts,
        confidence_temperatures=_numbers(raw, "confidence_temperatures"),
        confidence_biases=_numbers(raw, "confidence_biases"),
    )


def _numbers(raw: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """A field of the confidence head's calibration; an empty list, null or no field at all where there is none."""
    value = raw.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or any(isinstance(t, bool) or not isinstance(t, int | float) for t in value):
        raise ValueError(f"config field {name} {value!r}: must be a list of numbers")
    return tuple(map(float, value))


def _read_params(store: TensorStore, config: DrafterConfig, dtype: DTypeLike) -> dict[str, Any]:
    shapes = store.shapes()

    def array(name: str) -> jax.Array:
        return to_device(store.read(name), dtype)

    params: dict[str, Any] = {
        "fc": array("fc.weight"),  # [D, m*D]
        "hidden_norm": array("hidden_norm.weight"),  # [D]
        "layers": tuple(
            read_layer(store.read, f"layers.{i}.", config, config.attention, dtype, separate_queries=True)
            for i in range(config.num_layers)
        ),
        "norm": array("norm.weight"),  # [D]
    }
    for ours, name in (("embed", "embed_tokens.weight"), ("head", "lm_head.weight")):
        if name in shapes:
            params[ours] = array(name)  # [V, D], [Vd, D]
    if config.markov_rank:
        params["markov"] = {name: array(_MARKOV_TENSORS[name]) for name in _MARKOV_PARAMS[config.markov_kind]}
    if config.confidence:
        params["confidence"] = {
            "w": array("confidence_head.proj.weight")[0],  # [D (+ r)]
            "b": array("confidence_head.proj.bias")[0],  # []
        }
    offsets = read_offsets(store, config)
    if offsets is not None:
        params["d2t"] = jnp.asarray(offsets)  # int32 [Vd]
    return params


def read_offsets(store: TensorStore, config: Any) -> np.ndarray | None:
    """The vocabulary map as int32 offsets `[Vd]`, checked; None for a full draft vocabulary.

    Raises:
        ValueError: not offsets of distinct target tokens, a map beside a full vocabulary, or a `t2d` that differs.
    """
    if "d2t" not in store.shapes():
        return None
    offsets = store.read("d2t")
    if not np.issubdtype(offsets.dtype, np.integer):
        raise ValueError(f"{store.path}: tensor d2t has dtype {offsets.dtype}, must be an integer type")
    if not config.trims_vocabulary:
        if offsets.any():
            raise ValueError(
                f"{store.path}: tensor d2t maps draft tokens, but draft_vocab_size is vocab_size ({config.vocab_size})"
            )
        return None
    check_offsets(offsets, config, f"{store.path}: tensor d2t")
    if "t2d" in store.shapes():
        covered = np.zeros(config.vocab_size, bool)
        covered[offsets + np.arange(config.draft_vocab_size)] = True
        if not np.array_equal(store.read("t2d").astype(bool), covered):
            raise ValueError(f"{store.path}: tensors t2d and d2t name different target tokens")
    return offsets.astype(np.int32)


def check_offsets(offsets: np.ndarray, config: Any, name: str = "d2t") -> None:
    """Checks that `offsets [Vd]` map draft ids to distinct target ids.

    Raises:
        ValueError: a target id outside the vocabulary, or two draft ids with the same one.
    """
    targets = offsets.astype(np.int64) + np.arange(offsets.shape[0])  # [Vd]
    if targets.min() < 0 or targets.max() >= config.vocab_size:
        raise ValueError(
            f"{name}: draft ids map to target ids {targets.min()}..{targets.max()}, must lie in "
            f"0..{config.vocab_size - 1} (d2t holds offsets: target id = draft id + d2t[draft id])"
        )
    if len(np.unique(targets)) != len(targets):
        raise ValueError(f"{name}: two draft ids map to the same target id (d2t holds offsets, not target ids)")


def write_drafter(
    folder: str | Path,
    config: DrafterConfig,
    params: Mapping[str, Any],
    *,
    extra: Mapping[str, Any] | None = None,
    storage_dtype: str = "bfloat16",
    include_embeddings: bool | None = True,
) -> None:
    """Writes a drafter as a DeepSpec folder, all or nothing: a reader sees the old folder or the new one.

    Args:
        folder: made, with its parents; an older drafter in it is replaced.
        config: the drafter's config. params: its parameters, as `read_drafter` gives them.
        extra: further config fields, such as `num_anchors`.
        storage_dtype: "bfloat16", "float16" or "float32", of every tensor but `d2t` (int64).
        include_embeddings: whether `embed` and `head` are stored; without, a reader uses the target's. None: those that
            the parameters hold.

    Raises:
        ValueError: parameters that do not fit the config, an `extra` field that contradicts it, or a folder that holds
            other files.
    """
    write_folder(folder, config_fields(config), named_tensors(config, params, include_embeddings), extra, storage_dtype)


def write_folder(
    folder: str | Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    extra: Mapping[str, Any] | None,
    storage_dtype: str,
) -> None:
    """Writes `config.json` and the weights of any kind of drafter; `write_drafter` explains the arguments and errors.

    Args:
        fields: the config's own fields. tensors: by name; `d2t` is stored as int64, `t2d` as bool.
    """
    folder = Path(folder)
    if storage_dtype not in _STORAGE:
        raise ValueError(f"storage_dtype {storage_dtype!r}: must be one of {sorted(_STORAGE)}")
    fields = {**fields, "dtype": storage_dtype}
    for name, value in (extra or {}).items():
        if name in fields and fields[name] != value:
            raise ValueError(f"extra field {name} {value!r}: the drafter's config says {fields[name]!r}")
    dtype = _STORAGE[storage_dtype]
    stored = {name: np.ascontiguousarray(tensor, _STORED_AS.get(name, dtype)) for name, tensor in tensors.items()}
    with _replacing(folder) as fresh:
        save_file(stored, fresh / SINGLE_FILE, metadata={"format": "pt"})
        text = json.dumps({**(extra or {}), **fields}, indent=2, sort_keys=True)
        (fresh / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def write_calibration(folder: str | Path, temperatures: Sequence[float], biases: Sequence[float] = ()) -> None:
    """Sets the calibration of the confidence head in a drafter's `config.json`; a reader sees the old or the new file.

    Fields of an earlier calibration are replaced, or taken out where there is nothing to put in their place.

    Raises:
        FileNotFoundError: no `config.json`.
        ValueError: not this format, or temperatures or biases that do not fit the drafter.
    """
    file = Path(folder) / CONFIG_FILE
    raw = read_json(file)
    with naming(file):
        _family(raw)
        check_calibration(temperatures, biases, whole(raw, "block_size"), raw.get("enable_confidence_head") is True)
    others = {name: value for name, value in raw.items() if name not in CALIBRATION}
    text = json.dumps(others | _calibration_fields(temperatures, biases), indent=2, sort_keys=True)
    with tempfile.TemporaryDirectory(prefix=f".{CONFIG_FILE}-", dir=folder) as work:
        fresh = Path(work) / CONFIG_FILE
        fresh.write_text(text + "\n", encoding="utf-8")
        shutil.copymode(file, fresh)
        fresh.replace(file)


def _calibration_fields(temperatures: Sequence[float], biases: Sequence[float]) -> dict[str, list[float]]:
    """This project's own fields of `config.json`, of inference only; those that are not empty."""
    values = zip(CALIBRATION, (temperatures, biases), strict=True)
    return {name: list(numbers) for name, numbers in values if numbers}


def copy_with_calibration(
    source: str | Path, folder: str | Path, temperatures: Sequence[float], biases: Sequence[float] = ()
) -> None:
    """Copies a drafter of this format, all or nothing, and sets its calibration.

    Raises:
        FileNotFoundError, ValueError: as `write_calibration`, or a `folder` that holds other files.
    """
    with _replacing(Path(folder)) as fresh:
        for file in (Path(source) / CONFIG_FILE, *sorted(Path(source).glob("*.safetensors*"))):
            shutil.copy(file, fresh / file.name)
        write_calibration(fresh, temperatures, biases)


def config_fields(config: DrafterConfig) -> dict[str, Any]:
    """`config.json`'s content for a drafter; `read_drafter` turns it into an equal config.

    Raises:
        ValueError: a family without a class, or a switch that its class cannot express.
    """
    classes = {family: name for name, family in _CLASSES.items()}
    if config.family not in classes:
        raise ValueError(f"family {config.family!r}: drafters are written for {sorted(classes)}")
    if not config.anchor_predicts:
        raise ValueError(
            "anchor_predicts false: in DeepSpec's format the anchor is the first prediction slot; weights of the two "
            "slot conventions are not interchangeable, so the drafter would have to be trained anew"
        )
    fields = {
        "architectures": [classes[config.family]],
        **size_fields(config),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence,
    }
    if config.markov_rank:
        fields["markov_head_type"] = config.markov_kind
    if config.confidence:
        fields["confidence_head_with_markov"] = config.confidence_with_markov
    fields |= _calibration_fields(config.confidence_temperatures, config.confidence_biases)
    if config.trims_vocabulary:
        fields["draft_vocab_size"] = config.draft_vocab_size
    if not FAMILIES[config.family].qk_norm:
        fields["qk_norm"] = config.qk_norm
    return fields


def size_fields(config: DrafterConfig | RecurrentConfig) -> dict[str, Any]:
    """The fields of the backbone, as a Hugging Face config of its family holds them.

    Raises:
        ValueError: a switch that the family cannot express.
    """
    if FAMILIES[config.family].qk_norm and not config.qk_norm:
        raise ValueError(f"qk_norm false: layers of family {config.family} always have q and k norms")
    fields: dict[str, Any] = {
        "model_type": _WRITTEN_TYPES.get(config.family, config.family),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "layer_types": ["full_attention"] * config.num_layers,
        "tie_word_embeddings": False,
        **(_gemma_fields(config) if config.family in _WRITTEN_TYPES else rope_fields(config.rope)),
    }
    if config.traits.activation == "silu":
        fields["hidden_act"] = "silu"
    return fields


def _gemma_fields(config: DrafterConfig | RecurrentConfig) -> dict[str, Any]:
    """What Gemma's config says beside the common fields."""
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": config.final_softcap or None,
        "rope_parameters": {
            "full_attention": rope_fields(config.rope)["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},  # read by nobody, but expected
        },
    }
    if config.family == "gemma3":
        return fields | {"query_pre_attn_scalar": round((config.attention_scale or 1.0) ** -2, 6)}
    return fields | {
        "attention_k_eq_v": config.shared_kv,
        "num_global_key_value_heads": config.num_kv_heads,
        "global_head_dim": config.head_dim,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
    }


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """RoPE settings in both forms: `rope_parameters`, and `rope_theta` with `rope_scaling` for older readers."""
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default" and (rope.kind != "proportional" or rope.factor != 1):
        scaling["factor"] = rope.factor
    if rope.kind == "proportional":
        scaling["partial_rotary_factor"] = rope.rotary_fraction
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
        }
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else dict(scaling),
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }


def named_tensors(config: DrafterConfig, params: Mapping[str, Any], embeddings: bool | None) -> dict[str, np.ndarray]:
    """All tensors of a drafter by DeepSpec's names, each checked against the shape that the config asks for.

    `embeddings` as `include_embeddings` of `write_drafter`, which also tells the errors.
    """
    named: dict[str, Any] = {
        "fc.weight": params["fc"],
        "hidden_norm.weight": params["hidden_norm"],
        "norm.weight": params["norm"],
    }
    for i, layer in enumerate(params["layers"]):
        named |= layer_tensors(layer, f"layers.{i}.", config, config.attention)
    named |= embedding_tensors(params, embeddings)
    named |= {_MARKOV_TENSORS[name]: tensor for name, tensor in params.get("markov", {}).items()}
    if "confidence" in params:
        named["confidence_head.proj.weight"] = np.asarray(params["confidence"]["w"])[None, :]  # [1, D (+ r)]
        named["confidence_head.proj.bias"] = np.asarray(params["confidence"]["b"]).reshape(1)
    if "d2t" in params:
        named["d2t"] = params["d2t"]
    tensors = {name: np.asarray(tensor) for name, tensor in named.items()}
    expected = drafter_shapes(config)
    optional = () if embeddings else ("embed_tokens.weight", "lm_head.weight")
    check_tensors(Path("drafter parameters"), {n: t.shape for n, t in tensors.items()}, expected, optional=optional)
    if config.trims_vocabulary:
        check_offsets(tensors["d2t"], config)
    return tensors


def embedding_tensors(params: Mapping[str, Any], embeddings: bool | None) -> dict[str, Any]:
    """Embedding and head of `params` by tensor name; `embeddings` as `include_embeddings` of `write_drafter`."""
    names = {"embed": "embed_tokens.weight", "head": "lm_head.weight"}
    absent = [name for name in names if name not in params]
    if embeddings and absent:
        raise ValueError(f"include_embeddings true, but the parameters hold no {' and no '.join(absent)}")
    return {} if embeddings is False else {names[name]: params[name] for name in names if name in params}


def check_place(folder: Path) -> None:
    """Refuses a place where no drafter can be written.

    Raises:
        ValueError: a file, or a folder that holds other files than a drafter's.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; give a new or empty folder")
    foreign = sorted(set(os.listdir(folder)) - {CONFIG_FILE, SINGLE_FILE}) if folder.exists() else []
    if foreign:
        raise ValueError(f"{folder}: holds {foreign[0]}, which is no part of a drafter; give a new or empty folder")


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Gives an empty folder beside `folder` to fill, and puts it in `folder`'s place when the block ends well."""
    folder = folder.absolute()
    check_place(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh, old = work / "new", work / "old"
        fresh.mkdir()
        yield fresh
        if folder.exists():
            folder.rename(old)
        try:
            fresh.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(work)
