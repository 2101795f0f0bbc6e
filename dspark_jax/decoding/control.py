"""Control flow inside programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def once(chosen: jax.Array, run: Callable[[Any], Any], carry: Any) -> Any:
    """`run(carry)` if bool `chosen []`, else `carry`: a loop that runs once or not at all.

    `lax.cond` and `lax.switch` would copy all arrays, caches too, into and out of their branches.
    """
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.bool_(False), run(c[1])), (chosen, carry))[1]
