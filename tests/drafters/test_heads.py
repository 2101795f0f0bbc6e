"""The sequential heads at the start of a training; their numbers are compared in `test_golden_rounds`."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.dspark import init_params
from dspark_jax.drafters.heads import previous_embedding, teacher_forced_vectors
from tests.decoding.tiny import tiny_drafter


@pytest.mark.parametrize("kind, start", [("vanilla", lambda x: x), ("rnn", jnp.tanh), ("gated", lambda x: x / 2)])
def test_a_new_head_hears_the_previous_token_as_the_vanilla_one_does(kind, start):
    """Whatever h_k is, of which the gated head hears a little (normal weights of 0.02)."""
    config = replace(tiny_drafter().config, markov_kind=kind)
    params = init_params(config, jax.random.key(0))
    ids = jnp.asarray([[1, 5, 2], [7, 7, 0]])
    hidden = jax.random.normal(jax.random.key(1), (config.hidden_size, *ids.shape))
    vectors = teacher_forced_vectors(params, config, ids, hidden)
    embedded = previous_embedding(params, ids.reshape(-1)).reshape(-1, *ids.shape)
    np.testing.assert_allclose(vectors, start(embedded), rtol=0.2 if kind == "gated" else 1e-6)
    assert float(jnp.std(vectors)) > 0.005
