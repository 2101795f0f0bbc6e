"""Every kind of drafter through the same step: lossless, equal to plain decoding when greedy, compiled once."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.batching import run_admit, run_many
from dspark_jax.decoding.generate import Generator
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.drafters.ngram import NgramConfig, last_match, propose
from tests.decoding.test_generate import GREEDY, PROMPTS, TARGET, run, sampled, tokens_of
from tests.decoding.test_lossless import WORST, conditionals, joint, p_value, simulate
from tests.decoding.tiny import BLOCK, VOCAB, other_drafter

KINDS = ("eagle3", "mtp", "ngram")


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return conditionals()


@pytest.mark.parametrize("kind", KINDS)
def test_committed_tokens_have_the_targets_distribution(logits: np.ndarray, kind: str) -> None:
    tokens, counters = simulate(other_drafter(kind), buckets=(1, 2, 4) if kind == "ngram" else None)
    share = counters.accepted.sum() / counters.verified.sum()
    assert 0.02 < share < 0.9  # both acceptance and rejection happen a lot
    assert p_value(tokens, joint(logits)) > WORST


def test_a_reduced_draft_vocabulary_is_lossless(logits: np.ndarray) -> None:
    tokens, counters = simulate(other_drafter("eagle3", draft_vocab=7))
    assert counters.accepted.sum() > 0
    assert p_value(tokens, joint(logits)) > WORST


@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_filters_and_greedy_requests_in_one_batch(logits: np.ndarray, kind: str) -> None:
    settings = ((1.0, 1.0, 0, 0.0), (0.8, 0.9, 6, 0.05), (0.0, 1.0, 0, 0.0))
    tokens, _ = simulate(other_drafter(kind), mode="filtered", settings=settings)
    for i, setting in enumerate(settings[:-1]):
        assert p_value(tokens[i::3], joint(logits, *setting)) > WORST, setting
    expected = np.unravel_index(joint(logits, 0.01).argmax(), (VOCAB,) * 3)
    np.testing.assert_array_equal(tokens[2::3], np.tile(expected, (len(tokens[2::3]), 1)))


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    alone = Generator(TARGET, None, stop_ids=())
    return {r.id: tokens_of(alone, [r])[r.id] for r in GREEDY}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain_decoding_and_nothing_compiles_twice(plain: dict[str, list[int]], kind: str) -> None:
    """Requests of mixed lengths through two slots, twice; sampled ones depend on their seed alone."""
    generator = Generator(TARGET, other_drafter(kind), batch_size=2, stop_ids=())
    done = run(generator, GREEDY)
    assert {key: one.token_ids for key, one in done.items()} == plain
    assert all(one.drafted % BLOCK == 0 and one.verified <= one.drafted for one in done.values())
    before = run_many._cache_size(), run_admit._cache_size()
    again = tokens_of(generator, GREEDY[::-1])
    assert again == plain
    assert (run_many._cache_size(), run_admit._cache_size()) == before


def test_seeds_decide_whatever_the_batch() -> None:
    drafter = other_drafter("eagle3")
    requests = sampled(3)
    alone = {}
    for request in requests:
        alone |= tokens_of(Generator(TARGET, drafter, stop_ids=()), [request])
    assert tokens_of(Generator(TARGET, drafter, batch_size=2, stop_ids=()), requests) == alone


def test_threshold_needs_a_confidence_head() -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match="no confidence head"):
            Generator(TARGET, other_drafter(kind), schedule="threshold", stop_ids=())


def reference_lookup(history: list[int], config: NgramConfig) -> list[int]:
    """The drafts, by a plain loop over lengths and positions."""
    for size in range(config.longest, config.shortest - 1, -1):
        for at in range(len(history) - 2, size - 2, -1):
            if history[at - size + 1 : at + 1] == history[-size:]:
                follow = history[at + 1 :]
                return [follow[k % len(follow)] for k in range(config.block_size)]
    return []


@pytest.mark.parametrize("limits", [(3, 2), (2, 1), (4, 4)])
def test_lookup_equals_a_plain_loop(limits: tuple[int, int]) -> None:
    """Random histories over few tokens, with rubbish behind the present."""
    config = NgramConfig(5, *limits)
    rng = np.random.default_rng(3)
    history = rng.integers(0, 3, (64, 20)).astype(np.int32)
    start = rng.integers(0, 20, 64).astype(np.int32)
    proposal = propose({}, config, jnp.asarray(history), jnp.zeros(64), jnp.asarray(start), lambda *args: args)
    found = 0
    for i in range(64):
        wanted = reference_lookup(history[i, : start[i] + 1].tolist(), config)
        assert bool(proposal.confidence[i, 0]) == bool(wanted)
        if wanted:
            assert proposal.tokens[i].tolist() == wanted
            found += 1
    assert 2 < found < 64


def test_no_match_at_the_first_token() -> None:
    at, found = last_match(jnp.zeros((1, 4), jnp.int32), jnp.asarray([0]), 3, 1)
    assert not found[0] and at[0] == 0


def test_lookup_pays_on_repetitive_text() -> None:
    """A greedy target runs into a loop; lookup then drafts it, and rounds without a match cost one row."""
    generator = Generator(TARGET, other_drafter("ngram"), stop_ids=())
    request = [type(GREEDY[0])("0", PROMPTS[2], SamplingParams(max_tokens=48))]
    (done,) = run(generator, request).values()
    assert done.token_ids == tokens_of(Generator(TARGET, None, stop_ids=()), request)["0"]
    assert done.accepted_length > 1.2


@pytest.mark.parametrize(
    ("args", "message"),
    [((0,), "block_size 0"), ((7, 2, 3), "shortest match 3, longest 2"), ((7, 2, 0), "shortest match 0")],
)
def test_ngram_settings_that_cannot_be(args: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramConfig(*args)
