"""Packed rows, requests at different positions, rejected rows and slots that are used again: all equal plain runs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.config import auto_dtype
from dspark_jax.models.attention import (
    Packing,
    cached_attention,
    causal_attention,
    dense_packing,
    pack,
    softmax_attention,
    unpack,
)
from dspark_jax.models.cache import LayerCache, init_cache, insert
from dspark_jax.models.config import AttentionConfig, RopeConfig, TransformerConfig
from dspark_jax.models.transformer import extend, forward, init_params, init_target_cache

REQUESTS, SLOTS, ROWS, CAPACITY, VOCAB, WINDOW = 3, 4, 9, 24, 50, 6
CONFIG = TransformerConfig(
    family="qwen3",
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    qk_norm=True,
    tie_embeddings=True,
    max_positions=CAPACITY,
    num_tokens=VOCAB,
    sliding=AttentionConfig(num_kv_heads=2, head_dim=8, rope=RopeConfig(), window=WINDOW),
    pattern=(False, True),
)
PARAMS = jax.jit(init_params, static_argnames=("config",))(CONFIG, jax.random.key(0))
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (REQUESTS, CAPACITY)).astype(np.int32)
run_forward = jax.jit(forward, static_argnames=("config",))
run_extend = jax.jit(extend, static_argnames=("config", "capture"))


def step(cache, ids, start, packing: Packing):
    """One packed step: final states `[D, B]` and the new cache."""
    hidden, cache = run_extend(
        PARAMS, CONFIG, cache, jnp.asarray(ids, jnp.int32), jnp.asarray(start, jnp.int32), packing, capture=(-1, 0)
    )
    assert hidden.features.shape == (2 * CONFIG.hidden_size, len(ids))
    return np.asarray(hidden.final), cache


def dense_step(cache, ids: np.ndarray, start):
    """A step in which every request has all its slots `ids [R, S]`: final states `[R, S, D]` and the new cache."""
    final, cache = step(cache, ids.reshape(-1), start, dense_packing(*ids.shape))
    return final.T.reshape(*ids.shape, -1), cache


def ragged_packing(lengths: list[int], slots: int, rows: int) -> Packing:
    """Request after request without gaps, filled up to `rows` with copies of (0, 0)."""
    places = [(request, slot) for request, length in enumerate(lengths) for slot in range(length)]
    row = np.zeros((len(lengths), slots), np.int32)
    for i, place in enumerate(places):
        row[place] = i
    places += [(0, 0)] * (rows - len(places))
    request, offset = np.array(places, np.int32).T
    return Packing(jnp.asarray(request), jnp.asarray(offset), jnp.asarray(row))


def chunk(start, slots: int) -> np.ndarray:
    """The next `slots` tokens of each request, `[R, S]`."""
    return np.stack([tokens[at : at + slots] for tokens, at in zip(TOKENS, start, strict=True)])


@pytest.fixture(scope="module")
def whole() -> np.ndarray:
    """Final states of the whole sequences, `[R, T, D]`."""
    return np.asarray(run_forward(PARAMS, CONFIG, jnp.asarray(TOKENS)).final).T.reshape(REQUESTS, CAPACITY, -1)


@pytest.fixture(scope="module")
def prefilled() -> tuple[LayerCache, ...]:
    """A cache with all tokens but the last four of every request: a step may start anywhere before its end."""
    cache = init_target_cache(CONFIG, REQUESTS, CAPACITY, jnp.float32)
    return dense_step(cache, TOKENS[:, : CAPACITY - SLOTS], [0] * REQUESTS)[1]


@settings(max_examples=30)
@given(
    start=st.lists(st.integers(1, CAPACITY - SLOTS), min_size=REQUESTS, max_size=REQUESTS),
    lengths=st.lists(st.integers(0, SLOTS), min_size=REQUESTS, max_size=REQUESTS).filter(lambda n: 0 < sum(n) <= ROWS),
)
def test_packed_rows_equal_dense_ones_at_any_positions(prefilled, whole, start, lengths):
    ids = chunk(start, SLOTS)
    dense, _ = dense_step(prefilled, ids, start)
    packing = ragged_packing(lengths, SLOTS, ROWS)
    packed, cache = step(prefilled, ids[packing.request, packing.offset], start, packing)
    row = 0
    for request, length in enumerate(lengths):
        for slot in range(length):
            np.testing.assert_allclose(packed[:, row], dense[request, slot], atol=1e-5)
            np.testing.assert_allclose(packed[:, row], whole[request, start[request] + slot], atol=5e-5)
            row += 1
    # The next step goes on from each request's new length, over what the shorter requests left in their slots.
    after = [min(at + length, CAPACITY - SLOTS) for at, length in zip(start, lengths, strict=True)]
    following, _ = dense_step(cache, chunk(after, SLOTS), after)
    for request, at in enumerate(after):
        np.testing.assert_allclose(following[request], whole[request, at : at + SLOTS], atol=5e-5)


@settings(max_examples=20)
@given(
    start=st.lists(st.integers(1, CAPACITY - 2 * SLOTS), min_size=REQUESTS, max_size=REQUESTS),
    kept=st.lists(st.integers(0, SLOTS - 1), min_size=REQUESTS, max_size=REQUESTS),
    seed=st.integers(0, 99),
)
def test_rejected_rows_leave_no_trace(prefilled, start, kept, seed):
    right = chunk(start, SLOTS)
    wrong = np.random.default_rng(seed).integers(0, VOCAB, right.shape).astype(np.int32)
    draft = np.where(np.arange(SLOTS) < np.array(kept)[:, None], right, wrong)
    after = [at + count for at, count in zip(start, kept, strict=True)]
    _, clean = dense_step(prefilled, right, start)
    _, dirty = dense_step(prefilled, draft, start)
    want, want_cache = dense_step(clean, chunk(after, SLOTS), after)
    ours, our_cache = dense_step(dirty, chunk(after, SLOTS), after)
    np.testing.assert_array_equal(ours, want)
    for request, at in enumerate(after):
        for ours_leaf, want_leaf in zip(jax.tree.leaves(our_cache), jax.tree.leaves(want_cache), strict=True):
            np.testing.assert_array_equal(ours_leaf[request, :, : at + SLOTS], want_leaf[request, :, : at + SLOTS])


def test_garbage_beyond_the_length_is_never_read(prefilled):
    start = [5, 1, 12]
    beyond = np.arange(CAPACITY) >= np.array(start)[:, None]  # [R, T]
    rows = np.repeat(beyond, CONFIG.num_kv_heads, axis=0)  # [R * G, T]
    garbage = jax.tree.map(lambda a: jnp.where(rows[..., None], 1e6, a), prefilled)
    clean, dirty = (dense_step(cache, chunk(start, SLOTS), start)[0] for cache in (prefilled, garbage))
    np.testing.assert_array_equal(dirty, clean)


def test_requests_do_not_see_each_other(prefilled):
    start = [9, 4, 15]
    ids = chunk(start, SLOTS)
    other = ids.copy()
    other[1] = (other[1] + 7) % VOCAB
    first, first_cache = dense_step(prefilled, ids, start)
    second, second_cache = dense_step(prefilled, other, start)
    np.testing.assert_array_equal(first[[0, 2]], second[[0, 2]])
    assert np.abs(first[1] - second[1]).max() > 0.1
    keys = [cache[1].keys.reshape(3, -1, *cache[1].keys.shape[1:]) for cache in (first_cache, second_cache)]
    np.testing.assert_array_equal(keys[0][jnp.array([0, 2])], keys[1][jnp.array([0, 2])])


def test_a_slot_used_again_shows_nothing_of_the_first_request(prefilled, whole):
    # The slots hold 20 tokens each; a prompt of 4 replaces those of slot 1.
    prompt = TOKENS[:1, :SLOTS]
    fresh = init_target_cache(CONFIG, 1, SLOTS, jnp.float32)
    _, fresh = dense_step(fresh, prompt, [0])
    cache = insert(prefilled, fresh, jnp.array([1]))
    start = [10, SLOTS, 7]
    ids = np.stack([TOKENS[0, 10:14], TOKENS[0, SLOTS : 2 * SLOTS], TOKENS[2, 7:11]])
    final, _ = dense_step(cache, ids, start)
    for ours, want in zip(final, (whole[0, 10:14], whole[0, SLOTS : 2 * SLOTS], whole[2, 7:11]), strict=True):
        np.testing.assert_allclose(ours, want, atol=5e-5)


def test_one_program_serves_all_lengths_and_positions(prefilled):
    calls = [([4, 2, 3], [1, 5, 9]), ([1, 1, 1], [20, 3, 8]), ([0, 4, 4], [2, 2, 2])]
    for i, (lengths, start) in enumerate(calls):
        packing = ragged_packing(lengths, SLOTS, ROWS)
        step(prefilled, chunk(start, SLOTS)[packing.request, packing.offset], start, packing)
        if i == 0:
            programs = run_extend._cache_size()
    assert run_extend._cache_size() == programs


@pytest.mark.parametrize("lengths", [[4, 4, 4], [1, 4, 2], [0, 3, 4], [1, 1, 1]], ids=str)
def test_packing_and_unpacking(lengths):
    rows = sum(lengths)
    packing = dense_packing(3, 4) if rows == 12 else ragged_packing(lengths, 4, rows)
    x = jnp.arange(2.0 * rows).reshape(2, rows)
    slots = unpack(x, packing.row)
    assert slots.shape == (2, 3, 4)
    for i, (request, offset) in enumerate(zip(packing.request, packing.offset, strict=True)):
        np.testing.assert_array_equal(slots[:, request, offset], x[:, i])
    np.testing.assert_array_equal(pack(slots, packing), x)


def reference_attention(q, k, v, visible, scale) -> np.ndarray:
    """float64 attention head by head; shapes as `softmax_attention`, `visible [R, S, T]`."""
    out = np.zeros(q.shape)
    for request, group, head, slot in np.ndindex(*q.shape[:4]):
        seen = visible[request, slot]
        if seen.any():
            scores = k[request, group][seen] @ q[request, group, head, slot] * scale
            weights = np.exp(scores - scores.max())
            out[request, group, head, slot] = weights @ v[request, group][seen] / weights.sum()
    return out


def test_attention_against_float64():
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(size=(2, 2, 3, 4, 8)), rng.normal(size=(2, 2, 6, 8)), rng.normal(size=(2, 2, 6, 8))
    visible = rng.random((2, 4, 6)) < 0.6
    visible[0, 1] = False  # a query that sees nothing gets zeros
    arrays = (jnp.asarray(a, jnp.float32) for a in (q, k.reshape(4, 6, 8), v.reshape(4, 6, 8)))
    ours = softmax_attention(*arrays, jnp.asarray(visible), 0.35)
    np.testing.assert_allclose(ours, reference_attention(q, k, v, visible, 0.35), atol=1e-5)
    assert not ours[0, :, :, 1].any()


@pytest.mark.parametrize("causal", [True, False])
def test_what_a_chunk_sees(causal):
    rng = np.random.default_rng(4)
    start = np.array([3, 0])
    q = rng.normal(size=(2, 3, 8, 8))  # [G, Q, hd, B], two requests of four slots
    k, v = rng.normal(size=(2, 2, 8, 8))  # [G, hd, B] each
    empty = init_cache(1, 2, 2, 10, 8, jnp.float32)[0]
    cache = LayerCache(*(jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for leaf in empty))
    arrays = [jnp.asarray(a, jnp.float32) for a in (q, k, v)]
    ours, after = cached_attention(*arrays, cache, jnp.asarray(start), dense_packing(2, 4), 0.35, causal=causal)
    last = start[:, None] + (np.arange(4) if causal else np.full(4, 3))
    visible = np.arange(10) <= last[..., None]  # [R, S, T]
    keys, values = (np.array(leaf, np.float64).reshape(2, 2, 10, 8) for leaf in cache)  # [R, G, T, hd]
    for request, at in enumerate(start):
        rows = slice(4 * request, 4 * request + 4)
        keys[request, :, at : at + 4] = k[:, :, rows].transpose(0, 2, 1)
        values[request, :, at : at + 4] = v[:, :, rows].transpose(0, 2, 1)
    queries = q.reshape(2, 3, 8, 2, 4).transpose(3, 0, 1, 4, 2)  # [R, G, Q, S, hd]
    want = reference_attention(queries, keys, values, visible, 0.35).transpose(1, 2, 4, 0, 3).reshape(q.shape)
    np.testing.assert_allclose(ours, want, atol=1e-5)
    np.testing.assert_allclose(after.keys.reshape(keys.shape), keys, atol=1e-6)
    np.testing.assert_allclose(after.values.reshape(values.shape), values, atol=1e-6)
    if causal:
        fresh = init_cache(1, 2, 2, 4, 8, jnp.float32)[0]
        from_zero, _ = cached_attention(*arrays, fresh, jnp.zeros(2, jnp.int32), dense_packing(2, 4), 0.35)
        np.testing.assert_allclose(causal_attention(*arrays, 2, 0.35), from_zero, atol=1e-6)


@pytest.mark.skipif(
    jax.default_backend() != "cpu" or auto_dtype() != "bfloat16",
    reason="other compilers, and CPUs without bf16 matrix units, choose their sums by shape",
)
def test_bfloat16_rows_do_not_depend_on_how_many_there_are():
    """Verification must give the very bits of plain decoding: in bf16 an ulp is enough to turn a near-tie."""
    config = dataclasses.replace(
        CONFIG, hidden_size=192, intermediate_size=320, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=32
    )
    params = init_params(config, jax.random.key(1), jnp.bfloat16)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 48).astype(np.int32)
    zero = jnp.zeros((1,), jnp.int32)
    empty = init_target_cache(config, 1, 128, jnp.float32)
    prompt, rest = jnp.asarray(tokens[:16]), tokens[16:]
    prefilled = run_extend(params, config, empty, prompt, zero, dense_packing(1, 16))[1]

    def in_chunks(size: int) -> np.ndarray:
        cache, finals = prefilled, []
        for begin in range(0, len(rest), size):
            ids, start = jnp.asarray(rest[begin : begin + size]), jnp.full((1,), 16 + begin, jnp.int32)
            hidden, cache = run_extend(params, config, cache, ids, start, dense_packing(1, size))
            finals.append(np.asarray(hidden.final))
        return np.concatenate(finals, axis=1)

    one_by_one = in_chunks(1)
    for size in (2, 4, 8, 16):
        np.testing.assert_array_equal(in_chunks(size), one_by_one, err_msg=f"{size} rows at once")
