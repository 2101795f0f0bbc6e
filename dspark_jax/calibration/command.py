"""`dspark calibrate`: sequential temperature scaling of a drafter's confidences, from real decoding.

Prompts are answered with whole blocks verified; temperatures, with --biases a bias beside each, are fitted on one part
of them and judged on the other.
Nothing is written to a drafter unless --write or --output asks for it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro
from tqdm import tqdm

from dspark_jax.calibration import report
from dspark_jax.calibration.collect import (
    Records,
    check_drafter,
    collect,
    fingerprint,
    load_records,
    merge,
    save_records,
)
from dspark_jax.calibration.metrics import BINS
from dspark_jax.calibration.sts import STSFit, STSSettings, fit_temperatures, fit_with_biases
from dspark_jax.checkpoints import deepspec, drafters
from dspark_jax.checkpoints.convert import exact_storage
from dspark_jax.checkpoints.load import (
    Drafter,
    Target,
    embedded_drafter_path,
    embedded_target_path,
    load_drafter,
    load_target,
)
from dspark_jax.checkpoints.store import read_json
from dspark_jax.checkpoints.tokenizer import prompt_ids
from dspark_jax.config import exit_code, log_to_stderr, named_dtype, settings_as_json, write_json
from dspark_jax.data.prompts import iter_prompts, sampling_fields
from dspark_jax.decoding.generate import Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.serving.offline import request_seed

logger = logging.getLogger(__name__)
_PROGRAM = "dspark calibrate"
_NAMES = {"fit": "fitted on", "held_out": "held out"}


@dataclass(frozen=True)
class CalibrateSettings:
    """Fit temperatures that make a drafter's confidences true.

    Without --write or --output nothing but the report is made.

    Attributes:
        prompts: JSONL files or hf:NAME[@CONFIG][:SPLIT]; each is a domain of its own.
        target: target model: a folder, a GGUF file or a hub id; the embedded one by default.
        drafter: drafter with a confidence head: a folder or a hub id; the embedded one by default.
        fit_lines: lines of each source, by their 1-based number, that the temperatures are fitted on.
        test_lines: lines that they are judged on.
        limit: prompts of each source and part, the first ones; 0 for all.
        max_prompt_tokens: longer prompts are left out, in tokens.
        max_tokens: longest answer, in tokens.
        temperature: of sampling; 0 is greedy.
        batch_size: requests decoded together.
        seed: of the run; each prompt draws from (seed, its id).
        dtype: of the weights; auto is bfloat16 where the device multiplies it fast, else float32.
        bins: equal-width bins of the calibration error.
        biases: fit a bias per position beside the temperature, c = sigmoid(z / T + b). It helps where a position's
            confidences are all too high or all too low, which no temperature can shift; off, as in the paper.
        records_in: files of rounds of earlier runs (--records-out), to use in place of prompts.
        records_out: .npz file for the rounds, which can be used again.
        write: set the temperatures (and biases) in the drafter's own config.json.
        output: folder for a copy of the drafter with them; an older drafter in it is replaced.
        plots: folder for reliability diagrams (PNG).
        json: file for settings, temperatures, biases and metrics, as one JSON object.
    """

    prompts: tuple[str, ...] = ()
    target: str | None = None
    drafter: str | None = None
    fit_lines: Literal["odd", "even", "all"] = "odd"
    test_lines: Literal["odd", "even", "none"] = "even"
    limit: int = 0
    max_prompt_tokens: int = 512
    max_tokens: int = 192
    temperature: float = 1.0
    batch_size: int = 16
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    bins: int = BINS
    biases: bool = False
    records_in: tuple[Path, ...] = ()
    records_out: Path | None = None
    write: bool = False
    output: Path | None = None
    plots: Path | None = None
    json: Path | None = None

    def check(self) -> None:
        """Refuses what cannot run, before anything is loaded.

        Raises:
            ValueError, FileNotFoundError: naming the option, its value and what would be right.
        """
        sampling_fields({name: getattr(self, name) for name in ("temperature", "max_tokens", "seed")})
        for name, least in (("batch_size", 1), ("limit", 0), ("max_prompt_tokens", 1), ("bins", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {least}")
        if bool(self.prompts) == bool(self.records_in):
            raise ValueError(
                "give --prompts FILE.jsonl ..., or the rounds of an earlier run with --records-in FILE.npz"
            )
        if self.test_lines != "none" and self.fit_lines in ("all", self.test_lines):
            raise ValueError(
                f"test_lines {self.test_lines!r}: share prompts with fit_lines {self.fit_lines!r}, must be other lines "
                "or none"
            )
        for name in ("records_out", "json"):
            path = getattr(self, name)
            if path is not None and path.is_dir():
                raise ValueError(f"{name} {path}: is a folder, must be a file")
            if path is not None and not path.parent.is_dir():
                raise FileNotFoundError(f"{name} {path}: the folder {path.parent} does not exist, make it first")


# --- where the calibration goes ---


def check_places(settings: CalibrateSettings, drafter: Drafter, config: DrafterConfig) -> None:
    """Refuses, before anything runs, places where the calibration cannot be written.

    Raises:
        ValueError: --write for a drafter that is not the user's own folder of this format; an --output that holds other
            files or is the drafter itself; a drafter that this format cannot hold.
    """
    own_format = drafters.format_of(read_json(drafter.path / deepspec.CONFIG_FILE)) == "deepspec"
    if settings.write:
        named = settings.drafter or embedded_drafter_path()
        if Path(named).expanduser().resolve() == Path(embedded_drafter_path()).resolve():
            raise ValueError("--write: the embedded drafter is part of the package, give --output FOLDER for a copy")
        if not Path(named).expanduser().exists():
            raise ValueError(f"--write: {named} is a hub's, give --output FOLDER for a copy")
        if not own_format:
            raise ValueError(
                f"--write: {named} is in another project's format, give --output FOLDER for a copy in ours"
            )
    if settings.output is not None:
        if settings.output.exists() and settings.output.resolve() == drafter.path.resolve():
            raise ValueError(f"output {settings.output}: is the drafter itself, --write changes it in place")
        deepspec.check_place(settings.output)
        deepspec.config_fields(config)


def store(settings: CalibrateSettings, drafter: Drafter, config: DrafterConfig) -> list[str]:
    """Writes the calibration of `config` where the settings ask; the folders that have it now."""
    temperatures, biases = config.confidence_temperatures, config.confidence_biases
    written = []
    if settings.write:
        deepspec.write_calibration(drafter.path, temperatures, biases)
        written.append(str(drafter.path))
    if settings.output is not None:
        if drafters.format_of(read_json(drafter.path / deepspec.CONFIG_FILE)) == "deepspec":
            deepspec.copy_with_calibration(drafter.path, settings.output, temperatures, biases)
        else:
            params = load_drafter(drafter.path, dtype=jnp.float32).params
            storage = exact_storage(params, "bfloat16")
            drafters.write_drafter(settings.output, config, params, storage_dtype=storage, include_embeddings=None)
        written.append(str(settings.output))
    return written


# --- rounds ---


@dataclass(frozen=True)
class _Prompts:
    """Requests with their domains, and which are held out."""

    requests: list[Request]
    domains: list[str]
    held_out: list[bool]


def read_requests(settings: CalibrateSettings, target: Target) -> _Prompts:
    """The prompts of both parts, shortest first: attention reads whole caches, as long as the longest request.

    Raises:
        FileNotFoundError, ValueError: as `iter_prompts`, or nothing to fit on.
    """
    stems = [Path(source).stem for source in settings.prompts]
    parts = [(settings.fit_lines, False)]
    if settings.test_lines != "none":
        parts.append((settings.test_lines, True))
    found: list[tuple[Request, str, bool]] = []
    for source, stem in zip(settings.prompts, stems, strict=True):
        domain = stem if stems.count(stem) == 1 else source
        for lines, held_out in parts:
            chosen = [(r, domain, held_out) for r in _requests(settings, target, source, domain, lines)]
            if not chosen:
                raise ValueError(f"{source}: no prompt of at most {settings.max_prompt_tokens} tokens on {lines} lines")
            found += chosen
    found.sort(key=lambda entry: len(entry[0].prompt_ids))
    return _Prompts(*(list(column) for column in zip(*found, strict=True)))


def _requests(settings: CalibrateSettings, target: Target, source: str, domain: str, lines: str) -> list[Request]:
    requests: list[Request] = []
    for record in iter_prompts(source, line_filter=lines):
        ids = prompt_ids(target.tokenizer, record.messages)
        if len(ids) <= settings.max_prompt_tokens:
            name = f"{domain}/{record.id}"
            seed = request_seed(settings.seed, name)
            sampling = SamplingParams(settings.temperature, seed=seed, max_tokens=settings.max_tokens)
            requests.append(Request(name, ids, sampling))
        if settings.limit and len(requests) == settings.limit:
            break
    return requests


def decode(settings: CalibrateSettings, target: Target, drafter: Drafter, dtype: str) -> Records:
    """Answers the prompts and records every round; arguments as loaded, `dtype` for the record of how."""
    prompts = read_requests(settings, target)
    names = ("temperature", "max_tokens", "max_prompt_tokens", "seed", "fit_lines", "test_lines", "limit")
    about = {name: getattr(settings, name) for name in names} | {
        "prompts": list(settings.prompts),
        "target": str(settings.target or target.path),
        "drafter": str(settings.drafter or drafter.path),
        "dtype": dtype,
    }
    with tqdm(total=len(prompts.requests), desc="answers", unit="answer", disable=not sys.stderr.isatty()) as bar:
        return collect(
            target, drafter, prompts.requests, prompts.domains, prompts.held_out,
            batch_size=settings.batch_size, seed=settings.seed, about=about, progress=lambda _: bar.update(),
        )  # fmt: skip


def read_records(paths: Sequence[Path], drafter: Drafter) -> Records:
    """The rounds of earlier runs of this drafter.

    Raises:
        FileNotFoundError, ValueError: no such file, a damaged one, rounds of another drafter, or a request twice.
    """
    parts = []
    for path in paths:
        records = load_records(path)
        if records.block_size != drafter.config.block_size:
            raise ValueError(
                f"records {path}: blocks of {records.block_size} tokens, the drafter has {drafter.config.block_size}"
            )
        if records.about.get("fingerprint") != fingerprint(drafter.params):
            made = records.about.get("drafter")
            raise ValueError(f"records {path}: made with another drafter ({made}): its confidence head differs")
        parts.append(records)
    return merge(parts)


# --- the command ---


def calibrate(settings: CalibrateSettings) -> dict[str, Any]:
    """Does what the settings ask, and prints the tables; returns the report as JSON values.

    Raises:
        FileNotFoundError, ValueError: nothing there, a drafter that cannot be calibrated, too few rounds.
    """
    settings.check()
    dtype = named_dtype(settings.dtype, rows=settings.batch_size)
    target = None
    if not settings.records_in or settings.target is not None:
        target = load_target(settings.target or embedded_target_path(), dtype=dtype)
    named = settings.drafter or embedded_drafter_path()
    drafter = load_drafter(named, dtype=dtype, target=target.config if target else None)
    config = check_drafter(drafter.config)
    if target:
        config.check_target(target.config)
    check_places(settings, drafter, config)
    if settings.records_in:
        records = read_records(settings.records_in, drafter)
    else:
        assert target is not None  # loaded above
        records = decode(settings, target, drafter, dtype)
    if settings.records_out is not None:
        save_records(settings.records_out, records)
    return finish(settings, drafter, config, records)


def finish(settings: CalibrateSettings, drafter: Drafter, config: DrafterConfig, records: Records) -> dict[str, Any]:
    """Fits, reports and writes; result as `calibrate`'s."""
    fits = fit_or_refuse(records.split(held_out=False), STSSettings(bins=settings.bins), settings.biases)
    fit = fits["after"]
    splits = {"fit": records.split(held_out=False), "held_out": records.split(held_out=True)}
    reports = {}
    for name, part in splits.items():
        if not len(part.accepted):
            continue
        reports[name] = report.split_report(_NAMES[name], part, fits, settings.bins)
        print(report.table(reports[name], fit) + "\n")
        if settings.plots is not None:
            settings.plots.mkdir(parents=True, exist_ok=True)
            scaling = "temperature scaling with biases" if fit.biases else "temperature scaling"
            title = f"Confidences before and after {scaling}, {_NAMES[name]}"
            report.plot(settings.plots / f"{name}.png", part, fits, title, settings.bins)
    calibrated = replace(config, confidence_temperatures=fit.temperatures, confidence_biases=fit.biases)
    written = store(settings, drafter, calibrated)
    for folder in written:
        logger.info("%s: calibration written", folder)
    print("temperatures " + " ".join(f"{t:.4f}" for t in fit.temperatures))
    if fit.biases:
        print("biases " + " ".join(f"{b:.4f}" for b in fit.biases))
    return {
        "settings": settings_as_json(settings),
        "drafter": str(drafter.path),
        "records": records.about,
        "temperatures": list(fit.temperatures),
        "biases": list(fit.biases),
        "temperatures_alone": list(fits.get("temperatures", fit).temperatures),
        "fitted": list(fit.fitted),
        "survivors": list(fit.counts),
        "earlier_temperatures": list(config.confidence_temperatures),
        "earlier_biases": list(config.confidence_biases),
        "written": written,
        "splits": {name: report.as_json(entry) for name, entry in reports.items()},
    }


def fit_or_refuse(records: Records, settings: STSSettings, biases: bool) -> dict[str, STSFit]:
    """Fits of rounds that suffice for the first position at least; later positions are warned about.

    Args:
        biases: whether the fit `after` has them; plain temperature scaling is then the one before it, `temperatures`.

    Raises:
        ValueError: too few rounds.
    """
    fit = fit_temperatures(records.confidence, records.accepted, records.verified, settings)
    if not fit.fitted[0]:
        raise ValueError(
            f"{fit.counts[0]} rounds to fit on: too few, must be at least {settings.minimum}, with "
            f"{settings.minimum_each} accepted and {settings.minimum_each} rejected first tokens; give more prompts or "
            "a larger --max-tokens"
        )
    for k in np.flatnonzero(~np.asarray(fit.fitted)):
        logger.warning("position %d: too few rounds reach it (%d), it is scaled as k - 1", k + 1, fit.counts[k])
    if not biases:
        return {"after": fit}
    with_biases = fit_with_biases(records.confidence, records.accepted, records.verified, settings)
    return {"temperatures": fit, "after": with_biases}


def main(argv: Sequence[str] | None = None) -> int:
    """The command `dspark calibrate`: exit code 0, or 2 (bad input, one line on stderr)."""
    settings = tyro.cli(CalibrateSettings, args=argv, prog=_PROGRAM, config=(tyro.conf.FlagCreatePairsOff,))
    return exit_code(_PROGRAM, lambda: _run(settings))


def _run(settings: CalibrateSettings) -> None:
    with log_to_stderr():
        done = calibrate(settings)
    if settings.json is not None:
        write_json(settings.json, done)


if __name__ == "__main__":
    sys.exit(main())
