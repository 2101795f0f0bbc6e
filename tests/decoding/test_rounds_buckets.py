"""Rounds without a budget are verified in the smallest bucket that holds their rows, and `Totals` counts them there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.admission import NewRequests, admit, prefill
from dspark_jax.decoding.rounds import Totals, run_rounds
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.decoding.schedule import Schedule, buckets_for
from dspark_jax.decoding.state import DecodeState, Program, init_state
from dspark_jax.decoding.step import draft
from dspark_jax.drafters.interface import bind
from dspark_jax.drafters.ngram import NgramConfig
from tests.decoding.tiny import BLOCK, VOCAB, tiny_drafter, tiny_target

TARGET = tiny_target()
REQUESTS, SHORTEST = 3, 2
LIMITS = (18, 9, 30)  # tokens of each request: they end one after another
PROMPTS = np.random.default_rng(8).integers(0, VOCAB, (REQUESTS, 6)).astype(np.int32)
BUCKETS = buckets_for(REQUESTS, BLOCK)
ALL_ROUNDS = 1000
run_draft = jax.jit(draft, static_argnames=("program",))
run = jax.jit(run_rounds, static_argnames=("program", "buckets"))


class Begun(NamedTuple):
    """A batch whose prompts are in: how it goes on, the drafter's parameters, and the state."""

    program: Program
    params: dict
    state: DecodeState

    def rounds(self, state: DecodeState, most: int) -> tuple[DecodeState, Totals]:
        new, totals = run(
            TARGET.params, self.params, state, jnp.int32(most), jnp.bool_(False), program=self.program, buckets=BUCKETS
        )
        return new, jax.device_get(totals)


def begin(drafter: SimpleNamespace, schedule: Schedule, threshold: float = 0.0) -> Begun:
    """Greedy requests of `LIMITS` tokens in all slots."""
    program = Program(TARGET.config, drafter.config, schedule, "greedy", (), jnp.float32)
    params = bind(drafter.params, TARGET.params["embed"], TARGET.params["head"])
    full = lambda value, dtype: jnp.full(REQUESTS, value, dtype)  # noqa: E731
    zeros = full(0, jnp.float32)
    sampling = Sampling(zeros, zeros + 1, full(0, jnp.int32), zeros, jnp.zeros((REQUESTS, 2), jnp.uint32))
    lengths, limits = full(PROMPTS.shape[1], jnp.int32), jnp.asarray(LIMITS, jnp.int32)
    new = NewRequests(jnp.asarray(PROMPTS), lengths, jnp.arange(REQUESTS), limits, sampling)
    ready = prefill(TARGET.params, params, new, program=program)
    return Begun(program, params, admit(init_state(program, REQUESTS, 48, threshold), new, ready, program=program))


def leading(flags: np.ndarray) -> np.ndarray:
    """How many of each row of `flags [R, K]` hold without a gap from the first on."""
    return np.cumprod(flags, axis=1).sum(axis=1)


def by_threshold(begun: Begun, state: DecodeState) -> np.ndarray:
    """Drafts `[R]` that are confident enough."""
    confidence = np.asarray(run_draft(begun.params, state, program=begun.program).confidence)
    return leading(confidence >= np.asarray(state.threshold))


def by_history(begun: Begun, state: DecodeState) -> np.ndarray:
    """Drafts `[R]` of prompt lookup: a block where the last tokens have occurred before, else none."""
    found = []
    for prompt, tokens, length in zip(PROMPTS, np.asarray(state.tokens), np.asarray(state.length), strict=True):
        history = [*prompt.tolist(), *tokens[:length].tolist()]
        earlier = (history[i : i + SHORTEST] for i in range(len(history) - SHORTEST))
        found.append(BLOCK if history[-SHORTEST:] in earlier else 0)
    return np.array(found)


def smallest(rows: int) -> int:
    """The number of the smallest bucket that holds so many rows."""
    return min(i for i, size in enumerate(BUCKETS) if size >= rows)


def check(begun: Begun, drafts: Callable[[Begun, DecodeState], np.ndarray]) -> np.ndarray:
    """Round after round, then all at once; returns how many rounds were verified in each bucket, `[buckets]`.

    `drafts`: tokens `[R]` that the next round shall verify, as far as limits let it.
    """
    state, expected, rows = begun.state, np.zeros(len(BUCKETS), int), []
    while (active := np.asarray(state.active)).any():
        room = np.asarray(state.limit - state.length) - 1
        lengths = np.minimum(drafts(begun, state), room)
        rows.append(int((1 + lengths)[active].sum()))
        before, (state, one) = state.counters.verified, begun.rounds(state, 1)
        np.testing.assert_array_equal(np.asarray(state.counters.verified - before)[active], lengths[active])
        np.testing.assert_array_equal(one.by_bucket, np.eye(len(BUCKETS))[smallest(rows[-1])])
        assert (one.rounds, one.rows, one.requests) == (1, rows[-1], active.sum())
        expected += one.by_bucket
    last, whole = begun.rounds(begun.state, ALL_ROUNDS)
    np.testing.assert_array_equal(whole.by_bucket, expected)
    assert whole.by_bucket.sum() == whole.rounds == whole.drafted == len(rows) and whole.rows == sum(rows)
    np.testing.assert_array_equal(last.tokens, state.tokens)
    return expected


@pytest.mark.parametrize("threshold", [0.0, 0.45, 0.5, 0.54, 0.58])
def test_a_threshold_decides_the_bucket(threshold: float) -> None:
    used = check(begin(tiny_drafter(), "threshold", threshold), by_threshold)
    assert np.count_nonzero(used) > 1


def test_a_threshold_that_admits_nothing_takes_the_smallest_bucket() -> None:
    used = check(begin(tiny_drafter(), "threshold", 1.0), by_threshold)
    np.testing.assert_array_equal(used, [max(LIMITS) - 1, 0, 0])  # a token a round, the first one from the prefill


def test_prompt_lookup_that_abstains_takes_fewer_rows() -> None:
    drafter = SimpleNamespace(config=NgramConfig(BLOCK, longest=3, shortest=SHORTEST), params={})
    assert check(begin(drafter, "fixed"), by_history).all()  # all three buckets
