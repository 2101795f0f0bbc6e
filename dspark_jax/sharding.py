"""Where arrays lie on a mesh: one table names the axes of every parameter, another maps names to mesh axes.

The mesh has the axes `data` (copies of everything, each with its own sequences), `fsdp` (sequences too, and parameters,
gradients and optimizer state cut along one dimension; a layer's weights are brought together while it runs) and
`tensor` (heads, MLP columns and vocabulary rows cut, activations whole). One program serves every mesh: arrays carry a
`NamedSharding`, `constrain` states where intermediate values lie, and the compiler adds the communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

# logical axis -> mesh axes; an axis that is not named here is never cut
RULES: dict[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
}

# parameter -> its logical axes; one that is not named here (norms, biases, small heads) is whole everywhere
PARAMETERS: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "embed"),
    "head": ("vocab", "embed"),
    "qkv": ("heads", None, None, "embed"),
    "q": ("heads", None, None, "embed"),
    "kv": ("heads", None, None, "embed"),
    "o": ("embed", "heads", None, None),
    "gate_up": (None, "mlp", "embed"),
    "down": ("embed", "mlp"),
    "fc": ("embed", None),
    "proj": ("embed", None),
    "w1": ("vocab", "embed"),
    "w2": ("vocab", "embed"),
}


@dataclass(frozen=True)
class MeshShape:
    """Devices along each axis of the mesh.

    Attributes:
        data: copies of the model, each with its share of the sequences; 0: as many as the other axes leave.
        fsdp: parts that parameters, gradients and optimizer state are cut into; each has its share of the sequences.
        tensor: parts that heads, MLP columns and vocabulary rows are cut into; they share their sequences.
    """

    data: int = 0
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, low in (("data", 0), ("fsdp", 1), ("tensor", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"mesh.{name} {getattr(self, name)}: must be at least {low}")


def make_mesh(shape: MeshShape | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes `data`, `fsdp`, `tensor` over the devices (all of this run by default).

    Neighbouring devices share `tensor`, then `fsdp`, which talk most.

    Raises:
        ValueError: the axes do not multiply to the number of devices.
    """
    shape = shape or MeshShape()
    devices = list(jax.devices() if devices is None else devices)
    inner = shape.fsdp * shape.tensor
    data = shape.data or max(len(devices) // inner, 1)
    if data * inner != len(devices):
        wanted = f"data {shape.data or '(the rest)'} x fsdp {shape.fsdp} x tensor {shape.tensor}"
        fits = ", ".join(str(n) for n in range(1, len(devices) + 1) if len(devices) % n == 0)
        raise ValueError(
            f"mesh {wanted}: does not divide the {len(devices)} devices; fsdp x tensor must be one of {fits}, and data "
            f"x fsdp x tensor {len(devices)}"
        )
    grid = (data, shape.fsdp, shape.tensor)
    if len(devices) > 1 and getattr(devices[0], "platform", "") == "tpu":
        from jax.experimental import mesh_utils  # knows the torus

        return Mesh(mesh_utils.create_device_mesh(grid, devices, allow_split_physical_axes=True), AXES)
    return Mesh(np.asarray(devices).reshape(grid), AXES)


def spec_of(
    logical: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int], whole: Sequence[str] = ()
) -> PartitionSpec:
    """The partition of an array.

    Args:
        logical: names of its axes. shape: its sizes; an axis that the mesh does not divide is not cut (`check_mesh` has
            refused those that matter: what is left are single KV heads). sizes: devices along each axis of the mesh.
        whole: mesh axes along which nothing is cut.
    """
    parts: list[str | tuple[str, ...] | None] = []
    for name, size in zip(logical, shape, strict=True):
        part = RULES.get(name) if name else None
        devices = math.prod(sizes[axis] for axis in ((part,) if isinstance(part, str) else part or ()))
        parts.append(None if part in whole or size % devices else part)
    return PartitionSpec(*parts)


def active() -> bool:
    """Whether what is traced now is for a mesh of more than one device (`jax.set_mesh`)."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def axis_size(*axes: str) -> int:
    """Devices along mesh axes, together, of the mesh that is traced for; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes) if active() else 1


def constrain(x: jax.Array, *logical: str | None, whole: Sequence[str] = ()) -> jax.Array:
    """States how `x` lies on the mesh in context, by its axes' logical names; `x` itself without a mesh.

    `whole`: mesh axes along which it is not cut.
    """
    if not active():
        return x
    sizes = jax.sharding.get_abstract_mesh().shape
    return jax.lax.with_sharding_constraint(x, spec_of(logical, x.shape, sizes, whole))


def gathered(params: Any) -> Any:
    """Parameters whole along `fsdp`, as products need them: a copy on each device for as long as it is used.

    Their gradients go back to where the parameters are kept, so that devices exchange sums of their own parts only.
    """
    if not active():
        return params
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _gather(leaf, _logical(path, leaf)), params)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(leaf: jax.Array, logical: tuple[str | None, ...]) -> jax.Array:
    return constrain(leaf, *logical, whole=("fsdp",))


def _gather_forward(leaf: jax.Array, logical: tuple[str | None, ...]) -> tuple[jax.Array, None]:
    return _gather(leaf, logical), None


def _gather_backward(logical: tuple[str | None, ...], saved: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (constrain(cotangent, *logical),)


_gather.defvjp(_gather_forward, _gather_backward)


def stored(params: Any) -> Any:
    """Parameters or their gradients as they are kept: cut along `fsdp` too."""
    if not active():
        return params
    return jax.tree_util.tree_map_with_path(lambda path, leaf: constrain(leaf, *_logical(path, leaf)), params)


def _logical(path: Any, leaf: Any) -> tuple[str | None, ...]:
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    axes = PARAMETERS.get(names[-1], ()) if names else ()
    return axes if len(axes) == len(leaf.shape) else (None,) * len(leaf.shape)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A `NamedSharding` for each leaf of a pytree of parameters, or of anything made of such (optimizer states too).

    Args:
        tree: arrays or abstract values; the last dict key on the way to a leaf is its name in `PARAMETERS`.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_of(_logical(path, leaf), leaf.shape, mesh.shape)),
        tree,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on each device."""
    return NamedSharding(mesh, PartitionSpec())


def put(tree: Any, places: Any) -> Any:
    """Arrays of this host as global ones; in runs of several processes each gives the pieces of its own devices.

    Args:
        tree: arrays, whole (at least where this process's devices need them). places: a `NamedSharding` for each leaf.
    """

    def place(leaf: Any, where: NamedSharding) -> jax.Array:
        if where.is_fully_addressable:
            return jax.device_put(leaf, where)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    return jax.tree.map(place, tree, places)


def abstract(tree: Any, places: Any) -> Any:
    """Abstract values with shardings, for compilation ahead of time."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, places)


class Layers(Protocol):
    """What `check_mesh` asks of a config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def check_mesh(
    mesh: Mesh, target: Layers, drafter: Layers | None = None, batch_size: int = 0, micro_batches: int = 1
) -> None:
    """Refuses a mesh that does not divide what it cuts.

    Args:
        batch_size: N, sequences of an update, and micro_batches: M passes that they are split into; 0: no training.

    Raises:
        ValueError: names the axis of the mesh, the size that it does not divide, and what would be right.
    """
    sizes = dict(mesh.shape)
    pairs = [(who, config) for who, config in (("target", target), ("drafter", drafter)) if config is not None]
    for who, config in pairs:
        kinds = {getattr(config, "num_kv_heads", 0)}
        if who == "target" and hasattr(config, "attention"):
            kinds = {config.attention(i).num_kv_heads for i in range(config.num_layers)}  # type: ignore[attr-defined]
        cuts = [("tensor", "num_kv_heads", heads) for heads in sorted(kinds)]
        cuts += [("tensor", "intermediate_size", config.intermediate_size), ("tensor", "vocab_size", config.vocab_size)]
        draft = getattr(config, "draft_vocab_size", 0)
        cuts += [("tensor", "draft_vocab_size", draft)] if draft else []
        cuts.append(("fsdp", "hidden_size", config.hidden_size))
        if getattr(config, "markov_rank", 0):
            cuts.append(("fsdp", "markov_rank", config.markov_rank))  # type: ignore[attr-defined]
        for axis, name, size in cuts:
            if size % sizes[axis] and size > 1:  # a single KV head, with its queries, is whole on every device
                fits = [n for n in range(1, min(size, mesh.size) + 1) if size % n == 0]
                raise ValueError(
                    f"mesh.{axis} {sizes[axis]}: does not divide the {who}'s {name} {size}; of up to {mesh.size} "
                    f"devices {', '.join(map(str, fits))} would"
                )
    shares = sizes["data"] * sizes["fsdp"]
    if batch_size and batch_size % (shares * micro_batches):
        raise ValueError(
            f"batch_size {batch_size}: must be a multiple of data {sizes['data']} x fsdp {sizes['fsdp']} x "
            f"micro_batches {micro_batches} = {shares * micro_batches} sequences"
        )
