"""`dspark convert`: a drafter from any format that is read to any that can hold it, tensors bit for bit.

What a format cannot hold is refused by name, and so is a change of the slot convention: there the weights differ, not
the file. Nothing is rounded: tensors keep the dtype they are stored in, or become float32 where they differ.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from dspark_jax.checkpoints import deepspec, drafters, foreign, sglang, specforge, speculators, zlab
from dspark_jax.checkpoints.gguf import read_gguf_target
from dspark_jax.checkpoints.hf import read_hf_config, resolve
from dspark_jax.checkpoints.load import load_target
from dspark_jax.checkpoints.store import read_json
from dspark_jax.config import exit_code, log_to_stderr
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.interface import AnyConfig
from dspark_jax.models.config import TransformerConfig
from dspark_jax.models.transformer import head_weight

logger = logging.getLogger(__name__)
_PROGRAM = "dspark convert"
_DEEPSPEC_FAMILIES = ("qwen3", "gemma4")
_DEEPSPEC_LAYERS_READ = 5  # by its Eagle3
Params = dict[str, Any]


@dataclass(frozen=True)
class ConvertSettings:
    """Convert a drafter to another project's format.

    Attributes:
        source: the drafter: a folder or a hub id, in any of the formats.
        output: folder to write; an older drafter in it is replaced.
        format: deepspec (DSpark, DFlash, Eagle3), zlab (DFlash), specforge (DSpark), speculators (DSpark, DFlash,
            Eagle3) or sglang (Eagle3, as EAGLE and SpecForge write it).
        target: the target model: a folder, a GGUF file or a hub id. Needed where the source does not say how many
            layers the target has, where the output stores an embedding or a head that the source takes from the
            target, and where it stores none but the source does.
        json: file for what was done, as one JSON object.
    """

    source: tyro.conf.Positional[str]
    output: tyro.conf.Positional[Path]
    format: Literal["deepspec", "zlab", "specforge", "speculators", "sglang"]
    target: str | None = None
    json: Path | None = None


class TargetModel:
    """The target behind a drafter, read as far as it is asked for."""

    def __init__(self, path: str) -> None:
        """Reads the config.

        Raises:
            FileNotFoundError, ValueError: as `load_target`.
        """
        self.path = path
        local = resolve(path)
        is_file = local.is_file()
        self.config: TransformerConfig = read_gguf_target(local, jnp.float32)[0] if is_file else read_hf_config(local)
        raw = {} if is_file else read_json(local / deepspec.CONFIG_FILE)
        self.architectures: list[str] = list(raw.get("architectures") or [])
        self._tables: dict[str, np.ndarray] | None = None

    def table(self, name: str, params: Params) -> np.ndarray:
        """Float32 `embed [V, D]` or `head [Vd, D]`, the head's rows as the drafter's `d2t` names them."""
        if self._tables is None:
            whole = load_target(self.path, dtype=jnp.float32).params
            self._tables = {"embed": np.asarray(whole["embed"]), "head": np.asarray(head_weight(whole))}
        rows = self._tables[name]
        if name == "head" and "d2t" in params:
            offsets = np.asarray(params["d2t"])
            rows = rows[offsets + np.arange(offsets.shape[0])]
        return rows


def _write_deepspec(folder: Path, config: AnyConfig, params: Params, *, storage_dtype: str) -> None:
    check_deepspec(config)
    drafters.write_drafter(folder, config, params, storage_dtype=storage_dtype, include_embeddings=None)


def check_deepspec(config: AnyConfig) -> None:
    """Refuses what DeepSpec's own classes cannot hold; this project reads more in that format.

    Raises:
        ValueError: naming the field, its value and what would be right.
    """
    if not isinstance(config, DrafterConfig | Eagle3Config):
        kind = type(config).__name__
        raise ValueError(f"a drafter of type {kind}: DeepSpec's format holds DSpark, DFlash and Eagle3 only")
    if config.family not in _DEEPSPEC_FAMILIES:
        raise ValueError(f"family {config.family!r}: DeepSpec has classes for {' and '.join(_DEEPSPEC_FAMILIES)} only")
    if config.trims_vocabulary:
        raise ValueError(
            f"draft_vocab_size {config.draft_vocab_size}: DeepSpec's format has no reduced vocabulary, it must be "
            f"vocab_size ({config.vocab_size})"
        )
    if isinstance(config, DrafterConfig):
        return
    if len(config.target_layer_ids) != _DEEPSPEC_LAYERS_READ:
        raise ValueError(
            f"target_layer_ids {list(config.target_layer_ids)}: DeepSpec's Eagle3 reads exactly "
            f"{_DEEPSPEC_LAYERS_READ} layers"
        )
    if config.norm_before_residual:
        raise ValueError("norm_before_residual true: DeepSpec's Eagle3 has the state as it is on the residual stream")


def with_target_tables(params: Params, config: AnyConfig, name: str, target: TargetModel | None) -> Params:
    """The parameters as format `name` holds them: the target's embedding and head put in, or left out.

    Raises:
        ValueError: a format that uses the target's, and a drafter whose own are others.
    """
    if target is None:
        return params
    if name in ("zlab", "specforge"):
        for table in ("embed", "head"):
            if table in params and not np.array_equal(np.asarray(params[table]), target.table(table, params)):
                raise ValueError(
                    f"the drafter's own {table} differs from that of {target.path}: {drafters.TITLES[name]}'s format "
                    "has no place for it and uses the target's"
                )
        return {key: value for key, value in params.items() if key not in ("embed", "head")}
    stored: tuple[str, ...] = ("embed", "head") if name == "deepspec" else ()
    if name == "sglang" or getattr(config, "trims_vocabulary", False) or isinstance(config, Eagle3Config):
        stored = (*stored, "head")
    return params | {table: target.table(table, params) for table in stored if table not in params}


def exact_storage(params: Params, storage_dtype: str) -> str:
    """`storage_dtype` if it holds all of `params` (float32) without rounding, else float32."""
    dtype = jnp.dtype(storage_dtype)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves({k: v for k, v in params.items() if k != "d2t"})]
    exact = all(np.array_equal(leaf.astype(dtype).astype(np.float32), leaf, equal_nan=True) for leaf in leaves)
    return storage_dtype if exact else "float32"


def convert(settings: ConvertSettings) -> dict[str, Any]:
    """Reads `source`, writes `output`; returns what was done.

    Raises:
        FileNotFoundError, ValueError: nothing there, damaged, unsupported, or something that `format` cannot hold.
    """
    target = TargetModel(settings.target) if settings.target is not None else None
    local = resolve(settings.source)
    found = drafters.format_of(read_json(local / deepspec.CONFIG_FILE))
    config, params = drafters.read_drafter(local, jnp.float32, target.config if target else None)
    if target:
        config.check_target(target.config)
    params = with_target_tables(params, config, settings.format, target)
    storage = exact_storage(params, foreign.RenamedStore(local).storage_dtype())
    if settings.format == "speculators":
        verifier = {"name_or_path": target.path, "architectures": target.architectures} if target else None
        speculators.write_drafter(settings.output, config, params, storage_dtype=storage, verifier=verifier)
    else:
        _WRITERS[settings.format](settings.output, config, params, storage_dtype=storage)
    logger.info("%s: %s, %s", settings.output, drafters.describe(config, settings.format), storage)
    return {
        "source": settings.source,
        "source_format": found,
        "output": str(settings.output),
        "format": settings.format,
        "target": settings.target,
        "drafter": type(config).__name__.removesuffix("Config"),
        "storage_dtype": storage,
        "own_embedding": "embed" in params,
        "own_head": "head" in params,
        "parameters": sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params)),
    }


_WRITERS: dict[str, Callable[..., None]] = {
    "deepspec": _write_deepspec,
    "zlab": zlab.write_drafter,
    "specforge": specforge.write_drafter,
    "sglang": sglang.write_drafter,
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command `dspark convert`: exit code 0, or 2 (bad input, one line on stderr)."""
    settings = tyro.cli(ConvertSettings, args=argv, prog=_PROGRAM)
    return exit_code(_PROGRAM, lambda: _run(settings))


def _run(settings: ConvertSettings) -> None:
    with log_to_stderr():
        done = convert(settings)
    if settings.json is not None:
        settings.json.write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
