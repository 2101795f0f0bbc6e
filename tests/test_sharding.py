"""The mesh, the table of axes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dspark_jax.checkpoints.hf import read_hf_config
from dspark_jax.drafters.interface import init_params
from dspark_jax.models import transformer
from dspark_jax.sharding import MeshShape, check_mesh, constrain, make_mesh, put, shardings
from dspark_jax.training.optimizer import make_optimizer
from dspark_jax.training.settings import drafter_config
from tests.training.tiny_run import SHAPE, TARGETS

CONFIG = read_hf_config(TARGETS / "llama_tied")
DRAFTER = drafter_config(SHAPE, CONFIG)


def test_parameters_are_cut_as_the_table_says() -> None:
    mesh = make_mesh(MeshShape(2, 2, 2))
    params = transformer.init_params(CONFIG, jax.random.key(0))
    placed = put(params, shardings(params, mesh))
    specs = jax.tree.map(lambda x: x.sharding.spec, placed)
    assert specs["embed"] == P("tensor", "fsdp")
    assert specs["layers"][0]["qkv"] == P("tensor", None, None, "fsdp")
    assert specs["layers"][0]["o"] == P("fsdp", "tensor", None, None)
    assert specs["layers"][0]["gate_up"] == P(None, "tensor", "fsdp")
    assert specs["layers"][0]["down"] == P("fsdp", "tensor")
    assert placed["final_norm"].sharding.is_fully_replicated
    assert placed["layers"][0]["down"].addressable_shards[0].data.size * 4 == placed["layers"][0]["down"].size
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_moments_lie_where_their_parameters_lie() -> None:
    mesh = make_mesh(MeshShape(1, 4, 2))
    params = jax.eval_shape(lambda: init_params(DRAFTER, jax.random.key(0), jnp.float32))
    state = jax.eval_shape(make_optimizer(1e-3).init, params)
    found = {s.spec for s in jax.tree.leaves(shardings(state, mesh))}
    want = {s.spec for s in jax.tree.leaves(shardings(params, mesh))}
    assert want <= found | {P()} and P("tensor", "fsdp") in found


def test_every_large_parameter_is_in_the_table() -> None:
    """Nothing that has the size of a matrix is held whole by every device."""
    mesh = make_mesh(MeshShape(2, 2, 2))
    for kind in ("vanilla", "gated", "rnn"):
        shape = replace(SHAPE, markov_kind=kind, draft_vocab_size=0)
        params = jax.eval_shape(lambda shape=shape: init_params(drafter_config(shape, CONFIG), jax.random.key(0)))
        for (path, leaf), where in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings(params, mesh)), strict=True
        ):
            small = leaf.size <= 3 * SHAPE.markov_rank * (2 * SHAPE.markov_rank + CONFIG.hidden_size)
            assert small or not where.is_fully_replicated, jax.tree_util.keystr(path)


def test_without_a_mesh_nothing_is_constrained() -> None:
    x = jnp.ones((4, 6))
    assert constrain(x, "vocab", "batch") is x


def test_a_shape_fills_the_devices() -> None:
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(MeshShape(fsdp=2, tensor=2)).shape) == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize("shape", [MeshShape(data=3), MeshShape(fsdp=3), MeshShape(2, 2, 4), MeshShape(tensor=16)])
def test_a_mesh_that_does_not_divide_the_devices(shape: MeshShape) -> None:
    with pytest.raises(ValueError, match="does not divide the 8 devices"):
        make_mesh(shape)


@pytest.mark.parametrize("field", ["data", "fsdp", "tensor"])
def test_negative_sizes(field: str) -> None:
    with pytest.raises(ValueError, match=rf"mesh\.{field} -1"):
        MeshShape(**{field: -1})


def test_what_does_not_divide_the_models_or_the_batch() -> None:
    check_mesh(make_mesh(MeshShape(2, 2, 2)), CONFIG, DRAFTER, 8, 2)
    with pytest.raises(ValueError, match="mesh.tensor 4: does not divide the target's num_kv_heads 2"):
        check_mesh(make_mesh(MeshShape(2, 1, 4)), CONFIG)
    with pytest.raises(ValueError, match="mesh.fsdp 8: does not divide the drafter's markov_rank 12"):
        check_mesh(make_mesh(MeshShape(1, 8, 1)), CONFIG, replace(DRAFTER, markov_rank=12))
    with pytest.raises(ValueError, match="batch_size 12: must be a multiple of data 2 x fsdp 2 x micro_batches 2"):
        check_mesh(make_mesh(MeshShape(2, 2, 2)), CONFIG, DRAFTER, 12, 2)


def test_a_single_kv_head_is_whole() -> None:
    gemma = read_hf_config(TARGETS / "gemma4")
    mesh = make_mesh(MeshShape(2, 2, 2))
    check_mesh(mesh, gemma)
    params = jax.eval_shape(lambda: transformer.init_params(gemma, jax.random.key(0)))
    places = shardings(params, mesh)["layers"]
    assert places[2]["qkv"].spec == P(None, None, None, "fsdp") and places[0]["qkv"].spec[0] == "tensor"
