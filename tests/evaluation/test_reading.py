"""Packed reading: every text stands in a pass once and whole, and is read as if it were alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.data.packing import pack
from dspark_jax.decoding.sampling import SamplingParams, distribution, sampling_of
from dspark_jax.evaluation import reading
from dspark_jax.evaluation.reading import Reader, Text
from dspark_jax.models import transformer
from tests.decoding.tiny import VOCAB, tiny_target


def made_texts(lengths: list[tuple[int, int]], temperature: float = 0.8) -> list[Text]:
    rng = np.random.default_rng(len(lengths))
    draw = lambda count: tuple(rng.integers(0, VOCAB, count).tolist())  # noqa: E731
    settings = [SamplingParams(temperature, top_k=5 * (i % 2), max_tokens=99) for i in range(len(lengths))]
    return [Text(str(i), draw(a), draw(b), settings[i], False, i) for i, (a, b) in enumerate(lengths)]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=30), st.integers(1, 4))
def test_every_text_stands_in_a_pass_once(lengths, size):
    texts, width = made_texts(lengths), 32
    rows = pack(np.asarray([a + b for a, b in lengths]), width, len(texts))
    seen = []
    for first in range(0, int(rows.max()) + 1, size):
        page, places = reading._page(texts, rows, first, size, width)
        at, count = page.at, int(page.count)
        for number, row, start in places:
            text, tokens = texts[number], texts[number].prompt_ids + texts[number].token_ids
            part = (row, slice(start, start + len(tokens)))
            assert tuple(page.ids[part]) == tokens and (page.segments[part] == number + 1).all()
            assert page.positions[part].tolist() == list(range(len(tokens)))
            mine = [i for i in range(count) if row * width + start <= at[i] < row * width + start + len(tokens)]
            wanted = [row * width + start + len(text.prompt_ids) - 1 + i for i in range(len(text.token_ids))]
            assert at[mine].tolist() == wanted and tuple(page.labels[mine]) == text.token_ids
            assert (page.sampling.top_k[mine] == text.sampling.top_k).all()
        assert (page.segments > 0).sum() == sum(sum(lengths[number]) for number, _, _ in places)
        assert (at[count:] == size * width).all()
        seen += [number for number, _, _ in places]
    assert sorted(seen) == list(range(len(texts)))


@partial(jax.jit, static_argnames=("config", "layers", "mode"))
def _alone(params: Any, ids: Any, rows: Any, *, config: Any, layers: tuple[int, ...], mode: Any) -> tuple:
    hidden = transformer.forward(params, config, ids, layers)
    logits = reading.target_logits(params, hidden.final, config)
    return hidden.final.T, hidden.features.T, logits if mode == "greedy" else distribution(logits, rows, mode)


def alone(target: Any, text: Text, layers: tuple[int, ...], mode: Any) -> tuple[Any, Any, np.ndarray]:
    """Final states, features and probabilities of one text, `[T, ...]`, by a pass of its own, zeros behind it."""
    tokens = text.prompt_ids + text.token_ids
    ids = np.zeros((1, 40), np.int32)
    ids[0, : len(tokens)] = tokens
    rows = sampling_of([text.sampling] * 40, [(0, 0)] * 40)
    final, features, found = _alone(target.params, ids, rows, config=target.config, layers=layers, mode=mode)
    probs = np.ones(len(tokens), np.float32)
    if mode != "greedy":
        for i in range(len(text.prompt_ids) - 1, len(tokens) - 1):
            probs[i] = found[tokens[i + 1], i]
    return final[: len(tokens)], features[: len(tokens)], probs


@pytest.mark.parametrize("mode", ["greedy", "plain", "filtered"])
def test_packed_texts_are_read_as_if_alone(monkeypatch, mode):
    monkeypatch.setattr(reading, "_SHORTEST", 32)
    monkeypatch.setattr(reading, "_PASS", 64)
    monkeypatch.setattr(reading, "_AT_ONCE", 16)
    target = tiny_target()
    texts = made_texts([(3, 9), (20, 11), (1, 1), (7, 5), (2, 25), (9, 2)])
    if mode == "plain":
        plain = SamplingParams(0.8, max_tokens=99)
        texts = [Text(t.id, t.prompt_ids, t.token_ids, plain, t.stopped, t.stream) for t in texts]
    passes = []
    run = reading._read
    monkeypatch.setattr(reading, "_read", lambda *a, **k: passes.append(1) or run(*a, **k))
    reader = Reader((0, 1))
    read = reader.read(target, texts, (7, 40), mode, (1,))
    assert len(passes) > 1
    for row, text in enumerate(texts):
        length = len(text.prompt_ids) + len(text.token_ids)
        final, features, probs = alone(target, text, (1,), mode)
        np.testing.assert_allclose(read.final[row, :length], final, atol=2e-5)
        np.testing.assert_allclose(read.features[row, :length], features, atol=2e-5)
        np.testing.assert_allclose(read.probs[row, :length], probs, atol=1e-5)
        assert not read.final[row, length:].any() and not read.probs[row, length:].any()
    assert not read.final[len(texts)].any()
    count = len(passes)
    again = reader.read(target, texts[::-1], (6, 40), mode, (1,))
    assert len(passes) == count
    np.testing.assert_array_equal(again.final[::-1], read.final[:6])
