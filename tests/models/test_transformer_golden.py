"""Targets against reference values of tiny Llama, Qwen3 and Gemma4 models: forward, features, padding, decoding."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints.load import Target, load_target
from dspark_jax.models.attention import dense_packing
from dspark_jax.models.transformer import extend, forward, init_params, init_target_cache, logits

TARGETS = Path(__file__).resolve().parents[1] / "golden" / "targets"
NAMES = ("llama_tied", "qwen3_tied", "qwen3_untied", "gemma4")
CAPACITY = 48  # tokens; more than the 40 of the files
CAPTURE = (-1, 1, 3)
# Chunks come in sizes 1, 5 and 16 and always capture the same layers, so that each model compiles three programs.

run_forward = jax.jit(forward, static_argnames=("config", "capture"))
run_extend = jax.jit(extend, static_argnames=("config", "capture"))
run_logits = jax.jit(logits, static_argnames=("cap",))
close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


def close_to(name: str):
    """The comparison with a target's reference values, which Gemma4's larger activations need more room for."""
    return functools.partial(close, atol=2e-3) if name == "gemma4" else close


@functools.cache
def target(name: str, dtype: str = "float32") -> Target:
    """A tiny target, loaded once."""
    return load_target(TARGETS / name, dtype=dtype)


@functools.cache
def expected(name: str) -> dict[str, np.ndarray]:
    """The arrays of a target's `forward.npz`."""
    with np.load(TARGETS / name / "forward.npz") as arrays:
        return dict(arrays)


def by_sequence(x: jax.Array, sequences: int) -> np.ndarray:
    """Rows of `x [D, N * T]` as `[N, T, D]`."""
    return np.asarray(x).T.reshape(sequences, -1, x.shape[0])


def whole(model: Target, ids: np.ndarray):
    """The forward pass of `ids [N, T]` with every layer captured."""
    return run_forward(model.params, model.config, ids, capture=tuple(range(-1, model.config.num_layers)))


def feed(model: Target, cache, ids: np.ndarray, start: int):
    """Runs one chunk `ids [R, S]` at position `start` of every request: `Hidden` with `CAPTURE`, and the new cache."""
    requests, slots = ids.shape
    starts = jnp.full(requests, start, jnp.int32)
    packing = dense_packing(requests, slots)
    return run_extend(model.params, model.config, cache, ids.reshape(-1), starts, packing, capture=CAPTURE)


@pytest.mark.parametrize("name", NAMES)
def test_logits_final_states_and_every_feature(name):
    near = close_to(name)
    model, want = target(name), expected(name)
    depth, width = model.config.num_layers, model.config.hidden_size
    hidden = whole(model, want["input_ids"])
    assert hidden.final.dtype == hidden.features.dtype == jnp.float32
    assert hidden.features.shape == ((depth + 1) * width, want["input_ids"].size)
    near(by_sequence(run_logits(model.params, hidden.final, model.config.final_softcap), 2), want["logits"])
    near(by_sequence(hidden.final, 2), want["final_normed"])
    near(by_sequence(hidden.final, 2), want["hidden_states"][-1])
    outputs = [*want["hidden_states"][:-1], want["raw_layer_outputs_last"]]  # the embedding, then every layer
    for layer, output in enumerate(outputs, start=-1):
        rows = slice((layer + 1) * width, (layer + 2) * width)
        near(by_sequence(hidden.features[rows], 2), output, err_msg=f"layer {layer}")


@pytest.mark.parametrize("capture", [(), (0,), (-1, 2)])
def test_features_are_the_captured_layers_in_order(capture):
    model, want = target("qwen3_tied"), expected("qwen3_tied")
    hidden = run_forward(model.params, model.config, want["input_ids"], capture=capture)
    assert hidden.features.shape == (len(capture) * model.config.hidden_size, want["input_ids"].size)
    for i, layer in enumerate(capture):
        rows = hidden.features[i * model.config.hidden_size : (i + 1) * model.config.hidden_size]
        close(by_sequence(rows, 2), want["hidden_states"][layer + 1])


@pytest.mark.parametrize("name", NAMES)
def test_padding_on_the_right_changes_no_real_row(name):
    near = close_to(name)
    model, want = target(name), expected(name)
    real = want["rp_attention_mask"].astype(bool)
    assert not real.all()
    hidden = whole(model, want["rp_input_ids"])
    near(by_sequence(hidden.final, 2)[real], want["rp_final_normed"][real])
    near(
        by_sequence(run_logits(model.params, hidden.final, model.config.final_softcap), 2)[real],
        want["rp_logits"][real],
    )


@pytest.mark.parametrize("name", NAMES)
def test_positions_count_from_the_first_real_token(name):
    # The reference ran these rows padded on the left, with positions; here the padding moves to the right.
    near = close_to(name)
    model, want = target(name), expected(name)
    pads = [int((row == 0).sum()) for row in want["lp_attention_mask"]]
    assert max(pads) > 0
    ids = np.stack([np.roll(row, -pad) for row, pad in zip(want["lp_input_ids"], pads, strict=True)])
    scores = by_sequence(run_logits(model.params, whole(model, ids).final, model.config.final_softcap), 2)
    for row, output, pad in zip(scores, want["lp_logits"], pads, strict=True):
        near(row[: len(row) - pad], output[pad:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [(5, 1, 16, 1, 1, 16), (16, 16, 5, 1, 1, 1), (1,) * 40], ids=str)
def test_chunks_equal_the_whole_sequence(name, chunks):
    near = close_to(name)
    model, want = target(name), expected(name)
    assert sum(chunks) == want["input_ids"].shape[1]
    exact = 5e-4 if name == "gemma4" else 5e-5
    cache = init_target_cache(model.config, 2, CAPACITY, jnp.float32)
    finals, features, start = [], [], 0
    for size in chunks:
        hidden, cache = feed(model, cache, want["input_ids"][:, start : start + size], start)
        finals.append(by_sequence(hidden.final, 2))
        features.append(by_sequence(hidden.features, 2))
        start += size
    full = whole(model, want["input_ids"])
    width = model.config.hidden_size
    captured = np.concatenate([full.features[(i + 1) * width : (i + 2) * width] for i in CAPTURE])
    close(np.concatenate(finals, 1), by_sequence(full.final, 2), atol=exact)
    close(np.concatenate(features, 1), by_sequence(captured, 2), atol=exact)
    near(np.concatenate(finals, 1), want["final_normed"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [(16,), (5, 1, 5, 5), (1,) * 16], ids=str)
def test_greedy_decoding(name, chunks):
    model, want = target(name), expected(name)
    prompt, output = want["greedy_prompt_ids"], want["greedy_output_ids"]
    assert want["greedy_top2_margin"].min() > 1e-3  # no near-tie, so the ids must be equal
    cache = init_target_cache(model.config, 2, CAPACITY, jnp.float32)
    start = 0
    for size in chunks:
        hidden, cache = feed(model, cache, prompt[:, start : start + size], start)
        start += size
    ids = prompt
    while True:
        last = by_sequence(run_logits(model.params, hidden.final, model.config.final_softcap), 2)[:, -1]  # [R, V]
        ids = np.concatenate([ids, last.argmax(-1)[:, None].astype(np.int32)], 1)
        if ids.shape[1] == output.shape[1]:
            break
        hidden, cache = feed(model, cache, ids[:, -1:], ids.shape[1] - 1)
    np.testing.assert_array_equal(ids, output)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_untied"])
def test_bfloat16_is_close_to_float32(name):
    model, want = target(name, "bfloat16"), expected(name)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("bfloat16")}
    hidden = whole(model, want["input_ids"])
    cache = init_target_cache(model.config, 2, CAPACITY, jnp.bfloat16)
    first, cache = feed(model, cache, want["input_ids"][:, :20], 0)
    second, cache = feed(model, cache, want["input_ids"][:, 20:], 20)
    cached = np.concatenate([by_sequence(first.final, 2), by_sequence(second.final, 2)], 1)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}
    for final in (by_sequence(hidden.final, 2), cached):
        assert final.dtype == np.float32
        error = np.linalg.norm(final - want["final_normed"], axis=-1) / np.linalg.norm(want["final_normed"], axis=-1)
        assert error.mean() < 0.02 and error.max() < 0.1  # bf16 keeps 8 bits: 0.4 % a rounding, over 5 or 6 layers
    scores = by_sequence(run_logits(model.params, hidden.final, model.config.final_softcap), 2)
    assert scores.dtype == np.float32
    ordered = np.sort(want["logits"], -1)
    clear = ordered[..., -1] - ordered[..., -2] > 0.25
    assert clear.mean() > 0.2
    np.testing.assert_array_equal(scores.argmax(-1)[clear], want["logits"].argmax(-1)[clear])


@pytest.mark.parametrize("name", NAMES)
def test_random_parameters_have_the_shapes_of_loaded_ones(name):
    model = target(name)
    made = jax.eval_shape(lambda key: init_params(model.config, key, jnp.float32), jax.random.key(0))
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (made, model.params)]
    assert shapes[0] == shapes[1]
