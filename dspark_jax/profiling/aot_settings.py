"""What one run of `dspark aot` is: the options of the command line, checked before anything is compiled."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from dspark_jax.config import settings_as_json
from dspark_jax.profiling.topology import parse_topology


@dataclass(frozen=True)
class MeshOption:
    """Devices along each axis of the mesh.

    Attributes:
        data: copies of the model, each with its share of the sequences; left out: as many as the other axes leave.
        fsdp: parts that parameters and optimizer state are cut into, each with its share of the sequences; 1 if left
            out.
        tensor: parts that heads, MLP columns and vocabulary rows are cut into; 1 if left out.
    """

    data: int | None = None
    fsdp: int | None = None
    tensor: int | None = None

    @property
    def given(self) -> bool:
        """Whether any axis was named."""
        return any(size is not None for size in (self.data, self.fsdp, self.tensor))


@dataclass(frozen=True)
class AotSettings:
    """Compile a training config's programs for a TPU topology, without a TPU, and report what a chip would need.

    The train step has the config's real sizes; no weights are made or read. Exit code 0: everything fits, 1: something
    does not, 2: bad input.

    Attributes:
        config: training config, a file such as configs/dspark_qwen3_4b.py.
        topology: chips to compile for: v5e:2x4, v6e:8x8, v5p:4x4x8 and the like (needs libtpu), or cpu:8, that many
            virtual CPU devices of this host.
        mesh: devices by axis, for all programs. All left out: the config's, and where it names none, the one with the
            least communication that fits, for the train step and for decoding by itself.
        micro_batches: passes that an update is split into. Left out: the config's, and where it names none, as many as
            leave a device one sequence at a time.
        what: programs to compile: the train step, the speculative step of each bucket, or both.
        target_config: config.json of the target. Left out: by the config's target, a known hub id or a folder.
        batch_size: sequences of an update, in place of the config's.
        max_length: tokens of a sequence, in place of the config's.
        num_anchors: blocks of a sequence, in place of the config's.
        remat: keep less of the drafter's forward pass than the config says.
        regather: bring the target's weights together anew in each micro-batch, unlike the config.
        requests: requests decoded together, over all devices. Left out: 8 for each device.
        context: tokens that the caches hold for each request.
        sampling: the sampling program of decoding: greedy, plain (temperature) or filtered (top-p, top-k, min-p).
        hbm: memory of a device in GiB, in place of the chip's (15.75 on v5e, 95.73 on v5p, 31.24 on v6e).
        suggest: where the given mesh does not fit, look for one that does, each try being a compilation; --no-suggest
            leaves that out.
        json: file for the report as one JSON object, in bytes, FLOPs and seconds.
    """

    config: Path
    topology: str
    mesh: MeshOption = field(default_factory=MeshOption)
    micro_batches: int | None = None
    what: Literal["train", "decode", "both"] = "both"
    target_config: Path | None = None
    batch_size: int | None = None
    max_length: int | None = None
    num_anchors: int | None = None
    remat: bool = False
    regather: bool = False
    requests: int | None = None
    context: int = 4096
    sampling: Literal["greedy", "plain", "filtered"] = "greedy"
    hbm: float | None = None
    suggest: bool = True
    json: Path | None = None

    def check(self) -> None:
        """Refuses what cannot run.

        Raises:
            ValueError: naming option, value and what would be right. FileNotFoundError: a file or folder is missing.
        """
        parse_topology(self.topology)
        sizes = ("micro_batches", "batch_size", "max_length", "num_anchors", "requests", "context")
        axes = {f"mesh.{axis}": size for axis, size in asdict(self.mesh).items()}
        for name, value in ({name: getattr(self, name) for name in sizes} | axes).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: must be at least 1")
        if self.hbm is not None and not self.hbm > 0:
            raise ValueError(f"hbm {self.hbm}: GiB of a device, must be positive")
        for name, path in (("config", self.config), ("target-config", self.target_config)):
            if path is not None and not path.is_file():
                raise FileNotFoundError(f"{name} {path}: no such file")
        if self.json is not None and self.json.is_dir():
            raise ValueError(f"json {self.json}: is a folder, must be a file")
        if self.json is not None and not self.json.parent.is_dir():
            raise FileNotFoundError(f"json {self.json}: the folder {self.json.parent} does not exist, make it first")

    def as_json(self) -> dict[str, Any]:
        """The options with paths as text."""
        return settings_as_json(self)


def parse_settings(argv: list[str], program: str) -> AotSettings:
    """Settings from command line words. Exits with code 2 (and usage on stderr) on unknown options, 0 after --help.

    Raises:
        ValueError, FileNotFoundError: as `AotSettings.check`.
    """
    settings = tyro.cli(AotSettings, args=argv, prog=program, config=(tyro.conf.FlagCreatePairsOff,))
    settings.check()
    return settings
