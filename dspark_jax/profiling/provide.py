"""The curve that an engine gets: the stored one of its models on this machine, or one that is measured now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dspark_jax.decoding.curve import Curve
from dspark_jax.profiling.curves import (
    CurveKey,
    MeasuredPoint,
    Profile,
    check_key,
    default_path,
    load_curve,
    save_curve,
)
from dspark_jax.profiling.measure import CONTEXTS, Models, Timing, measure_point, measure_prefills

logger = logging.getLogger(__name__)


def stored(path: Path, key: CurveKey) -> Profile:
    """The profile of this key in the file at `path`; an empty one where there is none.

    Raises:
        ValueError: the file is damaged, or of another machine or other models.
    """
    if not path.exists():
        return Profile(key, ())
    profile = load_curve(path)
    check_key(profile.key, key, path)
    return profile


def add_points(
    path: Path,
    key: CurveKey,
    slots: Sequence[int],
    contexts: Sequence[int],
    make: Callable[[int, int], MeasuredPoint],
    again: bool,
) -> Profile:
    """The profile of this key at `path` with every pair of `slots` and `contexts`, made and stored point by point.

    Args:
        make: gives the point of R slots and T tokens. again: whether those that are there are made anew.

    Raises:
        ValueError: as `stored`, or `make`.
    """
    profile = stored(path, key)
    there = {p.place for p in profile.points}
    for r, t in dict.fromkeys((r, t) for r in slots for t in contexts if again or (r, t) not in there):
        profile = profile.with_points([make(r, t)])
        save_curve(path, profile)
    return profile


def measure_into(
    path: Path,
    models: Models,
    slots: Sequence[int],
    contexts: Sequence[int],
    lengths: Sequence[int] = (),
    timing: Timing | None = None,
    again: bool = False,
) -> Profile:
    """Measures what the file at `path` lacks and adds it, point by point, so that a stopped run keeps its points.

    Args:
        slots, contexts: every pair of them is a point. lengths: of prompts, padded. timing: how long and how often.
        again: measure what is there, too.

    Returns:
        All that the file holds now.

    Raises:
        ValueError: sizes that no program has; a file that is damaged, or of another machine or other models.
    """
    models.check(slots, contexts)

    def measure(r: int, t: int) -> MeasuredPoint:
        logger.info("measuring rounds of %d slots with caches of %d tokens", r, t)
        return measure_point(models, r, t, timing)

    profile = add_points(path, models.key, slots, contexts, measure, again)
    known = {p.tokens for p in profile.prefills}
    wanted = [length for length in lengths if again or length not in known]
    if wanted:
        logger.info("measuring prefills of %s tokens", ", ".join(map(str, wanted)))
        profile = profile.with_points((), measure_prefills(models, wanted, timing))
        save_curve(path, profile)
    return profile


def curve_for(
    models: Models,
    slots: Sequence[int],
    contexts: Sequence[int] = CONTEXTS,
    *,
    file: Path | None = None,
    measure: bool = False,
    lengths: Sequence[int] = (),
    timing: Timing | None = None,
) -> Curve:
    """The curve for engines of these models on this machine: the stored one, or measured now.

    Args:
        slots: R that must be in it. file: the user's own, by default `curves.default_path`.
        measure: whether to measure and store what is missing, with caches of `contexts` tokens and, where no curve is
            stored yet, prompts of `lengths` tokens; a stored curve may have other contexts. timing: how long.

    Raises:
        FileNotFoundError: none is stored; says what to run.
        ValueError: a curve of another machine or other models, a damaged file, or one that lacks a number of slots.
    """
    path = file or default_path(models.key)
    profile = stored(path, models.key)
    missing = [r for r in slots if r not in profile.slot_sizes]
    if not missing:
        return profile.curve
    if measure:
        return measure_into(path, models, missing, contexts, () if profile.points else lengths, timing).curve
    words = command_for(models, missing, file)
    if not profile.points:
        where = f"{file}: no such file" if file is not None else "no throughput curve is stored for these models here"
        raise FileNotFoundError(f"{where}; measure one with `{words}`")
    have = ", ".join(map(str, profile.slot_sizes))
    raise ValueError(f"{path}: has {have} slots, lacks {', '.join(map(str, missing))}; add them with `{words}`")


def command_for(models: Models, slots: Sequence[int], file: Path | None = None) -> str:
    """The command that measures the curve of these models for `slots`."""
    words = ["dspark profile"]
    target, drafter = getattr(models.target, "path", None), getattr(models.drafter, "path", None)
    words += [f"--target {target}"] if target is not None else []
    words += ["--drafter none"] if models.drafter is None else [f"--drafter {drafter}"] if drafter is not None else []
    words += ["--slots " + " ".join(map(str, slots)), f"--sampling {models.mode}"]
    words += [f"--dtype {np.dtype(models.target.params['embed'].dtype).name}"]
    sizes = dict(models.mesh.shape) if models.mesh is not None else {}
    words += [f"--{axis} {sizes[axis]}" for axis in ("data", "tensor") if sizes.get(axis, 1) > 1]
    words += [f"--output {file}"] if file is not None else []
    return " ".join(words)
