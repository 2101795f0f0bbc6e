"""Studies that take seconds: a golden target with a tokenizer, random records, a few updates, short answers.

As a program: `python -m tests.evaluation.tiny_study FOLDER [OPTIONS]` runs `dspark ablate` on the files in FOLDER, with
a study `pair` beside the others.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark_jax.evaluation import ablate_command, studies
from dspark_jax.evaluation.studies import Study, Variant
from dspark_jax.training.settings import TrainSettings
from tests.serving.conftest import write_target
from tests.training.tiny_run import SHAPE, write_records

PAIR = Study(
    "pair",
    "Two drafters",
    "Which is better?",
    (Variant("vanilla"), Variant("none", studies.STUDIES["head"].variants[-1].changes)),
    "Nothing.",
    pairs=(("none", "vanilla"),),
)
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TURNS = {
    "gsm8k": [["a b c"], ["the answer"], ["tulips"], ["red and blue"]],
    "mt-bench": [["one two"], ["tell me", "and then"], ["x y"], ["why", "so"]],
}
IMPORTS = """\
from dspark_jax.sharding import MeshShape
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings
"""


def base_settings(folder: Path, **fields: Any) -> TrainSettings:
    """The training run that tiny studies change, with records and target in `folder`."""
    base = TrainSettings(
        records=(str(folder / "records.jsonl"),),
        target=str(folder / "target"),
        cache=str(folder / "cache"),
        drafter=SHAPE,
        steps=4,
        batch_size=4,
        num_anchors=6,
        max_length=32,
        compute_dtype="float32",
        eval_every=0,
        eval_samples=2,
        eval_tokens=5,
        lr=1e-2,
        log_every=1,
        devices=1,
    )
    return replace(base, **fields)


def write_config(file: Path, settings: TrainSettings) -> Path:
    """A config file that defines these settings."""
    file.write_text(f"{IMPORTS}\nconfig = {settings!r}\n")
    return file


def write_study(folder: Path, **fields: Any) -> Path:
    """Target, records, prompts and config of a study in `folder`, which is made; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_target(GOLDEN, folder / "target")
    write_records(folder / "records.jsonl")
    (folder / "prompts").mkdir()
    for name, conversations in TURNS.items():
        lines = (json.dumps({"turns": turns}) + "\n" for turns in conversations)
        (folder / "prompts" / f"{name}.jsonl").write_text("".join(lines))
    write_config(folder / "config.py", base_settings(folder, **fields))
    return folder


def words(folder: Path, *more: str, output: str = "out") -> list[str]:
    """The command line of a study on the files in `folder`."""
    places = {"--config": "config.py", "--prompts": "prompts", "--output": output}
    given = [word for name, place in places.items() for word in (name, str(folder / place))]
    sizes = ["--max-tokens", "9", "--batch-size", "4", "--slots", "1", "2", "--repeats", "2"]
    return [*given, *sizes, *more]


if __name__ == "__main__":
    studies.STUDIES["pair"] = PAIR
    sys.exit(ablate_command.main(words(Path(sys.argv[1]), *sys.argv[2:])))
