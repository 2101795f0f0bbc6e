"""The lossless acceptance rule (facts section 1): accept left to right, then a corrected or a bonus token.

A draft token x is accepted with probability min(1, p_t(x) / p_d(x)); the first rejection draws from max(p_t - p_d, 0);
after a full accept the bonus token comes from the target's next distribution. All in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
_TINY = 1e-8


class Verdict(NamedTuple):
    """Outcome of one verification: accepted draft tokens `[R]`, and the corrected or bonus token `[R]` (int32)."""

    accepted: Array
    next_token: Array


def leading_run(ok: Array, length: Array) -> Array:
    """Int32 `[R]`: how many of the first `length [R]` entries of bool `ok [R, K]` hold before one that does not."""
    ok = ok & (jnp.arange(ok.shape[1]) < length[:, None])
    return jnp.sum(jnp.cumprod(ok.astype(jnp.int32), axis=1), axis=1)


def accept_probability(target: Array, draft: Array) -> Array:
    """`min(1, p_t / p_d)` elementwise, with p_d kept away from 0 by 1e-8 as in the reference implementation."""
    return jnp.minimum(1.0, target / jnp.maximum(draft, _TINY))


def residual(target: Array, draft: Array) -> Array:
    """Normalised `max(p_t - p_d, 0)` of columns `[V, R]`; p_t itself where the two are equal (mass below 1e-8)."""
    rest = jnp.maximum(target - draft, 0.0)
    mass = jnp.sum(rest, axis=0)
    return jnp.where(mass > _TINY, rest / jnp.maximum(mass, _TINY), target)


def verify_greedy(best: Array, draft: Array, length: Array) -> Verdict:
    """Temperature 0: `best [R, K+1]` are the target's argmaxes, `draft [R, K]` the proposals, `length [R]` verified."""
    accepted = leading_run(draft == best[:, :-1], length)
    return Verdict(accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0])


def accepted_length(target_probs: Array, draft_probs: Array, uniforms: Array, length: Array) -> Array:
    """Accepted draft tokens `[R]` from the probabilities `[R, K]` that both models give to the draft tokens.

    Args:
        uniforms: `[R, K]` in [0, 1); a token is accepted when its uniform is strictly below the ratio.
        length: int32 `[R]`, how many of the K were verified.
    """
    return leading_run(uniforms < accept_probability(target_probs, draft_probs), length)


def next_distribution(target: Array, draft: Array, rejected: Array) -> Array:
    """Distribution of the token after the accepted run, columns `[V, R]`.

    Args:
        target: p_t at the slot after the run. draft: p_d there, over the target's vocabulary.
        rejected: bool `[R]`: the run ended by a rejection (residual) and not by running out of tokens (bonus).
    """
    return jnp.where(rejected, residual(target, draft), target)
