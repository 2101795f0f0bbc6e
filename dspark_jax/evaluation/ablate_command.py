"""`dspark ablate`: trains and measures the variants of a config, study by study, and sets the paper's figures beside.

Drafters, answers and timings are kept under --output and shared by the studies: the same command goes on where it was
stopped, and makes only the reports where all is there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from dspark_jax.config import check_json, exit_code, log_to_stderr, settings_as_json, write_json
from dspark_jax.data.prompts import sampling_fields
from dspark_jax.evaluation.answering import Method, Protocol
from dspark_jax.evaluation.benchmarks import Benchmark
from dspark_jax.evaluation.eval_command import EvalSettings, read_prompts
from dspark_jax.evaluation.studies import Study, chosen, only
from dspark_jax.training.settings import TrainSettings

logger = logging.getLogger(__name__)
Lines = Literal["all", "odd", "even"]
_PROGRAM = "dspark ablate"
_STOPPED = "stopped; the same command goes on where it was"
_OTHER: dict[str, Lines] = {
    "odd": "even",
    "even": "odd",
}  # lines that confidences are calibrated on, by those that are asked
_CALIBRATED = ("calibration", "load")  # kinds of studies that need them


@dataclass(frozen=True)
class AblateSettings:
    """Train variants of a drafter and compare them, as in the paper's studies.

    Studies: main (drafters compared), depth, head, block, positions (acceptance by position), threshold (of the
    confidence), calibration, vocab, loss, cache (of hidden states), latency (of the sequential head), load (serving,
    simulated with this machine's throughput curve).

    Attributes:
        config: the training run whose variants are compared, as `dspark train --config`: a DSpark drafter.
        study: names of studies, or all.
        variants: patterns of names, as "vanilla*": other variants of depth, head, block, positions, vocab, loss and
            cache are left out; all by default.
        prompts: what is asked: JSONL files with `turns`, named like a benchmark (gsm8k.jsonl), folders of such,
            hf:NAME[@CONFIG][:SPLIT], or names of benchmarks.
        lines: lines of each source to ask, by their 1-based number. Confidences are calibrated on the others.
        limit: conversations of each benchmark, the first ones; 0 for all.
        domains: BENCHMARK=DOMAIN: whose mean a benchmark counts in, as notes=chat; one that is not known is in other.
        max_prompt_tokens: conversations that begin with a longer prompt are left out, in tokens; 0 for none.
        output: folder for drafters, outcomes, timings and STUDY/report.md with its pictures.
        temperatures: of sampling; studies of one temperature take the highest.
        max_tokens: longest answer, in tokens.
        batch_size: conversations decoded together.
        seed: of training, answers and intervals; the config's by default.
        steps: updates of every drafter; 0: as the config says.
        method: how rounds are found: forced, along plain decoding's answers, or decode, in the engine, with
            tokens/s.
        slots: requests at a time that rounds are timed with, for latency, load and vocab, ascending.
        repeats: timings of each case.
        json: file for settings and all figures, as one JSON object; times in seconds, shares of 1.
    """

    config: Path
    study: tuple[str, ...] = ("all",)
    variants: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    lines: Lines = "even"
    limit: int = 20
    domains: tuple[str, ...] = ()
    max_prompt_tokens: int = 0
    output: Path = Path("results/ablate")
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    batch_size: int = 16
    seed: int | None = None
    steps: int = 0
    method: Method = "forced"
    slots: tuple[int, ...] = (1, 4, 16)
    repeats: int = 9
    json: Path | None = None

    def studies(self) -> list[Study]:
        """The studies that are asked for; ValueError for an unknown one, or one that has none of the variants."""
        return [only(study, self.variants) for study in chosen(self.study)]

    def check(self) -> None:
        """Refuses what cannot run, before anything is read.

        Raises:
            ValueError, FileNotFoundError: naming the option, its value and what would be right.
        """
        studies = self.studies()
        for name, least in (
            ("limit", 0),
            ("max_prompt_tokens", 0),
            ("batch_size", 1),
            ("steps", 0),
            ("repeats", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {least}")
        if not self.prompts:
            raise ValueError("give --prompts: JSONL files with turns, a folder of such, or names of benchmarks")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures {list(self.temperatures)}: must be at least one, each once")
        for temperature in self.temperatures:
            sampling_fields({"temperature": temperature, "max_tokens": self.max_tokens, "seed": self.seed})
        if not self.slots or self.slots[0] < 1 or list(self.slots) != sorted(set(self.slots)):
            raise ValueError(f"slots {list(self.slots)}: must be numbers of at least 1, ascending")
        calibrated = [study.name for study in studies if study.kind in _CALIBRATED]
        if self.lines == "all" and calibrated:
            raise ValueError(
                f"lines 'all': study {calibrated[0]} calibrates on the lines that are not asked, must be odd or even"
            )
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output {self.output}: is a file, must be a folder")
        check_json(self.json)

    def protocol(self, temperature: float, seed: int) -> Protocol:
        """How conversations are answered at a temperature."""
        return Protocol(
            temperature, max_tokens=self.max_tokens, batch_size=self.batch_size, seed=seed, method=self.method
        )


def read_base(settings: AblateSettings) -> TrainSettings:
    """The config that is changed, with the seed and the updates of this run.

    Raises:
        FileNotFoundError, ValueError: no such file, or one that defines no training run.
    """
    from dspark_jax.training.trainer import read_config

    try:
        base = read_config(settings.config)
    except (ValueError, OSError):
        raise
    except Exception as error:  # a program of the user's: anything may go wrong in it
        raise ValueError(f"config {settings.config}: {type(error).__name__}: {error}") from error
    base = replace(base, steps=settings.steps or base.steps)
    return base if settings.seed is None else replace(base, seed=settings.seed)


def read_benchmarks(settings: AblateSettings, base: TrainSettings) -> tuple[list[Benchmark], list[Benchmark]]:
    """What is asked, and what confidences are calibrated on (nothing, where no study needs it).

    Raises:
        FileNotFoundError, ValueError: as `benchmarks.read_benchmarks`.
    """
    names = ("prompts", "limit", "domains", "max_prompt_tokens")
    common: dict[str, Any] = {name: getattr(settings, name) for name in names} | {"target": base.target}
    asked = read_prompts(EvalSettings(lines=settings.lines, **common))
    if not any(study.kind in _CALIBRATED for study in settings.studies()):
        return asked, []
    return asked, read_prompts(EvalSettings(lines=_OTHER[settings.lines], **common))


def ablate(settings: AblateSettings) -> dict[str, Any]:
    """Does what the settings ask, writes a report for each study and prints it; returns all figures as JSON values.

    Raises:
        FileNotFoundError, ValueError: bad settings, files or models. OSError, FloatingPointError: as `trainer.train`.
        KeyboardInterrupt: a signal asked to stop.
    """
    settings.check()
    base = read_base(settings)
    benchmarks, others = read_benchmarks(settings, base)
    from dspark_jax.evaluation import study_report
    from dspark_jax.evaluation.study_analyses import Workbench
    from dspark_jax.evaluation.study_kinds import KINDS
    from dspark_jax.evaluation.study_run import Lab
    from dspark_jax.profiling.measure import Timing

    lab = Lab(base, settings.output, settings.batch_size)
    lab.check()
    protocols = [settings.protocol(temperature, base.seed) for temperature in settings.temperatures]
    bench = Workbench(lab, benchmarks, others, protocols, base.seed, settings.slots, Timing(repeats=settings.repeats))
    made: dict[str, Any] = {"settings": settings_as_json(settings), "target": str(lab.target_path), "seed": base.seed}
    found: dict[str, Any] = {}
    for study in settings.studies():
        logger.info("study %s: %s", study.name, study.title)
        folder = settings.output / study.name
        report = KINDS[study.kind](study, bench, folder)
        print(study_report.write(folder, study, report, _how(settings, base, bench), made))
        found[study.name] = report.as_json()
        logger.info("%s: report written", folder / "report.md")
    return made | {"studies": found}


def _how(settings: AblateSettings, base: TrainSettings, bench: Any) -> list[str]:
    """Lines of a report that say how its figures were made."""
    counts = ", ".join(f"{one.title} {len(one.conversations)}" for one in bench.benchmarks)
    temperatures = ", ".join(f"{temperature:g}" for temperature in settings.temperatures)
    most = f" of at most {settings.max_prompt_tokens} tokens" if settings.max_prompt_tokens else ""
    training = f"{base.steps} updates" if base.steps else f"{base.epochs} epochs"
    return [
        f"config {settings.config}: {training} of {base.batch_size} sequences, {len(bench.lab.samples)} samples, seed "
        f"{base.seed}",
        f"target {bench.lab.target_path.name}, answers in {bench.lab.dtype}, training in {bench.lab.training_dtype}",
        f"conversations{most}, {settings.lines} lines: {counts}",
        f"temperatures {temperatures}, answers of at most {settings.max_tokens} tokens, method {settings.method}, "
        f"batches of {settings.batch_size}, whole blocks verified where nothing else is said",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command `dspark ablate`: exit code 0, or 1 (a loss that is not finite), 2 (bad input, told in one line), 130
    (stopped)."""
    settings = tyro.cli(AblateSettings, args=argv, prog=_PROGRAM, config=(tyro.conf.FlagCreatePairsOff,))
    return exit_code(_PROGRAM, lambda: _run(settings), stopped=_STOPPED)


def _run(settings: AblateSettings) -> int:
    with log_to_stderr():
        try:
            done = ablate(settings)
        except FloatingPointError as error:
            logger.error("%s", error)
            return 1
    if settings.json is not None:
        write_json(settings.json, done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
