"""Which meshes are tried, in which order, and when the compiler is asked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.profiling.aot_report import GIB, Memory, ProgramReport, Times
from dspark_jax.profiling.mesh_search import Candidate, decode_candidates, meshes, search, train_candidates
from dspark_jax.sharding import MeshShape


@given(st.integers(1, 300))
def test_meshes_use_every_device(devices: int) -> None:
    """Each once, all devices in each; copies of everything come first, `tensor` is at most 8."""
    found = list(meshes(devices))
    assert found[0] == MeshShape(devices, 1, 1)
    assert len(set(found)) == len(found)
    assert all(math.prod((m.data, m.fsdp, m.tensor)) == devices and m.tensor <= 8 for m in found)
    assert [m.tensor for m in found] == sorted(m.tensor for m in found)


def test_candidates_of_a_train_step() -> None:
    """A device has one sequence at a time, or the micro-batches that were asked for; remat comes last."""
    found = train_candidates(8, 512, remat=False)
    assert [str(c) for c in found[:5]] == [
        "--mesh.data 8 --mesh.fsdp 1 --mesh.tensor 1 --micro-batches 64",
        "--mesh.data 4 --mesh.fsdp 2 --mesh.tensor 1 --micro-batches 64",
        "--mesh.data 2 --mesh.fsdp 4 --mesh.tensor 1 --micro-batches 64",
        "--mesh.data 1 --mesh.fsdp 8 --mesh.tensor 1 --micro-batches 64",
        "--mesh.data 4 --mesh.fsdp 1 --mesh.tensor 2 --micro-batches 128",
    ]
    half = len(found) // 2
    assert [c.remat for c in found] == [False] * half + [True] * half
    assert str(found[half]).endswith("--micro-batches 64 --remat")
    assert all(c.remat for c in train_candidates(8, 512, remat=True))
    assert {c.micro_batches for c in train_candidates(8, 512, remat=False, micro_batches=16)} == {16}


def test_candidates_of_decoding_keep_weights_together() -> None:
    shapes = [(c.mesh.data, c.mesh.fsdp, c.mesh.tensor) for c in decode_candidates(8)]
    assert shapes == [(8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8)]


class Compiler:
    """Arguments that halve with fsdp and tensor, and temporaries that halve with tensor; what it was asked for."""

    def __init__(self, weights: float, temporaries: float, gives_up: bool = False, hbm: int | None = 16 * GIB) -> None:
        self.weights, self.temporaries, self.gives_up, self.hbm = weights, temporaries, gives_up, hbm
        self.asked: list[str] = []

    def arguments(self, candidate: Candidate) -> int:
        if candidate.mesh.tensor > 4:
            raise ValueError("mesh.tensor 8: does not divide")
        return int(self.weights * GIB / candidate.mesh.fsdp / candidate.mesh.tensor)

    def __call__(self, candidate: Candidate) -> ProgramReport:
        self.asked.append("x".join(map(str, candidate.axes.values())))
        beside = int(self.temporaries * GIB / candidate.mesh.tensor / (2 if candidate.remat else 1))
        memory = Memory(self.arguments(candidate), 0, 0, beside, 0, 0)
        kept = None if self.gives_up and memory.total > 16 * GIB else memory
        return ProgramReport("train", candidate.axes, 1, self.hbm, memory.total, Times(1, 1), kept)


@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize(
    ("weights", "temporaries", "found", "asked"),
    [
        (4, 4, "8x1x1", ["8x1x1"]),  # all fits at once
        (20, 2, "4x2x1", ["4x2x1"]),  # too large as a whole: not compiled
        (24, 9.5, "2x4x1", ["4x2x1", "2x4x1"]),
        (24, 12.5, "1x8x1", ["4x2x1", "1x8x1"]),  # what the first try needed beside its arguments rules the second out
        (11.5, 20, "4x1x2", ["8x1x1", "4x1x2"]),  # more fsdp cannot help, tensor halves the rest
    ],
)
def test_few_compilations(gives_up: bool, weights: float, temporaries: float, found: str, asked: list[str]) -> None:
    compiler = Compiler(weights, temporaries, gives_up)
    candidate, reports = search(train_candidates(8, 64, False), compiler.arguments, compiler, 16 * GIB)
    assert candidate is not None and "x".join(map(str, candidate.axes.values())) == found
    assert compiler.asked == asked
    assert [report.fits for report in reports] == [False] * (len(asked) - 1) + [True]


def test_nothing_fits() -> None:
    """Then no candidate comes back; what one try showed is not tried again, nor more than the allowed number."""
    compiler = Compiler(8, 200)
    candidate, reports = search(train_candidates(8, 64, False), compiler.arguments, compiler, 16 * GIB)
    assert candidate is None
    assert compiler.asked == ["8x1x1", "8x1x1"], "one each with and without remat"
    assert len(reports) == 2
    slow = Compiler(20, 10)
    assert search(train_candidates(8, 64, False), slow.arguments, slow, 16 * GIB, tries=1)[0] is None
    assert slow.asked == ["4x2x1"]


def test_keeping_less_is_the_last_resort() -> None:
    """Where temporaries are too large on every mesh, remat is what helps."""
    compiler = Compiler(2, 70)
    candidate, _ = search(train_candidates(8, 64, False), compiler.arguments, compiler, 16 * GIB)
    assert candidate is not None and candidate.remat and candidate.mesh.tensor == 4


def test_without_a_limit_the_first_is_taken() -> None:
    compiler = Compiler(1000, 1000, hbm=None)
    candidate, reports = search(train_candidates(8, 64, False), compiler.arguments, compiler, None)
    assert candidate is not None and candidate.mesh == MeshShape(8)
    assert len(reports) == 1
