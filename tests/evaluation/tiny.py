"""Records and curves that are small enough to follow by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_jax.calibration.collect import Records
from dspark_jax.decoding.curve import Curve, Point, Prefill
from dspark_jax.decoding.schedule import buckets_for
from dspark_jax.evaluation.replay import Calibration, Replay, make_replay


def records(
    requests: Sequence[Sequence[int]],
    *,
    prompt: int = 10,
    confidence: float | Sequence[float] = 0.5,
    block: int = 1,
    max_tokens: int = 0,
    name: str = "r",
) -> Records:
    """Records of requests that accepted so many draft tokens in each round; an answer ends with its last round.

    Args:
        confidence: of every round, the same for all positions or one for each. max_tokens: 0: long enough for all.
    """
    rows, answers = [], []
    for q, accepted in enumerate(requests):
        length = 1
        for i, count in enumerate(accepted):
            rows.append((count, q, i, prompt + length - 1))
            length += count + 1
        answers.append(length)
    accepted, request, number, position = np.asarray(rows, np.int32).reshape(-1, 4).T
    n, q = len(rows), len(requests)
    return Records(
        confidence=np.broadcast_to(np.asarray(confidence, np.float32), (n, block)),
        accepted=accepted.astype(np.int8),
        verified=np.full(n, block, np.int8),
        request=request,
        round=number,
        position=position,
        ids=tuple(f"{name}{i}" for i in range(q)),
        domain=np.zeros(q, np.int16),
        domains=("all",),
        held_out=np.zeros(q, bool),
        prompt_tokens=np.full(q, prompt, np.int32),
        tokens=np.asarray(answers, np.int32),
        about={"max_tokens": max_tokens or max(answers) + block, "fingerprint": "0" * 16},
    )


def replay(requests: Sequence[Sequence[int]], **how) -> Replay:
    """`records` as a replay, not calibrated."""
    return make_replay([records(requests, **how)], Calibration())


def mixed(count: int, block: int, seed: int = 0, longest: int = 12) -> Replay:
    """Requests with 1 to `longest` rounds that accept as their confidences of 0.6 say."""
    draws = np.random.default_rng(seed)
    rounds = draws.integers(1, longest + 1, count)
    runs = [np.cumprod(draws.random((n, block)) < 0.6, axis=1).sum(axis=1).tolist() for n in rounds]
    return replay(runs, block=block, confidence=0.6)


def curve(
    slots: Sequence[int] = (1,),
    block: int = 1,
    *,
    plain: float = 1.0,
    draft: float = 0.0,
    row: float = 0.0,
    prefill: float = 0.5,
) -> Curve:
    """A curve of rounds of `plain` seconds for R rows, `row` for each row more, and `draft` for the draft."""
    points = []
    for size in slots:
        rows = buckets_for(size, block)
        drafted = tuple(plain + draft + row * (b - size) for b in rows)
        points.append(Point(size, 256, rows, drafted, plain))
    return Curve(tuple(points), (Prefill(32, prefill),))
