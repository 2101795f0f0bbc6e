"""Eagle3: round by round parity with the reference decoding traces, checkpoints both ways, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.drafters import read_drafter, write_drafter
from dspark_jax.checkpoints.load import load_drafter
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.drafters import interface
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.models import transformer
from dspark_jax.models.attention import dense_packing
from tests.drafters.test_golden_rounds import (
    FOLDER,
    GREEDY,
    check_round,
    keep_logits,
    load_case,
    models,
    room,
    run_extend,
    run_step,
    start,
)

NAME = "eagle3_qwen3"
CASES = ("p0", "p1", "p0_stop_accepted", "p0_stop_bonus")
run_propose = jax.jit(interface.propose, static_argnames=("config", "draw"))


@pytest.mark.parametrize("case", ["p0", "p1"])
def test_rounds(case: str) -> None:
    """Drafts, draft and target logits, acceptance and committed tokens of every round equal the trace."""
    trace, meta = load_case(NAME, case)
    run = start(NAME, trace, meta)
    with_logits = trace["round_draft_logits"].shape[0] if "round_draft_logits" in trace else 0
    for i, left in enumerate(room(trace)):
        if left < 0:
            break
        assert int(run.state.start[0]) == trace["round_start"][i]
        assert int(run.state.anchor[0]) == trace["round_anchor_token"][i]
        if i < with_logits:
            state, engine = run.state, run.engine
            memory = state.draft_cache
            proposal = run_propose(engine.drafter, run.params, memory, state.anchor, state.start, keep_logits)
            np.testing.assert_allclose(proposal.probs[..., 0], trace["round_draft_logits"][i], atol=1e-4)
            np.testing.assert_allclose(memory.state[0], trace["round_draft_hidden"][i, 0], atol=1e-4)
            ids = jnp.concatenate([state.anchor, jnp.asarray(trace["round_draft_tokens"][i])])
            packing = dense_packing(1, engine.slots)
            hidden, _ = run_extend(run.target.params, engine.target, state.target_cache, ids, state.start, packing)
            logits = np.asarray(transformer.logits(run.target.params, hidden.final)).T
            np.testing.assert_allclose(logits, trace["round_target_logits"][i], atol=1e-4)
        run.state, out = run_step(run.target.params, run.params, run.state, engine=run.engine, bucket=run.engine.slots)
        check_round(trace, i, jax.tree.map(lambda x: np.asarray(x)[0], out), left)
    assert not run.state.active[0]


@pytest.mark.parametrize("case", CASES)
def test_outputs(case: str) -> None:
    """Whole outputs and rounds of the generator: one compiled loop, the small steps of a block inside it."""
    trace, meta = load_case(NAME, case)
    target, drafter = models(NAME)
    generator = Generator(target, drafter, stop_ids=tuple(meta["stop_token_ids"] or ()))
    prompt = tuple(trace["prompt_ids"][0].tolist())
    (done,) = generator.generate([Request("0", prompt, GREEDY)])
    assert [*prompt, *done.token_ids] == trace["output_ids"][0].tolist()
    assert done.finish_reason == ("stop" if meta["stop_token_ids"] else "length")
    assert done.rounds == (room(trace) >= 0).sum()


def eagle() -> tuple[Eagle3Config, dict]:
    """The golden drafter with random weights."""
    drafter = load_drafter(FOLDER / "drafters" / NAME)
    assert isinstance(drafter.config, Eagle3Config)
    return drafter.config, drafter.params


def same(one: dict, other: dict) -> None:
    """Asserts that two pytrees hold the same arrays."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("layers", [(0, 1, 2, 3, 4), (1, 2, 4)])
@pytest.mark.parametrize("embeddings", [True, False])
def test_a_folder_comes_back_as_it_was(tmp_path: Path, layers: tuple[int, ...], embeddings: bool) -> None:
    """Five layers of features (DeepSpec) or three (EAGLE), with and without the target's matrices."""
    config, params = eagle()
    width = config.hidden_size * len(layers)
    config = replace(config, target_layer_ids=layers, shares_embeddings=not embeddings)
    params = params | {"fc": params["fc"][:, :width]}
    write_drafter(tmp_path / "d", config, params, storage_dtype="float32", include_embeddings=embeddings)
    found, weights = read_drafter(tmp_path / "d", jnp.float32)
    assert found == config
    same(weights, params if embeddings else {k: v for k, v in params.items() if k not in ("embed", "head")})


def test_a_reduced_vocabulary_comes_back(tmp_path: Path) -> None:
    config, params = eagle()
    kept = np.sort(np.random.default_rng(0).permutation(config.vocab_size)[:50])
    config = replace(config, draft_vocab_size=50)
    params = params | {"head": params["head"][kept], "d2t": jnp.asarray(kept - np.arange(50), jnp.int32)}
    write_drafter(tmp_path / "d", config, params, storage_dtype="float32")
    found, weights = read_drafter(tmp_path / "d", jnp.float32)
    assert found == config
    same(weights, params)
    (tmp_path / "d" / "config.json").write_text((tmp_path / "d" / "config.json").read_text().replace('": 50', '": 40'))
    with pytest.raises(ValueError, match="lm_head.weight has shape|d2t has shape"):
        read_drafter(tmp_path / "d", jnp.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layer_ids": ()}, "target_layer_ids is missing or empty"),
        ({"target_layer_ids": (-1, 2, 3)}, "Eagle3 reads layers, not the embedding"),
        ({"target_layer_ids": (1, 2, 5)}, "layer 5 is the last one"),
        ({"block_size": 0}, "block_size 0: must be positive"),
        ({"draft_vocab_size": 301}, r"draft_vocab_size 301: must lie in 1..vocab_size \(300\)"),
        ({"num_kv_heads": 3}, "num_heads 4: must be a multiple of num_kv_heads 3"),
    ],
)
def test_configs_that_cannot_be_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(eagle()[0], **change)
