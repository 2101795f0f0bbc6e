"""`dspark profile`: measures the throughput curve of this machine and stores it, for the scheduler of engines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro

from dspark_jax.checkpoints.load import embedded_drafter_path, embedded_target_path, load_drafter, load_target
from dspark_jax.config import exit_code, log_to_stderr, named_dtype, settings_as_json, write_json
from dspark_jax.profiling import profile_report
from dspark_jax.profiling.aot_command import target_config
from dspark_jax.profiling.curves import Profile, default_path
from dspark_jax.profiling.estimate import Planned, estimate_into
from dspark_jax.profiling.measure import CONTEXTS, SLOTS, Models, Timing, prompt_lengths
from dspark_jax.profiling.profile_plot import plot
from dspark_jax.profiling.provide import measure_into
from dspark_jax.profiling.topology import open_topology, parse_topology
from dspark_jax.sharding import MeshShape, check_mesh, make_mesh

logger = logging.getLogger(__name__)
_PROGRAM = "dspark profile"


@dataclass(frozen=True)
class ProfileSettings:
    """Measure the throughput curve of this machine, which the scheduler of an engine reads, and store it.

    A round is timed in every bucket of rows that the target can verify, with and without the draft. What is stored
    already is not measured again, so a later run with other slots or contexts adds to the curve.

    Attributes:
        target: target model: a folder, a GGUF file or a hub id; the embedded one by default.
        drafter: drafter: a folder or a hub id; the embedded one by default. none: plain rounds only.
        slots: numbers of requests decoded together.
        contexts: capacities of the caches, in tokens: 256, 384, 512, 768, 1024, 1536 and so on.
        longest_prompt: prefills are timed up to this length (within the models' context), in tokens; 0: none.
        sampling: the sampling program: greedy, plain (temperature) or filtered (top-p, top-k, min-p).
        data: copies of the models in the mesh, each with its share of the slots.
        tensor: devices that each copy is cut into.
        dtype: of the weights; auto is bfloat16 where the device multiplies it fast, else float32.
        repeats: timings of each bucket, in turn with all others; the curve holds their medians.
        seconds: that one timing lasts at least, about.
        output: file of the curve; by default one for this machine and these models in ~/.cache/dspark_jax/profiles
            ($XDG_CACHE_HOME), where engines look for it.
        again: measure what is stored already, too.
        topology: TPU chips that are not here, such as v5e:2x4 (needs libtpu): seconds are then the compiler's estimates
            of its programs. For simulations: no engine takes them. data x tensor must be the number of chips.
        plot: file for a picture (PNG): rates and the draft's share against rows.
        json: file for settings, curve and report as one JSON object, in seconds.
    """

    target: str | None = None
    drafter: str | None = None
    slots: tuple[int, ...] = SLOTS
    contexts: tuple[int, ...] = CONTEXTS
    longest_prompt: int = 512
    sampling: Literal["greedy", "plain", "filtered"] = "plain"
    data: int = 1
    tensor: int = 1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    repeats: int = Timing.repeats
    seconds: float = Timing.seconds
    output: Path | None = None
    again: bool = False
    topology: str | None = None
    plot: Path | None = None
    json: Path | None = None

    def check(self) -> None:
        """Refuses what cannot run, before anything is loaded.

        Raises:
            ValueError, FileNotFoundError: naming the option, its value and what would be right.
        """
        Timing(self.repeats, self.seconds)
        for name in ("data", "tensor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        for name in ("slots", "contexts"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1:
                raise ValueError(f"{name} {' '.join(map(str, sizes))}: must be numbers of at least 1")
        if self.topology is not None:
            parse_topology(self.topology)
            if self.drafter == "none":
                raise ValueError("drafter 'none': --topology estimates rounds with and without a draft, give a drafter")
        if self.longest_prompt < 0:
            raise ValueError(f"longest_prompt {self.longest_prompt}: must be at least 0 tokens")
        for name in ("output", "plot", "json"):
            path = getattr(self, name)
            if path is not None and path.is_dir():
                raise ValueError(f"{name} {path}: is a folder, must be a file")
            if path is not None and not path.parent.is_dir():
                raise FileNotFoundError(f"{name} {path}: the folder {path.parent} does not exist, make it first")

    @property
    def timing(self) -> Timing:
        """How long and how often to measure."""
        return Timing(self.repeats, self.seconds)

    def as_json(self) -> dict[str, Any]:
        """The options with paths as text."""
        return settings_as_json(self)


def load_models(settings: ProfileSettings) -> Models:
    """Loads target and drafter onto the mesh that the settings ask for.

    Raises:
        FileNotFoundError, ValueError: nothing there, models that do not belong together, or a mesh that cannot be.
    """
    dtype = jnp.dtype(named_dtype(settings.dtype))
    count = settings.data * settings.tensor
    mesh = None
    if count > 1:
        if count > len(jax.devices()):
            raise ValueError(f"data {settings.data} x tensor {settings.tensor}: there are {len(jax.devices())} devices")
        mesh = make_mesh(MeshShape(data=settings.data, tensor=settings.tensor), jax.devices()[:count])
    target = load_target(settings.target or embedded_target_path(), dtype=dtype, mesh=mesh)
    drafter = None
    if settings.drafter != "none":
        named = settings.drafter or embedded_drafter_path()
        drafter = load_drafter(named, dtype=dtype, mesh=mesh, target=target.config)
        drafter.config.check_target(target.config)
    models = Models(target, drafter, settings.sampling, mesh)
    if mesh is not None:
        check_mesh(mesh, target.config, models.drafter.config if drafter is not None else None)
    return models


def planned(settings: ProfileSettings) -> Planned:
    """What --topology asks for; of the target only its config is read.

    Raises:
        FileNotFoundError, ValueError: as `load_models`; a target whose config is not known; a topology that cannot be.
    """
    assert settings.topology is not None  # asked for
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # an accelerator of this host stays free
    target = target_config(None, settings.target)
    dtype = jnp.dtype("bfloat16" if settings.dtype == "auto" else settings.dtype)
    drafter: Any = load_drafter(settings.drafter or embedded_drafter_path(), dtype=dtype, target=target).config
    drafter.check_target(target)
    shape = MeshShape(data=settings.data, tensor=settings.tensor)
    return Planned(target, drafter, dtype, settings.sampling, open_topology(settings.topology), shape)


def find(settings: ProfileSettings) -> tuple[Path, Profile]:
    """Measures, or estimates, what is not stored yet; the curve's file and its content."""
    sizes = settings.slots, settings.contexts
    if settings.topology is not None:
        plan = planned(settings)
        path = settings.output or default_path(plan.key)
        return path, estimate_into(path, plan, *sizes, settings.again)
    models = load_models(settings)
    path = settings.output or default_path(models.key)
    lengths = prompt_lengths(settings.longest_prompt, models.positions) if settings.longest_prompt else ()
    return path, measure_into(path, models, *sizes, lengths, settings.timing, settings.again)


def profile(settings: ProfileSettings) -> tuple[Path, Profile]:
    """Does what the settings ask, and prints the table; gives the curve's file and its content.

    Raises:
        FileNotFoundError, ValueError: as `load_models`, `planned`; sizes that no program has; a foreign file.
    """
    settings.check()
    path, found = find(settings)
    logger.info("%s: the curve", path)
    print(profile_report.table(found))
    if settings.plot is not None:
        plot(settings.plot, found)
    return path, found


def main(argv: Sequence[str] | None = None) -> int:
    """The command `dspark profile`: exit code 0, 2 (bad input, one line on stderr) or 130 (^C; points are kept)."""
    settings = tyro.cli(ProfileSettings, args=argv, prog=_PROGRAM, config=(tyro.conf.FlagCreatePairsOff,))
    return exit_code(_PROGRAM, lambda: _run(settings), "stopped; what was measured is kept")


def _run(settings: ProfileSettings) -> None:
    with log_to_stderr():
        path, found = profile(settings)
    if settings.json is not None:
        done = {"settings": settings.as_json(), "file": str(path), "key": asdict(found.key)}
        write_json(settings.json, done | profile_report.as_json(found))


if __name__ == "__main__":
    sys.exit(main())
