"""The drafter that a run starts from (`--initial`): its trainable weights, once it is found to be of the run's shape.

Embedding and head are the target's in every run. A drafter that holds them (DeepSpec's do) may only hold the target's.
The run's draft vocabulary may be smaller than the drafter's: it goes on with the rows of the tokens that are kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.load import load_drafter
from dspark_jax.drafters.config import CALIBRATION
from dspark_jax.models.transformer import head_weight
from dspark_jax.training.distributed import to_host
from dspark_jax.training.objectives import TrainableConfig
from dspark_jax.training.settings import DrafterSettings

Params = dict[str, Any]

_NO_SHAPE = (*CALIBRATION, "shares_embeddings")  # fields of a config that may differ
_ROUNDING = float(jnp.finfo(jnp.bfloat16).eps)  # between 16-bit forms of one number, relative


def read_initial(path: str, config: TrainableConfig) -> Params:
    """The float32 weights of an existing drafter of the same shape, with `embed`, `head` and `d2t` where it has them.

    Its calibration is no part of the shape, and is left behind: it belongs to the weights as they were. So are the
    scalars of Gemma4's layers, which are not trained. Its draft vocabulary may be larger (`cut_vocabulary`).

    Raises:
        FileNotFoundError, ValueError: no drafter there, one of another shape, or a scalar that is not 1; the message
            names the fields.
    """
    drafter = load_drafter(path)
    if type(drafter.config) is not type(config):
        kinds = type(drafter.config).__name__, type(config).__name__
        raise ValueError(f"initial {path}: a drafter of another kind, with {kinds[0]}; this run has {kinds[1]}")
    names = [f.name for f in dataclasses.fields(config) if f.name not in _NO_SHAPE]
    other = [name for name in names if getattr(drafter.config, name) != getattr(config, name)]
    if drafter.config.draft_vocab_size > config.draft_vocab_size:
        other.remove("draft_vocab_size")
    if other:
        found = [f"{name} {getattr(drafter.config, name)!r} (this run has {getattr(config, name)!r})" for name in other]
        raise ValueError(f"initial {path}: a drafter of another shape: {', '.join(found)}; {_advice(other)}")
    layers = tuple(_without_scalar(path, i, layer) for i, layer in enumerate(drafter.params["layers"]))
    return drafter.params | {"layers": layers}


def _advice(other: list[str]) -> str:
    """How to make fields of the run's config alike."""
    own = {f.name for f in dataclasses.fields(DrafterSettings)}
    if set(other) <= own:
        return "set the same in `drafter`"
    return f"{', '.join(name for name in other if name not in own)} cannot be set, give a drafter that is alike there"


def _without_scalar(path: str, number: int, layer: Params) -> Params:
    """A layer without its scalar, which must be 1 as in every drafter that is trained here."""
    if float(layer.get("scalar", 1.0)) != 1.0:
        raise ValueError(
            f"initial {path}: layer_scalar {float(layer['scalar'])} in layer {number}: drafters are trained without "
            "one here, must be 1"
        )
    return {name: weight for name, weight in layer.items() if name != "scalar"}


def drop_shared(path: str, initial: Params, target: Params) -> Params:
    """`initial` without `embed` and `head`, which are found to be those of the target; all processes must call it.

    Args:
        path: for messages. initial: from `read_initial`. target: parameters, on any mesh.

    Raises:
        ValueError: they differ from the target's.
    """
    if "embed" in initial:
        _check_equal(path, "embed", initial["embed"], to_host(target["embed"]))
    if "head" in initial:
        head = to_host(head_weight(target))  # [V, D]
        ids = None if "d2t" not in initial else np.arange(len(initial["d2t"])) + np.asarray(initial["d2t"])
        _check_equal(path, "head", initial["head"], head if ids is None else head[ids])
    return {name: part for name, part in initial.items() if name not in ("embed", "head")}


def draft_tokens(initial: Params, vocab_size: int) -> np.ndarray:
    """The target's ids of an initial drafter's draft tokens, int32 `[its Vd]`, ascending."""
    offsets = initial.get("d2t")
    return np.arange(vocab_size) if offsets is None else np.arange(len(offsets)) + np.asarray(offsets)


def cut_vocabulary(initial: Params, d2t: np.ndarray, vocab_size: int) -> Params:
    """`initial` without `d2t`, and of what it has by draft token only the rows of this run's.

    Args:
        initial: from `drop_shared`. d2t: int32 `[Vd]`, this run's draft vocabulary, all of which the drafter has.
    """
    kept = {name: part for name, part in initial.items() if name != "d2t"}
    own, wanted = draft_tokens(initial, vocab_size), np.arange(len(d2t)) + d2t
    if "markov" in kept and len(own) != len(wanted):
        kept["markov"] = kept["markov"] | {"w2": kept["markov"]["w2"][np.searchsorted(own, wanted)]}  # [Vd, r]
    return kept


def _check_equal(path: str, name: str, own: Any, target: np.ndarray) -> None:
    """Refuses weights that differ by more than what rounding to 16 bits does (ValueError)."""
    own, target = np.asarray(own, np.float32), target.astype(np.float32)
    apart = np.abs(own - target)
    if not (apart <= _ROUNDING * np.abs(target) + 1e-6).all():
        raise ValueError(
            f"initial {path}: its {name} is not the target's (they differ by up to {apart.max():.3g}), and this run "
            "trains with the target's: give the target that it was made for, or a drafter that uses the target's"
        )
