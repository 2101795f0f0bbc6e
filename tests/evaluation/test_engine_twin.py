"""The model does what the engine's batch does: the same rounds, rows, slots and tokens for the same requests."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.calibration.collect import collect
from dspark_jax.decoding.batching import Batch
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.evaluation.loads import Load, Waiting
from dspark_jax.evaluation.replay import Calibration, Replay, make_replay
from dspark_jax.evaluation.simulator import EngineSettings, _Engine
from tests.decoding.tiny import BLOCK, VOCAB, tiny_drafter, tiny_target
from tests.evaluation.tiny import curve

LATER = {3: 6, 4: 2, 9: 3}  # so many requests more come before this iteration


@pytest.fixture(scope="module")
def models():
    return tiny_target(), tiny_drafter()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Twelve requests with seeds of their own; two of them want one token only."""
    draws = np.random.default_rng(5)
    limits = [1, 30, 3, 12, 1, 25, 7, 2, 18, 9, 40, 5]
    prompts = [tuple(draws.integers(0, VOCAB, n).tolist()) for n in draws.integers(1, 15, len(limits))]
    return [
        Request(str(i), p, SamplingParams(1.0, seed=i, max_tokens=m))
        for i, (p, m) in enumerate(zip(prompts, limits, strict=True))
    ]


@pytest.fixture(scope="module")
def found(models, requests) -> Replay:
    count = len(requests)
    made = collect(*models, requests, ["d"] * count, [False] * count, batch_size=4, stop_ids=())
    return make_replay([made], Calibration())


@pytest.mark.parametrize(("system", "sizes"), [("plain", (4,)), ("fixed", (1, 4))])
def test_the_model_takes_the_rounds_that_the_batch_takes(system, sizes, models, requests, found):
    target, drafter = models
    generator = Generator(target, drafter if system == "fixed" else None, batch_size=4, slot_sizes=sizes, stop_ids=())
    batch = Batch(generator, "plain")
    settings = EngineSettings(slots=sizes, resize_seconds=1.0)
    model = _Engine(system, Load("open", 1e-30, 1), found, curve(sizes, BLOCK), settings, 0)
    model.source.waiting = []
    come, iteration = 0, 0
    while come < len(requests) or batch.busy:
        for _ in range(LATER.get(iteration, iteration == 0)):
            batch.add(requests[come])
            model.source.waiting.append(Waiting(come, model.clock))
            come += 1
        iteration += 1
        if not batch.busy:
            continue  # an engine waits
        batch.advance(settings.rounds)
        model.iteration()
        did, tally = batch.statistics, model.tally
        assert (did.rounds, did.drafted_rounds, did.request_rounds) == (tally.rounds, tally.drafted, tally.active)
        assert (did.rows, did.rows + did.padded_rows) == (tally.rows, tally.bucket_rows)
        assert (did.tokens, did.completed) == (tally.tokens + tally.committed, tally.answers)
        assert (batch.size, did.resizes) == (model.slots, tally.seconds["resize"])
    assert come == len(requests) == tally.answers and tally.rounds > 20
