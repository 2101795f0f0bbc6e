"""Anchors: golden candidates and targets, uniform sampling, independence of padding, batch and order."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.training.anchors import block_targets, sample_anchors, sample_keys, valid_anchors

GOLDEN = Path(__file__).parents[1] / "golden"
make_keys = jax.jit(sample_keys)
targets = jax.jit(block_targets, static_argnums=4)
draw = jax.jit(sample_anchors, static_argnums=2)
CASES = json.loads((GOLDEN / "anchors" / "cases.json").read_text())


def keys(count: int, seed: int = 0) -> jax.Array:
    return make_keys(seed, 0, jnp.arange(count))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_golden_candidates_and_targets(case: dict) -> None:
    mask = jnp.asarray([case["loss_mask"]])
    assert np.flatnonzero(valid_anchors(mask)[0]).tolist() == case["valid_anchor_positions"]
    ids = jnp.arange(100, 100 + case["seq_len"])[None]
    anchors, keep = jnp.asarray([case["anchors"]]), jnp.asarray([case["block_keep_mask"]])
    got = targets(ids, mask, anchors, keep, case["block_size"])
    np.testing.assert_array_equal(got.label_positions[0], case["safe_label_indices"])
    np.testing.assert_array_equal(got.labels[0], np.asarray(case["safe_label_indices"]) + 100)
    np.testing.assert_array_equal(got.supervised[0], np.asarray(case["eval_mask"], bool))
    np.testing.assert_array_equal(got.prev_ids[0, :, 0], np.asarray(case["anchors"]) + 100)
    np.testing.assert_array_equal(got.target_positions[0], np.maximum(np.asarray(case["safe_label_indices"]) - 1, 0))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_golden_sampling_length_order_padding(case: dict) -> None:
    mask = jnp.asarray([case["loss_mask"]])
    positions, keep = draw(keys(1), mask, case["sample_num_anchors"])
    assert positions.dtype == jnp.int32 and keep.dtype == jnp.bool_
    np.testing.assert_array_equal(keep[0], np.asarray(case["sampled_keep_mask"], bool))
    kept = positions[0][keep[0]].tolist()
    assert kept == sorted(set(kept)) and set(kept) <= set(case["valid_anchor_positions"])
    assert not positions[0][~keep[0]].any()
    if len(case["valid_anchor_positions"]) <= case["sample_num_anchors"]:
        np.testing.assert_array_equal(positions[0], case["sampled_anchor_positions"])


@pytest.mark.parametrize("name", ["train", "train_few", "train_zero", "train_allzero"])
def test_golden_training_batch(name: str) -> None:
    folder = GOLDEN / "drafters" / "dspark_qwen3_vanilla"
    ids = np.load(folder / "train.npz")["input_ids"]
    want = np.load(folder / f"{name}.npz")
    got = targets(ids, want["loss_mask"], want["anchor_positions"], want["block_keep_mask"], 7)
    np.testing.assert_array_equal(got.prev_ids, want["prev_token_ids"])
    np.testing.assert_array_equal(got.labels, want["target_ids"])
    np.testing.assert_array_equal(got.supervised, want["eval_mask"])
    assert all(field.dtype == jnp.int32 for field in got[:3]) and got.supervised.dtype == jnp.bool_


masks = st.lists(st.booleans(), min_size=16, max_size=16)


@settings(max_examples=60, deadline=None)
@given(st.lists(masks, min_size=2, max_size=2), st.integers(0, 2**31 - 1))
def test_sample_is_a_subset_of_the_valid(rows: list[list[bool]], seed: int) -> None:
    mask = np.asarray(rows)
    positions, keep = (np.asarray(x) for x in draw(keys(2, seed), jnp.asarray(mask), 5))
    for row, (chosen, kept) in enumerate(zip(positions, keep, strict=True)):
        valid = [i for i in range(15) if mask[row, i] and mask[row, i + 1]]
        real = chosen[kept].tolist()
        assert len(real) == min(5, len(valid)) == kept[: len(real)].sum()
        assert real == sorted(set(real)) and set(real) <= set(valid)
        assert not chosen[len(real) :].any()


@settings(max_examples=60, deadline=None)
@given(masks, st.lists(st.integers(0, 15), min_size=4, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_targets_against_a_plain_loop(mask: list[bool], anchors: list[int], keep: list[bool]) -> None:
    ids = np.random.default_rng(0).integers(0, 1000, 16)
    got = targets(
        jnp.asarray(ids)[None], jnp.asarray(mask)[None], jnp.asarray(anchors)[None], jnp.asarray(keep)[None], 5
    )
    for block, (anchor, kept) in enumerate(zip(anchors, keep, strict=True)):
        alive = kept
        for slot in range(5):
            label = anchor + 1 + slot
            alive = alive and label < 16 and bool(mask[label])
            assert bool(got.supervised[0, block, slot]) == alive
            if alive:
                assert got.labels[0, block, slot] == ids[label]
                assert got.prev_ids[0, block, slot] == ids[label - 1]
                assert got.label_positions[0, block, slot] == label


def test_sampling_is_uniform() -> None:
    count = 4000
    mask = jnp.zeros((count, 12), jnp.uint8).at[:, 2:10].set(1)  # 7 valid anchors, 3 drawn
    positions, keep = draw(keys(count), mask, 3)
    assert bool(keep.all())
    hits = np.bincount(np.asarray(positions).ravel(), minlength=12)[2:9]
    expected = count * 3 / 7
    assert hits.sum() == count * 3
    assert np.abs(hits - expected).max() < 4 * np.sqrt(count * (3 / 7) * (4 / 7))
    sets = np.unique(np.asarray(positions), axis=0, return_counts=True)[1]
    assert len(sets) == 35 and ((sets - count / 35) ** 2 / (count / 35)).sum() < 66  # chi-square, 34 degrees, p = 1e-3


def test_anchors_do_not_depend_on_padding_or_batch() -> None:
    mask = jnp.asarray(np.random.default_rng(1).random((6, 40)) < 0.8)
    names = jnp.asarray([5, 900, 17, 3, 2**32 - 1, 0], jnp.uint32)
    positions, keep = draw(make_keys(7, 2, names), mask, 8)
    padded, padded_keep = draw(make_keys(7, 2, names), jnp.pad(mask, ((0, 0), (0, 24))), 8)
    np.testing.assert_array_equal(positions, padded)
    np.testing.assert_array_equal(keep, padded_keep)
    for row in range(6):
        alone, _ = draw(make_keys(7, 2, names[row : row + 1]), mask[row : row + 1], 8)
        np.testing.assert_array_equal(alone[0], positions[row])


def test_keys_depend_on_seed_epoch_and_sample() -> None:
    data = [
        tuple(np.asarray(jax.random.key_data(sample_keys(seed, epoch, jnp.asarray([sample]))))[0].tolist())
        for seed, epoch, sample in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)]
    ]
    assert len(set(data)) == len(data)
    traced = jax.jit(sample_keys)(0, 1, jnp.asarray([1]))
    assert tuple(np.asarray(jax.random.key_data(traced))[0].tolist()) == data[4]


def test_more_anchors_than_positions() -> None:
    positions, keep = draw(keys(2), jnp.ones((2, 4), bool), 9)
    np.testing.assert_array_equal(positions, [[0, 1, 2] + [0] * 6] * 2)
    np.testing.assert_array_equal(keep.sum(1), [3, 3])
    positions, keep = draw(keys(1), jnp.ones((1, 1), bool), 2)
    assert not keep.any() and not positions.any()


def test_wrong_arguments_are_named() -> None:
    mask = jnp.ones((2, 4), bool)
    with pytest.raises(ValueError, match="num_anchors 0"):
        sample_anchors(keys(2), mask, 0)
    with pytest.raises(ValueError, match=r"key \[3\].*\[2, 4\]"):
        sample_anchors(keys(3), mask, 2)
    with pytest.raises(ValueError, match="block_size 0"):
        block_targets(jnp.ones((2, 4), int), mask, jnp.zeros((2, 1), int), jnp.ones((2, 1), bool), 0)
    with pytest.raises(ValueError, match="sample_ids float32"):
        sample_keys(0, 0, jnp.ones(3))
