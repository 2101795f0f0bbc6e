"""Answering with the engine and along plain answers: texts, turns, rounds, clocks, and going on where a run stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_jax.checkpoints.load import Drafter, Target, load_drafter, load_target
from dspark_jax.decoding.generate import Completion, Generator
from dspark_jax.decoding.trace import RoundTrace
from dspark_jax.drafters.ngram import NgramConfig
from dspark_jax.evaluation import answering
from dspark_jax.evaluation.answering import Answerer, Asked, Protocol, System, answer_text, ask, check_turns
from dspark_jax.evaluation.benchmarks import Conversation
from dspark_jax.evaluation.outcomes import Outcome
from tests.serving.conftest import write_target

GREEDY = Protocol(temperature=0.0, max_tokens=12, batch_size=2)
TALKS = [
    Conversation("mt-bench", "1", ("tulips", "red?")),
    Conversation("gsm8k", "2", ("a b c",)),
    Conversation("mt-bench", "3", ("the answer is", "why so", "and?")),
    Conversation("gsm8k", "4", ("x" * 40,)),
]
TURNS = 7


@pytest.fixture(scope="module")
def target(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The golden Qwen3 target with a tokenizer; its context has 512 tokens."""
    return load_target(write_target(golden, tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def systems(golden: Path) -> dict[str, System]:
    """Plain decoding, a drafter with confidences and one without."""
    dspark = load_drafter(golden / "inference/dspark_qwen3_vanilla")
    ngram = Drafter(NgramConfig(3, 2, 1), {}, Path("ngram"))
    return {"plain": System("plain", None), "dspark": System("dspark", dspark), "ngram": System("ngram", ngram)}


def run(
    target: Target,
    system: System,
    protocol: Protocol = GREEDY,
    talks: Sequence[Conversation] = TALKS,
    done: dict[str, Outcome] | None = None,
) -> dict[str, Outcome]:
    """The outcomes of a run by id, in the order in which they came."""
    kept: dict[str, Outcome] = {}
    Answerer(target, system, protocol).answer(talks, lambda outcome: kept.update({outcome.id: outcome}), done or {})
    return kept


@pytest.fixture(scope="module")
def greedy(target: Target, systems: dict[str, System]) -> dict[str, dict[str, Outcome]]:
    """Outcomes of all systems by the engine at temperature 0."""
    return {name: run(target, system) for name, system in systems.items()}


def texts(outcomes: dict[str, Outcome]) -> dict[tuple[str, str, int], tuple[tuple[int, ...], str, int]]:
    """What was answered, whoever did."""
    return {
        (o.benchmark, o.conversation, o.turn): (o.token_ids, o.finish_reason, o.prompt_tokens)
        for o in outcomes.values()
    }


def facts(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """Outcomes without their clocks."""
    return {name: replace(outcome, wall=None) for name, outcome in outcomes.items()}


def test_every_turn_is_answered_once(greedy: dict[str, dict[str, Outcome]]) -> None:
    wanted = {f"{c.benchmark}/{c.id}/{turn}" for c in TALKS for turn in range(len(c.turns))}
    assert len(wanted) == TURNS
    for name, outcomes in greedy.items():
        assert set(outcomes) == {f"{name}/{place}" for place in wanted}
        assert all(0 < len(o.token_ids) <= 12 for o in outcomes.values())


def test_greedy_texts_are_those_of_plain_decoding(greedy: dict[str, dict[str, Outcome]]) -> None:
    wanted = texts(greedy["plain"])
    assert len(set(wanted.values())) > 3
    for outcomes in greedy.values():
        assert texts(outcomes) == wanted


def test_rounds_add_up_to_the_answer(greedy: dict[str, dict[str, Outcome]]) -> None:
    """A round commits its accepted drafts and one token more; only an accepted stop token has none behind it."""
    for name, outcomes in greedy.items():
        for o in outcomes.values():
            assert all(a <= r <= v for a, r, v in zip(o.accepted, o.reached, o.verified, strict=True))
            ends_with_draft = o.reached[-1:] != o.verified[-1:]
            assert sum(o.accepted) + o.rounds - ends_with_draft == o.committed
            assert o.rounds == o.committed or name != "plain"
    assert sum(sum(o.accepted) for o in greedy["dspark"].values()) > 0
    assert max(max(o.verified) for o in greedy["ngram"].values()) == 3


def test_confidences_are_of_whole_blocks(greedy: dict[str, dict[str, Outcome]]) -> None:
    for o in greedy["dspark"].values():
        assert len(o.confidence) == o.rounds and all(len(row) == 7 for row in o.confidence)
        assert all(0 < c < 1 for row in o.confidence for c in row)
    assert all(o.confidence == () for name in ("plain", "ngram") for o in greedy[name].values())


def test_a_threshold_verifies_less(
    target: Target, systems: dict[str, System], greedy: dict[str, dict[str, Outcome]]
) -> None:
    system = replace(systems["dspark"], schedule="threshold", threshold=0.5)
    outcomes = run(target, system)
    assert texts(outcomes) == texts(greedy["plain"])
    for o in outcomes.values():
        length = 1
        for row, verified, accepted in zip(o.confidence, o.verified, o.accepted, strict=True):
            sure = next((k for k, c in enumerate(row) if c < 0.5), 7)
            assert verified == min(sure, 12 - length - 1)  # the limit cuts blocks too
            length += accepted + 1
    less, whole = (sum(sum(o.verified) for o in found.values()) for found in (outcomes, greedy["dspark"]))
    assert less < whole


def test_later_turns_hold_the_answers_before_them(
    target: Target, systems: dict[str, System], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, str] = {}
    stream = Generator.stream

    def spy(self, requests, mode, on_tokens=None, on_rounds=None):
        todo = list(requests)
        asked.update({r.id: target.tokenizer.decode(list(r.prompt_ids), skip_special=False) for r in todo})
        return stream(self, todo, mode, on_tokens, on_rounds)

    monkeypatch.setattr(Generator, "stream", spy)
    found = run(target, systems["dspark"])
    first, second = (answer_text(target, found[f"dspark/mt-bench/3/{turn}"].token_ids) for turn in (0, 1))
    assert first and second
    assert asked["dspark/mt-bench/3/0"].endswith("the answer is<|im_end|>\n<|im_start|>assistant\n")
    assert asked["dspark/mt-bench/3/2"] == (
        "<|im_start|>user\nthe answer is<|im_end|>\n"
        f"<|im_start|>assistant\n{first}<|im_end|>\n<|im_start|>user\nwhy so<|im_end|>\n"
        f"<|im_start|>assistant\n{second}<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    for o in found.values():
        assert o.prompt_tokens == len(target.tokenizer.encode(asked[o.id]))


def test_the_text_of_an_answer_has_no_stop_token(target: Target) -> None:
    (stop,) = target.tokenizer.eos_ids
    ids = target.tokenizer.encode("grün")
    assert answer_text(target, [*ids, stop]) == answer_text(target, ids) == "grün"
    assert answer_text(target, [stop]) == ""


def test_clocks_add_up_to_the_runs(target: Target, systems: dict[str, System], monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of one second a look: an answer's wall is the time since the one before it, and warming up is not in."""
    now, warm = [0.0], []

    def tick() -> float:
        now[0] += 1
        return now[0]

    class Clock:
        perf_counter = staticmethod(tick)

    compiles = Generator.warm_up

    def warms(self, requests):
        warm.append(now[0])
        now[0] += 100
        compiles(self, requests)

    monkeypatch.setattr(answering, "time", Clock)
    monkeypatch.setattr(Generator, "warm_up", warms)
    found = run(target, systems["dspark"])
    assert warm and [o.wall for o in found.values()] == [1.0] * TURNS


def test_a_run_goes_on_where_it_was(
    target: Target, systems: dict[str, System], greedy: dict[str, dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is there already is not answered again, and what follows is as if it had never stopped."""
    whole = greedy["dspark"]
    for count in (0, 1, 3, TURNS - 1, TURNS):
        done = dict(list(whole.items())[:count])
        before = dict(done)
        rest = run(target, systems["dspark"], done=done)
        assert done == before and set(rest) == set(whole) - set(done)
        assert facts(done | rest) == facts(whole)
        begun = {(o.benchmark, o.turn) for o in done.values()}  # whose time was also that of what was lost
        assert all((o.wall is None) == ((o.benchmark, o.turn) in begun) for o in rest.values())
    monkeypatch.setattr(Generator, "warm_up", lambda self, requests: pytest.fail("nothing is left to do"))
    assert run(target, systems["dspark"], done=whole) == {}


def test_answers_one_by_one_are_timed_wherever_a_run_goes_on(
    target: Target, systems: dict[str, System], greedy: dict[str, dict[str, Outcome]]
) -> None:
    done = {name: greedy["plain"][name] for name in ("plain/gsm8k/2/0",)}
    (rest,) = run(target, systems["plain"], replace(GREEDY, batch_size=1), TALKS[1::2], done).values()
    assert rest.id == "plain/gsm8k/4/0" and rest.wall is not None


def test_a_clock_is_of_an_answer_or_its_batch_or_there_is_none() -> None:
    protocols = GREEDY, replace(GREEDY, batch_size=1), replace(GREEDY, batch_size=1, method="forced")
    assert [protocol.clock for protocol in protocols] == ["shared", "own", "none"]


def test_benchmarks_are_run_one_after_another(greedy: dict[str, dict[str, Outcome]]) -> None:
    """So that their clocks are their own; turns come wave by wave."""
    order = [(o.benchmark, o.turn) for o in greedy["dspark"].values()]
    assert order == [("mt-bench", 0)] * 2 + [("mt-bench", 1)] * 2 + [("mt-bench", 2)] + [("gsm8k", 0)] * 2


def test_samples_depend_on_seed_and_turn_alone(target: Target, systems: dict[str, System]) -> None:
    """Not on the batch, the order, or the system's name."""
    sampled = replace(GREEDY, temperature=1.0)
    first = run(target, systems["dspark"], sampled)
    for talks in (TALKS[::-1], TALKS[2:3]):
        others = texts(run(target, systems["dspark"], sampled, talks))
        assert others == {place: text for place, text in texts(first).items() if place in others}
    assert texts(first) != texts(run(target, systems["dspark"], replace(sampled, seed=1)))
    renamed = run(target, replace(systems["dspark"], name="other"), sampled)
    assert texts(renamed) == texts(first) and set(renamed) == {f"other/{o.split('/', 1)[1]}" for o in first}


def test_filters_reach_the_engine(target: Target, systems: dict[str, System]) -> None:
    wanted = texts(run(target, systems["plain"], GREEDY, TALKS[1:2]))
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}):
        hot = replace(GREEDY, temperature=3.0, **filters)
        assert texts(run(target, systems["plain"], hot, TALKS[1:2])) == wanted


def test_a_conversation_ends_before_a_turn_without_room(
    target: Target, systems: dict[str, System], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history that fills the context of 512 tokens; the other conversation goes on. Nothing is left to do then."""
    talks = [Conversation("mt-bench", "long", ("a", "b" * 600, "c")), TALKS[0]]
    found = run(target, systems["plain"], GREEDY, talks)
    long = {o.turn: o for o in found.values() if o.conversation == "long"}
    assert [o.answered for o in long.values()] == [True, False, False] and found["plain/mt-bench/1/1"].answered
    assert long[1].prompt_tokens > 512 and long[1].token_ids == () and long[1].committed == long[1].rounds == 0
    assert [o.finish_reason for o in long.values()] == ["length", "context", "context"]
    assert "plain/mt-bench/long/1:" in caplog.text and "fill the context of 512" in caplog.text
    caplog.clear()
    monkeypatch.setattr(Generator, "warm_up", lambda self, requests: pytest.fail("nothing is left to do"))
    assert run(target, systems["plain"], GREEDY, talks, found) == {} and not caplog.text


def test_an_answer_is_cut_at_the_context(target: Target, systems: dict[str, System]) -> None:
    """`b` and a chat's frame leave 512 - 505 tokens."""
    frame = len(ask(target.tokenizer, GREEDY, "x", Conversation("a", "1", ("b",))).prompt_ids) - 1
    talks = [Conversation("a", "1", ("b" * (505 - frame),))]
    (found,) = run(target, systems["plain"], GREEDY, talks).values()
    assert found.prompt_tokens == 505 and len(found.token_ids) == 7 and found.finish_reason == "length"


def test_a_first_turn_without_room_is_refused(target: Target, systems: dict[str, System]) -> None:
    talks = [Conversation("a", "1", ("b" * 600,))]
    with pytest.raises(
        ValueError, match="request 'plain/a/1/0': the prompt has 6.. tokens, the target's context has 512"
    ):
        run(target, systems["plain"], GREEDY, talks)


def test_a_tokenizer_without_template_has_no_second_turn(bare_tokenizer) -> None:
    talk = Conversation("mt-bench", "9", ("a", "b"))
    assert ask(bare_tokenizer, GREEDY, "x", talk).prompt_ids
    message = "benchmark mt-bench, conversation 9, turn 2: messages: the tokenizer has no"
    with pytest.raises(ValueError, match=message):
        ask(bare_tokenizer, GREEDY, "x", talk, 1, ["said"])
    with pytest.raises(ValueError, match=message):
        check_turns(bare_tokenizer, GREEDY, talk)
    check_turns(bare_tokenizer, GREEDY, TALKS[1])


def test_systems_that_cannot_run_are_refused(target: Target, systems: dict[str, System], golden: Path) -> None:
    with pytest.raises(ValueError, match="schedule threshold: this drafter has no confidence head"):
        run(target, replace(systems["ngram"], schedule="threshold"))
    other = System("other", load_drafter(golden / "inference/dspark_gemma4_vanilla"))
    with pytest.raises(ValueError):
        run(target, other)


# --- along plain answers ---

FORCED = replace(GREEDY, method="forced")


@pytest.mark.parametrize("name", ["dspark", "ngram"])
def test_greedy_rounds_are_the_same_along_plain_answers(
    target: Target, systems: dict[str, System], greedy: dict[str, dict[str, Outcome]], name: str
) -> None:
    found = run(target, systems[name], FORCED, done=greedy["plain"])
    assert found.keys() == greedy[name].keys()
    for place, outcome in found.items():
        assert outcome == replace(greedy[name][place], wall=None, confidence=())


def test_confidences_along_plain_answers_are_for_the_asking(
    target: Target, systems: dict[str, System], greedy: dict[str, dict[str, Outcome]]
) -> None:
    found = run(target, systems["dspark"], replace(FORCED, confidences=True), TALKS[1:2], greedy["plain"])
    (outcome,) = found.values()
    wanted = greedy["dspark"][outcome.id]
    assert outcome.accepted == wanted.accepted
    assert [c for row in outcome.confidence for c in row] == pytest.approx(
        [c for row in wanted.confidence for c in row], abs=1e-4
    )


def test_plain_decoding_is_the_engines_with_both_methods(
    target: Target,
    systems: dict[str, System],
    greedy: dict[str, dict[str, Outcome]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for the clock: there is none where rounds are found along answers, so nothing is compiled ahead of time."""
    monkeypatch.setattr(Generator, "warm_up", lambda self, requests: pytest.fail("nothing is timed"))
    found = run(target, systems["plain"], FORCED)
    assert found == facts(greedy["plain"]) and all(o.wall is not None for o in greedy["plain"].values())


def test_rounds_along_plain_answers_go_on_where_they_were(
    target: Target, systems: dict[str, System], greedy: dict[str, dict[str, Outcome]]
) -> None:
    sampled = replace(FORCED, temperature=1.0)
    done = run(target, systems["plain"], sampled)
    whole = run(target, systems["dspark"], sampled, done=done)
    assert texts(whole) == texts(done) and len(whole) == TURNS
    half = dict(list(whole.items())[: TURNS // 2])
    rest = run(target, systems["dspark"], sampled, done=done | half)
    assert not set(rest) & set(half) and half | rest == whole


def test_rounds_need_plain_answers(
    target: Target, systems: dict[str, System], greedy: dict[str, dict[str, Outcome]]
) -> None:
    with pytest.raises(
        ValueError, match="dspark/mt-bench/1/0: there is no plain answer to follow, answer with 'plain'"
    ):
        run(target, systems["dspark"], FORCED)
    lacking = {place: o for place, o in greedy["plain"].items() if o.turn < 2}
    with pytest.raises(ValueError, match="dspark/mt-bench/3/2: there is no plain answer to follow"):
        run(target, systems["dspark"], FORCED, done=lacking)


def test_a_conversation_that_plain_decoding_ended_ends(target: Target, systems: dict[str, System]) -> None:
    talks = [Conversation("mt-bench", "long", ("a", "b" * 600, "c"))]
    plain = run(target, systems["plain"], GREEDY, talks)
    found = run(target, systems["ngram"], FORCED, talks, plain)
    assert [(o.id, o.answered) for o in found.values()] == [
        ("ngram/mt-bench/long/1", False), ("ngram/mt-bench/long/2", False), ("ngram/mt-bench/long/0", True)
    ]  # fmt: skip
    assert run(target, systems["ngram"], FORCED, talks, plain | found) == {}


# --- one outcome, by hand ---


def traced(*rounds: tuple[int, int, int]) -> list[RoundTrace]:
    """A prefill and rounds of (tokens, verified, accepted)."""
    return [RoundTrace((0,))] + [
        RoundTrace(tuple(range(tokens)), (9,) * 3, (0.5,) * 3, verified, accepted)
        for tokens, verified, accepted in rounds
    ]


@pytest.mark.parametrize(
    ("rounds", "reason", "reached"),
    [
        ([(3, 3, 2), (1, 3, 0)], "length", (3, 3)),
        ([(3, 3, 2), (2, 3, 1)], "stop", (3, 3)),  # the stop token corrected a draft
        ([(3, 3, 2), (4, 3, 3)], "stop", (3, 3)),  # it was the bonus
        ([(3, 3, 2), (2, 3, 2)], "stop", (3, 2)),  # it was an accepted draft
        ([(3, 3, 3)], "stop", (3,)),  # the last draft of a block
        ([], "stop", ()),
    ],
)
def test_a_stop_token_decides_nothing_behind_it(rounds, reason: str, reached: tuple[int, ...]) -> None:
    made = traced(*rounds)
    tokens = [token for one in made for token in one.tokens]
    done = Completion("d/a/1/0", tokens, reason, 5, len(rounds), 0, 0, 0, 1.0)
    asked = Asked(done.id, TALKS[1], 0, (1,) * 5, 0)
    found = answering._outcome("d", asked, done, made, 0.25)
    assert found.reached == reached and found.verified == tuple(v for _, v, _ in rounds)
    assert found.committed == len(tokens) - 1 and found.wall == 0.25 and len(found.confidence) == len(rounds)


@pytest.fixture
def bare_tokenizer(golden: Path, tmp_path: Path):
    """The target's tokenizer without a chat template."""
    from dspark_jax.checkpoints.tokenizer import load_tokenizer
    from tests.serving.conftest import write_tokenizer

    write_tokenizer(tmp_path, None)
    return load_tokenizer(tmp_path)
