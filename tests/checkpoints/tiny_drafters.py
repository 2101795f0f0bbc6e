"""Tiny random drafters of every kind, and what tests of their formats share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from dspark_jax.drafters import interface
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.models.config import RopeConfig

VOCAB, HIDDEN, TARGET_LAYERS = 24, 8, 9
KEPT = [0, 1, 3, 4, 9, 10, 11, 17, 22]  # of a reduced vocabulary: offsets 0, 0, 1, 1, 5, 5, 5, 10, 14
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_target_layers": TARGET_LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": 12,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope": RopeConfig(theta=5e5),
    "max_positions": 64,
}
Drafter = tuple[Any, dict[str, Any]]


def block(
    kind: str = "vanilla",
    *,
    confidence: bool = True,
    with_markov: bool = True,
    anchor: bool = True,
    kept: list[int] | None = None,
    own: tuple[str, ...] = (),
) -> Drafter:
    """A DSpark or DFlash drafter with Qwen3 layers; `own` names the tables that it brings itself."""
    config = DrafterConfig(
        block_size=3,
        num_layers=2,
        target_layer_ids=(-1, 2, 6),
        mask_token_id=VOCAB - 1,
        draft_vocab_size=len(kept or range(VOCAB)),
        markov_rank=0 if kind == "none" else 4,
        markov_kind=kind,
        confidence=confidence,
        confidence_with_markov=confidence and with_markov and kind != "none",
        shares_embeddings="embed" not in own,
        qk_norm=True,
        family="qwen3",
        anchor_predicts=anchor,
        **SIZES,
    )
    return filled(config, kept, own)


def eagle(
    *,
    family: str = "llama",
    ids: tuple[int, ...] = (1, 3, 5),
    kept: list[int] | None = KEPT,
    own: tuple[str, ...] = ("head",),
    norm_before_residual: bool = False,
) -> Drafter:
    """An Eagle3 drafter, of EAGLE's kind by default."""
    config = Eagle3Config(
        block_size=3,
        target_layer_ids=ids,
        draft_vocab_size=len(kept or range(VOCAB)),
        shares_embeddings="embed" not in own,
        qk_norm=family == "qwen3",
        family=family,
        norm_before_residual=norm_before_residual,
        **SIZES,
    )
    return filled(config, kept, own)


def filled(config: Any, kept: list[int] | None, own: tuple[str, ...]) -> Drafter:
    """Random parameters that bfloat16 holds, `d2t` for `kept` and the tables named in `own`."""
    rng = np.random.default_rng(len(own) + config.draft_vocab_size)

    def random(like: Any) -> np.ndarray:
        return np.asarray(rng.normal(size=like.shape), ml_dtypes.bfloat16).astype(np.float32)

    like = jax.eval_shape(lambda: interface.init_params(config, jax.random.key(0)))
    params = jax.tree.map(random, like)
    rows = {"embed": VOCAB, "head": config.draft_vocab_size}
    params |= {name: random(np.empty((rows[name], HIDDEN))) for name in own}
    if kept:
        params["d2t"] = np.array(kept, np.int32) - np.arange(len(kept), dtype=np.int32)
    return config, params


def same_params(one: Any, other: Any) -> None:
    """Asserts that two parameter trees are equal, bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, jax.tree.map(np.asarray, other))


def same_files(one: Path, other: Path) -> None:
    """Asserts that two folders hold the same tensors, bit for bit, and the same config."""
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        assert tensor.tobytes() == theirs[name].tobytes(), name
    assert read_config(one) == read_config(other)


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder."""
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, **fields: Any) -> None:
    """Changes config fields, those of nested objects written `outer__inner`; a value of `...` removes the field."""
    config = read_config(folder)
    for name, value in fields.items():
        *outer, last = name.split("__")
        at = config
        for part in outer:
            at = at[part]
        at.pop(last, None) if value is ... else at.update({last: value})
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, changes: dict[str, Any]) -> None:
    """Replaces tensors; a value of `...` removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: value for name, value in tensors.items() if value is not ...}, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    """Cuts the weights' file in half."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def float32(folder: Path) -> Drafter:
    """Reads a folder of any format in float32."""
    from dspark_jax.checkpoints.drafters import read_drafter

    return read_drafter(folder, jnp.float32)
