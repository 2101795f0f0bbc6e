"""Finds a mesh on which a program fits: few candidates in order of how little they communicate, cheap checks first.

Copies of everything need no communication but of gradients, `fsdp` brings weights together once a layer, `tensor` sums
activations several times a layer: so they are tried in this order. What arguments and gradients need on a device is
known without compiling; how much else there is, is learnt from the candidates that the compiler has refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dspark_jax.profiling.aot_report import GIB, ProgramReport, mesh_text
from dspark_jax.sharding import MeshShape

logger = logging.getLogger(__name__)
TRIES = 5  # compilations of one search


@dataclass(frozen=True)
class Candidate:
    """A mesh (its `data` is never 0), micro-batches of a train step (1 for others), and whether it keeps less."""

    mesh: MeshShape
    micro_batches: int = 1
    remat: bool = False

    @property
    def axes(self) -> dict[str, int]:
        """Devices by axis."""
        return {"data": self.mesh.data, "fsdp": self.mesh.fsdp, "tensor": self.mesh.tensor}

    def __str__(self) -> str:
        text = mesh_text(self.axes, self.micro_batches if self.micro_batches > 1 else 0)
        return text + (" --remat" if self.remat else "")


def meshes(devices: int) -> Iterator[MeshShape]:
    """Every way to spread a number of devices over the three axes by powers of two: `tensor` small, then `fsdp`."""
    tensor = 1
    while tensor <= min(devices, 8):
        fsdp = 1
        while tensor * fsdp <= devices:
            if devices % (tensor * fsdp) == 0:
                yield MeshShape(devices // (tensor * fsdp), fsdp, tensor)
            fsdp *= 2
        tensor *= 2


def train_candidates(devices: int, batch_size: int, remat: bool, micro_batches: int = 0) -> list[Candidate]:
    """Meshes for a train step, in the order to try.

    Args:
        batch_size: N. remat: the run's own choice; where it is off, the same meshes follow with it.
        micro_batches: M; 0: as many as leave each device one sequence at a time.
    """
    found = []
    for keeps_less in (False, True)[remat:]:
        for mesh in meshes(devices):
            passes = micro_batches or max(batch_size // (mesh.data * mesh.fsdp), 1)
            found.append(Candidate(mesh, passes, keeps_less))
    return found


def decode_candidates(devices: int) -> list[Candidate]:
    """Meshes for the speculative step: `fsdp` would bring all weights together in every step, so it stays 1."""
    return [Candidate(mesh) for mesh in meshes(devices) if mesh.fsdp == 1]


def search(
    candidates: Sequence[Candidate],
    least: Callable[[Candidate], int],
    compile_one: Callable[[Candidate], ProgramReport],
    hbm: int | None,
    tries: int = TRIES,
) -> tuple[Candidate | None, list[ProgramReport]]:
    """The first candidate that fits, and the reports of all that were compiled (the last is the found one's).

    Args:
        least: bytes on a device that a candidate needs for sure; raises ValueError where its mesh does not divide.
        compile_one: compiles a candidate. hbm: bytes of a device, None: not limited. tries: compilations at most.
    """
    reports: list[ProgramReport] = []
    beside: dict[tuple[int, bool], int] = {}  # (tensor, remat) -> bytes beside those, as last seen
    for candidate in candidates:
        if len(reports) == tries:
            break
        try:
            sure = least(candidate)
        except ValueError as error:
            logger.debug("%s: %s", candidate, error)
            continue
        expected = sure + _expected(beside, candidate)
        if hbm is not None and expected > hbm:
            logger.info("%s: not tried, would need %.2f GiB at least", candidate, expected / GIB)
            continue
        report = compile_one(candidate)
        reports.append(report)
        verdict = "fits" if report.fits else "does not fit"
        logger.info("%s: %s, %.2f GiB", candidate, verdict, report.needed / GIB)
        if report.fits:
            return candidate, reports
        beside[candidate.mesh.tensor, candidate.remat] = max(report.needed - sure, 0)
    return None, reports


def _expected(beside: dict[tuple[int, bool], int], candidate: Candidate) -> int:
    """What a candidate needs beside what is sure, at least: as others did, in equal parts over more of `tensor`."""
    tensor = candidate.mesh.tensor
    known = [
        n * other // tensor for (other, remat), n in beside.items() if remat == candidate.remat and other <= tensor
    ]
    return min(known, default=0)
