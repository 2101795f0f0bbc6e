"""Drafter configs at the door: what does not fit together is refused, with field, value and what would be right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspark_jax.drafters.config import HEAD_KINDS, DrafterConfig, check_target_layer_ids
from dspark_jax.models.config import RopeConfig, TransformerConfig

TARGET = TransformerConfig(
    family="qwen3",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    qk_norm=True,
    tie_embeddings=False,
    max_positions=512,
    num_tokens=300,
)
DRAFTER = DrafterConfig(
    block_size=7,
    num_layers=2,
    target_layer_ids=(1, 3, 4),
    mask_token_id=299,
    vocab_size=320,
    draft_vocab_size=320,
    markov_rank=16,
    markov_kind="vanilla",
    confidence=True,
    confidence_with_markov=True,
    shares_embeddings=False,
    num_target_layers=6,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    qk_norm=True,
    max_positions=512,
    family="qwen3",
)


def refused(message: str, **changes) -> None:
    """Asserts that the drafter with `changes` is refused with `message` (a pattern)."""
    with pytest.raises(ValueError, match=message):
        replace(DRAFTER, **changes)


def test_temperatures_of_the_confidence_head():
    assert DRAFTER.confidence_temperatures == ()
    assert replace(DRAFTER, confidence_temperatures=(0.5,) * 7).confidence_temperatures == (0.5,) * 7
    refused(
        r"confidence_temperatures \[1.0, 2.0\]: must be one for each of block_size 7",
        confidence_temperatures=(1.0, 2.0),
    )
    for bad in (0.0, -1.0, float("nan"), float("inf"), 1e-40):
        refused("must be positive, finite numbers", confidence_temperatures=(1.0,) * 6 + (bad,))
    refused(
        "there is no confidence head",
        confidence=False,
        confidence_with_markov=False,
        confidence_temperatures=(1.0,) * 7,
    )


def test_biases_of_the_confidence_head():
    assert DRAFTER.confidence_biases == ()
    biases = (0.0, -0.5, 3.0, -3.0, 0.1, 0.2, 0.3)
    assert replace(DRAFTER, confidence_biases=biases).confidence_biases == biases  # temperatures need not be there
    refused(r"confidence_biases \[0.5\]: must be one for each of block_size 7", confidence_biases=(0.5,))
    for bad in (float("nan"), float("-inf"), 1e31):
        refused("confidence_biases .*must be finite numbers", confidence_biases=(0.0,) * 6 + (bad,))
    refused(
        r"confidence_biases .*there is no confidence head",
        confidence=False,
        confidence_with_markov=False,
        confidence_biases=(0.0,) * 7,
    )


@pytest.mark.parametrize("ids", [(0,), (-1,), (-1, 0), (-1, 2, 4), (0, 1, 2, 3, 4), (4,)])
def test_layer_ids_that_exist(ids):
    assert replace(DRAFTER, target_layer_ids=ids).target_layer_ids == ids
    check_target_layer_ids(list(ids), 6)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((), "missing or empty"),
        ((3, 1), r"\[3, 1\]: must be strictly increasing"),
        ((1, 1, 4), r"\[1, 1, 4\]: must be strictly increasing"),
        ((0, -1), r"\[0, -1\]: must be strictly increasing"),
        ((1, 4, 40), r"layer 40 does not exist, the target has 6 layers \(0..5"),
        ((6,), r"layer 6 does not exist, the target has 6 layers"),
        ((-2, 1), r"layer -2 does not exist"),
        ((5,), r"layer 5 is the last one.*use at most 4"),
        ((1, 3, 5), r"layer 5 is the last one"),
    ],
    ids=str,
)
def test_layer_ids_that_are_wrong(ids, message):
    refused("target_layer_ids.*" + message, target_layer_ids=ids)
    with pytest.raises(ValueError, match=message):
        check_target_layer_ids(ids, 6)


def test_a_layer_count_that_is_off_by_one():
    refused("layer 4 is the last one", num_target_layers=5)
    refused("layer 4 does not exist, the target has 4 layers", num_target_layers=4)
    other = replace(DRAFTER, num_target_layers=7)  # possible by itself, but not with this target
    with pytest.raises(ValueError, match="num_target_layers is 7 in the drafter, 6 in the target"):
        other.check_target(TARGET)


@pytest.mark.parametrize("token", [320, 321, 151669, -1])
def test_mask_tokens_outside_the_vocabulary(token):
    refused(rf"mask_token_id {token}: outside the vocabulary, must lie in 0..319", mask_token_id=token)


@pytest.mark.parametrize("token", [0, 299, 300, 319])
def test_mask_tokens_inside_the_vocabulary_or_its_padding(token):
    config = replace(DRAFTER, mask_token_id=token)  # 300..319 are padding rows of the target
    config.check_target(TARGET)
    assert config.mask_token_id == token


@pytest.mark.parametrize("kind", [kind for kind in HEAD_KINDS if kind != "none"])
def test_markov_kind_and_rank_go_together(kind):
    assert replace(DRAFTER, markov_kind=kind).markov_kind == kind
    off = {"confidence": False, "confidence_with_markov": False}
    refused(f"markov_rank 0 with markov_head_type '{kind}'", markov_rank=0, markov_kind=kind, **off)
    refused("markov_rank -4 with markov_head_type", markov_rank=-4, markov_kind=kind, **off)
    refused("markov_rank 16 with markov_head_type 'none'", markov_kind="none", **off)


@pytest.mark.parametrize("kind", ["lstm", "Vanilla", "", "markov"])
def test_unknown_markov_kinds(kind):
    refused(f"markov_head_type '{kind}': must be one of .*vanilla", markov_kind=kind)


def test_a_confidence_head_without_the_features_it_reads():
    none = {"markov_rank": 0, "markov_kind": "none"}
    refused("confidence_head_with_markov true with markov_rank 0", **none)
    replace(DRAFTER, **none, confidence_with_markov=False)
    replace(DRAFTER, **none, confidence=False)  # nothing reads them


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size 0"),
        ({"block_size": -7}, "block_size -7"),
        ({"num_layers": 0}, "num_hidden_layers 0"),
        ({"num_kv_heads": 3}, "num_heads 4: must be a multiple of num_kv_heads 3"),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads 6: must be a multiple of num_kv_heads 4"),
        ({"draft_vocab_size": 0}, r"draft_vocab_size 0: must lie in 1..vocab_size \(320\)"),
        ({"draft_vocab_size": 321}, r"draft_vocab_size 321: must lie in 1..vocab_size \(320\)"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(changes, message):
    refused(message, **changes)


def test_a_vocabulary_is_trimmed_when_it_is_smaller_than_the_targets():
    assert not DRAFTER.trims_vocabulary
    assert replace(DRAFTER, draft_vocab_size=319).trims_vocabulary
    assert replace(DRAFTER, draft_vocab_size=1).trims_vocabulary


def test_a_target_that_it_was_made_for():
    DRAFTER.check_target(TARGET)
    # What the two need not share.
    DRAFTER.check_target(replace(TARGET, num_heads=8, head_dim=32, intermediate_size=7, tie_embeddings=True))


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        ("hidden_size", "hidden_size", 48),
        ("hidden_size", "hidden_size", 128),
        ("vocab_size", "vocab_size", 300),
        ("vocab_size", "vocab_size", 321),
        ("num_layers", "num_target_layers", 5),
        ("num_layers", "num_target_layers", 36),
    ],
)
def test_a_target_that_it_was_not_made_for(field, name, value):
    mine = getattr(DRAFTER, name)
    with pytest.raises(ValueError, match=f"belong together: {name} is {mine} in the drafter, {value} in the target"):
        DRAFTER.check_target(replace(TARGET, **{field: value}))
