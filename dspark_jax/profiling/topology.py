"""The machines that a program can be compiled for without having them: TPU topologies, and this host's CPU devices."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dspark_jax.config import one_line

_GIB = 1 << 30
_FORM = re.compile(r"(\w+):(\d+(?:x\d+){0,2})")
# libtpu looks for a TPU unless it is told what to expect; none is touched here. The first needs no lock file either, so
# that several compilations can run at once, beside a program that uses the TPU.
_LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(frozen=True)
class Chip:
    """A TPU chip, which JAX shows as one device.

    Attributes:
        hbm: bytes of memory that the compiler gives to programs. flops: bfloat16 FLOP/s at most. bandwidth: of the
            memory, bytes/s. links: bytes/s that it sends to its neighbours, over all links, at most. clock: Hz.
    """

    hbm: int
    flops: float
    bandwidth: float
    links: float
    clock: float


# FLOP/s, memory and link bandwidths: Google Cloud's pages "TPU v5e", "TPU v5p", "TPU v6e" (docs.cloud.google.com/tpu),
# which give links in both directions together; half of that is sent. Memory: what libtpu 0.0.52 says it has when a
# program does not fit (the pages say 16 GB, 95 GB, 32 GB). Clock: FLOP/s by the FLOPs of a cycle.
CHIPS = {
    "v5e": Chip(int(15.75 * _GIB), 197e12, 819e9, 200e9, 1.5e9),
    "v5p": Chip(int(95.73 * _GIB), 459e12, 2765e9, 600e9, 1.75e9),
    "v6e": Chip(int(31.24 * _GIB), 918e12, 1638e9, 400e9, 1.75e9),
}


@dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
        name: as it was asked for. platform: "tpu" or "cpu". devices: in JAX's order. chip: None for a CPU.
    """

    name: str
    platform: str
    devices: Sequence[Any]
    chip: Chip | None


def parse_topology(name: str) -> tuple[str, tuple[int, ...]]:
    """The kind ("v5e", "v5p", "v6e" or "cpu") and the extents of a topology's name.

    Raises:
        ValueError: an unknown kind, or extents that such machines do not have.
    """
    right = "right would be v5e:2x4, v6e:8x8 (two extents), v5p:4x4x8 (three), or cpu:8 (a number of devices)"
    form = _FORM.fullmatch(name)
    if form is None or form[1] not in (*CHIPS, "cpu"):
        raise ValueError(f"topology {name!r}: unknown; {right}")
    extents = tuple(int(n) for n in form[2].split("x"))
    if len(extents) != {"cpu": 1, "v5p": 3}.get(form[1], 2) or 0 in extents:
        raise ValueError(f"topology {name!r}: these extents cannot be; {right}")
    return form[1], extents


def open_topology(name: str) -> Topology:
    """The devices of a topology; for TPUs libtpu is loaded, which needs no TPU.

    Raises:
        ValueError: unknown, or refused by libtpu; more CPU devices than this process has; libtpu is not installed.
    """
    kind, extents = parse_topology(name)
    if kind == "cpu":
        return Topology(name, "cpu", _cpu_devices(extents[0]), None)
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ValueError(f"topology {name!r}: needs the compiler for TPUs, which is not installed: pip install libtpu")
    from jax.experimental import topologies

    for key, value in _LIBTPU.items():
        os.environ.setdefault(key, value)
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"topology {name!r}: libtpu refuses it: {one_line(error)}") from error
    return Topology(name, "tpu", tuple(described.devices), CHIPS[kind])


def _cpu_devices(count: int) -> Sequence[Any]:
    """`count` virtual devices of this host; only a process that has not used JAX yet can still make them."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            pass  # JAX is in use: what devices there are is all there will be
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"topology cpu:{count}: this process has {len(devices)} CPU devices; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before it starts"
        )
    return tuple(devices[:count])
