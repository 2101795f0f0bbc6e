"""Round by round parity with the reference decoding traces: whole outputs, stop tokens and the threshold rule too."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.load import load_drafter, load_target
from dspark_jax.decoding.admission import NewRequests, admit, prefill
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import Sampling, SamplingParams
from dspark_jax.decoding.state import Program, init_state
from dspark_jax.decoding.step import step
from dspark_jax.drafters.dspark import bind, propose
from dspark_jax.drafters.heads import head_step, markov_bias
from dspark_jax.models import transformer
from dspark_jax.models.attention import dense_packing

FOLDER = Path(__file__).resolve().parents[1] / "golden"
NAMES = ("dspark_qwen3_vanilla", "dspark_qwen3_rnn", "dflash_qwen3", "dspark_gemma4_vanilla")
NEW_TOKENS, CAPACITY = 40, 128
GREEDY = SamplingParams(max_tokens=NEW_TOKENS)
CASES = [
    (name, case)
    for name in NAMES
    for case in ("p0", "p1", "p0_stop_accepted", "p0_stop_bonus", "p0_thr05", "p1_thr05")
    if (FOLDER / "inference" / name / f"{case}.npz").exists() and (name, case) != ("dspark_qwen3_rnn", "p0_stop_bonus")
]
run_step = jax.jit(step, static_argnames=("program", "bucket"))
run_propose = jax.jit(propose, static_argnames=("config", "draw"))
run_extend = jax.jit(transformer.extend, static_argnames=("config",))
run_prefill = jax.jit(prefill, static_argnames=("program",))
run_admit = jax.jit(admit, static_argnames=("program",))


@cache
def models(name: str):
    """The target and a trained drafter."""
    target = "gemma4" if "gemma4" in name else "qwen3_untied"
    return load_target(FOLDER / "targets" / target), load_drafter(FOLDER / "inference" / name)


def load_case(name: str, case: str):
    """Arrays of a trace, and its entry in `meta.json`."""
    meta = json.loads((FOLDER / "inference" / name / "meta.json").read_text())
    return np.load(FOLDER / "inference" / name / f"{case}.npz"), meta["cases"][case]


def start(name: str, trace, meta):
    """Models, the program and the state after prefill; threshold cases use the threshold schedule."""
    target, drafter = models(name)
    params = bind(drafter.params, target.params["embed"], transformer.head_weight(target.params))
    stop_ids = tuple(meta["stop_token_ids"] or ())
    schedule = "threshold" if meta["confidence_threshold"] else "fixed"
    program = Program(target.config, drafter.config, schedule, "greedy", stop_ids, jnp.float32)
    prompt = jnp.asarray(trace["prompt_ids"])
    padded = jnp.pad(prompt, ((0, 0), (0, 16 - prompt.shape[1])))
    sampling = Sampling(jnp.zeros(1), jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.zeros(1), jnp.zeros((1, 2), jnp.uint32))
    lengths = jnp.asarray([prompt.shape[1]])
    new = NewRequests(padded, lengths, jnp.asarray([0]), jnp.asarray([NEW_TOKENS]), sampling)
    state = init_state(program, 1, CAPACITY, meta["confidence_threshold"])
    ready = run_prefill(target.params, params, new, program=program)
    return SimpleNamespace(
        target=target, params=params, program=program, state=run_admit(state, new, ready, program=program)
    )


def keep_logits(logits, slot):
    """A greedy draw that hands out the logits in place of the distribution."""
    best = jnp.argmax(logits, axis=0).astype(jnp.int32)
    return best, jnp.ones(logits.shape[1]), logits


def round_logits(run, drafts):
    """Draft logits `[K, V]`, and target logits `[K + 1, V]` of the round that the state is about to take."""
    program, state = run.program, run.state
    proposal = run_propose(run.params, program.drafter, state.draft_cache, state.anchor, state.start, keep_logits)
    ids = jnp.concatenate([state.anchor, drafts])
    packing = dense_packing(1, program.slots)
    hidden, _ = run_extend(run.target.params, program.target, state.target_cache, ids, state.start, packing)
    return np.asarray(proposal.probs[..., 0]), np.asarray(
        transformer.logits(run.target.params, hidden.final, program.target.final_softcap)
    ).T


def room(trace) -> np.ndarray:
    """Draft tokens that each round may verify: what is left of the new tokens, less the anchor and the bonus token."""
    return NEW_TOKENS + int(trace["num_input_tokens"]) - trace["round_start"] - 2


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, case in CASES if "stop" not in case])
def test_rounds(name: str, case: str) -> None:
    """Everything that a round decides equals the trace, up to the last token that is asked for."""
    trace, meta = load_case(name, case)
    run = start(name, trace, meta)
    with_logits = trace["round_draft_logits"].shape[0] if "round_draft_logits" in trace else 0
    for i, left in enumerate(room(trace)):
        if left < 0:
            break  # the reference takes one round more when the last token is its anchor
        assert int(run.state.start[0]) == trace["round_start"][i]
        assert int(run.state.anchor[0]) == trace["round_anchor_token"][i]
        if i < with_logits:
            drafts = jnp.asarray(trace["round_draft_tokens"][i])
            draft_logits, target_logits = round_logits(run, drafts)
            atol = 2e-3 if "gemma4" in name else 1e-4  # Gemma4's activations and logits are larger
            np.testing.assert_allclose(draft_logits, trace["round_draft_logits"][i], atol=atol)
            np.testing.assert_allclose(target_logits, trace["round_target_logits"][i], atol=atol)
        run.state, out = run_step(
            run.target.params, run.params, run.state, program=run.program, bucket=run.program.slots
        )
        check_round(trace, i, jax.tree.map(lambda x: np.asarray(x)[0], out), left)
    assert not run.state.active[0]


def check_round(trace, i: int, out, left: int) -> None:
    """One round's output against row `i` of the trace; ours verifies at most `left` tokens."""
    np.testing.assert_array_equal(out.drafts, trace["round_draft_tokens"][i])
    if "round_confidence_logits" in trace and trace["round_draft_token_count"][i]:
        # An empty proposal's confidence logits are not in the trace.
        logits = np.log(out.confidence) - np.log1p(-out.confidence)
        np.testing.assert_allclose(logits, trace["round_confidence_logits"][i], atol=1e-4)
    assert out.verified == min(trace["round_draft_token_count"][i], left)
    assert out.accepted == min(trace["round_accepted"][i], left)
    assert out.kept == min(trace["acceptance_lengths"][i], left + 1)
    np.testing.assert_array_equal(out.committed[: out.kept], trace["round_committed_tokens"][i][: out.kept])
    if trace["round_accepted"][i] <= left:
        assert out.committed[out.kept - 1] == trace["round_next_token"][i]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_outputs(name: str, case: str) -> None:
    """Whole outputs, rounds and verified tokens of the generator."""
    trace, meta = load_case(name, case)
    target, drafter = models(name)
    threshold = meta["confidence_threshold"]
    generator = Generator(
        target,
        drafter,
        schedule="threshold" if threshold else "fixed",
        threshold=threshold,
        buckets=(drafter.config.block_size + 1,),
        stop_ids=tuple(meta["stop_token_ids"] or ()),
    )
    prompt = tuple(trace["prompt_ids"][0].tolist())
    (done,) = generator.generate([Request("0", prompt, GREEDY)])
    assert [*prompt, *done.token_ids] == trace["output_ids"][0].tolist()
    assert done.finish_reason == ("stop" if meta["stop_token_ids"] else "length")
    useful = room(trace) >= 0
    assert done.rounds == useful.sum()
    assert done.drafted == done.rounds * drafter.config.block_size
    if meta["stop_token_ids"] is None:
        assert done.verified == np.minimum(trace["proposal_lengths"], room(trace))[useful].sum()


def test_gated_head_follows_its_formula() -> None:
    """W2 (sigmoid(G [h; W1 x] + b) * W1 x), on the gated reference drafter."""
    drafter = load_drafter(FOLDER / "drafters" / "dspark_qwen3_gated")
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(drafter.config.hidden_size, 5)).astype(np.float32)
    markov = {k: np.asarray(v, np.float64) for k, v in drafter.params["markov"].items()}
    previous = markov["w1"][rng.integers(0, drafter.config.vocab_size, 5)].T  # [r, B]
    _, vector = head_step(
        drafter.params, drafter.config, jnp.zeros((0, 5)), jnp.asarray(previous, jnp.float32), jnp.asarray(hidden)
    )
    gate = markov["gate_w"] @ np.concatenate([hidden, previous]) + markov["gate_b"][:, None]
    expected = previous / (1 + np.exp(-gate))
    np.testing.assert_allclose(vector, expected, atol=1e-5)
    np.testing.assert_allclose(markov_bias(drafter.params, vector), markov["w2"] @ expected, atol=1e-5)
