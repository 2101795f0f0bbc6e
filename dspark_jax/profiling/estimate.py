"""A throughput curve without the machine: seconds of a round by the TPU compiler's own account of its programs.

For simulations only: its key says `estimated`, so no engine takes it. Seconds are the compiler's cycles and what goes
over links, or the roofline where that is more; prefills, and time between programs, are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dspark_jax import sharding
from dspark_jax.decoding.batching import capacity_for
from dspark_jax.decoding.curve import Point
from dspark_jax.decoding.rounds import empty_proposal
from dspark_jax.decoding.sampling import Mode
from dspark_jax.decoding.schedule import buckets_for
from dspark_jax.decoding.state import DecodeState, Program
from dspark_jax.decoding.step import verify_and_commit
from dspark_jax.models import transformer
from dspark_jax.models.config import TransformerConfig
from dspark_jax.profiling.aot import compile_program
from dspark_jax.profiling.aot_programs import DecodeJob
from dspark_jax.profiling.aot_report import ProgramReport, refusal
from dspark_jax.profiling.curves import CurveKey, MeasuredPoint, Profile, key_of
from dspark_jax.profiling.provide import add_points
from dspark_jax.profiling.topology import Topology
from dspark_jax.sharding import MeshShape, make_mesh
from dspark_jax.training.objectives import TrainableConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """What a curve is estimated of.

    Attributes:
        target, drafter: configs. dtype: of weights and caches. mode: the sampling program. topology: chips.
        shape: of the mesh over all of them.
    """

    target: TransformerConfig
    drafter: TrainableConfig
    dtype: DTypeLike
    mode: Mode
    topology: Topology
    shape: MeshShape

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh (ValueError: it does not have the topology's devices)."""
        return make_mesh(self.shape, self.topology.devices)

    @property
    def key(self) -> CurveKey:
        """What the curve will be one of."""
        key = key_of(self.target, self.drafter, self.dtype, self.mode, self.mesh)
        return replace(key, estimated=True)

    def job(self, slots: int, context: int) -> DecodeJob:
        """The program of R `slots` with caches of `context` tokens."""
        return DecodeJob(self.target, self.drafter, self.dtype, slots, context, self.mode, "causal")

    def check(self, slots: Sequence[int], contexts: Sequence[int]) -> None:
        """Refuses sizes that no program has, and machines of which nothing is known (ValueError)."""
        if self.topology.chip is None:
            raise ValueError(f"topology {self.topology.name}: only TPU chips have estimates; measure CPUs instead")
        for context in contexts:
            if context != capacity_for(context):
                raise ValueError(f"contexts {context}: caches have {capacity_for(context)} tokens there, give that")
        for size in slots:
            self.job(size, capacity_for(1)).check(self.mesh)


def lower_plain(planned: Planned, slots: int, context: int) -> Any:
    """The lowered round without a draft, as `DecodeJob.lower` gives the others."""
    program = Program(planned.target, planned.drafter, "causal", planned.mode, (), planned.dtype)

    def run(target: Any, own: Any, state: DecodeState) -> Any:
        bound = {"embed": target["embed"], "head": transformer.head_weight(target)} | own
        nothing = empty_proposal(bound, state, program)._replace(cache=state.draft_cache)
        none = jnp.zeros_like(state.start)
        never = jnp.bool_(False)
        return verify_and_commit(
            target, bound, state, nothing, none, program=program, bucket=slots, drafted=never
        )  # fmt: skip

    arguments = planned.job(slots, context).arguments(planned.mesh)
    places = jax.tree.map(lambda x: x.sharding, arguments[-1])
    jitted = jax.jit(run, donate_argnums=2, out_shardings=(places, sharding.replicated(planned.mesh)))
    with jax.set_mesh(planned.mesh):
        return jitted.lower(*arguments)


def round_seconds(report: ProgramReport) -> float:
    """Seconds of one run of a program on its chips.

    Raises:
        ValueError: it does not fit into their memory, or there is no estimate.
    """
    if not report.fits:
        raise ValueError(refusal(report))
    times = report.times
    if times.roofline is None or times.links is None:
        raise ValueError(f"{report.name}: the machine's speed is not known")
    return max((times.compiler or 0.0) + times.links, times.roofline)


def estimate_point(planned: Planned, slots: int, context: int) -> MeasuredPoint:
    """The compiler's account of a round of R `slots` with caches of `context` tokens in every bucket.

    Raises:
        ValueError: the largest one does not fit, and the like.
    """
    job, mesh = planned.job(slots, context), planned.mesh
    axes = {axis: int(size) for axis, size in mesh.shape.items()}

    def seconds(name: str, lower: Any) -> float:
        found = round_seconds(compile_program(name, lower, planned.topology, axes))
        logger.info("%s: %.3f ms", name, 1e3 * found)
        return found

    buckets = buckets_for(slots, planned.drafter.block_size, fine=True)
    drafted = tuple(seconds(f"{size} rows", lambda size=size: job.lower(mesh, size)) for size in buckets)
    plain = seconds(f"{slots} rows, no draft", lambda: lower_plain(planned, slots, context))
    return MeasuredPoint(Point(slots, context, buckets, drafted, plain), (0.0,) * (len(buckets) + 1), 0)


def estimate_into(
    path: Path, planned: Planned, slots: Sequence[int], contexts: Sequence[int], again: bool = False
) -> Profile:
    """Estimates what the file at `path` lacks and adds it, point by point; as `provide.measure_into`.

    Raises:
        ValueError: sizes that no program has; a file that is damaged, or of something else.
    """
    planned.check(slots, contexts)

    def estimate(r: int, t: int) -> MeasuredPoint:
        logger.info("compiling rounds of %d slots with caches of %d tokens", r, t)
        return estimate_point(planned, r, t)

    return add_points(path, planned.key, slots, contexts, estimate, again)
