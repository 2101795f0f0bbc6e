"""The generator: equal tokens in every arrangement, exact ends, refusals, listeners, no compiling after warm-up."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.load import load_drafter, load_target
from dspark_jax.decoding import batching, resize
from dspark_jax.decoding.generate import Completion, Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.state import init_state
from dspark_jax.decoding.step import admitted_lengths, step
from dspark_jax.drafters.dspark import Proposal
from tests.decoding.tiny import BLOCK, VOCAB, tiny_drafter, tiny_target

TARGET, DRAFTER = tiny_target(), tiny_drafter()
RNG = np.random.default_rng(7)
PROMPTS = [tuple(RNG.integers(0, VOCAB, n).tolist()) for n in (1, 5, 12, 3, 8, 2)]
MAX_TOKENS = (17, 4, 9, 20, 1, 13)
GREEDY = [
    Request(str(i), p, SamplingParams(max_tokens=m)) for i, (p, m) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True))
]


@cache
def generator(drafter: bool = True, stop_ids: tuple[int, ...] = (), **options) -> Generator:
    return Generator(TARGET, DRAFTER if drafter else None, stop_ids=stop_ids, **options)


def run(generator: Generator, requests: list[Request], on_tokens=None) -> dict[str, Completion]:
    """Completions by id; every request comes out once."""
    done = list(generator.generate(requests, on_tokens))
    assert sorted(c.id for c in done) == sorted(r.id for r in requests)
    return {c.id: c for c in done}


def tokens_of(generator: Generator, requests: list[Request]) -> dict[str, list[int]]:
    return {key: done.token_ids for key, done in run(generator, requests).items()}


def sampled(count: int, seed: int | None = 0, max_tokens: int = 10) -> list[Request]:
    """Requests at temperature 1, each with a seed of its own or none."""
    seeds = [None if seed is None else seed + i for i in range(count)]
    return [
        Request(str(i), PROMPTS[1], SamplingParams(1.0, seed=s, max_tokens=max_tokens)) for i, s in enumerate(seeds)
    ]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    """Greedy tokens of every request, alone and without a drafter."""
    alone = generator(drafter=False)
    return {r.id: tokens_of(alone, [r])[r.id] for r in GREEDY}


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": False, "batch_size": 3},
        {"batch_size": 1},
        {"batch_size": 3},
        {"batch_size": 3, "schedule": "threshold", "threshold": 0.5},
        {"batch_size": 3, "schedule": "threshold", "threshold": 0.6, "buckets": (7, 12)},
    ],
    ids=str,
)
def test_greedy_is_plain_decoding(plain: dict[str, list[int]], options: dict) -> None:
    """Six requests of different lengths and limits: slots are used again, the queue is longer than they are many."""
    done = run(generator(**options), GREEDY)
    assert {key: c.token_ids for key, c in done.items()} == plain
    for request in GREEDY:
        c = done[request.id]
        assert len(c.token_ids) == request.sampling.max_tokens and c.finish_reason == "length"
        assert c.prompt_tokens == len(request.prompt_ids) and c.seconds > 0
        assert c.accepted <= c.verified <= c.drafted and len(c.token_ids) == 1 + c.rounds + c.accepted


def test_trained_drafter(golden) -> None:
    """On a trained drafter of the reference: batched, both schedules, against the target's own greedy tokens."""
    target = load_target(golden / "targets" / "qwen3_untied")
    folder = golden / "inference" / "dspark_qwen3_vanilla"
    drafter = load_drafter(folder)
    traces = [np.load(folder / f"{name}.npz") for name in ("p0", "p1")]
    requests = [
        Request(str(i), tuple(t["prompt_ids"][0].tolist()), SamplingParams(max_tokens=40)) for i, t in enumerate(traces)
    ]
    for options in ({"schedule": "fixed"}, {"schedule": "threshold", "buckets": (6, 16)}):
        got = tokens_of(Generator(target, drafter, batch_size=2, stop_ids=(), **options), requests)
        for i, trace in enumerate(traces):
            assert got[str(i)] == trace["target_greedy_ids"][0, trace["num_input_tokens"] :].tolist()


def test_max_tokens_inside_a_block(plain: dict[str, list[int]]) -> None:
    for limit in range(1, 2 * BLOCK + 2):
        done = run(generator(), [Request("0", PROMPTS[3], SamplingParams(max_tokens=limit))])["0"]
        assert done.token_ids == plain["3"][:limit] and done.finish_reason == "length"
        assert done.rounds or limit == 1


@pytest.mark.parametrize("drafter", [False, True])
def test_stop_tokens(plain: dict[str, list[int]], drafter: bool) -> None:
    """Wherever the stop token comes, it is the last one; others in the batch go on."""
    stop = plain["3"][max(plain["3"].index(t) for t in set(plain["3"]))]  # the token that comes first the latest
    stop_ids = (stop, plain["0"][0])  # request 0 ends at once
    done = run(generator(drafter=drafter, stop_ids=stop_ids, batch_size=3), GREEDY)
    for key, tokens in plain.items():
        ends = [i for i, t in enumerate(tokens) if t in stop_ids]
        assert done[key].token_ids == (tokens[: ends[0] + 1] if ends else tokens)
        assert done[key].finish_reason == ("stop" if ends else "length")
    assert done["0"].rounds == 0 and done["0"].accepted_length == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt is empty"),
        ((0,) * 64, "64 tokens, the target's context has 64"),
        ((1, VOCAB), f"token {VOCAB} is outside the vocabulary 0..{VOCAB - 1}"),
        ((-1,), "token -1 is outside"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(prompt: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generator().generate([GREEDY[0], Request("bad", prompt)])


def test_bad_generators_are_refused() -> None:
    wide = dataclasses.replace(TARGET.config, hidden_size=32)
    bare = tiny_drafter(confidence=False)
    for match, target, drafter, options in (
        ("hidden_size is 16 in the drafter, 32", type(TARGET)(config=wide, params=TARGET.params), DRAFTER, {}),
        ("no confidence head", TARGET, bare, {"schedule": "threshold"}),
        ("batch_size 0", TARGET, DRAFTER, {"batch_size": 0}),
        ("threshold 2", TARGET, DRAFTER, {"threshold": 2.0}),
        ("schedule 'often'", TARGET, DRAFTER, {"schedule": "often"}),
        ("buckets", TARGET, DRAFTER, {"batch_size": 2, "buckets": (4,)}),
    ):
        with pytest.raises(ValueError, match=match):
            Generator(target, drafter, stop_ids=(), **options)


def test_near_the_last_position(plain: dict[str, list[int]]) -> None:
    """A context that ends: the request ends there by length, and no draft is verified beyond it."""
    short = type(TARGET)(config=dataclasses.replace(TARGET.config, max_positions=12), params=TARGET.params)
    request = Request("0", PROMPTS[3], SamplingParams(max_tokens=20))  # 3 tokens
    done = run(Generator(short, DRAFTER, stop_ids=()), [request])["0"]
    assert done.token_ids == plain["3"][:9] and done.finish_reason == "length"
    narrow = tiny_drafter(max_positions=8)  # the drafter ends before the target: from there on it is plain decoding
    done = run(Generator(TARGET, narrow, stop_ids=()), [request])["0"]
    assert done.token_ids == plain["3"] and done.verified < done.drafted
    switched = run(Generator(TARGET, narrow, stop_ids=(), switchable=True), [request])["0"]
    assert switched.token_ids == plain["3"] and switched.verified == done.verified
    assert 0 < switched.drafted <= 4 * BLOCK < done.drafted  # from position 3 to 7: at most four blocks have room
    program = Generator(short, DRAFTER, stop_ids=()).program("greedy")
    starts = jnp.arange(14)
    state = init_state(program, 14, 32)
    state = state._replace(start=starts, limit=jnp.full(14, 64), active=jnp.ones(14, bool))
    ones = jnp.ones((14, BLOCK))
    lengths = admitted_lengths(Proposal(ones.astype(jnp.int32), ones, ones, ones, ()), state, program, 56)
    np.testing.assert_array_equal(lengths, np.clip(11 - np.arange(14), 0, BLOCK))


def test_seeds() -> None:
    """The same seed gives the same tokens alone, in a batch and in another order; no seed gives different ones."""
    requests = sampled(9)
    batch = tokens_of(generator(batch_size=3), requests)
    assert tokens_of(generator(batch_size=3), requests[::-1]) == batch
    for request in requests[:3]:
        assert tokens_of(generator(batch_size=1), [request])[request.id] == batch[request.id]
    assert len({tuple(t) for t in batch.values()}) > 6
    same = [dataclasses.replace(r, sampling=requests[0].sampling) for r in requests]
    assert len({tuple(t) for t in tokens_of(generator(batch_size=3), same).values()}) == 1
    unseeded = tokens_of(generator(batch_size=3), sampled(9, seed=None))
    assert len({tuple(t) for t in unseeded.values()}) > 6
    assert tokens_of(generator(batch_size=3), sampled(9, seed=None)) == unseeded
    assert tokens_of(generator(batch_size=3, seed=1), sampled(9, seed=None)) != unseeded


def test_one_request_given_many_times() -> None:
    assert len(list(generator(batch_size=3).generate([GREEDY[1]] * 7))) == 7


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_padding_rows_are_never_produced(temperature: float) -> None:
    target, drafter = tiny_target(padding=4), tiny_drafter(padding=4)
    requests = [Request(str(i), PROMPTS[1], SamplingParams(temperature, max_tokens=20)) for i in range(4)]
    done = run(Generator(target, drafter if temperature else None, batch_size=4, stop_ids=()), requests)
    assert max(max(c.token_ids) for c in done.values()) < VOCAB


def test_prompts_are_admitted_eight_at_a_time(plain: dict[str, list[int]]) -> None:
    """Groups of equal padding, with one longer prompt between them: the tokens are those of each request alone."""
    long = Request("long", PROMPTS[2] * 4, SamplingParams(max_tokens=5))
    many = [dataclasses.replace(GREEDY[i % 6], id=f"{i}") for i in range(12)]
    done = tokens_of(generator(batch_size=10), [*many[:3], long, *many[3:]])
    assert all(done[r.id] == plain[str(i % 6)] for i, r in enumerate(many))
    assert done["long"] == tokens_of(generator(), [long])["long"]


def test_listener(plain: dict[str, list[int]]) -> None:
    """Tokens come in pieces that add up; a listener that has enough ends its request and no other."""
    heard: dict[str, list[int]] = {}

    def on_tokens(key: str, tokens: list[int]) -> bool:
        assert tokens
        heard.setdefault(key, []).extend(tokens)
        return key == "3" and len(heard[key]) >= 3

    done = run(generator(batch_size=3, stream_rounds=1), GREEDY, on_tokens)
    assert {key: c.token_ids for key, c in done.items()} == heard
    assert done["3"].finish_reason == "stop" and 3 <= len(heard["3"]) <= 3 + 2 * BLOCK
    for key, tokens in heard.items():
        assert tokens == plain[key][: len(tokens)] and (key == "3" or len(tokens) == len(plain[key]))


def compiled() -> list[int]:
    """How many programs there are of each kind."""
    kinds = (batching.run_prefill, batching.run_admit, batching.run_many, resize._resized)
    return [kind._cache_size() for kind in kinds]


def test_nothing_compiles_after_warm_up() -> None:
    """Other prompts, limits, settings and seeds of the same sizes: every program is there already."""
    busy = generator(batch_size=3, schedule="threshold")
    busy.warm_up(sampled(5))
    before = compiled()
    run(busy, sampled(5))
    other = [
        Request(str(i), PROMPTS[i], SamplingParams(0.5 + i / 4, seed=i, max_tokens=3 + i)) for i in range(len(PROMPTS))
    ]
    run(busy, other)
    run(busy, sampled(1))
    list(busy.stream(GREEDY[:3], "plain"))  # prompts come in by the same programs, whatever they sample with
    assert compiled() == before


@pytest.mark.parametrize("options", [{"drafter": False}, {"batch_size": 1}, {"batch_size": 3}], ids=str)
def test_caches_follow_the_texts(monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    """Caches begin small, grow while a text does, and shrink for the next one; the tokens are those of large caches."""
    requests = [Request(str(i), PROMPTS[i], SamplingParams(max_tokens=50 - 20 * (i % 2))) for i in range(4)]
    one = generator(**options)
    large = tokens_of(one, requests)
    monkeypatch.setattr(batching, "_SMALLEST", 32)
    one.warm_up(requests)
    before, sizes = compiled(), []

    def with_capacity(state, capacity, program):
        sizes.append(capacity)
        return resize.with_capacity(state, capacity, program)

    monkeypatch.setattr(batching, "with_capacity", with_capacity)
    assert tokens_of(one, requests) == large
    assert sizes[:3] == [32, 48, 64] and (one.batch_size > 1 or 32 in sizes[3:])
    assert compiled() == before


def test_packed_equals_dense() -> None:
    """A step in a bucket of 6 rows does what the dense one of 8 does, where the drafts fit."""
    program = generator(batch_size=2, schedule="threshold").program("greedy")
    params = generator(batch_size=2).draft_params
    rng = np.random.default_rng(0)
    state = init_state(program, 2, 32, 0.5)
    noise = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)  # noqa: E731
    state = state._replace(
        target_cache=jax.tree.map(noise, state.target_cache),
        draft_cache=jax.tree.map(noise, state.draft_cache),
        active=jnp.ones(2, bool),
        limit=jnp.asarray([40, 5]),
        length=jnp.asarray([1, 3]),  # room for one draft only
        start=jnp.asarray([9, 4]),
        anchor=jnp.asarray([2, 5]),
    )
    one_step = jax.jit(step, static_argnames=("program", "bucket"))
    fixed = dataclasses.replace(program, schedule="fixed")
    (dense, out), (packed, packed_out) = (
        one_step(TARGET.params, params, state, program=fixed, bucket=b) for b in (8, 6)
    )
    np.testing.assert_array_equal(out.verified, [3, 1])
    np.testing.assert_array_equal(packed_out.verified, out.verified)
    np.testing.assert_array_equal(packed_out.kept, out.kept)
    np.testing.assert_array_equal(packed.tokens[:, :10], dense.tokens[:, :10])
    np.testing.assert_array_equal(packed.start, dense.start)
    for a, b in zip(jax.tree.leaves(packed.target_cache), jax.tree.leaves(dense.target_cache), strict=True):
        for r in range(2):
            end = int(dense.start[r])
            np.testing.assert_allclose(a[r, :end], b[r, :end], atol=1e-5)
    tight, cut = one_step(TARGET.params, params, state, program=fixed, bucket=3)  # later drafts do not fit
    np.testing.assert_array_equal(cut.verified, [1, 0])
    assert int(tight.start[0]) > 9 and int(tight.start[1]) == 5


def test_a_stream_takes_requests_as_it_needs_them():
    """Of a thousand requests, no more than a few wait at any time; and one that cannot run ends it at its turn."""
    taken = []

    def coming():
        for i in range(1000):
            taken.append(i)
            yield Request(str(i), (1, 2, 3) if i < 40 else (), SamplingParams(max_tokens=4))

    engine, done = generator(batch_size=2), []
    with pytest.raises(ValueError, match="request '40': the prompt is empty"):
        for completion in engine.stream(coming(), "greedy"):
            done.append(completion.id)
            assert len(taken) <= len(done) + 12
    assert len(taken) == 41
