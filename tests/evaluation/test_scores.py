"""Figures of hand-made outcomes: sums, means by domain, intervals, paired differences and positions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dspark_jax.evaluation.outcomes import Outcome
from dspark_jax.evaluation.scores import Clock, Estimate, Score, score
from tests.evaluation.outcome_sets import benchmark, outcome, random_outcomes


def test_sums_and_ratios_are_of_all_rounds_together() -> None:
    """Two conversations, 3 and 1 rounds: 2 + 0 + 3 and 1 accepted, and a token of each round."""
    one = benchmark("gsm8k", conversations=2)
    outcomes = [
        outcome("d", "gsm8k", "c0", [2, 0, 3], wall=2.0, reason="stop"),
        outcome("d", "gsm8k", "c1", [1], wall=3.0),
        outcome("plain", "gsm8k", "c0", [0] * 9, block=0, wall=5.0),
        outcome("plain", "gsm8k", "c1", [0] * 9, block=0, wall=5.0),
        outcome("other", "gsm8k", "c1", [1]),
    ]
    scores = score(outcomes, [one], ["plain", "d"], baseline="plain")
    found = scores.by_benchmark["d"]["gsm8k"]
    assert (found.answers, found.tokens, found.rounds, found.stopped) == (2, 12, 4, 0.5)
    assert found.accepted_length.value == pytest.approx(10 / 4)
    assert found.verified.value == 3 and found.acceptance_rate.value == pytest.approx(6 / 12)
    assert found.seconds == 5 and found.tokens_per_second == pytest.approx(12 / 5)
    assert found.speedup.value == pytest.approx((12 / 5) / (20 / 10))
    plain = scores.by_benchmark["plain"]["gsm8k"]
    assert plain.accepted_length == Estimate(1.0, 1.0, 1.0) and plain.speedup == Estimate(1.0, 1.0, 1.0)
    assert plain.acceptance_rate == Estimate(None) and plain.positions == () and plain.verified.value == 0
    assert scores.by_domain["d"]["math"] == scores.by_domain["d"]["all"] == found


def test_positions_are_conditional_on_the_prefix() -> None:
    """A last round that ended with an accepted stop token decided nothing behind it."""
    outcomes = [outcome("d", "a", "c0", [0, 1, 3, 2], reached=[3, 3, 3, 2], reason="stop")]
    found = score(outcomes, [benchmark("a")], ["d"]).by_benchmark["d"]["a"]
    assert found.reached == (4, 3, 1)
    assert [estimate.value for estimate in found.positions] == pytest.approx([3 / 4, 2 / 3, 1])
    assert found.tokens == 1 + 0 + 1 + 3 + 2 + 3  # no bonus token in the last round


def test_a_position_that_no_round_reached_has_no_value() -> None:
    outcomes = [outcome("d", "a", "c0", [0, 0])]
    found = score(outcomes, [benchmark("a")], ["d"]).by_benchmark["d"]["a"]
    assert found.reached == (2, 0, 0) and found.positions[1:] == (Estimate(None), Estimate(None))


def test_turns_of_a_conversation_count_together() -> None:
    one = benchmark("mt-bench", conversations=2, turns=2)
    outcomes = [outcome("d", "mt-bench", f"c{i}", [i + turn], turn=turn) for i in (0, 1) for turn in (0, 1)]
    found = score(outcomes, [one], ["d"]).by_benchmark["d"]["mt-bench"]
    assert found.answers == 4 and found.accepted_length.value == pytest.approx((1 + 2 + 2 + 3) / 4)
    # drawn are whole conversations: (1 + 2) / 2 twice, (2 + 3) / 2 twice, or one of each
    assert found.accepted_length[1:] == (1.5, 2.5)


def test_domains_are_means_of_their_benchmarks() -> None:
    benchmarks = [benchmark("a", "math", 2), benchmark("b", "math", 2), benchmark("c", "code", 2)]
    many = {"a": [0] * 50, "b": [3], "c": [1]}
    outcomes = [outcome("d", name, f"c{i}", many[name]) for name in many for i in (0, 1)]
    scores = score(outcomes, benchmarks, ["d"])
    assert [column.name for column in scores.domains] == ["math", "code", "all"]
    assert scores.domains[0].members == ("a", "b") and scores.domains[-1].members == ("a", "b", "c")
    lengths = {name: found.accepted_length.value for name, found in scores.by_domain["d"].items()}
    assert lengths == pytest.approx({"math": (1 + 4) / 2, "code": 2, "all": (1 + 4 + 2) / 3})
    # rounds by position are added up
    assert scores.by_domain["d"]["math"].positions[0].value == pytest.approx(2 / 102)
    assert scores.by_domain["d"]["math"].rounds == 102


def test_domains_come_in_the_order_of_the_tables() -> None:
    names = ("law", "other", "chat", "code", "math")
    benchmarks = [benchmark(f"b{i}", domain) for i, domain in enumerate(names)]
    outcomes = [outcome("d", one.name, "c0", [1]) for one in benchmarks]
    found = score(outcomes, benchmarks, ["d"]).domains
    assert [column.name for column in found] == ["math", "code", "chat", "other", "law", "all"]


def test_speedup_of_a_domain_is_the_mean_of_its_benchmarks() -> None:
    benchmarks = [benchmark("a"), benchmark("b")]
    outcomes = [
        outcome("plain", "a", "c0", [0] * 9, block=0, wall=10.0), outcome("d", "a", "c0", [0] * 9, wall=5.0),
        outcome("plain", "b", "c0", [0] * 9, block=0, wall=1.0), outcome("d", "b", "c0", [0] * 9, wall=1.0),
    ]  # fmt: skip
    scores = score(outcomes, benchmarks, ["plain", "d"], baseline="plain")
    assert scores.by_domain["d"]["math"].speedup.value == pytest.approx((2 + 1) / 2)
    assert scores.by_domain["d"]["math"].tokens_per_second == pytest.approx(20 / 6)


def test_a_speedup_is_resampled_over_the_same_conversations() -> None:
    """Answers of other lengths of time, each halved, leave no doubt; one that gained nothing does."""
    one = benchmark("a", conversations=5)

    def speedup(walls: list[float]) -> Estimate:
        outcomes = [outcome("plain", "a", f"c{i}", [0] * 9, block=0, wall=2.0 + i) for i in range(5)]
        outcomes += [outcome("d", "a", f"c{i}", [0] * 9, wall=wall) for i, wall in enumerate(walls)]
        return score(outcomes, [one], ["plain", "d"], baseline="plain").by_benchmark["d"]["a"].speedup

    halved = [1 + i / 2 for i in range(5)]
    assert speedup(halved) == pytest.approx(Estimate(2, 2, 2))
    mixed = speedup([2.0, *halved[1:]])
    assert mixed.value == pytest.approx(20 / 11) and mixed.low is not None and mixed.high is not None
    assert 1 <= mixed.low < mixed.value < mixed.high <= 2 + 1e-9


def test_there_is_no_speed_without_a_clock_or_plain_decoding() -> None:
    outcomes = [outcome("plain", "a", "c0", [0], block=0, wall=1.0), outcome("d", "a", "c0", [1])]
    found = score(outcomes, [benchmark("a")], ["plain", "d"], baseline="plain").by_benchmark["d"]["a"]
    assert found.tokens_per_second is None and found.speedup.value is None
    timed = [outcome("d", "a", "c0", [1], wall=2.0)]
    found = score(timed, [benchmark("a")], ["d"], baseline="plain").by_benchmark["d"]["a"]
    assert found.tokens_per_second == 1.5 and found.speedup.value is None


def test_a_benchmark_with_an_answer_that_was_not_timed_has_no_speed() -> None:
    """The others are timed, and so is plain decoding; means of domains have none either."""
    benchmarks = [benchmark("a", conversations=2), benchmark("b", conversations=2)]
    outcomes = random_outcomes({"plain": 0, "d": 0.5}, benchmarks)
    broken = [replace(o, wall=None) if o.id == "d/a/c1/0" else o for o in outcomes]
    for clock in ("own", "shared"):
        scores = score(broken, benchmarks, ["plain", "d"], baseline="plain", clock=clock)  # type: ignore[arg-type]
        found = scores.by_benchmark["d"]
        assert found["a"].tokens_per_second is None and found["a"].speedup == Estimate(None) and not found["a"].seconds
        assert found["b"].tokens_per_second == pytest.approx(4) and found["b"].speedup.value == pytest.approx(2)
        domain = scores.by_domain["d"]["all"]
        assert domain.tokens_per_second is None and domain.speedup == Estimate(None) and not domain.seconds
        assert scores.by_domain["plain"]["all"].tokens_per_second == pytest.approx(2)


def test_without_a_clock_walls_say_nothing() -> None:
    """Plain answers that drafters were forced along have them in old files."""
    one = benchmark("a", conversations=2)
    outcomes = random_outcomes({"plain": 0, "d": 0.5}, [one])
    scores = score(outcomes, [one], ["plain", "d"], baseline="plain", clock="none")
    for row in scores.by_benchmark.values():
        assert row["a"].tokens_per_second is None and row["a"].speedup == Estimate(None) and row["a"].seconds == 0


def test_the_time_of_a_batch_is_shared_out_by_work() -> None:
    """Clocks of answers that ended together: all of the time is on the first. Shared out, the interval is that of
    answers which each took their own."""
    one = benchmark("a", conversations=20)
    outcomes = random_outcomes({"plain": 0, "d": 0.5}, [one])
    own = [replace(o, wall=(o.rounds + 1) * (0.5 if o.system == "plain" else 0.6)) for o in outcomes]
    totals = {name: sum(o.wall or 0 for o in own if o.system == name) for name in ("plain", "d")}
    batch = [replace(o, wall=totals[o.system] if o.conversation == "c0" else 0.0) for o in own]

    def found(made: list[Outcome], clock: Clock) -> Score:
        return score(made, [one], ["plain", "d"], baseline="plain", clock=clock).by_benchmark["d"]["a"]

    wanted, shared, wrong = found(own, "own"), found(batch, "shared"), found(batch, "own")
    assert shared.speedup == pytest.approx(wanted.speedup) and shared.seconds == pytest.approx(wanted.seconds)
    assert wrong.speedup.value == pytest.approx(wanted.speedup.value)
    assert wanted.speedup != pytest.approx(wrong.speedup)


def test_intervals_are_those_of_a_plain_bootstrap() -> None:
    """The resampling loop, written out: ratios of sums over drawn conversations."""
    one = benchmark("a", conversations=40)
    outcomes = random_outcomes({"d": 0.6}, [one], rounds=10)
    found = score(outcomes, [one], ["d"]).by_benchmark["d"]["a"].accepted_length
    random = np.random.default_rng(7)
    ratios = []
    for _ in range(4000):
        drawn = [outcomes[i] for i in random.integers(0, 40, 40)]
        ratios.append(sum(o.committed for o in drawn) / sum(o.rounds for o in drawn))
    assert found[1:] == pytest.approx(np.quantile(ratios, (0.025, 0.975)), abs=0.03)
    assert found.low is not None and found.value is not None and found.high is not None
    assert found.low < found.value < found.high


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Acceptance 0.6 at four positions: 1 + 0.6 + 0.36 + 0.216 + 0.1296 tokens a round, less what the shift changes."""
    one, covered = benchmark("a", conversations=30), 0
    lengths = [random_outcomes({"d": 0.6}, [one], rounds=8, seed=seed) for seed in range(60)]
    truth = np.mean([sum(o.committed for o in made) / sum(o.rounds for o in made) for made in lengths])
    for made in lengths:
        found = score(made, [one], ["d"]).by_benchmark["d"]["a"].accepted_length
        covered += found.low < truth < found.high  # type: ignore[operator]
    assert 50 <= covered <= 60


def test_the_same_seed_gives_the_same_intervals() -> None:
    one = benchmark("a", conversations=10)
    outcomes = random_outcomes({"d": 0.6}, [one])
    first, again, other = (score(outcomes, [one], ["d"], seed=seed) for seed in (0, 0, 1))
    assert first == again and first != other
    shuffled = [outcomes[i] for i in np.random.default_rng(0).permutation(len(outcomes))]
    assert score(shuffled, [one], ["d"]) == first


def test_differences_are_paired() -> None:
    """Systems that rise and fall with the conversation differ by far less than either varies."""
    benchmarks = [benchmark("a", conversations=30), benchmark("b", "chat", conversations=20)]
    outcomes = [
        outcome(system, one.name, c.id, [min(i % 6 + better, 7)] * 5, block=7)
        for one in benchmarks for i, c in enumerate(one.conversations) for system, better in (("x", 1), ("y", 0))
    ]  # fmt: skip
    scores = score(outcomes, benchmarks, ["x", "y"])
    ((pair, row),) = scores.differences.items()
    assert pair == ("x", "y") and list(row) == ["math", "chat", "all"]
    for name, found in row.items():
        single = scores.by_domain["x"][name].accepted_length
        assert list(found) == pytest.approx([1, 1, 1])
        assert single.high - single.low > 0.5  # type: ignore[operator]


def test_plain_decoding_is_in_no_difference() -> None:
    one = benchmark("a", conversations=3)
    outcomes = random_outcomes({"plain": 0, "x": 0.5, "y": 0.6, "z": 0.7}, [one])
    scores = score(outcomes, [one], ["plain", "x", "y", "z"], baseline="plain")
    assert list(scores.differences) == [("x", "y"), ("x", "z"), ("y", "z")]
    assert scores.by_domain["x"]["all"].speedup.value == pytest.approx(2)


def test_one_conversation_has_no_interval() -> None:
    benchmarks = [benchmark("a", conversations=1), benchmark("b", conversations=5)]
    scores = score(random_outcomes({"d": 0.5}, benchmarks), benchmarks, ["d"])
    assert scores.by_benchmark["d"]["a"].accepted_length.low is None
    assert scores.by_benchmark["d"]["b"].accepted_length.low is not None
    assert scores.by_domain["d"]["math"].accepted_length.low is None


def test_answers_without_rounds_count_as_answers() -> None:
    """An answer that ended with its first token; a draw of such conversations only says nothing."""
    one = benchmark("a", conversations=2)
    outcomes = [outcome("d", "a", "c0", [], reason="stop"), outcome("d", "a", "c1", [2], reason="stop")]
    found = score(outcomes, [one], ["d"]).by_benchmark["d"]["a"]
    assert found.answers == 2 and found.accepted_length == Estimate(3.0, 3.0, 3.0)
    nothing = score([outcomes[0], outcome("d", "a", "c1", [])], [one], ["d"]).by_benchmark["d"]["a"]
    assert nothing.accepted_length == Estimate(None) and nothing.rounds == 0


def test_a_missing_conversation_is_refused() -> None:
    one = benchmark("a", conversations=3)
    with pytest.raises(ValueError, match="system 'd': has not answered 2 of 3 conversations of a, as 'c1'"):
        score([outcome("d", "a", "c0", [1])], [one], ["d"])


def test_systems_are_compared_on_the_turns_that_all_have(caplog: pytest.LogCaptureFixture) -> None:
    """One had no room for a second turn: the other's, longer, does not count."""
    one = benchmark("mt-bench", conversations=2, turns=2)
    outcomes = [outcome(s, "mt-bench", f"c{i}", [1], wall=1.0) for s in ("x", "y") for i in (0, 1)]
    outcomes += [outcome(s, "mt-bench", "c0", [1], turn=1, wall=1.0) for s in ("x", "y")]
    longer = outcome("x", "mt-bench", "c1", [3, 3, 3], turn=1, wall=9.0)
    lacking = replace(longer, id="y/mt-bench/c1/1", system="y", token_ids=(), finish_reason="context", accepted=(),
                      verified=(), reached=(), wall=None)  # fmt: skip
    for more in ([longer], [longer, lacking]):
        scores = score([*outcomes, *more], [one], ["x", "y"])
        x, y = (scores.by_benchmark[name]["mt-bench"] for name in ("x", "y"))
        assert x == y and x.answers == 3 and x.accepted_length.value == 2 and x.seconds == 3
        assert scores.dropped == 1 and "1 turns that not every system had room to answer" in caplog.text
    assert score([*outcomes, longer], [one], ["x"]).by_benchmark["x"]["mt-bench"].answers == 4
    assert score(outcomes, [one], ["x", "y"]).dropped == 0


def test_scores_are_json_values() -> None:
    benchmarks = [benchmark("a", conversations=2), benchmark("b", "chat", conversations=1)]
    outcomes = random_outcomes({"plain": 0, "x": 0.5, "y": 0.6}, benchmarks)
    found = score(outcomes, benchmarks, ["plain", "x", "y"], baseline="plain").as_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["by_benchmark"]["x"]["a"]["accepted_length"].keys() == {"value", "low", "high"}
    assert found["differences"][0]["one"] == "x" and found["domains"][-1]["members"] == ["a", "b"]
