"""What the rounds did for each request, as callers see it: tokens, origins, log-probabilities; and plain requests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.batching import Batch, Event
from dspark_jax.decoding.generate import Generator
from dspark_jax.decoding.requests import Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.trace import RoundTrace
from dspark_jax.models import transformer
from tests.decoding.test_engine import PROMPTS, compiled, generator
from tests.decoding.test_lossless import TARGET
from tests.decoding.tiny import BLOCK, tiny_drafter

TRACED = {"trace_rounds": 4, "top_logprobs": 3, "switchable": True, "batch_size": 4, "slot_sizes": (4,)}
SCHEDULES = ("causal", "fixed")


def request(number: int, max_tokens: int = 18, logprobs: int | None = 2, speculative: bool = True, **s) -> Request:
    settings = SamplingParams(max_tokens=max_tokens, **s)
    return Request(str(number), PROMPTS[number], settings, number, speculative, logprobs)


def run(maker: Generator, requests: list[Request], rounds: int = 9) -> tuple[dict[str, list[Event]], Batch]:
    """The events of each request, and the batch."""
    batch = Batch(maker, "plain")
    names = {batch.add(one): one.id for one in requests}
    events: dict[str, list[Event]] = {name: [] for name in names.values()}
    while batch.busy:
        for event in batch.advance(rounds):
            events[names[event.ticket]].append(event)
    return events, batch


def rounds_of(events: list[Event]) -> list[RoundTrace]:
    return [one for event in events for one in event.rounds]


def reference(prompt: tuple[int, ...], tokens: list[int]) -> np.ndarray:
    """The target's log-probabilities, `[tokens, V]`, from one pass over the whole text."""
    ids = jnp.asarray([[*prompt, *tokens]], jnp.int32)
    hidden = jax.jit(transformer.forward, static_argnames=("config",))(TARGET.params, TARGET.config, ids)
    logits = np.asarray(transformer.logits(TARGET.params, hidden.final), np.float64)
    logits = logits.reshape(TARGET.config.vocab_size, -1)[:, len(prompt) - 1 : -1].T
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def plain_tokens(requests: list[Request]) -> dict[str, list[int]]:
    """Of plain decoding, with neither trace nor drafter."""
    alone = generator(schedule="fixed", drafter=None, batch_size=1, slot_sizes=(1,))
    asked = [Request(one.id, one.prompt_ids, one.sampling) for one in requests]
    return {one.id: one.token_ids for one in alone.generate(asked)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rounds_add_up_to_the_answer(schedule: str) -> None:
    """Tokens, counts and drafts of every round, and tokens that are those without a trace."""
    requests = [request(i, temperature=i % 2, seed=i) for i in range(7)]
    events, _ = run(generator(schedule=schedule, **TRACED), requests)
    plain = plain_tokens(requests)
    origins = set()
    for name, mine in events.items():
        done = mine[-1].completion
        assert done is not None
        if schedule == "causal" or requests[int(name)].sampling.mode == "greedy":
            assert done.token_ids == plain[name]
        assert [t for event in mine for t in event.tokens] == done.token_ids
        for event in mine:
            assert [t for one in event.rounds for t in one.tokens] == event.tokens
        first, *rounds = rounds_of(mine)
        assert first.drafts == () and first.origin(0) == "plain" and len(rounds) == done.rounds
        assert sum(len(one.drafts) for one in rounds) == done.drafted
        assert sum(one.verified for one in rounds) == done.verified
        assert sum(one.accepted for one in rounds) == done.accepted
        for one in rounds:
            assert len(one.drafts) == len(one.confidence) and all(0 <= c <= 1 for c in one.confidence)
            assert one.tokens[: one.accepted] == one.drafts[: one.accepted]
            origins |= {one.origin(i) for i in range(len(one.tokens))}
            if one.origin(len(one.tokens) - 1) == "corrected" and requests[int(name)].sampling.temperature == 0:
                assert one.tokens[-1] != one.drafts[one.accepted]
    assert origins >= {"draft", "corrected", "bonus"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_log_probabilities_are_the_targets(schedule: str) -> None:
    """At temperature 1 and unfiltered, whatever the request samples with; only for requests that ask."""
    requests = [
        request(0), request(4, temperature=1.5), request(6, logprobs=0), request(2, logprobs=None),
        request(5, logprobs=3, speculative=False),
    ]  # fmt: skip
    events, _ = run(generator(schedule=schedule, **TRACED), requests)
    for one in requests:
        done = events[one.id][-1].completion
        assert done is not None
        rounds = rounds_of(events[one.id])
        if one.logprobs is None:
            assert all(r.logprobs == () and r.top == () for r in rounds)
            continue
        expected = reference(one.prompt_ids, done.token_ids)
        mine = [value for r in rounds for value in r.logprobs]
        np.testing.assert_allclose(mine, expected[np.arange(len(mine)), done.token_ids], atol=2e-5)
        top = [entry for r in rounds for entry in r.top]
        ranked = np.sort(expected, axis=1)[:, ::-1][:, : one.logprobs]
        values = np.asarray([[value for _, value in entry] for entry in top]).reshape(ranked.shape)
        np.testing.assert_allclose(values, ranked, atol=2e-5)
        for row, entry in zip(expected, top, strict=True):
            assert all(abs(row[token] - value) < 2e-5 for token, value in entry)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plain_requests_among_speculative_ones(schedule: str) -> None:
    """They draft and verify nothing and give the same tokens, by the programs that all share; with nobody else there,
    nothing is drafted at all."""
    mixed = [request(i, speculative=i % 2 == 0, temperature=i % 3 / 2, seed=i) for i in range(6)]
    maker = generator(schedule=schedule, **TRACED)
    maker.warm_up(mixed)
    before = compiled()
    events, batch = run(maker, mixed)
    assert compiled() == before
    expected = plain_tokens(mixed)
    for one in mixed:
        done = events[one.id][-1].completion
        assert done is not None
        if not one.speculative or one.sampling.temperature == 0:
            assert done.token_ids == expected[one.id]
        rounds = rounds_of(events[one.id])
        if not one.speculative:
            assert done.drafted == done.verified == done.accepted == 0 and done.rounds == len(done.token_ids) - 1
            assert all(r.drafts == r.confidence == () and r.origin(0) == "plain" for r in rounds)
        else:
            assert done.drafted == sum(len(r.drafts) for r in rounds) > 0
            assert all(len(r.drafts) == len(r.confidence) for r in rounds)
    assert batch.statistics.drafted_rounds
    alone = [request(i, speculative=False) for i in range(3)]
    events, batch = run(generator(schedule=schedule, **TRACED), alone)
    if schedule == "fixed":
        assert batch.statistics.drafted_rounds == 0 and set(batch.statistics.by_bucket) == {4}
    assert batch.statistics.rows == batch.statistics.request_rounds


def test_a_drafter_without_confidences_shows_none() -> None:
    maker = generator(schedule="fixed", drafter=tiny_drafter(confidence=False), **TRACED)
    events, _ = run(maker, [request(1)])
    drafted = [one for one in rounds_of(events["1"]) if one.drafts]
    assert drafted and all(len(one.drafts) == BLOCK and one.confidence == () for one in drafted)


def test_a_stop_token_inside_an_accepted_run() -> None:
    """The round's record ends with the answer, and says that the stop token was a draft where it was."""
    asked = [request(i) for i in range(7)]
    whole, _ = run(generator(schedule="fixed", **TRACED), asked)

    def first_drafts(name: str) -> list[int]:
        before: list[int] = []
        found = []
        for one in rounds_of(whole[name]):
            if one.accepted and one.tokens[0] not in before:
                found.append(one.tokens[0])
            before += one.tokens
        return found

    name, stop = next((one.id, stop) for one in asked for stop in first_drafts(one.id))
    events, _ = run(generator(schedule="fixed", stop_ids=(stop,), **TRACED), [asked[int(name)]])
    done = events[name][-1].completion
    assert done is not None and done.finish_reason == "stop" and done.token_ids[-1] == stop
    mine = rounds_of(events[name])
    assert mine[-1].tokens == (stop,) and mine[-1].origin(0) == "draft"
    assert [t for one in mine for t in one.tokens] == done.token_ids
    assert sum(one.accepted for one in mine) == done.accepted


def test_log_probabilities_that_are_not_recorded_are_refused() -> None:
    with pytest.raises(ValueError, match="logprobs 0: this generator records none"):
        generator().check(request(0, logprobs=0))
    with pytest.raises(ValueError, match=r"logprobs 4: must lie in 0\.\.3"):
        generator(**TRACED).check(request(0, logprobs=4))
    with pytest.raises(ValueError, match="logprobs 0: this generator records none"):
        generator(**TRACED | {"top_logprobs": None}).check(request(0, logprobs=0))
    with pytest.raises(ValueError, match="trace_rounds -1"):
        generator(trace_rounds=-1)
    with pytest.raises(ValueError, match="top_logprobs 99"):
        generator(trace_rounds=1, top_logprobs=99)


def test_listeners_of_rounds_hear_all_of_them_without_scores() -> None:
    """A generator that records no log-probabilities; its programs hold none."""
    maker, heard = generator(**TRACED | {"top_logprobs": None}), dict[str, list[RoundTrace]]()
    requests = [request(0, logprobs=None), request(6, logprobs=None)]

    def hear(name: str, rounds: tuple[RoundTrace, ...]) -> None:
        heard.setdefault(name, []).extend(rounds)

    done = {one.id: one.token_ids for one in maker.stream(requests, "greedy", on_rounds=hear)}
    assert done == {name: [t for one in rounds for t in one.tokens] for name, rounds in heard.items()}
    assert all(one.logprobs == () for rounds in heard.values() for one in rounds)
    batch = Batch(maker)
    assert batch.empty_state(1).trace.scores == ()
    events, _ = run(generator(**TRACED), requests)
    assert {name: rounds_of(own) for name, own in events.items()} == heard
