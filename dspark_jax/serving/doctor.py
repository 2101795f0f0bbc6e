"""The command `dspark doctor`: do this target and this drafter belong together, and if not, what is wrong?

It reads both checkpoints without believing them, names every mismatch with both values and what would be right, and
then lets them run (`doctor_checks`, `doctor_trial`). A drafter that does not fit is silent otherwise: the text stays
the target's, only the accepted length falls to 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from tyro.conf import Positional

from dspark_jax.config import exit_code, one_line

if TYPE_CHECKING:
    from dspark_jax.checkpoints.load import Target
    from dspark_jax.serving.doctor_checks import DrafterFiles, Finding, Prompted

PROMPT = "Explain step by step: a train covers 120 km in 90 minutes. How many kilometres does it cover in two hours?"


@dataclass(frozen=True)
class DoctorSettings:
    """Check that a target and a drafter belong together, and say what is wrong where they do not.

    Exit code 0: all is well (warnings too); 1: something is wrong; 2: a checkpoint cannot be read.

    Attributes:
        target: target model: a folder, a GGUF file or a hub id; the embedded one by default.
        drafter: drafter: a folder or a hub id; the embedded one by default.
        prompt: text that the trial run answers, greedily.
        max_tokens: tokens that the trial run generates at most, from 2 on.
        dtype: dtype of the weights; auto is bfloat16 where the device multiplies it fast, else float32.
        run: let both generate; --no-run only checks the files.
        suspects: try other layer ids and the other slot convention even where the accepted length is not near 1.
        json: file for all findings and the trial's numbers, as one JSON object.
    """

    target: Positional[str | None] = None
    drafter: Positional[str | None] = None
    prompt: str = PROMPT
    max_tokens: int = 96
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    run: bool = True
    suspects: bool = False
    json: Path | None = None

    def check(self) -> None:
        """Refuses what cannot run, before anything is loaded.

        Raises:
            ValueError: naming option, value and what would be right.
            FileNotFoundError: the folder of --json is missing.
        """
        if not self.prompt:
            raise ValueError("prompt '': must not be empty")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens {self.max_tokens}: must be at least 2, the first token belongs to no round")
        if self.json is not None and self.json.is_dir():
            raise ValueError(f"json {self.json}: is a folder, must be a file")
        if self.json is not None and not self.json.parent.is_dir():
            raise FileNotFoundError(f"json {self.json}: the folder {self.json.parent} does not exist, make it first")


class Unreadable(Exception):
    """One or both checkpoints cannot be read; the arguments are the messages."""


def read_both(settings: DoctorSettings) -> tuple[Target, DrafterFiles]:
    """The target, loaded, and the drafter's files.

    Raises:
        Unreadable: with a message for each that cannot be read.
    """
    from dspark_jax.checkpoints import load
    from dspark_jax.config import named_dtype
    from dspark_jax.serving.doctor_checks import read_files

    dtype = named_dtype(settings.dtype)
    errors: list[str] = []

    def attempt(read: Callable[[str], Any], path: str) -> Any:
        try:
            return read(path)
        except (ValueError, TypeError, OSError) as error:
            errors.append(one_line(error))

    target = attempt(lambda path: load.load_target(path, dtype=dtype), settings.target or load.embedded_target_path())
    files = attempt(lambda path: read_files(path, target), settings.drafter or load.embedded_drafter_path())
    if errors:
        raise Unreadable(*errors)
    return target, files


def tokenized(target: Target, text: str) -> Prompted:
    """The trial prompt as the target's chat renders it; the reason where there is no tokenizer to do so."""
    from dspark_jax.checkpoints.tokenizer import prompt_ids
    from dspark_jax.serving.doctor_checks import Prompted

    try:
        return Prompted(target.tokenizer, prompt_ids(target.tokenizer, [{"role": "user", "content": text}]))
    except (FileNotFoundError, ValueError) as error:
        return Prompted(None, (), str(error))


def examine(settings: DoctorSettings) -> dict[str, Any]:
    """All checks, printed as they come; returns the report.

    Raises:
        Unreadable: a checkpoint cannot be read.
        ValueError: the prompt does not fit the target's context.
    """
    from dspark_jax.serving.doctor_checks import OK, WARNING, WRONG, Finding, static_findings

    target, files = read_both(settings)
    shape = target.config
    sizes = f"{shape.num_layers} layers of {shape.hidden_size}, {shape.vocab_size} tokens"
    print(f"target  {target.path}: {shape.family}, {sizes}")
    print(f"drafter {files.folder}: {files.kind or 'of unknown kind'}\n")
    prompted = tokenized(target, settings.prompt)
    findings: list[Finding] = []

    def tell(new: list[Finding]) -> None:
        findings.extend(new)
        for finding in new:
            print(finding.line(), flush=True)

    if prompted.tokenizer is None:
        tell([Finding("tokenizer", WRONG, f"{prompted.reason}; right would be tokenizer files beside the target")])
    tell(static_findings(files, target, prompted))
    numbers = None
    if settings.run and findings[-1].status == OK and files.loaded is not None and prompted.tokenizer is not None:
        from dspark_jax.serving.doctor_trial import trial

        new, numbers = trial(target, files.loaded, files, prompted.ids, settings.max_tokens, settings.suspects)
        tell(new)
    elif settings.run:
        tell([Finding("trial run", WARNING, "not possible before the above is right")])
    wrong, warnings = (sum(f.status == status for f in findings) for status in (WRONG, WARNING))
    verdict = "they belong together" if not wrong else "they do not work together as they are"
    print(f"\n{verdict}: {wrong} wrong, {warnings} warning{'s' if warnings != 1 else ''}")
    return {
        "target": str(target.path),
        "drafter": str(files.folder),
        "settings": {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()
        },
        "findings": [asdict(finding) for finding in findings],
        "trial": numbers,
        "wrong": wrong,
        "warnings": warnings,
        "exit_code": 1 if wrong else 0,
    }


def write_report(settings: DoctorSettings, report: dict[str, Any]) -> int:
    """Writes the report where it is asked for; returns its exit code."""
    if settings.json is not None:
        text = json.dumps(report, ensure_ascii=False, indent=1, default=str)
        settings.json.write_text(text + "\n", encoding="utf-8")
    return int(report["exit_code"])


def main(argv: list[str] | None = None, program: str = "dspark doctor") -> int:
    """Entry point: exit code 0 (fine), 1 (something is wrong), 2 (bad options, or a checkpoint that cannot be read)."""
    words = sys.argv[1:] if argv is None else list(argv)
    settings = tyro.cli(DoctorSettings, args=words, prog=program, config=(tyro.conf.FlagCreatePairsOff,))
    return exit_code(program, lambda: _run(settings, program), "stopped")


def _run(settings: DoctorSettings, program: str) -> int:
    try:
        settings.check()
        return write_report(settings, examine(settings))
    except Unreadable as error:
        for message in error.args:
            print(f"{program}: cannot be read: {message}", file=sys.stderr)
        return write_report(settings, {"errors": list(error.args), "exit_code": 2})
