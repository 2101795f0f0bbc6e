"""Committed tokens keep the target's distribution under both budgeted schedules; a search that anticipates does not.

The drafter is made sharp: its confidence in a token depends on the token before it, as in the paper's Appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding import rounds as rounds_module
from dspark_jax.decoding.budget import Past, init_past, make_costs
from dspark_jax.decoding.curve import RoundSeconds
from tests.decoding.test_lossless import REQUESTS, WORST, conditionals, joint, p_value, simulate
from tests.decoding.tiny import BLOCK, HIDDEN, VOCAB, tiny_drafter

BUCKETS = (1, 2, BLOCK + 1)


def sharp_drafter(sure: Sequence[int] = range(0, VOCAB, 2)) -> SimpleNamespace:
    """Confidences near 1 after the tokens `sure`, near 0 after others; slot 1 is always fairly sure."""
    drafter = tiny_drafter()
    w1 = np.array(drafter.params["markov"]["w1"])
    w1[:, 0] = np.where(np.isin(np.arange(VOCAB), sure), 3.0, -3.0)
    weights = np.zeros(HIDDEN + w1.shape[1], np.float32)
    weights[HIDDEN] = 1.5
    params = drafter.params | {
        "markov": drafter.params["markov"] | {"w1": jnp.asarray(w1)},
        "confidence": {"w": jnp.asarray(weights), "b": jnp.float32(0.3)},
    }
    return SimpleNamespace(config=drafter.config, params=params)


def curve(*seconds: float, plain: float = 0.9) -> RoundSeconds:
    return RoundSeconds((), np.asarray(seconds), plain)


def random_past(requests: int) -> Past:
    """What rounds before might have said."""
    rng = np.random.default_rng(5)
    older, newer = (jnp.asarray(np.cumprod(rng.uniform(0.2, 1, (requests, BLOCK)), axis=1), jnp.float32) for _ in "ab")
    counts = jnp.asarray(rng.uniform(0, 50, (2, BLOCK)), jnp.float32)
    return Past(older, newer, jnp.mean(older, axis=0), jnp.int32(0), *counts)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return joint(conditionals())


@pytest.mark.parametrize(("schedule", "own_seeds"), [("causal", False), ("async", False), ("causal", True)])
def test_budgeted_schedules_are_lossless(expected: np.ndarray, schedule: str, own_seeds: bool) -> None:
    """A staircase on which verify lengths of all kinds occur, from 0 to the whole block."""
    costs = make_costs(curve(1.0, 1.12, 2.6), len(BUCKETS))
    past = random_past(REQUESTS)
    tokens, counters = simulate(sharp_drafter(), schedule, buckets=BUCKETS, costs=costs, past=past, own_seeds=own_seeds)
    per_round = counters.verified / np.maximum(counters.rounds, 1)
    assert len(np.unique(per_round)) > 2 and 0.2 < per_round.mean() < BLOCK - 0.2
    assert 0.05 < counters.accepted.sum() / counters.verified.sum() < 0.95
    assert p_value(tokens, expected) > WORST


def test_what_a_refused_block_promised_says_nothing_of_the_next(expected: np.ndarray) -> None:
    """One request alone, at break-even: it drafts a second time only where the third slot of the first block was sure.

    That depended on the token drafted in the second slot, whose position is drafted again after a refusal in the first.
    Drawn by the same uniform, tokens that make the drafter sure would be committed too often (p of 1e-10).
    """
    costs = make_costs(curve(3.0, 3.05, 3.1, plain=1.0), len(BUCKETS))
    past = init_past(1, BLOCK)._replace(idle=jnp.int32(1000))  # the first round drafts
    drafter = sharp_drafter([token for token in range(VOCAB) if token % 3 != 2])
    tokens, counters = simulate(
        drafter, "causal", buckets=BUCKETS, costs=costs, past=past, together=1, series=range(10)
    )
    again = counters.drafted == 2 * BLOCK
    assert 0.1 < again.mean() < 0.9
    assert p_value(tokens, expected) > WORST


def test_plain_rounds_between_are_lossless(expected: np.ndarray) -> None:
    """A curve on which drafting never pays: no draft in the first rounds, and the tokens are plain decoding's."""
    costs = make_costs(curve(1.8, 2.0, 2.6, plain=0.5), len(BUCKETS))
    tokens, counters = simulate(sharp_drafter(), "causal", buckets=BUCKETS, costs=costs)
    assert not counters.drafted.any() and not counters.verified.any()
    assert p_value(tokens, expected) > WORST


def test_a_global_search_on_these_confidences_is_not(expected: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appendix A: SPS = (1, 0.5, 0.45, ...), each request searching all of its own confidences: the test finds it."""
    seconds = jnp.asarray([1.0, 2.0, 2.22, 2.5])

    def naive(schedule, now, survival, gains, costs):  # type: ignore[no-untyped-def]
        tau = 1 + jnp.concatenate([jnp.zeros((survival.shape[0], 1)), jnp.cumsum(survival, axis=1)], axis=1)
        lengths = jnp.minimum(jnp.argmax(tau / seconds, axis=1), jnp.maximum(now.room, 0)).astype(jnp.int32)
        return jnp.where(now.active, lengths, 0), jnp.int32(len(BUCKETS) - 1)

    monkeypatch.setattr(rounds_module, "budgeted_lengths", naive)
    monkeypatch.setattr(rounds_module, "corrected", lambda past, survival: survival)
    costs = make_costs(None, len(BUCKETS))
    tokens, counters = simulate(sharp_drafter(), "causal", buckets=BUCKETS, costs=costs, series=range(4))
    assert len(np.unique(counters.verified)) > 2
    assert p_value(tokens, expected) < WORST


@pytest.mark.parametrize("schedule", ["causal", "async"])
def test_ours_on_the_curve_of_the_appendix(expected: np.ndarray, schedule: str) -> None:
    """The same costs a row, the same drafter: our schedules pass."""
    seconds = np.interp(BUCKETS, [1, 2, 3, 4], [1.0, 2.0, 2.22, 2.5])
    costs = make_costs(RoundSeconds((), seconds, 1.2), len(BUCKETS))
    tokens, _ = simulate(sharp_drafter(), schedule, buckets=BUCKETS, costs=costs, past=random_past(REQUESTS))
    assert p_value(tokens, expected) > WORST


def test_appendix_a_by_hand() -> None:
    """The example's own numbers: the naive rule gives P(A) = 0.85, causal 0.7, by exact enumeration."""
    target, draft, seconds = np.array([0.7, 0.3]), np.array([0.5, 0.5]), np.array([1.0, 2.0, 1 / 0.45])
    residual = np.maximum(target - draft, 0) / np.maximum(target - draft, 0).sum()

    def law(length_of) -> np.ndarray:
        total = np.zeros(2)
        for x in range(2):
            survival = np.cumprod([0.8, 0.9 if x == 0 else 0.0])
            if length_of(survival) == 0:
                total += draft[x] * target
            else:
                accept = min(1, target[x] / draft[x])
                total[x] += draft[x] * accept
                total += draft[x] * (1 - accept) * residual
        return total

    def naive(survival) -> int:
        tau = 1 + np.concatenate([[0], np.cumsum(survival)])
        return int(np.argmax(tau / seconds))

    def causal(survival) -> int:
        return int(one_request(survival, seconds))

    np.testing.assert_allclose(law(naive), [0.85, 0.15])
    np.testing.assert_allclose(law(causal), [0.7, 0.3])


def one_request(survival: np.ndarray, seconds: np.ndarray) -> int:
    """Drafts that `causal` verifies of one request, with buckets of all sizes and a past that promises a lot."""
    from dspark_jax.decoding.budget import Round, budgeted_lengths

    ones = jnp.ones(1, jnp.int32)
    now = Round(ones.astype(bool), 2 * ones, jnp.arange(1, 4), jnp.full(3, 2))
    costs = make_costs(RoundSeconds((), seconds, 9.0), 3)
    gains = jnp.asarray([0.0, 0.8, 1.52])
    lengths, _ = jax.jit(budgeted_lengths, static_argnums=0)("causal", now, jnp.asarray(survival)[None], gains, costs)
    return lengths[0]
