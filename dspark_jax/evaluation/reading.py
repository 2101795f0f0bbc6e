"""What the target says of texts that are given: hidden states and the probabilities of their tokens, in one pass.

`Reader` keeps them on the host for the next drafter: a token takes (m + 1) D + 1 numbers. Letters: R texts side by
side, T padded tokens of one, A of its answer, m captured layers, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.batching import padded_length
from dspark_jax.decoding.sampling import Mode, Sampling, SamplingParams, distribution
from dspark_jax.decoding.state import mask_padding
from dspark_jax.models import transformer
from dspark_jax.models.config import TransformerConfig

Array = jax.Array
Params = dict[str, Any]


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


class Read(NamedTuple):
    """What the target says of R texts.

    Attributes:
        final: float32 `[R, T, D]`, final-normed states. features: float32 `[R, T, m D]`, of the captured layers.
        probs: float32 `[R, T]`, p_t of the next token, where that is of the answer; 1 elsewhere, and where greedy.
    """

    final: Any
    features: Any
    probs: Any


class Reader:
    """Reads texts of one target, each once as far as there is room to keep it."""

    def __init__(self, layer_ids: Iterable[int], keep_bytes: int = 4 << 30) -> None:
        """
        Args:
            layer_ids: layers that any of the drafters reads, in any order. keep_bytes: kept on the host at most.
        """
        self._layers = tuple(sorted(set(layer_ids)))
        self._left = keep_bytes
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...], SamplingParams], Read] = {}

    def read(
        self,
        target: Any,
        texts: Sequence[Text],
        ids: np.ndarray,
        sampling: Sampling,
        mode: Mode,
        layer_ids: Sequence[int],
    ) -> Read:
        """The states of R rows.

        Args:
            target: as `Generator`'s, the same one every time.
            texts: those of the first rows. ids: int32 `[R, T]`. sampling, mode: of the R rows.
            layer_ids: layers whose states are wanted, of those that are read.
        """
        keys = [(text.prompt_ids, text.token_ids, text.sampling) for text in texts]
        if all(key in self._kept for key in keys):
            made = self._together([self._kept[key] for key in keys], ids.shape)
        else:
            begin = np.ones(len(ids), np.int32)
            begin[: len(texts)] = [len(text.prompt_ids) for text in texts]
            answer = padded_length(max(len(text.token_ids) for text in texts))
            how: dict[str, Any] = {"config": target.config, "layers": self._layers, "mode": mode}
            made = _read(target.params, ids, begin, sampling, answer=min(answer, ids.shape[1]), **how)
            self._keep(keys, made)
        columns = [self._layers.index(layer) for layer in layer_ids]
        if columns != list(range(len(self._layers))):
            apart = made.features.reshape(*made.features.shape[:2], len(self._layers), -1)
            made = made._replace(features=apart[:, :, columns].reshape(*apart.shape[:2], -1))
        return made

    def _keep(self, keys: Sequence[Any], made: Read) -> None:
        if self._left <= 0:
            return
        host = jax.device_get(made)
        for row, key in enumerate(keys):
            length = len(key[0]) + len(key[1])
            one = Read(*(array[row, :length].copy() for array in host))
            size = sum(array.nbytes for array in one)
            if key not in self._kept and size <= self._left:
                self._kept[key] = one
                self._left -= size

    @staticmethod
    def _together(parts: Sequence[Read], shape: tuple[int, ...]) -> Read:
        """Rows of R texts out of what was kept; further ones stay zero."""

        def join(*arrays: np.ndarray) -> np.ndarray:
            joined = np.zeros((*shape, *arrays[0].shape[1:]), np.float32)
            for row, array in zip(joined, arrays, strict=False):
                row[: len(array)] = array
            return joined

        return jax.tree.map(join, *parts)


@partial(jax.jit, static_argnames=("config", "layers", "mode", "answer"))
def _read(
    params: Params,
    ids: Array,
    begin: Array,
    sampling: Sampling,
    *,
    config: TransformerConfig,
    layers: tuple[int, ...],
    mode: Mode,
    answer: int,
) -> Read:
    """What the target says of `ids [R, T]`, whose answers begin at `begin [R]` and have `answer` tokens at most."""
    requests, length = ids.shape
    hidden = transformer.forward(params, config, ids, layers)
    final, features = (x.T.reshape(requests, length, -1).astype(jnp.float32) for x in hidden)
    probs = jnp.ones((requests, length))
    if mode == "greedy":
        return Read(final, features, probs)

    def one(text: tuple[Array, Array, Sampling]) -> Array:
        """Of one text: what has the size of the vocabulary is never there for all."""
        states, wanted, settings = text
        rows = Sampling(*(jnp.repeat(x[None], answer, axis=0) for x in settings))
        found = distribution(target_logits(params, states.T, config), rows, mode)  # [V, A]
        return jnp.take_along_axis(found, wanted[None], axis=0)[0]

    at = begin[:, None] - 1 + jnp.arange(answer)  # [R, A]; those behind the end are not written
    states = jnp.take_along_axis(final, at[..., None], axis=1, mode="clip")
    wanted = jnp.take_along_axis(ids, at + 1, axis=1, mode="clip")
    of_answer = jax.lax.map(one, (states, wanted, sampling))
    return Read(final, features, probs.at[jnp.arange(requests)[:, None], at].set(of_answer, mode="drop"))


def target_logits(params: Params, final: Array, config: TransformerConfig) -> Array:
    """The target's logits of final states `[D, B]`, float32 `[V, B]`; padding rows of the vocabulary are impossible."""
    return mask_padding(transformer.logits(params, final, config.final_softcap), config)
