"""Forced decoding gives the rounds of real decoding: the very same greedily, the same distribution otherwise."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

from dspark_jax.decoding.batching import Batch, capacity_for
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.requests import mode_of
from dspark_jax.decoding.sampling import SamplingParams, raw_key, sampling_of
from dspark_jax.evaluation import forced, reading
from dspark_jax.evaluation.forced import forced_rounds
from dspark_jax.evaluation.reading import Reader, Text
from tests.decoding.tiny import VOCAB, other_drafter, tiny_drafter, tiny_target

STOPS = (3,)


def requests(count: int, sampling: SamplingParams, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, VOCAB, size=n).tolist()) for n in rng.integers(1, 9, size=count)]
    return [Request(str(i), prompt, sampling, 1000 + i) for i, prompt in enumerate(prompts)]


def decoded(target: Any, drafter: Any, todo: list[Request], size: int = 8, **how: Any) -> dict[str, tuple]:
    """(tokens, finish reason, rounds as (accepted, verified, confidence)) of each request, by the engine."""
    generator = Generator(target, drafter, batch_size=size, stop_ids=STOPS, trace_rounds=8, **how)
    batch = Batch(generator, mode_of(todo))
    names = {batch.add(request): request.id for request in todo}
    rounds: dict[str, list] = {name: [] for name in names.values()}
    done = {}
    while batch.busy:
        for event in batch.advance(8):
            rounds[names[event.ticket]] += event.rounds
            if event.completion:
                done[names[event.ticket]] = event.completion
    return {
        name: (one.token_ids, one.finish_reason, [(r.accepted, r.verified, r.confidence) for r in rounds[name][1:]])
        for name, one in done.items()
    }


def texts_of(todo: list[Request], answers: dict[str, tuple]) -> list[Text]:
    return [
        Text(r.id, r.prompt_ids, tuple(answers[r.id][0]), r.sampling, answers[r.id][1] == "stop", r.stream or 0)
        for r in todo
    ]


@pytest.mark.parametrize("kind", ["reduced", "eagle3", "ngram"])
def test_greedy_rounds_are_those_of_decoding(kind):
    target = tiny_target()
    drafter = tiny_drafter(draft_vocab=7) if kind == "reduced" else other_drafter(kind, 7)
    todo = requests(20, SamplingParams(max_tokens=17))
    answers = decoded(target, drafter, todo)
    plain = decoded(target, None, todo)
    assert {name: one[0] for name, one in answers.items()} == {name: one[0] for name, one in plain.items()}
    assert {one[1] for one in answers.values()} == {"stop", "length"}
    made = {one.id: one for one in forced_rounds(target, drafter, texts_of(todo, plain), batch_size=6)}
    assert len(made) == len(todo)
    for name, (_, _, rounds) in answers.items():
        assert list(made[name].accepted) == [accepted for accepted, _, _ in rounds]
        assert list(made[name].verified) == [verified for _, verified, _ in rounds]
    assert sum(sum(one.accepted) for one in made.values()) >= 5


def test_greedy_confidences_are_those_of_decoding_with_a_threshold():
    target, drafter = tiny_target(), tiny_drafter()
    todo = requests(12, SamplingParams(max_tokens=12))
    answers = decoded(target, drafter, todo, schedule="threshold", threshold=0.4)
    texts = texts_of(todo, decoded(target, None, todo))
    for one in forced_rounds(target, drafter, texts, schedule="threshold", threshold=0.4):
        rounds = answers[one.id][2]
        assert list(one.verified) == [verified for _, verified, _ in rounds]
        np.testing.assert_allclose(one.confidence, [confidence for _, _, confidence in rounds], atol=1e-5)
    assert len({v for _, _, rounds in answers.values() for _, v, _ in rounds}) > 1


def alike(one: list[Any], other: list[Any]) -> float:
    """p-value of the hypothesis that two samples are of one distribution."""
    counts = [Counter(one), Counter(other)]
    kinds = [kind for kind in set(one) | set(other) if counts[0][kind] + counts[1][kind] >= 10]
    return chi2_contingency([[count[kind] for kind in kinds] for count in counts]).pvalue


@pytest.mark.parametrize(
    ("schedule", "sampling"),
    [
        ("threshold", SamplingParams(temperature=0.8, max_tokens=6)),
        ("fixed", SamplingParams(temperature=1.3, top_k=6, top_p=0.9, max_tokens=6)),
    ],
)
def test_sampled_rounds_have_the_distribution_of_decoding(schedule, sampling):
    target, drafter = tiny_target(), tiny_drafter(draft_vocab=8)
    prompt = (1, 5, 2)
    count = 768
    todo = [Request(str(i), prompt, sampling, i) for i in range(count)]
    others = [Request(str(i), prompt, sampling, 77_000 + i) for i in range(count)]
    answers = decoded(target, drafter, todo, 64, schedule=schedule, threshold=0.5)
    texts = texts_of(others, decoded(target, None, others, 64))
    made = list(forced_rounds(target, drafter, texts, schedule=schedule, threshold=0.5, whole=True, batch_size=64))
    by_id = {text.id: text for text in texts}
    ours = [(by_id[one.id].token_ids[1:3], one.accepted[:1], one.verified[:1]) for one in made]
    theirs = [
        (tuple(tokens[1:3]), tuple(a for a, _, _ in rounds[:1]), tuple(v for _, v, _ in rounds[:1]))
        for tokens, _, rounds in answers.values()
    ]
    assert alike(ours, theirs) > 1e-3
    assert alike([one.accepted for one in made], [tuple(a for a, _, _ in r) for _, _, r in answers.values()]) > 1e-3
    first = lambda rows: [tuple(np.round(row[0], 2)) for row in rows if len(row)]  # noqa: E731
    confidences = [[c for _, _, c in rounds] for _, _, rounds in answers.values()]
    assert alike(first([one.confidence for one in made]), first(confidences)) > 1e-3


def test_the_draft_behind_a_run_to_the_texts_end_is_the_drafters_own():
    """Nothing was refused there. The drafter says 2 or 5, the target 2: a refused draft is 5."""
    plan = forced._Plan(None, None, "fixed", "plain", True, 1, jnp.float32)
    count = 400
    sampling = sampling_of([SamplingParams(1.0)] * count, [raw_key(i, own=False) for i in range(count)])
    texts = forced._Texts(None, None, None, None, sampling, None)
    labels = forced._Labels(jnp.ones((count, 2), jnp.int32), jnp.ones((count, 2), jnp.int32))
    logits = jnp.full((VOCAB, count), -1e9).at[jnp.array([2, 5])].set(0.0)
    refused = jnp.zeros((VOCAB, count)).at[2].set(1.0)
    start, run = jnp.zeros(count, jnp.int32), jnp.ones(count, jnp.int32)
    left = jnp.where(jnp.arange(count) < count // 2, 1, 2)  # the run ends the text, or does not
    draw = forced._whole(texts, labels, start, run, left, refused, {}, plan)
    assert (draw(logits, jnp.int32(0))[0] == 1).all()  # accepted
    ends, goes_on = np.split(np.asarray(draw(logits, jnp.int32(1))[0]), 2)
    assert (goes_on == 5).all() and set(ends) == {2, 5} and 60 < (ends == 2).sum() < 140


def test_rounds_do_not_depend_on_what_follows():
    target, drafter = tiny_target(), other_drafter("ngram")
    sampling = SamplingParams(max_tokens=20)
    short, long = (1, 2, 1, 2, 1, 2, 5), (1, 2, 1, 2, 1, 2, 5, 7, 7, 7, 7, 7)
    texts = [Text(str(len(t)), (4, 1), t, sampling, False, 0) for t in (short, long)]
    made = {one.id: one for one in forced_rounds(target, drafter, texts)}
    count = len(made["7"].accepted) - 1  # the last one may be cut
    assert made["7"].accepted[:count] == made["12"].accepted[:count]
    assert sum(made["7"].accepted) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_shared_reader_reads_once_and_changes_nothing(monkeypatch, temperature):
    target, drafters = tiny_target(), {"dspark": tiny_drafter(), "ngram": other_drafter("ngram")}
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature, max_tokens=12)
    texts = [Text(str(i), (1, 2), tuple(rng.integers(0, VOCAB, 9 + i).tolist()), sampling, False, i) for i in range(5)]
    alone = {name: list(forced_rounds(target, drafter, texts, batch_size=3)) for name, drafter in drafters.items()}
    counts: Counter[str] = Counter()
    run = reading._read

    def counted(*args: Any, **options: Any) -> Any:
        counts["reads"] += 1
        return run(*args, **options)

    monkeypatch.setattr(reading, "_read", counted)
    reader = Reader((0, 1))
    for name, drafter in drafters.items():
        made = forced_rounds(target, drafter, texts, batch_size=3, reader=reader)
        assert list(made) == alone[name]
    assert counts["reads"] == 2  # groups of texts
    full = Reader((0, 1), keep_bytes=1)
    assert [list(forced_rounds(target, drafters["dspark"], texts, batch_size=3, reader=full)) for _ in range(2)]
    assert counts["reads"] == 6


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(2, 300)), max_size=40), st.integers(1, 48))
def test_long_texts_come_in_smaller_groups(lengths, size):
    sampling = SamplingParams(max_tokens=300)
    texts = [Text(str(i), (1,) * a, (2,) * b, sampling, False, i) for i, (a, b) in enumerate(lengths)]
    made = list(forced.groups_of(texts, size))
    order = [len(text.prompt_ids) + len(text.token_ids) for group, _ in made for text in group]
    assert order == sorted(order) and sorted(one.id for group, _ in made for one in group) == sorted(
        map(str, range(len(texts)))
    )
    for group, rows in made:
        longest = capacity_for(len(group[-1].prompt_ids) + len(group[-1].token_ids))
        assert 1 <= len(group) <= rows <= size
        assert rows == 1 or rows * longest <= size * 512


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rounds_do_not_depend_on_the_groups(monkeypatch, temperature):
    target, drafter = tiny_target(), tiny_drafter()
    texts = [
        Text(
            one.id,
            one.prompt_ids,
            tuple(np.random.default_rng(i).integers(0, VOCAB, 3 * i + 2).tolist()),
            one.sampling,
            False,
            i,
        )
        for i, one in enumerate(requests(7, SamplingParams(temperature, max_tokens=30)))
    ]
    found = {one.id: one for one in forced_rounds(target, drafter, texts, batch_size=4)}
    monkeypatch.setattr(forced, "_ROOM", 100)  # 400 padded tokens: one text of 256
    assert [rows for _, rows in forced.groups_of(texts, 4)] == [1] * 7
    assert {one.id: one for one in forced_rounds(target, drafter, texts, batch_size=4)} == found
    assert sum(sum(one.accepted) for one in found.values()) > 0


def test_a_text_of_one_token_has_no_rounds():
    target, drafter = tiny_target(), tiny_drafter()
    text = Text("one", (1, 2), (3,), SamplingParams(), True, 0)
    (made,) = forced_rounds(target, drafter, [text])
    assert made.accepted == made.verified == made.reached == ()


def test_what_cannot_be_forced_is_refused():
    target, drafter = tiny_target(), tiny_drafter(confidence=False)
    with pytest.raises(ValueError, match="causal: shares rows among requests"):
        list(forced_rounds(target, drafter, [], schedule="causal"))
    with pytest.raises(ValueError, match="no confidence head"):
        list(forced_rounds(target, drafter, [], schedule="threshold"))
