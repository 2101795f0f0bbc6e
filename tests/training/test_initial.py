"""Runs that start from a drafter: Gemma4's scalars, and drafters that hold the target's embedding and head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.drafters import write_drafter
from dspark_jax.checkpoints.load import Drafter, load_drafter
from dspark_jax.sharding import MeshShape
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.prepare import Run, prepare
from dspark_jax.training.settings import DrafterSettings
from tests.training.golden_drafters import FOLDER
from tests.training.tiny_run import TARGETS, tiny_settings

VANILLA = DrafterSettings(num_layers=2, target_layer_ids=(1, 3, 4), mask_token_id=299, markov_rank=16)
PLAIN = replace(VANILLA, target_layer_ids=(-1, 2, 4), confidence_with_markov=False)
EAGLE = LossConfig(ce=1.0, tv=0.0, confidence=0.0)
# golden drafter -> its target, and fields of a run that makes such a one
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark_gemma4_vanilla": ("gemma4", {"drafter": VANILLA}),
    "dspark_gemma4_rnn_embed": ("gemma4", {"drafter": replace(PLAIN, markov_kind="rnn")}),
    "eagle3_gemma4": (
        "gemma4",
        {"drafter": DrafterSettings(kind="eagle3", target_layer_ids=(0, 1, 2, 3, 4)), "loss": EAGLE},
    ),
    "dspark_qwen3_vanilla": ("qwen3_untied", {"drafter": VANILLA}),
    "dspark_qwen3_tied_embed_noconf": ("qwen3_tied", {"drafter": replace(PLAIN, confidence=False)}),
}
QWEN3 = "dspark_qwen3_vanilla"


def prepared(folder: Path, name: str, initial: Path, shape: dict[str, Any] | None = None, **more: Any) -> Run:
    """The run that starts from `initial`, a drafter like the golden one; `shape`: changed fields of `drafter`."""
    target, fields = CASES[name]
    fields = fields | {"drafter": replace(fields["drafter"], **(shape or {}))}
    common: dict[str, Any] = {"target": str(TARGETS / target), "states": "online", "eval_samples": 0, "ema": 0.0}
    return prepare(tiny_settings(folder, initial=str(initial), **common, **fields, **more))


def without(name: str, tree: Any) -> Any:
    """A pytree without the dict entries of that name."""
    if isinstance(tree, dict):
        return {key: without(name, part) for key, part in tree.items() if key != name}
    return tuple(without(name, part) for part in tree) if isinstance(tree, tuple) else tree


def assert_starts_from(run: Run, params: Any) -> None:
    """The run's first state has these trainable weights, and the structure of the run's state."""
    fresh = jax.device_get(run.fresh())
    assert jax.tree.structure(fresh) == jax.tree.structure(run.like)
    expected = params
    for name in ("embed", "head", "d2t", "scalar"):
        expected = without(name, expected)
    assert jax.tree.structure(fresh.params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, fresh.params, expected)


def rewritten(folder: Path, name: str, change: Any, **options: Any) -> tuple[Path, Drafter]:
    """A golden drafter as `change(config, params)` leaves it, in a folder of its own."""
    golden = load_drafter(FOLDER / name)
    place = folder / "initial"
    write_drafter(place, *change(golden.config, golden.params), **{"storage_dtype": "float32", **options})
    return place, load_drafter(place)


@pytest.mark.parametrize("name", CASES)
def test_golden_drafters_are_gone_on_with(tmp_path: Path, name: str) -> None:
    """They hold their target's embedding and head, and Gemma4's layers a scalar, here 1 as in all that are trained."""
    initial, drafter = rewritten(tmp_path, name, lambda config, params: (config, without("scalar", params)))
    assert {"embed", "head"} <= set(drafter.params) and not drafter.config.shares_embeddings
    run = prepared(tmp_path, name, initial)
    assert_starts_from(run, drafter.params)
    assert run.config.shares_embeddings


@pytest.mark.parametrize("name", [name for name, (target, _) in CASES.items() if target == "gemma4"])
def test_a_scalar_that_is_not_1_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"initial .*{name}: layer_scalar 0\.\d+ in layer 0: .*must be 1"):
        prepared(tmp_path, name, FOLDER / name)


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_the_targets_embedding_may_be_rounded(tmp_path: Path, storage: str) -> None:
    """And the target may lie on several devices."""
    initial, drafter = rewritten(tmp_path, QWEN3, lambda *parts: parts, storage_dtype=storage)
    run = prepared(tmp_path, QWEN3, initial, devices=4, mesh=MeshShape(fsdp=2, tensor=2))
    assert_starts_from(run, drafter.params)


@pytest.mark.parametrize("part", ["embed", "head"])
def test_an_embedding_and_a_head_of_its_own_are_refused(tmp_path: Path, part: str) -> None:
    def change(config: Any, params: Any) -> tuple[Any, Any]:
        return config, params | {part: params[part].at[17, 3].add(0.25)}

    initial, _ = rewritten(tmp_path, QWEN3, change)
    with pytest.raises(ValueError, match=rf"its {part} is not the target's \(they differ by up to 0.25\)"):
        prepared(tmp_path, QWEN3, initial)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_head_of_a_reduced_vocabulary_is_compared_through_its_map(tmp_path: Path, shift: int) -> None:
    """The embedding is the target's, the head's rows are those of the map, or with a shift of others."""
    ids = np.arange(100) * 2 + 1  # [Vd]

    def change(config: Any, params: Any) -> tuple[Any, Any]:
        markov = params["markov"] | {"w2": params["markov"]["w2"][ids]}
        own = {"markov": markov, "head": params["head"][ids + shift], "d2t": jnp.asarray(ids - np.arange(100))}
        return replace(config, draft_vocab_size=100), without("embed", params) | own

    initial, drafter = rewritten(tmp_path, QWEN3, change, include_embeddings=None)
    assert "head" in drafter.params and drafter.config.shares_embeddings
    if shift:
        with pytest.raises(ValueError, match="its head is not the target's"):
            prepared(tmp_path, QWEN3, initial, {"draft_vocab_size": 100})
        return
    run = prepared(tmp_path, QWEN3, initial, {"draft_vocab_size": 100})
    assert_starts_from(run, drafter.params)
    np.testing.assert_array_equal(run.d2t, drafter.params["d2t"])


@pytest.mark.parametrize("before", [300, 100])
def test_a_larger_draft_vocabulary_is_cut(tmp_path: Path, before: int) -> None:
    """The run keeps those of the drafter's tokens that its answers have most often, and their rows of W2."""
    ids = np.arange(before) * (300 // before)  # [Vd before]

    def change(config: Any, params: Any) -> tuple[Any, Any]:
        if before == config.vocab_size:
            return config, params
        markov = params["markov"] | {"w2": params["markov"]["w2"][ids]}
        own = {"markov": markov, "d2t": jnp.asarray(ids - np.arange(before))}
        return replace(config, draft_vocab_size=before), without("head", without("embed", params)) | own

    initial, drafter = rewritten(tmp_path, QWEN3, change, include_embeddings=None)
    run = prepared(tmp_path, QWEN3, initial, {"draft_vocab_size": 40})
    assert run.d2t is not None and run.config.draft_vocab_size == 40
    kept = np.asarray(run.d2t) + np.arange(40)
    assert set(kept) <= set(ids)
    w2 = np.asarray(drafter.params["markov"]["w2"])[np.searchsorted(ids, kept)]  # [40, r]
    assert_starts_from(run, drafter.params | {"markov": drafter.params["markov"] | {"w2": w2}})
    again = prepared(tmp_path, QWEN3, initial, {"draft_vocab_size": 40})
    np.testing.assert_array_equal(again.d2t, run.d2t)


def test_a_smaller_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    def change(config: Any, params: Any) -> tuple[Any, Any]:
        markov = params["markov"] | {"w2": params["markov"]["w2"][:30]}
        own = {"markov": markov, "d2t": jnp.zeros(30, jnp.int32)}
        return replace(config, draft_vocab_size=30), without("head", without("embed", params)) | own

    initial, _ = rewritten(tmp_path, QWEN3, change, include_embeddings=None)
    with pytest.raises(ValueError, match=r"draft_vocab_size 30 \(this run has 40\); set the same in `drafter`"):
        prepared(tmp_path, QWEN3, initial, {"draft_vocab_size": 40})


def test_what_cannot_be_set_is_not_advised(tmp_path: Path) -> None:
    initial, _ = rewritten(tmp_path, QWEN3, lambda config, params: (replace(config, max_positions=256), params))
    with pytest.raises(ValueError, match=r"max_positions 256 \(this run has 512\); max_positions cannot be set"):
        prepared(tmp_path, QWEN3, initial)
    with pytest.raises(ValueError, match=r"block_size 7 \(this run has 5\); set the same in `drafter`"):
        prepared(tmp_path, QWEN3, FOLDER / QWEN3, {"block_size": 5})
