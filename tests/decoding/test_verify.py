"""The acceptance rule against the reference's numbers, at three temperatures and for proposals of any length."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.sampling import Sampling, distribution
from dspark_jax.decoding.verify import (
    accept_probability,
    accepted_length,
    leading_run,
    next_distribution,
    residual,
    verify_greedy,
)


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Distributions `[..., V]` by the code under test, for `logits [..., V]`."""
    flat = np.asarray(logits, np.float32).reshape(-1, np.shape(logits)[-1])
    rows = len(flat)
    sampling = Sampling(
        jnp.full(rows, temperature), jnp.ones(rows), jnp.zeros(rows, jnp.int32), jnp.zeros(rows), jnp.zeros((rows, 2))
    )
    return np.asarray(distribution(jnp.asarray(flat.T), sampling, "plain")).T.reshape(np.shape(logits))


def pick(probs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Probabilities `[R, K]` of `tokens [R, K]`."""
    return np.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("name", ["temp1", "temp0", "temp07"])
def test_reference_cases(golden: Path, name: str) -> None:
    case = np.load(golden / "verify" / f"{name}.npz")
    temperature, tokens = float(case["temperature"]), case["draft_tokens"]
    target, draft = (probabilities(case[key], temperature) for key in ("target_logits", "draft_logits"))
    rows, block = tokens.shape
    p_target, p_draft = pick(target[:, :-1], tokens), pick(draft, tokens)
    np.testing.assert_allclose(accept_probability(p_target, p_draft), case["accept_prob"], atol=1e-5)
    length = jnp.full(rows, block)
    accepted = np.asarray(accepted_length(p_target, p_draft, jnp.asarray(case["uniforms"]), length))
    np.testing.assert_array_equal(accepted, case["accepted"])
    prefix = np.arange(block) < accepted[:, None]
    np.testing.assert_array_equal(prefix, case["accept_prefix_mask"] == 1)
    rejected = accepted < block
    np.testing.assert_array_equal(rejected, case["is_residual"])
    at = np.arange(rows)
    here = next_distribution(
        target[at, accepted].T, draft[at, np.minimum(accepted, block - 1)].T, jnp.asarray(rejected)
    )
    np.testing.assert_allclose(np.asarray(here).T, case["next_distribution"], atol=1e-5)
    if temperature == 0:
        verdict = verify_greedy(jnp.asarray(target.argmax(-1)), jnp.asarray(tokens), length)
        np.testing.assert_array_equal(verdict.accepted, case["accepted"])
        np.testing.assert_array_equal(verdict.next_token, case["next_distribution"].argmax(-1))


def test_variable_lengths(golden: Path) -> None:
    """Proposals of 0, 1, 3 and 7 tokens; a stop token among the accepted ones cuts the run there."""
    for case in json.loads((golden / "verify" / "misc.json").read_text())["variable_length"]:
        count, block = case["draft_token_count"], 7
        tokens = np.asarray(case["draft_tokens"] + [0] * (block - count), np.int32)
        target, draft = (
            probabilities(np.resize(np.asarray(case[key] or [[0.0]]), (rows, 24)), 1.0)  # filled up with repeats
            for key, rows in (("target_logits", block + 1), ("draft_logits", block))
        )
        ratios = pick(target[None, :-1], tokens[None]), pick(draft[None], tokens[None])
        uniforms = jnp.asarray([case["uniforms"] + [0.0] * (block - count)], jnp.float32)
        accepted = int(accepted_length(*ratios, uniforms, jnp.asarray([count]))[0])
        if count:
            prefix = np.asarray(case["accept_prefix_mask"]).reshape(-1)
            np.testing.assert_array_equal(prefix, np.arange(count) < accepted)
        stops = np.flatnonzero(np.isin(tokens[:accepted], case["stop_token_ids"] or []))
        if case["terminated_by_stop_token"]:
            assert case["accepted_draft_tokens"] == stops[0] + 1
            continue
        assert not len(stops) and case["accepted_draft_tokens"] == accepted
        assert case["committed_length"] == accepted + 1
        other = draft[min(accepted, block - 1)]
        rejected = jnp.asarray([accepted < count])
        np.testing.assert_allclose(
            np.asarray(next_distribution(target[accepted][:, None], other[:, None], rejected))[:, 0],
            case["next_distribution"],
            atol=1e-5,
        )


def test_residuals(golden: Path) -> None:
    for case in json.loads((golden / "verify" / "misc.json").read_text())["residual"]:
        target, draft = (jnp.asarray(case[key], jnp.float32).reshape(-1, 1) for key in ("target_probs", "draft_probs"))
        expected = np.asarray(case["residual_distribution"]).reshape(-1, 1)
        np.testing.assert_allclose(residual(target, draft), expected, atol=1e-5)


def test_leading_run_stops_at_the_length() -> None:
    ok = jnp.asarray([[True, True, True], [True, False, True], [False, True, True], [True, True, True]])
    np.testing.assert_array_equal(leading_run(ok, jnp.asarray([3, 3, 3, 2])), [3, 1, 0, 2])
    np.testing.assert_array_equal(leading_run(jnp.zeros((2, 0), bool), jnp.zeros(2, jnp.int32)), [0, 0])
