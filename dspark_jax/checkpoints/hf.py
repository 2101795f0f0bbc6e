"""Targets from Hugging Face folders (`config.json` + safetensors), and the way from a name to a local folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from dspark_jax.checkpoints.store import TensorStore, read_json
from dspark_jax.checkpoints.tensors import check_tensors, read_target_params, target_shapes
from dspark_jax.models.config import TransformerConfig, text_fields

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.jinja", "generation_config.json")
CHECKPOINT_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(path: str | Path, patterns: Sequence[str] = CHECKPOINT_FILES) -> Path:
    """The local file or folder of `path`, downloading it first where it is the id of a model on the hub.

    Args:
        path: a local path (used as it is when it exists) or a hub id, `name` or `owner/name`.
        patterns: which files of a hub model are wanted.

    Raises:
        FileNotFoundError: neither a local path nor a model that the hub (or its local cache) gives.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    name = str(path)
    if not _HUB_ID.fullmatch(name) or local.suffix in (".gguf", ".safetensors", ".json"):
        raise FileNotFoundError(f"{path}: no such file or folder (and no hub id, which would be owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the HTTP client's errors have no common base with the hub's
        raise FileNotFoundError(
            f"{name}: no such local path, and the hub did not give a model of that id "
            f"(tried huggingface_hub.snapshot_download: {type(error).__name__}: {error})"
        ) from error


def read_hf_config(folder: Path) -> TransformerConfig:
    """The target's config from `config.json`, with the token count of `tokenizer.json` where that file exists.

    Raises:
        FileNotFoundError: no config.json.
        ValueError: unreadable, unsupported, or a tokenizer that has more tokens than the embedding has rows.
    """
    file = folder / "config.json"
    raw = read_json(file)
    tokens = count_tokens(folder / "tokenizer.json")
    if tokens is not None:
        rows = text_fields(raw).get("vocab_size")
        if isinstance(rows, int) and tokens > rows:
            raise ValueError(f"{file}: vocab_size {rows}: tokenizer.json beside it has {tokens} tokens")
        raw = {**raw, "num_tokens": tokens}
    try:
        return TransformerConfig.from_hf(raw)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


def count_tokens(file: Path) -> int | None:
    """One more than the largest id in a `tokenizer.json`; None without the file or for a vocabulary of unknown form."""
    if not file.is_file():
        return None
    content = read_json(file)
    vocabulary = (content.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        ids = list(vocabulary.values())
    elif isinstance(vocabulary, list):
        ids = [len(vocabulary) - 1]
    else:
        return None
    ids += [token["id"] for token in content.get("added_tokens") or []]
    return max(ids) + 1 if ids else None


def read_hf_target(folder: str | Path, dtype: DTypeLike) -> tuple[TransformerConfig, dict[str, Any]]:
    """Reads a target model from a Hugging Face folder.

    Args:
        folder: holds `config.json` and `model.safetensors`, or an index and its shards.
        dtype: dtype of every parameter array.

    Returns:
        The config and the parameter pytree (weights [out, in], q, k, v and gate, up fused).

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: unsupported config; truncated or corrupt files; missing, unexpected or mis-shaped tensors.
    """
    folder = Path(folder)
    config = read_hf_config(folder)
    store = TensorStore(folder)
    stored = _text_tensors(store.shapes())  # their names in the file, by the names of a text model
    found = store.shapes()
    shapes = {name: found[inner] for name, inner in stored.items()}
    spare_head = config.tie_embeddings and "lm_head.weight" in shapes
    check_tensors(
        store.path,
        shapes,
        target_shapes(config),
        ignored=lambda name: name.endswith("rotary_emb.inv_freq") or (spare_head and name == "lm_head.weight"),
    )

    def read(name: str) -> np.ndarray:
        return store.read(stored[name])

    if spare_head and not np.array_equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
        raise ValueError(
            f"{store.path}: lm_head.weight differs from model.embed_tokens.weight, but the config says that "
            "they are tied (tie_word_embeddings true)"
        )
    return config, read_target_params(read, config, dtype)


def _text_tensors(names: Iterable[str]) -> dict[str, str]:
    """Names of a text model's tensors, and what the file calls them.

    Where the language model is a part of a larger one (Gemma with vision or audio) its tensors have a longer prefix,
    and those of the other parts are left out: text never meets them.
    """
    names = list(names)
    for prefix in ("model.language_model.", "language_model.model."):
        if any(name.startswith(prefix) for name in names):
            inner = {"model." + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
            heads = [name for name in names if name.removeprefix("language_model.") == "lm_head.weight"]
            return inner | ({"lm_head.weight": heads[0]} if heads else {})
    return {name: name for name in names}
