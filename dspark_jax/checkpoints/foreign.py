"""What the formats of other projects share: they are read by turning their config into DeepSpec's fields.

Tensors have DeepSpec's names once a prefix is changed (`RenamedStore`); what differs is where a field lies, how layers
are numbered and whether the anchor slot predicts. A field that is not understood and could change the computation is
refused, and what only the weights can tell (rank, kind of head, size of the vocabulary) is taken from their shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoints.fields import whole
from dspark_jax.checkpoints.store import TensorStore
from dspark_jax.checkpoints.tensors import Shape
from dspark_jax.drafters.config import CALIBRATION, DrafterConfig
from dspark_jax.models.config import TransformerConfig

logger = logging.getLogger(__name__)
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MARKOV = "markov_head."


class RenamedStore(TensorStore):
    """A checkpoint folder whose tensors go by other names.

    `rename` gives the name that a stored tensor shall have, or None for one that is left out.
    """

    def __init__(self, folder: Path, rename: Callable[[str], str | None] = lambda name: name) -> None:
        """Opens the folder; errors as `TensorStore`.

        Raises:
            ValueError: also where two tensors would get one name.
        """
        super().__init__(folder)
        self._stored: dict[str, str] = {}
        for stored in self._handles:
            name = rename(stored)
            if name in self._stored:
                raise ValueError(f"{self.path}: tensors {self._stored[name]} and {stored} are both {name}")
            if name is not None:
                self._stored[name] = stored

    def shapes(self) -> dict[str, Shape]:
        """Shapes by the new names."""
        shapes = super().shapes()
        return {name: shapes[stored] for name, stored in self._stored.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor by its new name; errors as `TensorStore.read`."""
        return super().read(self._stored[name])

    def storage_dtype(self) -> str:
        """The dtype that stores every float tensor without rounding: the one they all have, or float32."""
        kinds = {str(self._handles[stored].get_slice(stored).get_dtype()) for stored in self._stored.values()}
        kinds -= {"I64", "I32", "BOOL"}
        return _DTYPES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def allow(raw: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Refuses fields that would change the computation: each may have one of its `allowed` values, or be absent.

    Raises:
        ValueError: naming the field (after `where`), its value and the allowed ones.
    """
    for name, values in allowed.items():
        if name in raw and raw[name] not in values:
            raise ValueError(f"{where}{name} {raw[name]!r}: not supported, right would be one of {list(values)}")


def refuse_unknown(raw: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuses fields of a nested object that nobody has described.

    Raises:
        ValueError: naming them.
    """
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise ValueError(f"{where}{unknown[0]} {raw[unknown[0]]!r}: an unknown field, which may change the computation")


def nested(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object `name` of a config.

    Raises:
        ValueError: absent, or no object.
    """
    value = raw.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} {value!r}: must be an object of config fields")
    return dict(value)


def target_layers(raw: Mapping[str, Any], target: TransformerConfig | None) -> int:
    """Layers of the target: what the config says, or else the target itself.

    Raises:
        ValueError: neither says it, or they differ.
    """
    said = raw.get("num_target_layers")
    if said is None and target is None:
        raise ValueError(
            "num_target_layers is missing: this format does not say how many layers the target has; load the drafter "
            "together with its target (`load_drafter(path, target=config)`, `dspark convert --target`)"
        )
    count = target.num_layers if said is None and target is not None else whole(raw, "num_target_layers")
    if target is not None and target.num_layers != count:
        raise ValueError(f"num_target_layers {count}: the target has {target.num_layers} layers")
    return count


def draft_vocabulary(raw: Mapping[str, Any], shapes: Mapping[str, Shape], vocab_size: int) -> int:
    """Size of the draft vocabulary: `draft_vocab_size`, or the length of the map, or the whole vocabulary."""
    if raw.get("draft_vocab_size") is not None:
        return whole(raw, "draft_vocab_size")
    return shapes["d2t"][0] if "d2t" in shapes else vocab_size


def head_fields(raws: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape], hidden_size: int) -> dict[str, Any]:
    """The fields of the sequential and the confidence head: from the first of `raws` that has one, or from the shapes.

    Raises:
        ValueError: two of `raws` say different things.
    """
    rank = shapes.get(_MARKOV + "markov_w1.weight", (0, 0))[1]
    confidence = shapes.get("confidence_head.proj.weight")
    kind = "vanilla"
    for name, other in (("gate_proj", "gated"), ("joint_proj", "rnn")):
        if f"{_MARKOV}{name}.weight" in shapes:
            kind = other
    found = {
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence[1] != hidden_size,
    }
    for name in found:
        said = [raw[name] for raw in raws if raw.get(name) is not None]
        if any(value != said[0] for value in said):
            raise ValueError(f"{name}: said twice, {said[0]!r} and {said[1]!r}")
        if said:
            found[name] = said[0]
    if not found["enable_confidence_head"]:
        found["confidence_head_with_markov"] = False
    return found


def kept_tokens(config: Any, offsets: np.ndarray) -> np.ndarray:
    """`t2d`, bool `[V]`: the target tokens that the map `offsets [Vd]` covers."""
    kept = np.zeros(config.vocab_size, bool)
    kept[np.asarray(offsets, np.int64) + np.arange(config.draft_vocab_size)] = True
    return kept


def vocabulary_tensors(config: Any, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`tensors` with `t2d` beside `d2t`."""
    return {**tensors, "t2d": kept_tokens(config, tensors["d2t"])} if "d2t" in tensors else dict(tensors)


def check_block(config: Any, who: str) -> DrafterConfig:
    """Refuses what a format of Qwen3-shaped block drafters cannot hold, whoever's it is.

    Raises:
        ValueError: another kind of drafter, or layers of another family.
    """
    if not isinstance(config, DrafterConfig):
        raise ValueError(f"a drafter of type {type(config).__name__}: {who} holds DSpark and DFlash drafters only")
    if config.family != "qwen3":
        raise ValueError(f"family {config.family!r}: {who} has layers of the family 'qwen3' only")
    for name, neutral in (("shared_kv", False), ("attention_scale", None), ("final_softcap", 0.0)):
        if getattr(config, name) != neutral:
            raise ValueError(f"{name} {getattr(config, name)!r}: {who} has no field for it, must be {neutral!r}")
    for name in CALIBRATION:  # they refine the confidences only, so the drafter is whole without them
        if getattr(config, name):
            logger.warning("%s: %s has no field for them, they are left out", name, who)
    return config


def refuse_embeddings(params: Mapping[str, Any], who: str) -> None:
    """Refuses own embeddings and heads where a format always uses the target's.

    Raises:
        ValueError: naming what is there.
    """
    own = [name for name in ("embed", "head") if name in params]
    if own:
        raise ValueError(
            f"the drafter brings its own {' and '.join(own)}: {who} has no place for them and uses the target's; give "
            "the target (--target), to show that they are the same"
        )
