"""Files of measured throughput curves, each with the key of what it was measured on (section 3: SPS is profiled).

A curve belongs to one device kind, mesh, dtype, pair of models and sampling program, and is used for no other:
`check_key` names what differs. Profiling more slots or contexts later adds points to the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from dspark_jax.checkpoints.store import read_json
from dspark_jax.decoding.curve import Curve, Point, Prefill
from dspark_jax.decoding.sampling import Mode
from dspark_jax.drafters.interface import AnyConfig
from dspark_jax.models.config import TransformerConfig

FORMAT = "dspark_jax throughput curve 1"
_AGAIN = "profile again with `dspark profile`"
_CALIBRATION = ("confidence_temperatures", "confidence_biases")  # of a drafter's config: changes no time


@dataclass(frozen=True)
class CurveKey:
    """What a curve was measured on.

    Attributes:
        platform: "cpu", "gpu" or "tpu". device: the kind of device; of CPUs the model's name. cores: of CPUs, that this
            process may use; 0 elsewhere. devices: how many. mesh: of them along data, fsdp and tensor.
        dtype: of the weights. mode: the sampling program.
        target, drafter: fingerprints of their configs (`fingerprint`). block_size: gamma; 0 without a drafter.
        jax: its version. estimated: seconds are a compiler's estimates, for simulation only.
    """

    platform: str
    device: str
    cores: int
    devices: int
    mesh: tuple[int, int, int]
    dtype: str
    mode: str
    target: str
    drafter: str
    block_size: int
    jax: str
    estimated: bool = False

    def __post_init__(self) -> None:
        kinds = {"cores": int, "devices": int, "block_size": int, "estimated": bool, "mesh": tuple}
        for entry in fields(self):
            value, kind = getattr(self, entry.name), kinds.get(entry.name, str)
            if type(value) is not kind:
                raise ValueError(f"key field {entry.name} {value!r}: must be of type {kind.__name__}")
        if len(self.mesh) != 3 or not all(type(size) is int and size > 0 for size in self.mesh):
            raise ValueError(f"key field mesh {self.mesh}: must be three numbers of devices")


@dataclass(frozen=True)
class MeasuredPoint:
    """A point, and how much its repeats differed.

    Attributes:
        spread: relative interquartile range of the repeats' seconds, of each bucket and, last, of plain rounds.
        repeats: timings behind each median; 0 where nothing was measured (an estimate).
    """

    point: Point
    spread: tuple[float, ...]
    repeats: int

    def __post_init__(self) -> None:
        wanted = len(self.point.buckets) + 1
        if len(self.spread) != wanted or not all(0 <= s < float("inf") for s in self.spread):
            raise ValueError(f"spread {list(self.spread)}: must be {wanted} finite numbers of at least 0")
        if self.repeats < 0:
            raise ValueError(f"repeats {self.repeats}: must be at least 0")

    @property
    def place(self) -> tuple[int, int]:
        """Slots R and context T."""
        return self.point.slots, self.point.context


@dataclass(frozen=True)
class Profile:
    """A curve with its key, as it lies in a file; points ascend by slots, then context, prefills by tokens."""

    key: CurveKey
    points: tuple[MeasuredPoint, ...]
    prefills: tuple[Prefill, ...] = ()

    @property
    def curve(self) -> Curve:
        """What the scheduler reads."""
        return Curve(tuple(p.point for p in self.points), self.prefills)

    @property
    def slot_sizes(self) -> tuple[int, ...]:
        """Slot counts R that were measured, ascending."""
        return tuple(sorted({p.point.slots for p in self.points}))

    def with_points(self, points: Iterable[MeasuredPoint], prefills: Iterable[Prefill] = ()) -> Profile:
        """This profile with more points and prefills, which take the place of earlier ones of the same sizes."""
        by_place = {p.place: p for p in (*self.points, *points)}
        by_tokens = {p.tokens: p for p in (*self.prefills, *prefills)}
        return Profile(
            self.key,
            tuple(by_place[place] for place in sorted(by_place)),
            tuple(by_tokens[tokens] for tokens in sorted(by_tokens)),
        )


# --- keys ---


def fingerprint(config: TransformerConfig | AnyConfig | None) -> str:
    """What of a model decides its times: a hash of its config, calibration left out; "none" for None."""
    if config is None:
        return "none"
    sizes = {name: value for name, value in asdict(config).items() if name not in _CALIBRATION}
    return _hash([type(config).__name__, sizes])


def key_of(
    target: TransformerConfig,
    drafter: AnyConfig | None,
    dtype: DTypeLike,
    mode: Mode,
    mesh: jax.sharding.Mesh | None = None,
) -> CurveKey:
    """The key of a curve on this machine.

    Args:
        dtype: of the weights. mode: the sampling program. mesh: as `sharding.make_mesh`; None: the default device.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    sizes = dict(mesh.shape) if mesh is not None else {}
    return CurveKey(
        platform=device.platform,
        device=cpu_model() if on_cpu else device.device_kind,
        cores=cores() if on_cpu else 0,
        devices=mesh.size if mesh is not None else 1,
        mesh=(sizes.get("data", 1), sizes.get("fsdp", 1), sizes.get("tensor", 1)),
        dtype=np.dtype(dtype).name,
        mode=mode,
        target=fingerprint(target),
        drafter=fingerprint(drafter),
        block_size=drafter.block_size if drafter is not None else 0,
        jax=jax.__version__,
    )


def cpu_model(cpuinfo: str | Path = "/proc/cpuinfo") -> str:
    """The processor's name, "unknown" where Linux does not tell it."""
    file = Path(cpuinfo)
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_key(stored: CurveKey, wanted: CurveKey, where: str | Path = "curve") -> None:
    """Refuses a curve that was measured on something else.

    Args:
        where: what to call it, a file by preference.

    Raises:
        ValueError: names the first field that differs, and both values.
    """
    for entry in fields(CurveKey):
        had, has = getattr(stored, entry.name), getattr(wanted, entry.name)
        if had != has:
            raise ValueError(f"{where}: {entry.name} {had!r} was profiled, it is {has!r} here: {_AGAIN}")


def default_path(key: CurveKey) -> Path:
    """Where the curve of this key lies: `dspark_jax/profiles` in $XDG_CACHE_HOME, or else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base else Path.home() / ".cache"
    return folder / "dspark_jax" / "profiles" / f"{_hash(asdict(key))}.json"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# --- files ---


def save_curve(path: Path, profile: Profile) -> None:
    """Writes a profile; a file that is there is replaced at once or not at all. Makes the folder."""
    values = {
        "format": FORMAT,
        "key": asdict(profile.key),
        "points": [asdict(p.point) | {"spread": p.spread, "repeats": p.repeats} for p in profile.points],
        "prefills": [asdict(p) for p in profile.prefills],
    }
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_curve(path: Path) -> Profile:
    """Reads what `save_curve` wrote.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a damaged file, or one that is no curve.
    """
    try:
        values = read_json(path)
        if values.get("format") != FORMAT:
            raise ValueError(f"format {values.get('format')!r}, must be {FORMAT!r}")
        key = dict(values["key"])
        profile = Profile(
            CurveKey(**key | {"mesh": tuple(key["mesh"])}),
            tuple(_point(entry) for entry in values["points"]),
            tuple(Prefill(_whole(entry["tokens"]), float(entry["seconds"])) for entry in values["prefills"]),
        )
        profile.curve  # noqa: B018  (its checks: at least one point, each once)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: damaged, or no curve of `dspark profile` ({what}); {_AGAIN}") from error
    return profile.with_points(())


def _point(entry: dict[str, Any]) -> MeasuredPoint:
    point = Point(
        _whole(entry["slots"]),
        _whole(entry["context"]),
        tuple(_whole(size) for size in entry["buckets"]),
        tuple(float(seconds) for seconds in entry["drafted"]),
        float(entry["plain"]),
    )
    return MeasuredPoint(point, tuple(float(s) for s in entry["spread"]), _whole(entry["repeats"]))


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r}: must be a whole number")
    return value
