"""Serving on a mesh of eight devices gives the tokens of one: tensor-parallel weights, requests spread over devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.decoding import batching, resize
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import init_params as init_drafter
from dspark_jax.models.config import RopeConfig, TransformerConfig
from dspark_jax.models.transformer import init_params
from dspark_jax.sharding import MeshShape, make_mesh, put, shardings

VOCAB = 32
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(),
    "qk_norm": True,
    "family": "qwen3",
    "max_positions": 96,
}
TARGET = TransformerConfig(vocab_size=VOCAB, num_layers=2, tie_embeddings=False, num_tokens=VOCAB, **SIZES)
DRAFTER = DrafterConfig(
    block_size=3, num_layers=1, target_layer_ids=(0,), mask_token_id=VOCAB - 1, vocab_size=VOCAB,
    draft_vocab_size=VOCAB, markov_rank=4, markov_kind="vanilla", confidence=True, confidence_with_markov=True,
    shares_embeddings=True, num_target_layers=2, **SIZES,
)  # fmt: skip
RNG = np.random.default_rng(4)
REQUESTS = [
    Request(str(i), tuple(RNG.integers(0, VOCAB - 1, n).tolist()), SamplingParams(i % 2, seed=i, max_tokens=14))
    for i, n in enumerate((1, 7, 20, 40, 3, 12))
]


def models() -> tuple[Any, Any]:
    target = jax.jit(init_params, static_argnames="config")(TARGET, jax.random.key(0))
    target["head"] = target["head"] * 3.0
    drafter = jax.tree.map(
        lambda x: x if x.ndim == 1 else np.asarray(RNG.normal(size=x.shape) * 0.3, np.float32),
        init_drafter(DRAFTER, jax.random.key(1)),
    )
    return target, drafter


def answers(generator: Generator) -> dict[str, list[int]]:
    engine = Engine(generator, rounds=2)
    engine.batch.least_mode = "plain"  # one program serves all requests
    with engine:
        submitted = [engine.submit(request) for request in REQUESTS]
        return {answer.request.id: answer.result(300).token_ids for answer in submitted}


@pytest.mark.parametrize("schedule", ["causal"])
def test_a_mesh_gives_the_tokens_of_one_device(schedule: str) -> None:
    """Data 2, tensor 4: greedy and seeded requests, prompts in chunks, slots that grow."""
    target, drafter = models()
    options: dict[str, Any] = {
        "batch_size": 8, "slot_sizes": (2, 8), "schedule": schedule, "stop_ids": (), "prefill_chunk": 32,
    }  # fmt: skip

    def on(params: Any, mesh: Any) -> Any:
        return params if mesh is None else put(params, shardings(params, mesh))

    def generator(mesh: Any) -> Generator:
        one = SimpleNamespace(config=TARGET, params=on(target, mesh))
        two = SimpleNamespace(config=DRAFTER, params=on(drafter, mesh))
        return Generator(one, two, mesh=mesh, **options)

    alone = answers(generator(None))
    mesh = make_mesh(MeshShape(2, 1, 4), jax.devices()[:8])
    spread = generator(mesh)
    assert answers(spread) == alone
    before = [kind._cache_size() for kind in (batching.run_many, batching.run_admit, resize._resized)]
    assert answers(spread) == alone  # and nothing is placed, and so compiled, differently the second time
    assert [kind._cache_size() for kind in (batching.run_many, batching.run_admit, resize._resized)] == before
    batch = batching.Batch(spread, "plain")
    with spread.in_mesh():
        for request in REQUESTS:
            batch.add(request)
        batch.advance(1)
        caches = batch.state.target_cache[0].keys
        assert len(caches.sharding.device_set) == 8 and not caches.is_fully_replicated
        assert caches.addressable_shards[0].data.shape[0] == caches.shape[0] // 8
