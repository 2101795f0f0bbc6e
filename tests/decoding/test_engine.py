"""The engine under load: requests that come and go at any time, in slots that grow and shrink, in several programs."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from dspark_jax.decoding import batching, resize
from dspark_jax.decoding.curve import Curve, Point
from dspark_jax.decoding.engine import Answer, Engine, EngineClosed, EngineFull
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.schedule import buckets_for
from tests.decoding.test_lossless import LENGTH, PROMPT, TARGET, WORST, conditionals, joint, p_value
from tests.decoding.test_lossless_budget import sharp_drafter
from tests.decoding.tiny import BLOCK, VOCAB

DRAFTER = sharp_drafter()
SIZES = (1, 2, 4)
RNG = np.random.default_rng(2)
PROMPTS = [tuple(RNG.integers(0, VOCAB - 1, n).tolist()) for n in (1, 2, 5, 9, 17, 30, 40, 3, 8, 33)]


def curve_for(sizes: tuple[int, ...], per_row: float = 0.1, plain: float = 1.0) -> Curve:
    """A made-up curve: rows that cost a little each, and a draft that costs a tenth of a plain round."""
    points = []
    for size in sizes:
        rows = buckets_for(size, BLOCK, fine=True)
        points.append(Point(size, 256, rows, tuple(1.1 + per_row * (r - size) for r in rows), plain))
    return Curve(tuple(points))


def generator(**options) -> Generator:
    options = {"schedule": "causal", "batch_size": 4, "slot_sizes": SIZES, "prefill_chunk": 32} | options
    if "curve" not in options:
        options["curve"] = curve_for(options["slot_sizes"])
    drafter = options.pop("drafter", DRAFTER)
    return Generator(TARGET, drafter, stop_ids=options.pop("stop_ids", ()), **options)


def request(number: int, max_tokens: int = 12, **sampling) -> Request:
    return Request(str(number), PROMPTS[number], SamplingParams(max_tokens=max_tokens, **sampling))


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    """Greedy answers, one request at a time, without a drafter."""
    alone = Generator(TARGET, None, stop_ids=())
    done = alone.generate([request(i, 20) for i in range(len(PROMPTS))])
    return {one.id: one.token_ids for one in done}


def everything_ended(engine: Engine) -> None:
    assert engine.load == (0, 0)
    assert not engine.batch.busy


@pytest.mark.parametrize("schedule", ["causal", "async", "fixed", "threshold", "none"])
def test_greedy_answers_are_those_of_plain_decoding(plain: dict[str, list[int]], schedule: str) -> None:
    """More requests than slots, of all lengths, long prompts in chunks; then some more on an engine that was empty."""
    options = {"drafter": None} if schedule == "none" else {"schedule": schedule}
    with Engine(generator(**options), rounds=2) as engine:
        answers = [engine.submit(request(i, 20)) for i in range(len(PROMPTS))]
        done = [answer.result(300) for answer in answers]
        late = engine.submit(request(4, 20))
        assert list(late) == plain["4"]
    assert {one.id: one.token_ids for one in done} == plain
    assert all(one.finish_reason == "length" for one in done)
    assert engine.batch.statistics.completed == len(PROMPTS) + 1
    everything_ended(engine)


def test_a_seeded_answer_depends_on_nothing_but_its_seed() -> None:
    """Mixed settings and greedy neighbours: the same tokens alone, in company, and without a curve."""
    settings = {"temperature": 1.0, "seed": 7}
    alone = next(generator().generate([request(3, **settings)])).token_ids
    others = [request(i, temperature=(0.0, 0.7)[i % 2], top_p=(1.0, 0.8)[i % 2]) for i in (0, 1, 2, 4, 5, 6)]
    with Engine(generator(), rounds=3) as engine:
        answers = [engine.submit(one) for one in (*others[:3], request(3, **settings), *others[3:])]
        assert answers[3].result(300).token_ids == alone
        unseeded = [engine.submit(request(3, temperature=1.0)) for _ in range(3)]
        assert len({tuple(one.result(300).token_ids) for one in unseeded}) == 3


def test_tokens_come_as_they_are_committed() -> None:
    heard: list[list[int]] = []
    endings: list[str] = []

    def listener(event: batching.Event) -> None:
        heard.append(event.tokens)
        if event.completion:
            endings.append(event.completion.finish_reason)

    with Engine(generator(), rounds=1) as engine:
        answer = engine.submit(request(2, 15), listener)
        pieces = list(answer.pieces())
        assert list(answer.pieces()) == []  # they were handed out
    assert sum(pieces, []) == sum(heard, []) == answer.result().token_ids
    assert len(pieces) > 3 and len(pieces[0]) == 1 and endings == ["length"]


def test_cancelled_requests_free_their_slots(plain: dict[str, list[int]]) -> None:
    """While they wait, while they decode, and after the end; the others never notice."""
    with Engine(generator(batch_size=2, slot_sizes=(2,)), rounds=1) as engine:
        long = [engine.submit(request(i, 25)) for i in (0, 1)]
        waits = engine.submit(request(2, 20))
        stays = engine.submit(request(4, 20))
        next(iter(long[0]))
        long[0].cancel()
        waits.cancel()
        assert long[0].result(300).finish_reason == "cancelled"
        assert 1 <= len(long[0].result().token_ids) < 25
        assert waits.result(300).token_ids == [] or waits.result().finish_reason == "cancelled"
        assert stays.result(300).token_ids == plain["4"]
        assert long[1].result(300).token_ids[:20] == plain["1"]
        stays.cancel()
        assert stays.result().finish_reason == "length"
    assert engine.batch.statistics.cancelled == 2
    everything_ended(engine)


def test_a_long_prompt_that_is_cancelled_between_its_chunks(plain: dict[str, list[int]]) -> None:
    batch = batching.Batch(generator())
    batch.add(request(0, 25))
    batch.advance(1)
    ticket = batch.add(request(6, 20))  # 40 tokens: two chunks of 32
    batch.advance(1)
    assert batch._long is not None
    batch.cancel(ticket)
    events = batch.advance(1)
    assert [e.completion.finish_reason for e in events if e.ticket == ticket and e.completion] == ["cancelled"]
    again = batch.add(request(6, 20))
    tokens: list[int] = []
    while batch.busy:
        tokens += [t for e in batch.advance(4) if e.ticket == again for t in e.tokens]
    assert tokens == plain["6"]


def test_requests_are_served_in_their_order() -> None:
    ended: list[str] = []
    with Engine(generator(batch_size=1, slot_sizes=(1,))) as engine:
        answers = []
        for i in (5, 0, 3, 1):
            note = lambda event, i=i: ended.append(str(i)) if event.completion else None  # noqa: E731
            answers.append(engine.submit(request(i, 5), note))
        for answer in answers:
            answer.result(300)
    assert ended == ["5", "0", "3", "1"]


def test_what_cannot_be_served_is_refused_at_the_door() -> None:
    engine = Engine(generator(max_context=36), max_waiting=2)
    with pytest.raises(ValueError, match="40 tokens, the engine's context has 36"):
        engine.submit(request(6))
    with pytest.raises(ValueError, match="is empty"):
        engine.submit(Request("x", ()))
    engine.submit(request(0)), engine.submit(request(5, 50))
    with pytest.raises(EngineFull, match="at most 2"):
        engine.submit(request(1))
    with engine:
        pass
    with pytest.raises(EngineClosed):
        engine.submit(request(0))


def test_closing_drains_or_ends() -> None:
    engine = Engine(generator(), rounds=1)
    answers = [engine.submit(request(i, 6)) for i in range(6)]
    engine.start()
    engine.close()
    assert [len(a.result(0).token_ids) for a in answers] == [6] * 6
    engine = Engine(generator(batch_size=1, slot_sizes=(1,)), rounds=1).start()
    answers = [engine.submit(request(i, 40)) for i in range(6)]
    next(iter(answers[0]))
    engine.close(drain=False)
    assert {a.result(0).finish_reason for a in answers[1:]} == {"cancelled"}
    assert not engine.alive


def test_a_failure_reaches_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(generator())
    heard: list[batching.Event] = []
    answers = [engine.submit(request(i), heard.append) for i in range(3)]

    def breaks(self, rounds):  # type: ignore[no-untyped-def]
        raise MemoryError("no room")

    monkeypatch.setattr(batching.Batch, "advance", breaks)
    engine.start()
    for answer in answers:
        with pytest.raises(EngineClosed) as caught:
            answer.result(60)
        assert isinstance(caught.value.__cause__, MemoryError)
    assert [type(event.failed) for event in heard] == [MemoryError] * 3
    with pytest.raises(EngineClosed):
        engine.submit(request(0))


def compiled() -> list[int]:
    kinds = (batching.run_prefill, batching.run_chunk, batching.run_admit, batching.run_many)
    return [kind._cache_size() for kind in (*kinds, resize._resized, resize._taken)]


def test_nothing_compiles_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that rise and fall, texts that grow and shrink, all settings: no program is new."""
    monkeypatch.setattr(batching, "capacity_for", lambda tokens: 32 if tokens <= 32 else 64)  # few to compile
    monkeypatch.setattr(batching, "PATIENCE", 2)
    traced = {"trace_rounds": 2, "top_logprobs": 2, "switchable": True}
    engine = Engine(generator(batch_size=2, slot_sizes=(1, 2), max_context=44, **traced), rounds=2)
    engine.warm_up(longest=44, longest_prompt=40, modes=("filtered",))
    before = compiled()
    with engine:
        for load in (1, 4, 1):
            answers = [
                engine.submit(request((0, 6, 3, 4)[i], 12, temperature=1, top_k=4, seed=i % 2 or None))
                for i in range(load)
            ]
            for answer in answers:
                answer.result(300)
    assert engine.batch.statistics.resizes > 3
    assert compiled() == before


@pytest.mark.parametrize("schedule", ["causal", "async"])
def test_many_requests_keep_the_distribution(schedule: str) -> None:
    """Through the whole engine: thousands of short requests in 64 slots, budgets of all kinds; chi-square."""
    sizes = (64,)
    engine = Engine(
        generator(schedule=schedule, batch_size=64, slot_sizes=sizes, curve=curve_for(sizes, 0.003, 1.7)),
        rounds=1 << 20,
    )
    count = 2048
    settings = SamplingParams(temperature=1.0, max_tokens=LENGTH + 2)
    answers = [engine.submit(Request(str(i), PROMPT, settings, stream=i)) for i in range(count)]
    with engine:
        tokens = np.asarray([answer.result(600).token_ids[:LENGTH] for answer in answers])
    did = engine.batch.statistics
    assert len(did.by_bucket) > 1 and 0 < did.drafted_rounds and did.rows > 1.1 * did.request_rounds
    assert p_value(tokens, joint(conditionals())) > WORST


def test_submitting_from_many_threads(plain: dict[str, list[int]]) -> None:
    results: dict[int, list[int]] = {}

    def client(number: int) -> None:
        time.sleep(0.01 * (number % 3))
        answer: Answer = engine.submit(request(number % len(PROMPTS), 20))
        results[number] = list(answer)

    with Engine(generator(), rounds=2) as engine:
        threads = [threading.Thread(target=client, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {i: plain[str(i % len(PROMPTS))] for i in range(12)} == results


def test_statistics_add_up() -> None:
    with Engine(generator(), rounds=2) as engine:
        done = [a.result(300) for a in [engine.submit(request(i, 10)) for i in range(6)]]
    did = engine.batch.statistics
    assert did.tokens == sum(len(one.token_ids) for one in done) == 60
    assert did.prompt_tokens == sum(one.prompt_tokens for one in done)
    assert did.request_rounds == sum(one.rounds for one in done)
    assert did.rows == did.request_rounds + sum(one.verified for one in done)
    assert sum(did.by_bucket.values()) == did.rounds
    assert sum(size * n for size, n in did.by_bucket.items()) == did.rows + did.padded_rows
    report = did.as_json()
    assert report["accepted_length"] == pytest.approx(54 / did.request_rounds, abs=1e-4)
    assert report["budget"] == pytest.approx(did.rows / did.request_rounds, abs=1e-4)
    assert sum(report["time_shares"].values()) == pytest.approx(1, abs=1e-3)
    assert report["first_token_seconds"]["p50"] > 0
