"""Hand-made outcomes and the benchmarks that they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dspark_jax.evaluation.benchmarks import Benchmark, Conversation
from dspark_jax.evaluation.outcomes import Outcome, outcome_id


def benchmark(name: str, domain: str = "math", conversations: int = 1, turns: int = 1) -> Benchmark:
    """Conversations c0, c1, ... that say nothing much."""
    said = tuple(f"turn {i}" for i in range(turns))
    return Benchmark(name, name.upper(), domain, tuple(Conversation(name, f"c{i}", said) for i in range(conversations)))


def outcome(
    system: str,
    name: str,
    conversation: str,
    accepted: Sequence[int],
    *,
    turn: int = 0,
    block: int = 3,
    reached: Sequence[int] | None = None,
    wall: float | None = None,
    reason: str = "length",
) -> Outcome:
    """An answer whose rounds accepted so many drafts out of `block`; `reached` as verified by default."""
    verified = (block,) * len(accepted)
    tokens = 1 + sum(accepted) + len(accepted)
    if reached is not None and reached[-1] == accepted[-1] < block:
        tokens -= 1  # an accepted stop token: no bonus behind it
    return Outcome(
        outcome_id(system, name, conversation, turn), system, name, conversation, turn, 5, tuple(range(tokens)),
        reason, tuple(accepted), verified, tuple(reached or verified), (), wall,
    )  # fmt: skip


def random_outcomes(
    rates: Mapping[str, float], benchmarks: Sequence[Benchmark], *, rounds: int = 30, block: int = 4, seed: int = 0
) -> list[Outcome]:
    """Each system accepts every draft with its rate, shifted by the conversation; `plain` drafts nothing.

    Drafters take a second for four tokens, plain decoding one for two.
    """
    draws = np.random.default_rng(seed)
    made = []
    for one in benchmarks:
        for c in one.conversations:
            shift = draws.normal(scale=0.08)
            for system, rate in rates.items():
                if system == "plain":
                    made.append(outcome(system, one.name, c.id, [0] * rounds, block=0, wall=(rounds + 1) / 2))
                    continue
                runs = np.cumprod(draws.random((rounds, block)) < np.clip(rate + shift, 0.05, 0.95), axis=1)
                accepted = runs.sum(axis=1).tolist()
                wall = (sum(accepted) + rounds + 1) / 4
                made.append(outcome(system, one.name, c.id, accepted, block=block, wall=wall))
    return made
