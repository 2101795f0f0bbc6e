"""Committed tokens are distributed exactly as the target's own, through the whole compiled step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from dspark_jax.decoding import step as step_module
from dspark_jax.decoding.admission import NewRequests, admit, prefill
from dspark_jax.decoding.rounds import run_rounds
from dspark_jax.decoding.sampling import Sampling, raw_key
from dspark_jax.decoding.state import Program, init_state
from dspark_jax.drafters.dspark import bind
from dspark_jax.models import transformer
from tests.decoding.test_sampling import filter_reference
from tests.decoding.tiny import VOCAB, tiny_drafter, tiny_target

PROMPT = (3, 1, 4, 1, 5)
LENGTH, REQUESTS, WORST = 3, 4096, 1e-4
TARGET = tiny_target()


def conditionals() -> np.ndarray:
    """Target logits of the next token after the prompt and every prefix of up to LENGTH - 1 tokens, `[V, ..., V]`."""
    grids = np.stack(np.meshgrid(*[np.arange(VOCAB)] * (LENGTH - 1), indexing="ij"), axis=-1).reshape(-1, LENGTH - 1)
    ids = jnp.asarray(np.concatenate([np.tile(PROMPT, (len(grids), 1)), grids], axis=1), jnp.int32)
    hidden = jax.jit(transformer.forward, static_argnames=("config",))(TARGET.params, TARGET.config, ids)
    logits = np.asarray(transformer.logits(TARGET.params, hidden.final), np.float64)
    return logits.reshape(VOCAB, len(grids), -1)[..., len(PROMPT) - 1 :]  # [V, prefixes, LENGTH]


def joint(logits: np.ndarray, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> np.ndarray:
    """Exact probabilities `[V ** LENGTH]` of the first LENGTH tokens."""
    probs = np.exp(logits / temperature)
    probs /= probs.sum(axis=0)
    if top_p < 1 or top_k or min_p:
        probs = np.apply_along_axis(filter_reference, 0, probs, top_p, top_k, min_p)
    total = np.ones(VOCAB ** (LENGTH - 1))
    prefixes = np.arange(len(total))
    for i in range(LENGTH - 1):
        token = prefixes // VOCAB ** (LENGTH - 2 - i) % VOCAB
        total = total * probs[token, prefixes, i]
    return (total[:, None] * probs[..., LENGTH - 1].T).reshape(-1)


def simulate(
    drafter,
    schedule="fixed",
    mode="plain",
    settings=((1.0, 1.0, 0, 0.0),),
    buckets=None,
    confidence=0.5,
    costs=None,
    past=None,
    own_seeds=False,
    series=(11,),
    together=REQUESTS,
):
    """Tokens `[REQUESTS, LENGTH]` and counts of requests that cycle through `settings`; of each series of keys.

    Batches have `together` requests.
    """
    program = Program(TARGET.config, drafter and drafter.config, schedule, mode, (), jnp.float32)
    params = bind(drafter.params, TARGET.params["embed"], TARGET.params["head"]) if drafter else {}
    columns = [jnp.asarray(np.resize(column, together)) for column in zip(*settings, strict=True)]
    dtypes = (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
    columns = [c.astype(d) for c, d in zip(columns, dtypes, strict=True)]
    full = lambda value: jnp.full(together, value, jnp.int32)  # noqa: E731
    ids = jnp.tile(jnp.asarray(PROMPT, jnp.int32), (together, 1))
    limit = LENGTH + 5  # room for whole blocks

    def whole(keys):
        new = NewRequests(ids, full(len(PROMPT)), jnp.arange(together), full(limit), Sampling(*columns, keys))
        state = init_state(program, together, 24, confidence)
        ready = prefill(TARGET.params, params, new, program=program)
        state = admit(state, new, ready, program=program)
        state = state._replace(past=past or state.past)
        sizes = tuple(int(together * b) for b in (buckets or (program.slots,)))
        most, until_free = jnp.int32(LENGTH - 1), jnp.bool_(False)
        state, _ = run_rounds(TARGET.params, params, state, most, until_free, costs, program=program, buckets=sizes)
        return state.tokens, state.counters

    @jax.jit  # a fresh program each time, so that patched rules are traced
    def batches(keys):
        if len(keys) == 1:
            return whole(keys[0])
        return jax.tree.map(lambda x: x.reshape(REQUESTS, *x.shape[2:]), jax.vmap(whole)(keys))

    keys = ([raw_key(one << 32 | i, own_seeds) for i in range(REQUESTS)] for one in series)
    runs = jax.device_get([batches(jnp.asarray(each, jnp.uint32).reshape(-1, together, 2)) for each in keys])
    tokens, counters = jax.tree.map(lambda *parts: np.concatenate(parts), *runs)
    return tokens[:, :LENGTH], counters


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square over the joint distribution of the tokens, rare outcomes merged."""
    codes = tokens @ VOCAB ** np.arange(LENGTH)[::-1]
    counts, expected = np.bincount(codes, minlength=len(expected)), expected * len(tokens)
    assert not counts[expected < 1e-9].any(), "an impossible outcome came up"
    order = np.argsort(expected)
    group = np.floor(np.cumsum(expected[order]) / 8).astype(int)  # at least about 8 expected in each
    _, group = np.unique(group, return_inverse=True)
    observed, wanted = (np.bincount(group, weights=x[order]) for x in (counts, expected))
    keep = wanted > 2
    observed, wanted = (np.append(x[keep], x[~keep].sum()) for x in (observed, wanted))
    keep = wanted > 0
    return float(chisquare(observed[keep], wanted[keep] * observed[keep].sum() / wanted[keep].sum()).pvalue)


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return conditionals()


def test_plain(logits: np.ndarray) -> None:
    assert p_value(simulate(None)[0], joint(logits)) > WORST


def test_fixed(logits: np.ndarray) -> None:
    tokens, counters = simulate(tiny_drafter())
    share = counters.accepted.sum() / counters.verified.sum()
    assert 0.05 < share < 0.9  # both acceptance and rejection happen a lot
    assert p_value(tokens, joint(logits)) > WORST


def test_reduced_draft_vocabulary(logits: np.ndarray) -> None:
    tokens, counters = simulate(tiny_drafter(draft_vocab=7))
    assert counters.accepted.sum() > 0
    assert p_value(tokens, joint(logits)) > WORST


def test_threshold(logits: np.ndarray) -> None:
    """Verified lengths follow the drafted tokens through the Markov features, in packed buckets."""
    tokens, counters = simulate(tiny_drafter(), "threshold", buckets=(1, 2, 4))
    per_round = counters.verified / np.maximum(counters.rounds, 1)
    assert len(np.unique(per_round)) > 2 and 0.2 < per_round.mean() < 2.8
    assert p_value(tokens, joint(logits)) > WORST


def test_filters_in_one_batch(logits: np.ndarray) -> None:
    settings = ((1.0, 1.0, 0, 0.0), (0.8, 1.0, 4, 0.0), (1.0, 0.8, 0, 0.0), (1.3, 0.95, 8, 0.1), (0.0, 1.0, 0, 0.0))
    tokens, _ = simulate(tiny_drafter(), mode="filtered", settings=settings)
    for i, setting in enumerate(settings[:-1]):
        assert p_value(tokens[i :: len(settings)], joint(logits, *setting)) > WORST, setting
    greedy = tokens[len(settings) - 1 :: len(settings)]
    expected = np.unravel_index(joint(logits, 0.01).argmax(), (VOCAB,) * LENGTH)
    np.testing.assert_array_equal(greedy, np.tile(expected, (len(greedy), 1)))


@pytest.mark.parametrize("rule", ["no residual", "lenient"])
def test_wrong_rules_are_found(logits: np.ndarray, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """The test has teeth: drawing from the target after a rejection, or accepting too easily, fails it."""
    if rule == "no residual":
        monkeypatch.setattr(step_module, "next_distribution", lambda target, draft, rejected: target)
    else:
        right = step_module.accepted_length
        monkeypatch.setattr(step_module, "accepted_length", lambda p, q, u, length: right(1.3 * p, q, u, length))
    assert p_value(simulate(tiny_drafter())[0], joint(logits)) < WORST
