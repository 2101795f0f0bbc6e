"""Anchors: golden candidates and targets, uniform sampling, independence of padding, batch, packing and devices."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dspark_jax.training.anchors import (
    block_targets,
    document_positions,
    document_starts,
    sample_anchors,
    token_scores,
    valid_anchors,
)

GOLDEN = Path(__file__).parents[1] / "golden"
targets = jax.jit(block_targets, static_argnums=4)
targets_and_positions = jax.jit(lambda *args: ((got := block_targets(*args)), got.target_positions), static_argnums=4)
draw = jax.jit(sample_anchors, static_argnums=2)
scores_of = jax.jit(token_scores, static_argnums=3)
valid_of = jax.jit(valid_anchors)
places_of = jax.jit(lambda segments: (document_starts(segments), document_positions(segments)))
CASES = json.loads((GOLDEN / "anchors" / "cases.json").read_text())


def ids(count: int) -> np.ndarray:
    """Sample numbers of unpacked rows, [N, 1]."""
    return np.arange(count, dtype=np.uint32)[:, None]


def pack_rows(documents: list[list[np.ndarray]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks [N, T] and segments [N, T] of rows of documents, each a mask."""
    masks, segments = (np.zeros((len(documents), length), np.int32) for _ in range(2))
    for row, parts in enumerate(documents):
        end = 0
        for number, part in enumerate(parts, start=1):
            masks[row, end : end + len(part)] = part
            segments[row, end : end + len(part)] = number
            end += len(part)
    return masks, segments


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_golden_candidates_and_targets(case: dict) -> None:
    mask = np.asarray([case["loss_mask"]])
    count = len(case["anchors"])
    tokens = np.arange(100, 100 + case["seq_len"])[None]
    fill = ((0, 0), (0, 29 - count))  # one number of anchors: compiled less often
    anchors, keep = (np.pad([case[name]], fill) for name in ("anchors", "block_keep_mask"))
    got, positions = targets_and_positions(tokens, mask, anchors, keep.astype(bool), case["block_size"])
    got, positions = jax.tree.map(np.asarray, (got, positions))
    labels = np.asarray(case["safe_label_indices"])  # [A, K]
    assert np.flatnonzero(valid_of(mask)[0]).tolist() == case["valid_anchor_positions"]
    np.testing.assert_array_equal(got.label_positions[0][:count], labels)
    np.testing.assert_array_equal(got.labels[0][:count], labels + 100)
    np.testing.assert_array_equal(got.supervised[0][:count], np.asarray(case["eval_mask"], bool))
    np.testing.assert_array_equal(got.prev_ids[0][:count, 0], np.asarray(case["anchors"]) + 100)
    np.testing.assert_array_equal(positions[0][:count], np.maximum(labels - 1, 0))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_golden_sampling_length_order_padding(case: dict) -> None:
    mask = np.pad([case["loss_mask"]], ((0, 0), (0, 30 - case["seq_len"])))  # one length: compiled less often
    positions, keep = (np.asarray(x) for x in draw(ids(1), mask, case["sample_num_anchors"], 0, 0))
    assert positions.dtype == np.int32 and keep.dtype == np.bool_
    np.testing.assert_array_equal(keep[0], np.asarray(case["sampled_keep_mask"], bool))
    kept = positions[0][keep[0]].tolist()
    assert kept == sorted(set(kept)) and set(kept) <= set(case["valid_anchor_positions"])
    assert not positions[0][~keep[0]].any()
    if len(case["valid_anchor_positions"]) <= case["sample_num_anchors"]:
        np.testing.assert_array_equal(positions[0], case["sampled_anchor_positions"])


@pytest.mark.parametrize("name", ["train", "train_few", "train_zero", "train_allzero"])
def test_golden_training_batch(name: str) -> None:
    folder = GOLDEN / "drafters" / "dspark_qwen3_vanilla"
    tokens = np.load(folder / "train.npz")["input_ids"]
    want = np.load(folder / f"{name}.npz")
    got = targets(tokens, want["loss_mask"], want["anchor_positions"], want["block_keep_mask"], 7)
    np.testing.assert_array_equal(got.prev_ids, want["prev_token_ids"])
    np.testing.assert_array_equal(got.labels, want["target_ids"])
    np.testing.assert_array_equal(got.supervised, want["eval_mask"])
    assert all(field.dtype == jnp.int32 for field in got[:3]) and got.supervised.dtype == jnp.bool_


masks = st.lists(st.booleans(), min_size=16, max_size=16)


@settings(max_examples=60, deadline=None)
@given(st.lists(masks, min_size=2, max_size=2), st.integers(0, 2**31 - 1))
def test_sample_is_a_subset_of_the_valid(rows: list[list[bool]], seed: int) -> None:
    mask = np.asarray(rows)
    positions, keep = (np.asarray(x) for x in draw(ids(2), jnp.asarray(mask), 5, seed, 0))
    for row, (chosen, kept) in enumerate(zip(positions, keep, strict=True)):
        valid = [i for i in range(15) if mask[row, i] and mask[row, i + 1]]
        real = chosen[kept].tolist()
        assert len(real) == min(5, len(valid)) == kept[: len(real)].sum()
        assert real == sorted(set(real)) and set(real) <= set(valid)
        assert not chosen[len(real) :].any()


@settings(max_examples=60, deadline=None)
@given(masks, st.lists(st.integers(0, 15), min_size=4, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_targets_against_a_plain_loop(mask: list[bool], anchors: list[int], keep: list[bool]) -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, 16)
    got = targets(
        jnp.asarray(tokens)[None], jnp.asarray(mask)[None], jnp.asarray(anchors)[None], jnp.asarray(keep)[None], 5
    )
    for block, (anchor, kept) in enumerate(zip(anchors, keep, strict=True)):
        alive = kept
        for slot in range(5):
            label = anchor + 1 + slot
            alive = alive and label < 16 and bool(mask[label])
            assert bool(got.supervised[0, block, slot]) == alive
            if alive:
                assert got.labels[0, block, slot] == tokens[label]
                assert got.prev_ids[0, block, slot] == tokens[label - 1]
                assert got.label_positions[0, block, slot] == label


def test_sampling_is_uniform() -> None:
    count = 4000
    mask = jnp.zeros((count, 12), jnp.uint8).at[:, 2:10].set(1)  # 7 valid anchors, 3 drawn
    positions, keep = draw(ids(count), mask, 3, 0, 0)
    assert bool(keep.all())
    hits = np.bincount(np.asarray(positions).ravel(), minlength=12)[2:9]
    expected = count * 3 / 7
    assert hits.sum() == count * 3
    assert np.abs(hits - expected).max() < 4 * np.sqrt(count * (3 / 7) * (4 / 7))
    sets = np.unique(np.asarray(positions), axis=0, return_counts=True)[1]
    assert len(sets) == 35 and ((sets - count / 35) ** 2 / (count / 35)).sum() < 66  # chi-square, 34 degrees, p = 1e-3


def test_anchors_do_not_depend_on_padding_or_batch() -> None:
    mask = np.random.default_rng(1).random((6, 40)) < 0.8
    names = np.asarray([5, 900, 17, 3, 2**32 - 1, 0], np.uint32)[:, None]
    positions, keep = draw(names, mask, 8, 7, 2)
    padded, padded_keep = draw(names, np.pad(mask, ((0, 0), (0, 24))), 8, 7, 2)
    np.testing.assert_array_equal(positions, padded)
    np.testing.assert_array_equal(keep, padded_keep)
    for row in range(6):
        alone, _ = draw(names[row : row + 1], mask[row : row + 1], 8, 7, 2)
        np.testing.assert_array_equal(alone[0], np.asarray(positions)[row])


def test_scores_depend_on_seed_epoch_sample_and_position() -> None:
    cases = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0, 2**32 - 1)]
    scores = [np.asarray(scores_of(np.asarray([[name]], np.uint32), seed, epoch, 6))[0] for seed, epoch, name in cases]
    assert len({int(score) for row in scores for score in row}) == 6 * len(cases)
    np.testing.assert_array_equal(token_scores(jnp.asarray([[1]], jnp.uint32), 0, 1, 6)[0], scores[4])


rows_of_documents = st.lists(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=7), max_size=4).filter(lambda row: sum(map(len, row)) <= 20),
    min_size=3,
    max_size=3,
)


@settings(max_examples=50)
@given(rows_of_documents)
def test_positions_and_starts_against_a_plain_loop(documents: list) -> None:
    _, segments = pack_rows(documents, 20)
    starts, positions = (np.asarray(x) for x in places_of(segments))
    assert starts.dtype == positions.dtype == np.int32
    for row, parts in enumerate(documents):
        want = [i for part in parts for i in range(len(part))]
        want += list(range(20 - len(want)))  # padding counts on its own
        assert positions[row].tolist() == want
        assert starts[row].tolist() == [i - position for i, position in enumerate(want)]


@settings(max_examples=25)
@given(rows_of_documents, st.integers(0, 2**31 - 1))
def test_a_document_has_the_same_scores_and_anchors_alone_and_packed(documents: list, seed: int) -> None:
    masks, segments = pack_rows(documents, 20)
    names = np.zeros((3, 4), np.uint32)
    every = [(row, place, part) for row, parts in enumerate(documents) for place, part in enumerate(parts)]
    for number, (row, place, _) in enumerate(every):
        names[row, place] = 90 + number
    lonely = 90 + np.arange(12, dtype=np.uint32)[:, None]
    alone, _ = pack_rows([[part] for _, _, part in every] + [[]] * (12 - len(every)), 20)
    want, want_keep = (np.asarray(x) for x in draw(lonely, alone, 20, seed, 3))
    want_scores = np.asarray(scores_of(lonely, seed, 3, 20))
    got, keep = (np.asarray(x) for x in draw(names, masks, 20, seed, 3, segments))
    scores = np.asarray(scores_of(names, seed, 3, 20, segments))
    expected: list[list[int]] = [[], [], []]
    for number, (row, place, part) in enumerate(every):
        start = sum(map(len, documents[row][:place]))
        np.testing.assert_array_equal(scores[row, start : start + len(part)], want_scores[number, : len(part)])
        expected[row] += (start + want[number][want_keep[number]]).tolist()
    assert [got[row][keep[row]].tolist() for row in range(3)] == expected


def test_fewer_anchors_than_valid_ones_go_to_the_best_scores_of_a_row() -> None:
    rng = np.random.default_rng(3)
    masks, segments = pack_rows([[rng.random(n) < 0.8 for n in (7, 9, 3)], [rng.random(19) < 0.8], []], 20)
    names = np.asarray([[4, 5, 6, 0], [7, 0, 0, 0], [0] * 4], np.uint32)
    got, keep = (np.asarray(x) for x in draw(names, masks, 6, 1, 0, segments))
    scores = np.asarray(scores_of(names, 1, 0, 20, segments)) | np.uint32(2**31)
    valid = np.asarray(valid_of(masks, segments))
    for row in range(2):
        candidates = np.flatnonzero(valid[row])
        best = candidates[np.argsort(-scores[row, candidates].astype(np.int64))[:6]]
        assert len(candidates) > 6 and keep[row].all() and got[row].tolist() == sorted(best)


@settings(max_examples=50)
@given(rows_of_documents)
def test_anchors_and_targets_end_with_the_document(documents: list) -> None:
    masks, segments = pack_rows(documents, 20)
    tokens = np.random.default_rng(0).integers(0, 1000, (3, 20))
    anchors, keep = np.tile(np.arange(20), (3, 1)), np.ones((3, 20), bool)
    valid = np.asarray(valid_of(masks, segments))
    supervised = np.asarray(targets(tokens, masks, anchors, keep, 4, segments).supervised)
    for row, parts in enumerate(documents):
        flat = [(document, on) for document, part in enumerate(parts) for on in part] + [(-1, False)] * 24
        for anchor in range(20):
            alive = [flat[label] == (flat[anchor][0], True) for label in range(anchor + 1, anchor + 5)]
            assert supervised[row, anchor].tolist() == [all(alive[: slot + 1]) for slot in range(4)]
            assert valid[row, anchor] == (flat[anchor][1] and alive[0])


def test_rows_without_valid_anchors() -> None:
    parts = [[], [np.asarray([0, 0, 0]), np.asarray([1, 0, 1])], [np.asarray([1]), np.ones(1)]]
    masks, segments = pack_rows(parts, 20)
    anchors, keep = draw(np.zeros((3, 4), np.uint32), masks, 20, 0, 0, segments)
    assert not np.asarray(keep).any() and not np.asarray(anchors).any()
    got = targets(np.ones((3, 20), np.int64), masks, anchors, keep, 4, segments)
    assert not np.asarray(got.supervised).any() and not np.asarray(got.label_positions).any()


def test_rows_stay_on_their_devices() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    rng = np.random.default_rng(0)
    masks, segments = pack_rows([[rng.random(n) < 0.8 for n in (9, 5, 7)] for _ in range(16)], 24)
    names = rng.integers(0, 2**32, (16, 4), np.uint32)
    tokens = rng.integers(0, 99, (16, 24), np.int32)

    def both(tokens: jax.Array, names: jax.Array, masks: jax.Array, segments: jax.Array) -> tuple:
        anchors, keep = sample_anchors(names, masks, 8, 0, 1, segments)
        return anchors, keep, block_targets(tokens, masks, anchors, keep, 4, segments)

    arguments = [jax.device_put(x, place) for x in (tokens, names, masks, segments)]
    compiled = jax.jit(both, out_shardings=place).lower(*arguments).compile()
    assert not re.findall("all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    jax.tree.map(np.testing.assert_array_equal, compiled(*arguments), jax.jit(both)(tokens, names, masks, segments))


def test_more_anchors_than_positions() -> None:
    positions, keep = draw(ids(2), jnp.ones((2, 4), bool), 9, 0, 0)
    np.testing.assert_array_equal(positions, [[0, 1, 2] + [0] * 6] * 2)
    np.testing.assert_array_equal(keep.sum(1), [3, 3])
    positions, keep = draw(ids(1), jnp.ones((1, 1), bool), 2, 0, 0)
    assert not keep.any() and not positions.any()


def test_wrong_arguments_are_named() -> None:
    mask = jnp.ones((2, 4), bool)
    with pytest.raises(ValueError, match="num_anchors 0"):
        sample_anchors(ids(2), mask, 0, 0, 0)
    with pytest.raises(ValueError, match=r"sample_ids uint32\[3, 1\] with loss_mask \[2, 4\]"):
        sample_anchors(ids(3), mask, 2, 0, 0)
    with pytest.raises(ValueError, match=r"sample_ids uint32\[2\]: must be integers of shape \[N, S\]"):
        sample_anchors(ids(2)[:, 0], mask, 2, 0, 0)
    with pytest.raises(ValueError, match="sample_ids float32"):
        sample_anchors(jnp.ones((2, 1)), mask, 2, 0, 0)
    with pytest.raises(ValueError, match="without segments"):
        sample_anchors(jnp.zeros((2, 3), jnp.uint32), mask, 2, 0, 0)
    with pytest.raises(ValueError, match=r"segments \[2, 3\]"):
        sample_anchors(ids(2), mask, 2, 0, 0, jnp.ones((2, 3), int))
    with pytest.raises(ValueError, match="block_size 0"):
        block_targets(jnp.ones((2, 4), int), mask, jnp.zeros((2, 1), int), jnp.ones((2, 1), bool), 0)
