"""Sampling settings, filtered distributions, and draws that depend only on (request seed, position, purpose).

Everything here is float32 and feature-major: a distribution is a column of `[V, B]`. The same function makes the
draft's and the target's distributions, so a draft token is drawn from the very array that is in its acceptance ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Mode = Literal["greedy", "plain", "filtered"]
MODES: tuple[Mode, ...] = get_args(Mode)  # each serves what those before it do
GREEDY_BELOW = 1e-5  # a temperature below this is greedy, as in the reference implementation
HOTTEST = 1e30  # flat to the last bit, and its reciprocal is a number too
# Purposes of a random draw at a position: each has its own stream, and drafts one for each slot of a block. So a
# position that is drafted again after a rejection is drafted anew: what the first draft there did to confidences, which
# budgets remember, says nothing about the second.
DRAW_TARGET, DRAW_ACCEPT, DRAW_DRAFT = 0, 1, 2


_UNSEEDED = 0x80000000  # set in the second word of a raw key that does not come from a request's own seed


def raw_key(seed: int, own: bool) -> tuple[int, int]:
    """Key data, two 32-bit words, of a seed of 63 bits; `own`: the request brought it (see `Sampling.pinned`)."""
    high = (seed >> 32) & 0x7FFFFFFF
    return seed & 0xFFFFFFFF, high if own else high | _UNSEEDED


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        temperature: divides the logits; 0 is greedy. top_p: smallest set of tokens with this mass, in (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all. min_p: drop tokens below this share of the most likely one.
        seed: the request's own seed: the same tokens whatever else runs, under every schedule; None: drawn from the
            generator's. max_tokens: tokens to generate at most.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ValueError(f"temperature {self.temperature}: must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must lie in (0, 1]; 1 keeps everything")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be 0 (off) or a positive count")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p {self.min_p}: must lie in [0, 1); 0 is off")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens}: must be at least 1")

    @property
    def mode(self) -> Mode:
        """The cheapest program that serves this request."""
        if self.temperature < GREEDY_BELOW:
            return "greedy"
        return "plain" if self.top_p == 1 and self.top_k == 0 and self.min_p == 0 else "filtered"


class Sampling(NamedTuple):
    """Per-request sampling settings on the device, `[R]` each; `key` is raw uint32 key data `[R, 2]`."""

    temperature: Array
    top_p: Array
    top_k: Array
    min_p: Array
    key: Array

    @property
    def pinned(self) -> Array:
        """Whether each request has a seed of its own (`raw_key`), bool `[R]`."""
        return self.key[:, 1] < jnp.uint32(_UNSEEDED)

    def rows(self, request: Array) -> Sampling:
        """The settings of each packed row."""
        return Sampling(*(jnp.take(x, request, axis=0) for x in self))


def sampling_of(settings: Sequence[SamplingParams], keys: Iterable[tuple[int, int]]) -> Sampling:
    """`settings` of R requests as arrays of the host. `keys`: raw key data of each (`raw_key`).

    Temperatures above `HOTTEST` are that; a `top_p` that float32 would round to 0, which keeps nothing, stays above it.
    """

    def column(name: str, dtype: Any) -> Any:
        return np.asarray([getattr(one, name) for one in settings], dtype)

    raw: Any = np.asarray(list(keys), np.uint32)
    return Sampling(
        np.minimum(column("temperature", np.float64), HOTTEST).astype(np.float32),
        np.maximum(column("top_p", np.float32), np.finfo(np.float32).tiny),
        column("top_k", np.int32),
        column("min_p", np.float32),
        raw,
    )


def best_token(logits: Array) -> Array:
    """The most likely token of each column of `logits [V, B]`, int32 `[B]`; the lowest id of those that tie.

    Two levels: the maxima of tiles are a fast reduction, and only one tile's position is searched (on CPUs, five times
    faster than an argmax over the vocabulary).
    """
    vocab, rows = logits.shape
    width = 64
    tiles = jnp.pad(logits, ((0, -vocab % width), (0, 0)), constant_values=-jnp.inf).reshape(-1, width, rows)
    tile = jnp.argmax(jnp.max(tiles, axis=1), axis=0)  # [B]
    inside = jnp.take_along_axis(tiles, tile[None, None], axis=0)[0]  # [width, B]
    return (tile * width + jnp.argmax(inside, axis=0)).astype(jnp.int32)


def distribution(logits: Array, sampling: Sampling, mode: Mode) -> Array:
    """Probabilities `[V, B]` that tokens are drawn from, for `logits [V, B]` and settings of B rows.

    Temperature first, then top-k, top-p on what is left, then min-p. Rows with temperature 0 are one-hot at the argmax.
    Tokens that tie with the last one kept are kept too.
    """
    greedy = sampling.temperature < GREEDY_BELOW
    scaled = logits / jnp.where(greedy, 1.0, sampling.temperature)
    probs = jax.nn.softmax(scaled, axis=0)
    if mode == "filtered":
        probs = filter_probs(probs, sampling)
    one_hot = (jnp.arange(logits.shape[0])[:, None] == best_token(logits)).astype(jnp.float32)
    return jnp.where(greedy, one_hot, probs)


def filter_probs(probs: Array, sampling: Sampling) -> Array:
    """Applies top-k, top-p and min-p to each column of `probs [V, B]` and renormalises.

    Thresholds are found by bisection on the bits of the float: exact, and without sorting the vocabulary.
    """
    ones = jnp.ones_like(probs)
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, probs.shape[0]).astype(jnp.float32)
    probs = _keep(probs, probs >= _threshold(probs, ones, top_k))
    probs = _keep(probs, (probs >= _threshold(probs, probs, sampling.top_p)) | (sampling.top_p >= 1))
    return _keep(probs, probs >= sampling.min_p * jnp.max(probs, axis=0))


def _keep(probs: Array, kept: Array) -> Array:
    probs = jnp.where(kept, probs, 0.0)
    return probs / jnp.sum(probs, axis=0)


def _threshold(probs: Array, weight: Array, enough: Array) -> Array:
    """Largest t `[B]` such that tokens with `probs >= t` weigh at least `enough [B]`; 0 where nothing does."""
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)  # order-preserving: probabilities are not negative

    def try_bit(i: Array, best: Array) -> Array:
        candidate = best | (1 << (30 - i))
        weighs = jnp.sum(jnp.where(bits >= candidate, weight, 0.0), axis=0)
        return jnp.where(weighs >= enough, candidate, best)

    best = jax.lax.fori_loop(0, 31, try_bit, jnp.zeros(probs.shape[1], jnp.int32))
    return jax.lax.bitcast_convert_type(best, jnp.float32)


def uniforms(key: Array, position: Array, purpose: Array | int) -> Array:
    """One float32 uniform in [0, 1) for each row: raw keys `[B, 2]`, absolute token positions `[B]`.

    Drafts have the purpose `DRAW_DRAFT` + slot.
    """

    def draw(data: Array, at: Array) -> Array:
        folded = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(data), at), purpose)
        return jax.random.uniform(folded)

    return jax.vmap(draw)(key, position)


def categorical(probs: Array, uniform: Array) -> Array:
    """Inverse-CDF draw from each column of `probs [V, B]` (need not sum to 1) at `uniform [B]` -> int32 `[B]`.

    Two levels, so that one pass over the vocabulary is enough. A token of probability 0 is never returned.
    """
    vocab, rows = probs.shape
    width = 256
    tiles = jnp.pad(probs, ((0, -vocab % width), (0, 0))).reshape(-1, width, rows)  # [C, width, B]
    masses = jnp.sum(tiles, axis=1)  # [C, B]
    ends = jnp.cumsum(masses, axis=0)
    goal = uniform * ends[-1]
    # Rounding may place the goal on a tile or token without mass, or past the end: see `_at_or_before`.
    tile = _at_or_before(masses, jnp.sum(ends <= goal, axis=0))  # [B]
    before = jnp.where(tile > 0, jnp.take_along_axis(ends, jnp.maximum(tile - 1, 0)[None], axis=0)[0], 0.0)
    inside = jnp.take_along_axis(tiles, tile[None, None], axis=0)[0]  # [width, B]
    index = jnp.sum(jnp.cumsum(inside, axis=0) <= goal - before, axis=0)
    return (tile * width + _at_or_before(inside, index)).astype(jnp.int32)


def _at_or_before(mass: Array, index: Array) -> Array:
    """Last row of `mass [N, B]` at or before `index [B]` with a positive entry; the first such where there is none."""
    rows = jnp.arange(mass.shape[0])[:, None]
    last = jnp.max(jnp.where((mass > 0) & (rows <= index), rows, -1), axis=0)
    return jnp.where(last >= 0, last, jnp.argmax(mass > 0, axis=0))


def choose(logits: Array, sampling: Sampling, position: Array, mode: Mode) -> Array:
    """Plain decoding's next token `[B]` of each row: argmax, or a draw from its filtered distribution."""
    if mode == "greedy":
        return best_token(logits)
    probs = distribution(logits, sampling, mode)
    return categorical(probs, uniforms(sampling.key, position, DRAW_TARGET))


def choose_as_needed(logits: Array, sampling: Sampling, position: Array) -> Array:
    """`choose` in the cheapest mode that serves all rows, found out on the device: one program for all requests."""
    samples = sampling.temperature >= GREEDY_BELOW
    filters = (sampling.top_p < 1) | (sampling.top_k > 0) | (sampling.min_p > 0)
    mode = jnp.any(samples).astype(jnp.int32) + jnp.any(samples & filters)
    ways = [partial(choose, mode=each) for each in MODES]
    return jax.lax.switch(mode, ways, logits, sampling, position)
