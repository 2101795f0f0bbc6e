"""What `dspark aot` compiles: each kind of program on the mesh that was given, or on one that is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dspark_jax.models.config import TransformerConfig
from dspark_jax.profiling import mesh_search
from dspark_jax.profiling.aot import compile_program
from dspark_jax.profiling.aot_programs import DecodeJob, TrainJob, device_bytes
from dspark_jax.profiling.aot_report import GIB, ProgramReport, Times
from dspark_jax.profiling.aot_settings import AotSettings
from dspark_jax.profiling.mesh_search import Candidate, decode_candidates, train_candidates
from dspark_jax.profiling.topology import Topology
from dspark_jax.sharding import MeshShape, make_mesh
from dspark_jax.training.settings import TrainSettings, drafter_config, resolve_dtype

_REQUESTS = 8  # of each device, where their number is not given


@dataclasses.dataclass
class Outcome:
    """Reports of one kind of program; where they do not fit, the candidate that would, if one was looked for and found.

    The last report is that of the program that needs most.
    """

    reports: list[ProgramReport]
    suggestion: Candidate | None = None
    searched: bool = False

    @property
    def fits(self) -> bool:
        """Whether all of them fit."""
        return all(report.fits for report in self.reports)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of program on any mesh.

    Attributes:
        name: for reports. candidates: meshes in the order to try. least: bytes on a device that are needed for sure,
            known without compiling; raises ValueError where the mesh does not divide. compile_one: compiles it.
        hbm: bytes of a device or None.
    """

    name: str
    candidates: Sequence[Candidate]
    least: Callable[[Candidate], int]
    compile_one: Callable[[Candidate], ProgramReport]
    hbm: int | None

    def outcome(self, given: Candidate | None, suggest: bool) -> Outcome:
        """Compiles the given candidate; where there is none, or it does not fit, looks for one that does.

        Raises:
            ValueError: the given mesh does not divide something; without one, that none of the meshes does.
        """
        first = None if given is None else self._report(given)
        if first is not None and (first.fits or not suggest):
            return Outcome([first])
        others = [candidate for candidate in self.candidates if candidate != given]
        found, tried = mesh_search.search(others, self.least, self.compile_one, self.hbm)
        if first is not None:
            return Outcome([first], found, searched=True)
        if found is not None:
            return Outcome(tried[-1:])
        best = min(tried, key=lambda report: report.needed) if tried else self._smallest()
        return Outcome([best], searched=True)

    def _report(self, candidate: Candidate) -> ProgramReport:
        """A candidate's report; it is not compiled where what it needs for sure is too much."""
        least = self.least(candidate)
        if self.hbm is not None and least > self.hbm:
            passes = candidate.micro_batches
            return ProgramReport(self.name, candidate.axes, passes, self.hbm, least, Times(0, 0))
        return self.compile_one(candidate)

    def _smallest(self) -> ProgramReport:
        """The report of the candidate that needs least, where not even that fits."""
        sizes, refused = [], []
        for candidate in self.candidates:
            try:
                sizes.append((self.least(candidate), candidate))
            except ValueError as error:
                refused.append(error)
        if not sizes:
            raise refused[0]
        return self._report(min(sizes, key=lambda pair: pair[0])[1])


def compile_train(
    settings: AotSettings, config: TrainSettings, target: TransformerConfig, topology: Topology
) -> Outcome:
    """The train step on the given mesh, or on one that is found.

    Raises:
        ValueError: drafter and target, or the mesh and their sizes, do not go together.
    """
    job = TrainJob(config, target, drafter_config(config.drafter, target), dtype_of(config, topology))
    hbm = memory_limit(settings, topology)
    passes = settings.micro_batches or (config.micro_batches if config.micro_batches > 1 else 0)
    axes = given_mesh(settings, config, topology)
    given = None
    if axes is not None:
        one_each = max(config.batch_size // (axes["data"] * axes["fsdp"]), 1)
        given = Candidate(MeshShape(**axes), passes or one_each, config.remat)

    def least(candidate: Candidate) -> int:  # arguments, and gradients
        mesh = make_mesh(candidate.mesh, topology.devices)
        job.check(mesh, candidate.micro_batches)
        arguments = job.arguments(mesh, candidate.micro_batches)
        return device_bytes(arguments) + device_bytes(arguments[0].params)

    def compile_one(candidate: Candidate) -> ProgramReport:
        mesh = make_mesh(candidate.mesh, topology.devices)
        name = "train, remat" if candidate.remat else "train"
        return compile_program(
            name,
            lambda: job.lower(mesh, candidate.micro_batches, candidate.remat),
            topology,
            candidate.axes,
            candidate.micro_batches,
            hbm,
        )

    candidates = train_candidates(len(topology.devices), config.batch_size, config.remat, passes)
    return Kind("train", candidates, least, compile_one, hbm).outcome(given, settings.suggest)


def compile_decode(
    settings: AotSettings, config: TrainSettings, target: TransformerConfig, topology: Topology
) -> Outcome:
    """The speculative step of every bucket, on the given mesh or on one where the largest bucket fits.

    Raises:
        ValueError: drafter and target, or the mesh and their sizes, do not go together.
    """
    drafter, dtype = drafter_config(config.drafter, target), dtype_of(config, topology)
    requests = settings.requests or _REQUESTS * len(topology.devices)
    job = DecodeJob(target, drafter, dtype, requests, settings.context, settings.sampling)
    hbm = memory_limit(settings, topology)
    axes = given_mesh(settings, config, topology) if settings.mesh.given else None
    given = None if axes is None else Candidate(MeshShape(**axes))

    def least(candidate: Candidate) -> int:
        mesh = make_mesh(candidate.mesh, topology.devices)
        job.check(mesh)
        return device_bytes(job.arguments(mesh))

    def compile_bucket(candidate: Candidate, bucket: int) -> ProgramReport:
        mesh = make_mesh(candidate.mesh, topology.devices)
        lower = lambda: job.lower(mesh, bucket)  # noqa: E731
        return compile_program(f"decode, {bucket} rows", lower, topology, candidate.axes, hbm=hbm)

    def compile_largest(candidate: Candidate) -> ProgramReport:
        return compile_bucket(candidate, job.buckets[-1])

    candidates = decode_candidates(len(topology.devices))
    outcome = Kind("decode", candidates, least, compile_largest, hbm).outcome(given, settings.suggest)
    if outcome.fits:
        used = Candidate(MeshShape(**outcome.reports[-1].mesh))
        outcome.reports[:0] = [compile_bucket(used, bucket) for bucket in job.buckets[:-1]]
    return outcome


def given_mesh(settings: AotSettings, config: TrainSettings, topology: Topology) -> dict[str, int] | None:
    """Devices by axis that the command line or the config names; None: neither does.

    Raises:
        ValueError: they do not multiply to the devices of the topology.
    """
    shape = config.mesh
    if settings.mesh.given:
        axes = dataclasses.asdict(settings.mesh)
        shape = MeshShape(**{axis: size for axis, size in axes.items() if size is not None})
    elif shape == MeshShape():
        return None
    return {axis: int(size) for axis, size in make_mesh(shape, topology.devices).shape.items()}


def dtype_of(config: TrainSettings, topology: Topology) -> Any:
    """The dtype of products: what the config says, and for auto bfloat16 on TPUs."""
    on_tpu = config.compute_dtype == "auto" and topology.platform == "tpu"
    return resolve_dtype("bfloat16" if on_tpu else config.compute_dtype)


def memory_limit(settings: AotSettings, topology: Topology) -> int | None:
    """Bytes of a device: the option's, the chip's, or None."""
    if settings.hbm is not None:
        return int(settings.hbm * GIB)
    return topology.chip.hbm if topology.chip else None
