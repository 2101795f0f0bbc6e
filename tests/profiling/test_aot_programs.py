"""Abstract values of the programs: what they are made of is what a run makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.data.pipeline import HostBatch
from dspark_jax.data.quantized import quantize, scale_group
from dspark_jax.decoding.state import init_state
from dspark_jax.drafters.interface import bind, init_params
from dspark_jax.models import transformer
from dspark_jax.models.config import TransformerConfig
from dspark_jax.profiling.aot_programs import DecodeJob, TrainJob, device_bytes
from dspark_jax.sharding import MeshShape, make_mesh
from dspark_jax.training.optimizer import cosine_schedule, make_optimizer
from dspark_jax.training.settings import DrafterSettings, TrainSettings, drafter_config
from dspark_jax.training.step import init_state as init_train_state
from dspark_jax.training.step import make_frozen, place_batch, place_frozen

TARGET = TransformerConfig.from_hf(
    {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
)
BLOCK = DrafterSettings(block_size=3, num_layers=1, target_layer_ids=(0, 1), mask_token_id=63, markov_rank=8)
EAGLE = DrafterSettings(kind="eagle3", block_size=3, target_layer_ids=(0, 1), draft_vocab_size=32)


def settings(**changed: Any) -> TrainSettings:
    return TrainSettings(states="online", drafter=BLOCK, batch_size=8, num_anchors=4, max_length=16, **changed)


def shapes(tree: Any) -> list[tuple[Any, ...]]:
    """Shape, dtype and sharding of each leaf."""
    return [(x.shape, np.dtype(x.dtype), x.sharding) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("drafter", [BLOCK, EAGLE], ids=["block", "eagle3"])
@pytest.mark.parametrize("kind", ["online", "auto", "int8"])
def test_a_train_step_is_called_with_what_a_run_makes(drafter: DrafterSettings, kind: str) -> None:
    """State, frozen parameters and batch of a real run have the same shapes, dtypes and places."""
    states = {"online": {"states": "online"}}.get(kind, {"states": "cache", "cache_kind": kind})
    run = replace(settings(ema=0.9), drafter=drafter, **states)
    config = drafter_config(drafter, TARGET)
    mesh = make_mesh(MeshShape(2, 2, 2), jax.devices()[:8])
    state, frozen, batch, epoch = TrainJob(run, TARGET, config, jnp.float32).arguments(mesh, 2)

    schedule = cosine_schedule(peak=1e-3, total=10, warmup_ratio=0.1)
    optimizer = make_optimizer(schedule, max_norm=1.0, weight_decay=0.0)
    assert shapes(state) == shapes(init_train_state(config, optimizer, 0, True, mesh))
    target = transformer.init_params(TARGET, jax.random.key(0))
    d2t = np.zeros(32, np.int32) if drafter is EAGLE else None
    assert shapes(frozen) == shapes(place_frozen(make_frozen(target, d2t, kind == "online"), mesh))
    host = HostBatch(np.zeros((8, 16), np.int32), np.zeros((8, 16), np.uint8), np.zeros((8, 1), np.uint32))
    if kind != "online":
        parts: list[Any] = [np.zeros((8, 16, width), np.float32) for width in (64, 32)]
        if kind == "int8":
            parts = [quantize(part, kind, scale_group(32)) for part in parts]
        host = host._replace(features=parts[0], final=parts[1], normalizer=np.zeros((8, 16), np.float32))
    assert shapes(batch) == shapes(place_batch(host, mesh, 2))
    assert (epoch.shape, epoch.dtype) == ((), jnp.int32)


@pytest.mark.parametrize("drafter", [BLOCK, EAGLE], ids=["block", "eagle3"])
def test_a_decoding_step_has_each_array_once(drafter: DrafterSettings) -> None:
    """The drafter's own arrays and the target's are all that a generator binds together; the state is a real one's."""
    config = drafter_config(drafter, TARGET)
    mesh = make_mesh(MeshShape(2, 1, 2), jax.devices()[:4])
    job = DecodeJob(TARGET, config, jnp.bfloat16, requests=4, context=32)
    target, own, state = job.arguments(mesh)
    real_target = transformer.init_params(TARGET, jax.random.key(0), jnp.bfloat16)
    trained = init_params(config, jax.random.key(1), jnp.bfloat16)
    if drafter is EAGLE:
        trained["d2t"] = jnp.zeros(32, jnp.int32)
    bound = bind(trained, real_target["embed"], real_target["head"])
    borrowed = {"embed"} if drafter is EAGLE else {"embed", "head"}

    def sizes(tree: Any) -> list[Any]:
        return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]

    assert sizes(target) == sizes(real_target)
    assert sizes(own) == sizes({name: part for name, part in bound.items() if name not in borrowed})
    assert sizes(state) == sizes(init_state(job._program, 4, 32))
    assert job.buckets == (4, 8, 16)


def test_bytes_of_a_device() -> None:
    """Cut arrays count their parts, others whole; by hand for one of each."""
    mesh = make_mesh(MeshShape(2, 2, 2), jax.devices()[:8])
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp"), "tensor"))
    values = [
        jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=cut),
        jax.ShapeDtypeStruct((3,), jnp.bfloat16),
        jax.ShapeDtypeStruct((), jnp.int32),
    ]
    assert device_bytes(values) == 2 * 3 * 4 + 3 * 2 + 4


def test_meshes_that_do_not_divide() -> None:
    config = drafter_config(BLOCK, TARGET)
    mesh = make_mesh(MeshShape(2, 1, 4), jax.devices()[:8])
    with pytest.raises(ValueError, match="mesh.tensor 4: does not divide the target's num_kv_heads 2"):
        TrainJob(settings(), TARGET, config, jnp.float32).check(mesh, 1)
    mesh = make_mesh(MeshShape(8, 1, 1), jax.devices()[:8])
    with pytest.raises(ValueError, match="batch_size 8: must be a multiple of"):
        TrainJob(settings(), TARGET, config, jnp.float32).check(mesh, 2)
    with pytest.raises(ValueError, match="requests 4: must be a multiple of data x fsdp = 8"):
        DecodeJob(TARGET, config, jnp.float32, 4, 32).check(mesh)
