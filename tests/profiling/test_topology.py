"""Names of topologies, the devices behind them, and the errors of those that cannot be."""

from __future__ import annotations

import importlib.util

import jax
import pytest

from dspark_jax.profiling.topology import CHIPS, open_topology, parse_topology


@pytest.mark.parametrize(
    ("name", "kind", "extents"),
    [("v5e:2x4", "v5e", (2, 4)), ("v5p:4x4x8", "v5p", (4, 4, 8)), ("v6e:8x8", "v6e", (8, 8)), ("cpu:8", "cpu", (8,))],
)
def test_names(name: str, kind: str, extents: tuple[int, ...]) -> None:
    assert parse_topology(name) == (kind, extents)


@pytest.mark.parametrize(
    "name",
    ["", "v5e", "v5e:", "v9z:2x4", "v5e-8", "v5e:2", "v5e:2x2x2", "v5p:4x4", "v6e:0x4", "cpu:2x2", "cpu:0", "tpu:8"],
)
def test_bad_names_are_told_with_good_ones(name: str) -> None:
    with pytest.raises(ValueError, match="right would be v5e:2x4") as caught:
        parse_topology(name)
    assert repr(name) in str(caught.value)


def test_cpu_devices() -> None:
    """The first ones of this process; more than there are cannot be had any more."""
    topology = open_topology("cpu:4")
    assert list(topology.devices) == jax.devices("cpu")[:4]
    assert (topology.platform, topology.chip) == ("cpu", None)
    with pytest.raises(ValueError, match="cpu:64: this process has 8 CPU devices; set XLA_FLAGS=.*=64"):
        open_topology("cpu:64")


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ValueError, match="pip install libtpu"):
        open_topology("v5e:2x4")


def test_chips_are_told_apart() -> None:
    """Public figures, in bytes and bytes per second: a slip of a unit would be a factor of ten and more."""
    for chip in CHIPS.values():
        assert 15 < chip.hbm / 2**30 < 100
        assert 100e12 < chip.flops < 1e15 and 500e9 < chip.bandwidth < 3e12 and 100e9 < chip.links < 1e12
        assert 80e3 < chip.flops / chip.clock < 600e3
