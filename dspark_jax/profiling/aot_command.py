"""The command `dspark aot`: compiles a config for a topology, refuses what does not fit, and finds a mesh that does."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_jax.config import exit_code, log_to_stderr
from dspark_jax.profiling.aot_settings import AotSettings, parse_settings

if TYPE_CHECKING:
    from dspark_jax.models.config import TransformerConfig
    from dspark_jax.profiling.aot_plan import Outcome
    from dspark_jax.profiling.topology import Topology
    from dspark_jax.training.settings import TrainSettings


def main(argv: Sequence[str] | None = None, program: str = "dspark aot") -> int:
    """Entry point: exit code 0 (all fits), 1 (something does not), 2 (bad input, one line on stderr), 130 (^C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(program, lambda: _logged(parse_settings(words, program)), "stopped")


def _logged(settings: AotSettings) -> int:
    with log_to_stderr():
        return run(settings)


def run(settings: AotSettings) -> int:
    """Compiles, prints the report, writes the JSON; returns the exit code.

    Raises:
        ValueError, FileNotFoundError: a config, target, topology or mesh that cannot be; nothing was compiled then.
    """
    import jax

    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # an accelerator of this host stays free
    from dspark_jax.profiling.aot_plan import compile_decode, compile_train
    from dspark_jax.profiling.topology import open_topology
    from dspark_jax.training.trainer import read_config

    config = with_options(read_config(settings.config), settings)
    target = target_config(settings.target_config, config.target)
    topology = open_topology(settings.topology)
    outcomes = {}
    if settings.what in ("train", "both"):
        outcomes["train"] = compile_train(settings, config, target, topology)
    if settings.what in ("decode", "both"):
        outcomes["decode"] = compile_decode(settings, config, target, topology)
    print(describe(settings, topology, outcomes))
    if settings.json is not None:
        settings.json.write_text(json.dumps(as_json(settings, topology, outcomes), indent=1) + "\n")
    return 0 if all(outcome.fits for outcome in outcomes.values()) else 1


def with_options(config: TrainSettings, settings: AotSettings) -> TrainSettings:
    """The config with the sizes of the command line."""
    names = ("batch_size", "max_length", "num_anchors")
    own = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    if own.get("max_length") is not None:
        own["buckets"] = ()
    if "batch_size" in own or settings.micro_batches is not None:
        own["micro_batches"] = settings.micro_batches or 1
    return dataclasses.replace(
        config, **own, remat=config.remat or settings.remat, regather=config.regather or settings.regather
    )


def target_config(file: Path | None, name: str | None) -> TransformerConfig:
    """The target's config: from a file, a known hub id, or a local folder.

    Raises:
        ValueError: none of these, or one that is not supported.
    """
    from dspark_jax.checkpoints.hf import read_hf_config
    from dspark_jax.checkpoints.known_configs import KNOWN_CONFIGS
    from dspark_jax.checkpoints.load import EMBEDDED_HUB_ID
    from dspark_jax.checkpoints.store import read_json
    from dspark_jax.models.config import TransformerConfig

    name = name or EMBEDDED_HUB_ID
    if file is not None:
        try:
            return TransformerConfig.from_hf(read_json(file))
        except (ValueError, TypeError) as error:
            raise ValueError(f"target-config {file}: {error}") from error
    if name in KNOWN_CONFIGS:
        return TransformerConfig.from_hf(KNOWN_CONFIGS[name])
    if (Path(name) / "config.json").is_file():
        return read_hf_config(Path(name))
    raise ValueError(
        f"target {name!r}: its sizes are not known here; give --target-config FILE (its config.json), or have the "
        f"config name a folder that holds one, or one of {', '.join(KNOWN_CONFIGS)}"
    )


def describe(settings: AotSettings, topology: Topology, outcomes: dict[str, Outcome]) -> str:
    """The report as text: the table, and what does not fit with its sizes and what would."""
    from dspark_jax.profiling.aot_report import largest_lines, refusal, table

    reports = [report for outcome in outcomes.values() for report in outcome.reports]
    count, kind = len(topology.devices), "chips" if topology.chip else "CPU devices"
    lines = [
        f"{settings.config} on {topology.name}, {count} {kind}; all numbers are of one of them",
        "",
        table(reports),
    ]
    for name, outcome in outcomes.items():
        for report in outcome.reports:
            if not report.fits:
                lines += ["", refusal(report)]
                lines += ["largest arrays:", *largest_lines(report)] if report.largest else []
        if outcome.suggestion is not None:
            lines += ["", f"{name}: fits with {outcome.suggestion}"]
        elif outcome.searched and not outcome.fits:
            lines += ["", f"{name}: no mesh of these {count} was found that fits: take more or larger chips"]
        lines += notes(name, outcome)
    return "\n".join(lines)


def notes(name: str, outcome: Outcome) -> list[str]:
    """What the numbers of a kind of program leave out."""
    costs = [report.cost for report in outcome.reports]
    loops, kernels = max(cost.unknown_loops for cost in costs), max(cost.silent_kernels for cost in costs)
    said = [f"{name}: {loops} loops count once, since their rounds depend on data"] if loops else []
    if kernels:
        said.append(f"{name}: {kernels:.0f} runs of kernels count without FLOPs and cycles, since they claim none")
    return said


def as_json(settings: AotSettings, topology: Topology, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """The report as one object, in bytes, FLOPs and seconds of one device."""
    chip = dataclasses.asdict(topology.chip) if topology.chip else None
    found: dict[str, str | None] = {}
    for name in ("jax", "jaxlib", "libtpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    suggestions = {
        name: None if o.suggestion is None else dataclasses.asdict(o.suggestion) for name, o in outcomes.items()
    }
    return {
        "options": settings.as_json(),
        "topology": {"name": topology.name, "platform": topology.platform, "devices": len(topology.devices)},
        "chip": chip,
        "versions": found,
        "fits": all(outcome.fits for outcome in outcomes.values()),
        "programs": [report.as_json() for outcome in outcomes.values() for report in outcome.reports],
        "suggestions": suggestions,
    }
