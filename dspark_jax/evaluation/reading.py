"""What the target says of texts that are given: hidden states and the probabilities of their tokens, in one pass.

Texts come packed, several whole ones in a row, so that a pass has little padding; its size is one of a few, whatever
the number of texts. `Reader` keeps what it read on the host for the next drafter: a token takes (m + 1) D + 1 numbers.
Letters: N rows of T tokens in a pass, B = N T, R texts side by side, m captured layers, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.packing import pack
from dspark_jax.decoding.batching import padded_length
from dspark_jax.decoding.sampling import Mode, Sampling, SamplingParams, distribution, sampling_of
from dspark_jax.decoding.state import mask_padding
from dspark_jax.models import transformer
from dspark_jax.models.config import TransformerConfig

Array = jax.Array
Params = dict[str, Any]
_PASS = 2048  # tokens of a pass, where texts are no longer
_SHORTEST = 512  # tokens of a row at least
_AT_ONCE = 128  # a power of two: tokens whose probabilities of the whole vocabulary are held at once


@dataclass(frozen=True)
class Text:
    """An answer of plain decoding.

    Attributes:
        token_ids: the answer, a stop token included. sampling: what it was drawn with, its limit `max_tokens` too.
        stopped: whether its last token is a stop token. stream: names the random numbers (63 bits).
    """

    id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopped: bool
    stream: int

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of the prompt and of the answer."""
        return self.prompt_ids + self.token_ids


class Read(NamedTuple):
    """What the target says of R texts; of one text without the first axis, and no longer than it is.

    Attributes:
        final: float32 `[R, T, D]`, final-normed states. features: float32 `[R, T, m D]`, of the captured layers.
        probs: float32 `[R, T]`, p_t of the next token, where that is of the answer; 1 elsewhere, and where greedy.
    """

    final: Any
    features: Any
    probs: Any


_Key = tuple[tuple[int, ...], tuple[int, ...], SamplingParams]


class Reader:
    """Reads texts of one target, each once as far as there is room to keep it."""

    def __init__(self, layer_ids: Iterable[int], keep_bytes: int = 4 << 30) -> None:
        """
        Args:
            layer_ids: layers that any of the drafters reads, in any order. keep_bytes: kept on the host at most.
        """
        self._layers = tuple(sorted(set(layer_ids)))
        self._left = keep_bytes
        self._kept: dict[_Key, Read] = {}

    def read(
        self, target: Any, texts: Sequence[Text], shape: tuple[int, int], mode: Mode, layer_ids: Sequence[int]
    ) -> Read:
        """The states of texts side by side, on the host.

        Args:
            target: as `Generator`'s, the same one every time. texts: those of the first rows.
            shape: R and T; rows and tokens without a text stay zero. mode: the sampling program that serves all texts.
            layer_ids: layers whose states are wanted, of those that are read.
        """
        found = {key: self._kept[key] for text in texts if (key := _key(text)) in self._kept}
        fresh = {_key(text): text for text in texts if _key(text) not in found}
        for text, made in self._passes(target, list(fresh.values()), mode):
            found[_key(text)] = made
            size = sum(array.nbytes for array in made)
            if size <= self._left:
                self._kept[_key(text)] = made
                self._left -= size
        made = _together([found[_key(text)] for text in texts], shape)
        columns = [self._layers.index(layer) for layer in layer_ids]
        if columns != list(range(len(self._layers))):
            apart = made.features.reshape(*shape, len(self._layers), -1)
            made = made._replace(features=apart[:, :, columns].reshape(*shape, -1))
        return made

    def _passes(self, target: Any, texts: Sequence[Text], mode: Mode) -> Iterator[tuple[Text, Read]]:
        """Reads texts, rows full of them at a time."""
        if not texts:
            return
        lengths = np.asarray([len(text.ids) for text in texts])
        width = max(_SHORTEST, padded_length(int(lengths.max())))
        rows = pack(lengths, width, len(texts))
        size = min(max(1, _PASS // width), 1 << int(rows.max()).bit_length())
        for first in range(0, int(rows.max()) + 1, size):
            page, places = _page(texts, rows, first, size, width)
            made = jax.device_get(_read(target.params, page, config=target.config, layers=self._layers, mode=mode))
            for number, row, start in places:
                whole = slice(start, start + int(lengths[number]))
                yield texts[number], Read(*(array[row, whole].copy() for array in made))


def _key(text: Text) -> _Key:
    return text.prompt_ids, text.token_ids, text.sampling


def _together(parts: Sequence[Read], shape: tuple[int, int]) -> Read:
    """Rows of texts, filled up with zeros."""

    def join(*arrays: np.ndarray) -> np.ndarray:
        joined = np.zeros((*shape, *arrays[0].shape[1:]), np.float32)
        for row, array in zip(joined, arrays, strict=False):
            row[: len(array)] = array
        return joined

    return jax.tree.map(join, *parts)


class _Page(NamedTuple):
    """A pass: `ids`, the text of each token `segments` (0: none) and its place there `positions`, int32 `[N, T]`; the
    `count` tokens before an answer's, as `at`, int32 `[B]` (B behind the last one), with the next token, `labels [B]`,
    and the settings that it was drawn with, `sampling` of B."""

    ids: Any
    segments: Any
    positions: Any
    at: Any
    labels: Any
    count: Any
    sampling: Sampling


def _page(
    texts: Sequence[Text], rows: np.ndarray, first: int, size: int, width: int
) -> tuple[_Page, list[tuple[int, int, int]]]:
    """The pass over the rows `first .. first + size - 1`, and what stands where: (number of a text, row, column)."""
    ids, segments, positions = (np.zeros((size, width), np.int32) for _ in range(3))
    at, labels = np.full(size * width, size * width, np.int32), np.zeros(size * width, np.int32)
    drawn = np.zeros(size * width, np.int32)  # the text of each entry of `at`, as counted in `here`
    used, count, places = [0] * size, 0, []
    here = np.flatnonzero((rows >= first) & (rows < first + size)).tolist()
    for local, number in enumerate(here):
        text, row = texts[number], int(rows[number]) - first
        start, answer = used[row], len(text.token_ids)
        end = start + len(text.ids)
        place = row, slice(start, end)
        ids[place], segments[place], positions[place] = text.ids, number + 1, range(end - start)
        wanted = slice(count, count + answer)
        at[wanted] = row * width + end - 1 - answer + np.arange(answer)
        labels[wanted], drawn[wanted] = text.token_ids, local
        used[row], count = end, count + answer
        places.append((number, row, start))
    settings = sampling_of([texts[number].sampling for number in here], [(0, 0)] * len(here))  # keys are not read
    sampling = Sampling(*(column[drawn] for column in settings))
    return _Page(ids, segments, positions, at, labels, np.int32(count), sampling), places


@partial(jax.jit, static_argnames=("config", "layers", "mode"))
def _read(params: Params, page: _Page, *, config: TransformerConfig, layers: tuple[int, ...], mode: Mode) -> Read:
    """What the target says of a pass, arrays `[N, T, ...]`."""
    shape = page.ids.shape
    hidden = transformer.forward(params, config, page.ids, layers, page.segments, page.positions)
    final, features = (x.T.reshape(*shape, -1).astype(jnp.float32) for x in hidden)
    probs = jnp.ones(page.at.shape)
    if mode == "greedy":
        return Read(final, features, probs.reshape(shape))

    def some(number: Array, probs: Array) -> Array:
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, number * _AT_ONCE, _AT_ONCE)  # noqa: E731
        at = cut(page.at)
        states = jnp.take(hidden.final, at, axis=1, mode="clip")
        found = distribution(target_logits(params, states, config), jax.tree.map(cut, page.sampling), mode)  # [V, ...]
        return probs.at[at].set(jnp.take_along_axis(found, cut(page.labels)[None], axis=0)[0], mode="drop")

    probs = jax.lax.fori_loop(0, (page.count + _AT_ONCE - 1) // _AT_ONCE, some, probs)
    return Read(final, features, probs.reshape(shape))


def target_logits(params: Params, final: Array, config: TransformerConfig) -> Array:
    """The target's logits of final states `[D, B]`, float32 `[V, B]`; padding rows of the vocabulary are impossible."""
    return mask_padding(transformer.logits(params, final, config.final_softcap), config)
