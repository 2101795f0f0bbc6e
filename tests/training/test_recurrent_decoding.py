"""Eagle3 and MTP draft what they were trained for: the logits of training, in the rounds of decoding."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters import eagle3, interface, mtp
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.interface import Committed
from dspark_jax.models.attention import dense_packing
from dspark_jax.models.layers import linear, softcap
from dspark_jax.models.transformer import Hidden
from dspark_jax.training.losses import Batch
from dspark_jax.training.recurrent import unroll
from tests.decoding.tiny import HIDDEN, VOCAB, other_drafter

LENGTH, CAPACITY = 14, 32
RNG = np.random.default_rng(4)
TOKENS = jnp.asarray(RNG.integers(0, VOCAB, LENGTH), jnp.int32)
FINAL, FEATURES = (jnp.asarray(RNG.normal(size=(LENGTH, HIDDEN)), jnp.float32) for _ in range(2))


def trained_logits(config: Any, params: dict[str, Any], steps: int) -> np.ndarray:
    """Of each step at each token, `[steps, T, Vd]`: step s at token t predicts token t + 2 + s."""
    model = eagle3.MODEL if isinstance(config, Eagle3Config) else mtp.MODEL
    batch = Batch(TOKENS[None], jnp.ones((1, LENGTH), jnp.uint8), FEATURES[None], FINAL[None])
    run = jax.jit(partial(unroll, model, config=config, steps=steps))
    states = run(params, embed=params["embed"], batch=batch)
    read = [linear(params["head"], model.read(params, config, state)) for state in states]
    logits = [softcap(x, config.final_softcap) for x in read]
    return np.asarray(jnp.stack(logits)).transpose(0, 2, 1)


def drafted_logits(config: Any, params: dict[str, Any], rounds: list[int]) -> np.ndarray:
    """Of a block after each round that committed so many tokens, `[rounds, K, Vd]`; drafts are the text's tokens."""
    memory = interface.init_memory(config, 1, CAPACITY, jnp.float32)
    one = lambda value: jnp.asarray([value], jnp.int32)  # noqa: E731
    start, found = 0, []
    for count in rounds:
        rows = slice(start, start + count)
        features = FEATURES[rows].T if config.target_layer_ids else jnp.zeros((0, count))
        hidden, following = Hidden(FINAL[rows].T, features), TOKENS[None, start + 1 : start + count + 1]
        new = Committed(hidden, one(start), TOKENS[start][None], following, one(count - 1), dense_packing(1, count))
        memory = interface.ingest(config, params, memory, new)
        start += count

        def draw(logits: jax.Array, slot: jax.Array, at: int = start) -> tuple[jax.Array, jax.Array, jax.Array]:
            return TOKENS[at + 1 + slot][None], jnp.ones(1), logits

        found.append(interface.propose(config, params, memory, TOKENS[start][None], one(start), draw).probs[..., 0])
    return np.asarray(found)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_decoding_drafts_by_the_logits_of_training(kind: str) -> None:
    drafter = other_drafter(kind)
    table, head = (jnp.asarray(RNG.normal(size=(VOCAB, HIDDEN)) * 0.5, jnp.float32) for _ in range(2))
    params = interface.bind(drafter.params, table, head)
    steps, rounds = drafter.config.block_size, [5, 1, 3]
    trained = trained_logits(drafter.config, params, steps)
    drafted = drafted_logits(drafter.config, params, rounds)
    for block, start in zip(drafted, np.cumsum(rounds), strict=True):
        np.testing.assert_allclose(block, trained[:, start - 1][: len(block)], rtol=1e-4, atol=1e-5)
    assert np.ptp(trained) > 0.1
