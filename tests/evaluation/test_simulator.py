"""The engine's model: exact times of tiny cases, when schedules draft, loads, and what a curve must have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_jax.decoding.curve import Curve, Point, Prefill
from dspark_jax.evaluation.loads import Load, Waiting
from dspark_jax.evaluation.simulator import SYSTEMS, EngineSettings, _Engine, simulate
from tests.evaluation.tiny import curve, mixed, replay

ONE = Load("closed", 1, 1)
SMALL = EngineSettings(slots=(1, 2, 4, 8))


def run(system, load, found, costs, settings=SMALL, **how):
    return simulate(system, load, found, costs, settings, **how)


def engine(system, found, costs, settings, *requests):
    """An engine before the recorded `requests`, in this order."""
    made = _Engine(system, Load("open", 1e-30, len(requests)), found, costs, settings, 0)
    made.source.waiting = [Waiting(number, 0.0) for number in requests]
    return made


# --- exact times ---


def test_one_plain_request_takes_its_prefill_and_a_round_for_each_token_more():
    result = run("plain", ONE, replay([[0, 0, 0, 0]]), curve())
    assert result.seconds == 4.5 and result.tokens_per_second == 5 / 4.5 and result.tokens_per_second_per_user == 1
    assert (result.rounds, result.accepted_length, result.budget, result.drafted) == (4, 1, 1, 0)
    assert result.time_to_first_token["p50"] == 0.5 and result.inter_token["p99"] == 1
    assert result.shares["prefill"] == 0.5 / 4.5 and result.shares["verify"] == 4 / 4.5


def test_one_fixed_request_commits_what_was_accepted():
    """Blocks of two, three rows: 1 + 0.25 + 2 * 0.1 s a round; 3 + 1 + 2 tokens, the limit cuts nothing."""
    costs = curve(block=2, draft=0.25, row=0.1)
    result = run("fixed", ONE, replay([[2, 0, 1]], block=2), costs)
    assert result.seconds == pytest.approx(0.5 + 3 * 1.45) and result.rounds == 3
    assert result.tokens_per_second == pytest.approx(7 / 4.85) and result.accepted_length == 2
    assert (result.budget, result.padding, result.drafted) == (3, 0, 1)
    assert result.shares["draft"] == pytest.approx(0.75 / 4.85)
    assert result.inter_token["p50"] == pytest.approx(1.45 * 5 / 12)  # between the third and the fourth of the six:
    # three are 1.45 / 3 s behind each other, two 1.45 / 2 s, one 1.45 s


def test_near_the_limit_less_is_verified_and_the_rest_is_padding():
    """Two tokens are left when the round begins: one draft token may be verified, of two in the bucket."""
    result = run("fixed", ONE, replay([[1]], block=2, max_tokens=3), curve(block=2))
    assert result.budget == 2 and result.padding == pytest.approx(1 / 3)


def test_mtp1_verifies_one_token_and_drafts_for_its_share():
    """Two rows: 1 + 0.1 s, and a quarter of the draft's 0.4 s; rounds of 2, 2 and 1 tokens from blocks of four."""
    found = replay([[3, 0]], block=4)
    settings = replace(SMALL, mtp_draft_share=0.5)
    for share, seconds in ((None, 1.2), (0.5, 1.3)):
        settings = replace(SMALL, mtp_draft_share=share)
        result = run("mtp1", ONE, found, curve(block=4, draft=0.4, row=0.1), settings)
        assert result.seconds == pytest.approx(0.5 + 3 * seconds) and result.rounds == 3 and result.budget == 2


def test_threshold_verifies_the_confident_prefix_in_the_smallest_bucket():
    """Confidences 0.9, 0.6, 0.8 at 0.7: one token of a block, in two rows; two tokens on 0.8 counts: three, in four."""
    found = replay([[2, 0, 0]], block=3, confidence=[0.9, 0.6, 0.8])
    result = run("threshold", ONE, found, curve(block=3, row=0.1), replace(SMALL, threshold=0.7))
    assert result.seconds == pytest.approx(0.5 + 3 * 1.1 + 1.3) and result.rounds == 4
    assert (result.budget, result.padding) == (2.5, 0)


def test_the_host_looks_after_so_many_rounds():
    """Nine rounds of a second are seen in looks after 4, 8 and 9; or one by one."""
    found = replay([[0] * 9])
    for rounds, looks in ((4, 3), (1, 9), (100, 1)):
        result = run("plain", ONE, found, curve(), replace(SMALL, rounds=rounds, host_seconds=0.125))
        assert result.seconds == 9.5 + looks * 0.125


def test_a_slot_that_ends_while_requests_wait_ends_the_rounds():
    """The first request ends with round 1: with a third waiting the host looks then, without only after four."""
    found = replay([[0], [0] * 6, [0] * 6])
    for requests, looks in (((0, 1), [4, 2]), ((0, 1, 2), [1, 4, 2])):
        made = engine("plain", found, curve((2,)), replace(SMALL, slots=(2,)), *requests)
        rounds = []
        while made.answered < len(requests):
            before = made.tally.rounds
            made.iteration()
            rounds.append(made.tally.rounds - before)
        assert rounds == looks


def test_a_long_prompt_comes_in_pieces_between_the_rounds_of_others():
    """600 tokens: 512 first, then 88 (padded to 128); at once where nobody decodes, else with rounds between."""
    costs = Curve(curve((2,)).points, (Prefill(32, 1.0), Prefill(128, 4.0), Prefill(512, 16.0)))
    found = replay([[0] * 9, [0] * 9])
    found = replace(found, prompt=np.array([10, 600]), position=found.position + np.repeat([0, 590], 9))
    made = engine("plain", found, costs, replace(SMALL, slots=(2,)), 0, 1)
    made.iteration()
    assert made.tally.seconds["prefill"] == 1 + 16 + 4 and made.tally.rounds == 4
    made = engine("plain", found, costs, replace(SMALL, slots=(2,)), 0)
    spent = []
    for _ in range(3):
        made.iteration()
        spent.append((made.tally.seconds["prefill"], int(made.held.sum()), made.tally.rounds))
        made.source.waiting += [Waiting(1, made.clock)] * (len(spent) == 1)
    assert spent == [(1, 1, 4), (17, 1, 8), (21, 1, 12)]  # the first request ends with round 9, the other goes on


def test_pieces_are_as_long_as_the_engine_says():
    """600 tokens beside a request that decodes: 256, 256, and 88 padded to 128, with rounds between."""
    costs = Curve(curve((2,)).points, (Prefill(32, 1.0), Prefill(128, 4.0), Prefill(256, 8.0)))
    found = replay([[0] * 12, [0] * 9])
    found = replace(found, prompt=np.array([10, 600]), position=found.position + np.repeat([0, 590], [12, 9]))
    made = engine("plain", found, costs, replace(SMALL, slots=(2,), prefill_chunk=256), 0)
    spent = []
    for _ in range(4):
        made.iteration()
        spent.append(made.tally.seconds["prefill"])
        made.source.waiting += [Waiting(1, made.clock)] * (len(spent) == 1)
    assert spent == [1, 9, 17, 21]


def test_a_file_is_worked_off_with_looks_only_where_a_slot_ends():
    """Two slots; requests of 3, 5 and 2 rounds: the third takes the first one's slot, and ends with the second."""
    found = replay([[0] * 3, [0] * 5, [0] * 2])
    made = _Engine("plain", Load("file", 2, 3), found, curve((2,)), replace(SMALL, host_seconds=0.25), 0)
    made.source.waiting = [Waiting(number, 0.0) for number in range(3)]
    while made.answered < 3:
        made.iteration()
    assert made.clock == 3 * 0.5 + 5 + 2 * 0.25 and made.slots == 2


def test_more_slots_cost_a_copy_each_step_and_shrink_late():
    """From 1 to 4 slots in two steps, at 8 s each; back only after sixteen iterations that would fit fewer."""
    settings = replace(SMALL, slots=(1, 2, 4), rounds=1, resize_seconds=8.0)
    made = engine("plain", replay([[0] * 60, [0]]), curve((1, 2, 4)), settings, 0)
    made.iteration()
    assert made.slots == 1 and made.tally.seconds["resize"] == 0
    made.source.waiting = [Waiting(1, made.clock)] * 3
    made.iteration()  # these end in their first round
    assert made.slots == 4 and made.tally.seconds["resize"] == 16 and made.held.sum() == 1
    sizes = []
    for _ in range(17):
        made.iteration()
        sizes.append(made.slots)
    assert sizes == [4] * 15 + [1] * 2 and made.tally.seconds["resize"] == 32


def test_caches_follow_the_longest_text():
    """Costs of 256 tokens and of 384 differ: a text grows past 256 in its 245th round."""
    points = (Point(1, 256, (1, 2), (1.0, 1.0), 1.0), Point(1, 384, (1, 2), (3.0, 3.0), 3.0))
    found = replay([[0] * 300])
    result = run("plain", ONE, found, Curve(points), replace(SMALL, slots=(1,)))
    assert result.seconds == 246 + 54 * 3  # anchors at 10..255 fit into 256


# --- when to draft ---


def drafts(system, confidence, rounds, costs, accepted=0):
    """Which rounds of one request had a draft."""
    found = replay([[accepted] * rounds], confidence=confidence)
    engine = _Engine(system, ONE, found, costs, replace(SMALL, rounds=1), 0)
    seen = []
    for _ in range(rounds):
        before = engine.tally.drafted
        engine.iteration()
        seen.append(engine.tally.drafted > before)
    return seen


@pytest.mark.parametrize("system", ["causal", "async"])
def test_a_draft_that_does_not_pay_is_tried_the_more_rarely_the_more_it_loses(system):
    """1.7 tokens at first in 1.8 s, where a plain round gives one a second: a look in the 15th round. It finds 1.5."""
    seen = np.flatnonzero(drafts(system, 0.5, 200, curve(draft=0.8)))
    gaps = np.diff(seen)
    assert seen[0] == 14 and gaps[0] > 25 and gaps[-1] < 60 and (np.diff(gaps) >= 0).all()


def test_a_probe_that_finds_more_brings_drafting_back():
    """1.99 tokens in 1.8 s pay. `async` sees the probe's confidences a round later than `causal`."""
    costs = curve(draft=0.8)
    assert drafts("causal", 0.99, 16, costs, accepted=1) == [False] * 14 + [True] * 2
    assert drafts("async", 0.99, 20, costs, accepted=1) == [False] * 14 + [True, False] + [True] * 4


def test_the_bonus_token_is_no_accepted_draft():
    """Twelve rounds of one verified token of 0.5: four accepted it, though each round committed a token at least."""
    found = replay([[1, 0, 0] * 4], confidence=0.5)
    made = engine("causal", found, curve(), replace(SMALL, slots=(1,), rounds=1), 0)
    for _ in range(12):
        made.iteration()
    weights = 0.99 ** np.arange(12)[::-1]
    assert made.past.promised == pytest.approx([0.5 * weights.sum()])
    assert made.past.kept == pytest.approx([weights[::3].sum()])


def test_async_fills_the_bucket_of_two_rounds_before():
    """Before anything is known 1.7 tokens in 1.6 s pay; confidences of 0.1 do not, from round 2 (async: 3) on."""
    costs = curve(draft=0.6)
    assert drafts("causal", 0.1, 6, costs) == [True] + [False] * 5
    assert drafts("async", 0.1, 6, costs) == [True, True] + [False] * 4


# --- loads ---


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_every_token_of_every_request_is_produced(system, slots):
    found = mixed(30, 3)
    costs = curve((slots,), 3, draft=0.1, row=0.02)
    result = run(system, Load("file", slots, 30), found, costs)
    assert result.tokens_per_second * result.seconds == pytest.approx(found.tokens.sum())
    assert result.requests == 30 and result.accepted_length >= 1
    assert sum(result.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("system", ["plain", "causal"])
def test_a_closed_load_keeps_its_clients_busy(system):
    """With a look after each round every client is at work in every round."""
    costs = curve((1, 2, 4, 8), 3, draft=0.1, row=0.02)
    load = Load("closed", 5, 60, 10)
    result = run(system, load, mixed(20, 3), costs, replace(SMALL, rounds=1))
    assert result.concurrency == 5 and result.shares["idle"] == 0
    assert 60 <= result.requests < 65  # those that end in the last look count all


def test_an_open_load_below_capacity_is_served_as_it_comes():
    """Requests of about 7 s of work, one each 50 s: they are alone, and as many are answered as come."""
    costs = curve((1, 2, 4, 8), 3)
    result = run("plain", Load("open", 0.02, 400, 20), mixed(20, 3), costs)
    assert result.requests_per_second == pytest.approx(0.02, rel=0.12)
    assert result.shares["idle"] > 0.5 and result.time_to_first_token["p50"] == pytest.approx(0.5)


def test_an_open_load_above_capacity_queues():
    costs = curve((1,), 3)
    settings = replace(SMALL, slots=(1,))
    result = run("plain", Load("open", 50.0, 40), mixed(20, 3), costs, settings)
    assert result.requests_per_second < 1 and result.time_to_first_token["p90"] > 50


def test_the_same_seed_gives_the_same_and_another_another():
    found, costs = mixed(20, 3), curve((1, 2, 4, 8), 3, draft=0.1)
    one, same, other = (run("async", Load("open", 0.5, 30), found, costs, seed=seed) for seed in (1, 1, 2))
    assert one == same and one != other


# --- facts that hold for any curve ---


def test_with_a_free_draft_and_a_flat_curve_fixed_is_never_worse_than_plain():
    found, costs = mixed(30, 3), curve((1, 2, 4, 8), 3)
    for clients in (1, 2, 4, 8):
        plain, fixed = (run(s, Load("closed", clients, 60, 10), found, costs) for s in ("plain", "fixed"))
        assert fixed.tokens_per_second >= plain.tokens_per_second
        assert fixed.tokens_per_second_per_user >= plain.tokens_per_second_per_user


@pytest.mark.parametrize("system", ["causal", "async"])
def test_a_budget_shrinks_where_rows_cost_more(system):
    found = mixed(30, 3)
    budgets = [
        run(system, Load("closed", 8, 60, 10), found, curve((1, 2, 4, 8), 3, row=row)).budget
        for row in (0.0, 0.03, 0.06, 0.5)
    ]
    assert budgets == sorted(budgets, reverse=True) and budgets[0] > 3.5 and budgets[-1] < 1.3


def test_replicas_multiply_rates_and_nothing_else():
    found, costs = mixed(20, 3), curve((1, 2, 4, 8), 3)
    one, three = (run("fixed", Load("closed", 4, 40, 4), found, costs, replicas=n) for n in (1, 3))
    assert three.tokens_per_second == pytest.approx(3 * one.tokens_per_second) and three.load == 12
    assert three.tokens_per_second_per_user == one.tokens_per_second_per_user and three.budget == one.budget


# --- refusals ---


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("closed", 0, "load 0: must be a whole number of at least 1"),
        ("closed", 1.5, "load 1.5: must be a whole"),
        ("open", 0.0, "load 0: must be a positive number of requests"),
        ("open", float("inf"), "load inf"),
    ],
)
def test_loads_that_are_none_are_refused(kind, value, message):
    with pytest.raises(ValueError, match=message):
        Load(kind, value, 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": ()}, "slots"),
        ({"slots": (2, 1)}, "ascending"),
        ({"rounds": 0}, "rounds 0"),
        ({"prefill_chunk": 0}, "prefill_chunk 0"),
        ({"prefill_chunk": 500}, "prefill_chunk 500: must be a power of two"),
        ({"host_seconds": -1.0}, "host_seconds -1.0"),
        ({"mtp_draft_share": float("nan")}, "mtp_draft_share nan"),
        ({"threshold": 1.5}, "threshold 1.5"),
    ],
)
def test_engines_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        EngineSettings(**change)


def test_an_unknown_system_is_refused():
    with pytest.raises(ValueError, match="system 'eagle': must be one of plain, mtp1"):
        run("eagle", ONE, replay([[0]]), curve())


def test_slots_that_the_curve_lacks_are_refused_where_a_load_needs_them():
    found, costs = mixed(5, 3), curve((1, 2), 3)
    assert run("plain", Load("closed", 2, 5), found, costs).requests >= 5
    with pytest.raises(ValueError, match=r"slots 4: not in the curve, which has \(1, 2\)"):
        run("plain", Load("closed", 3, 5), found, costs)
    with pytest.raises(ValueError, match="slots 4: not in the curve"):
        run("plain", Load("open", 0.1, 5), found, costs)


def test_a_curve_of_another_block_size_is_refused():
    with pytest.raises(ValueError, match="1 slots were measured up to 4 rows; the records' blocks of 2 tokens need 3"):
        run("fixed", ONE, replay([[0]], block=2), curve(block=3))
