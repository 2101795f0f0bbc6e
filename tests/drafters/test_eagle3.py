"""Eagle3: round by round parity with the reference decoding traces, checkpoints both ways, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

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

NAMES = ("eagle3_qwen3", "eagle3_gemma4")
ATOL = {"eagle3_qwen3": 1e-4, "eagle3_gemma4": 2e-3}  # Gemma4's activations and logits are larger
CASES = [
    (name, case)
    for name in NAMES
    for case in ("p0", "p1", "p0_stop_accepted", "p0_stop_bonus")
    if (FOLDER / "inference" / name / f"{case}.npz").exists()
]
run_propose = jax.jit(interface.propose, static_argnames=("config", "draw"))


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, case in CASES if "stop" not in case])
def test_rounds(name: str, case: str) -> None:
    """Drafts, draft and target logits, acceptance and committed tokens of every round equal the trace."""
    trace, meta = load_case(name, case)
    run = start(name, trace, meta)
    with_logits = trace["round_draft_logits"].shape[0] if "round_draft_logits" in trace else 0
    for i, left in enumerate(room(trace)):
        if left < 0:
            break
        assert int(run.state.start[0]) == trace["round_start"][i]
        assert int(run.state.anchor[0]) == trace["round_anchor_token"][i]
        if i < with_logits:
            state, program = run.state, run.program
            memory = state.draft_cache
            proposal = run_propose(program.drafter, run.params, memory, state.anchor, state.start, keep_logits)
            np.testing.assert_allclose(proposal.probs[..., 0], trace["round_draft_logits"][i], atol=ATOL[name])
            np.testing.assert_allclose(memory.state[0], trace["round_draft_hidden"][i, 0], atol=ATOL[name])
            ids = jnp.concatenate([state.anchor, jnp.asarray(trace["round_draft_tokens"][i])])
            packing = dense_packing(1, program.slots)
            hidden, _ = run_extend(run.target.params, program.target, state.target_cache, ids, state.start, packing)
            logits = transformer.logits(run.target.params, hidden.final, program.target.final_softcap)
            np.testing.assert_allclose(logits.T, trace["round_target_logits"][i], atol=ATOL[name])
        run.state, out = run_step(
            run.target.params, run.params, run.state, program=run.program, bucket=run.program.slots
        )
        check_round(trace, i, jax.tree.map(lambda x: np.asarray(x)[0], out), left)
    assert not run.state.active[0]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_outputs(name: str, case: str) -> None:
    """Whole outputs and rounds of the generator: one compiled loop, the small steps of a block inside it."""
    trace, meta = load_case(name, case)
    target, drafter = models(name)
    generator = Generator(target, drafter, stop_ids=tuple(meta["stop_token_ids"] or ()))
    prompt = tuple(trace["prompt_ids"][0].tolist())
    (done,) = generator.generate([Request("0", prompt, GREEDY)])
    assert [*prompt, *done.token_ids] == trace["output_ids"][0].tolist()
    assert done.finish_reason == ("stop" if meta["stop_token_ids"] else "length")
    assert done.rounds == (room(trace) >= 0).sum()


def eagle(name: str = NAMES[0]) -> tuple[Eagle3Config, dict]:
    """A golden drafter with random weights."""
    drafter = load_drafter(FOLDER / "drafters" / name)
    assert isinstance(drafter.config, Eagle3Config)
    return drafter.config, drafter.params


def same(one: dict, other: dict) -> None:
    """Asserts that two pytrees hold the same arrays."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("kind", ["drafters", "inference"])
@pytest.mark.parametrize("name", NAMES)
def test_golden_folders_round_trip_bit_for_bit(name: str, kind: str, tmp_path: Path) -> None:
    """Every tensor, and every config field that both sides hold."""
    folder = FOLDER / kind / name
    config, params = read_drafter(folder, jnp.float32)
    write_drafter(tmp_path / "d", config, params, storage_dtype="float32")
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "d", folder))
    assert set(ours) == set(theirs)
    for tensor, value in theirs.items():
        assert ours[tensor].dtype == value.dtype
        np.testing.assert_array_equal(ours[tensor], value)
    found, weights = read_drafter(tmp_path / "d", jnp.float32)
    assert found == config
    same(weights, params)
    fields, wanted = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "d", folder))
    if config.family == "gemma4":
        for one in (fields, wanted):
            one["rope_parameters"] = one["rope_parameters"]["full_attention"]
            del one["head_dim"], one["num_key_value_heads"]  # of sliding layers, which a drafter has none of
    common = fields.keys() & wanted.keys()
    assert {key: fields[key] for key in common} == {key: wanted[key] for key in common}
    assert {"architectures", "model_type", "ttt_length", "target_layer_ids", "rope_parameters"} <= common


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
