"""Where a batch lies on a mesh: requests are split over `data` and `fsdp`; caches over `tensor` too, by requests.

Weights are cut along `tensor` (heads, MLP columns, vocabulary rows), so products of a step run on all devices; each
device then attends for its own requests. A cache is never copied, whatever the number of KV heads.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax import sharding

Array = jax.Array


def spec_for(shape: tuple[int, ...], requests: int, sizes: Any) -> PartitionSpec:
    """The partition of an array whose first axis is R requests, or R times something.

    Args:
        shape: of the array. requests: R. sizes: devices along each axis of the mesh.
    """
    shares = sizes["data"] * sizes["fsdp"]
    if not shape or requests % shares or shape[0] % requests:
        return PartitionSpec()
    everywhere = len(shape) > 2 and requests % (shares * sizes["tensor"]) == 0
    return PartitionSpec(sharding.AXES if everywhere else sharding.RULES["batch"])


def places(state: Any, requests: int, mesh: Mesh) -> Any:
    """A `NamedSharding` for each leaf of a state of R requests."""
    return jax.tree.map(lambda x: NamedSharding(mesh, spec_for(x.shape, requests, mesh.shape)), state)


def placed(tree: Any, requests: int) -> Any:
    """Inside a program: `tree` of R requests as `places` says, on the mesh in context; as it is without one."""
    if not sharding.active():
        return tree
    sizes = jax.sharding.get_abstract_mesh().shape
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec_for(x.shape, requests, sizes)), tree)
