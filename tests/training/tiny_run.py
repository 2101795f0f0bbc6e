"""A training run that takes seconds: a tiny golden target, random answers, float32, one device.

As a program: `python -m tests.training.tiny_run FOLDER OUTPUT [FIELDS]` with fields of the settings as JSON, `mesh` as
[data, fsdp, tensor].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.sharding import MeshShape
from dspark_jax.training.log import TIMINGS
from dspark_jax.training.settings import DrafterSettings, TrainSettings

ROOT = Path(__file__).parents[2]
TARGETS = Path(__file__).parents[1] / "golden" / "targets"

SHAPE = DrafterSettings(
    block_size=4,
    num_layers=1,
    target_layer_ids=(0, 2),
    mask_token_id=299,
    draft_vocab_size=64,
    markov_rank=8,
)


def write_records(file: Path, count: int = 14, seed: int = 0) -> Path:
    """Records of random tokens, prompts of 4..7 and answers of 16..30 tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        prompt, answer = (rng.integers(0, 100, size=rng.integers(*span)).tolist() for span in ((4, 8), (16, 31)))
        rows.append({"id": f"r{i}", "prompt_ids": prompt, "token_ids": answer, "finish_reason": "length"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def tiny_settings(folder: Path, output: str = "out", **fields: object) -> TrainSettings:
    """Settings of a run inside `folder`, whose records are made if needed."""
    records = folder / "records.jsonl"
    if not records.exists():
        write_records(records)
    base = TrainSettings(
        records=(str(records),),
        target=str(TARGETS / "llama_tied"),
        output=str(folder / output),
        cache=str(folder / "cache"),
        drafter=SHAPE,
        steps=7,
        batch_size=4,
        num_anchors=6,
        max_length=32,
        compute_dtype="float32",
        ema=0.5,
        checkpoint_every=3,
        eval_every=0,
        eval_samples=2,
        eval_tokens=9,
        lr=1e-2,
        log_every=1,
        devices=1,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


class Job:
    """A run as a process of its own, with so many virtual devices; killed at the end of a `with` block."""

    def __init__(self, folder: Path, output: str, virtual: int = 8, **fields: Any) -> None:
        self.folder = folder / output
        self._log = folder / f"{output}.{fields.get('process_id', 0)}.log"
        command = [sys.executable, "-m", "tests.training.tiny_run", str(folder), output, json.dumps(fields)]
        flags = f"--xla_force_host_platform_device_count={virtual} --xla_backend_optimization_level=0"  # compiles fast
        with self._log.open("a") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, stderr=log)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def lines(self) -> int:
        """Lines of its metrics until now."""
        file = self.folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def finish(self, code: int = 0, seconds: float = 500) -> str:
        """Wait for its end; returns what it said."""
        found = self.process.wait(seconds)
        assert found == code, self._log.read_text()[-3000:]
        return self._log.read_text()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


def metrics_of(folder: Path, output: str) -> list[dict[str, float]]:
    """The lines of a run's log, without what differs from run to run."""
    rows = [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in (*TIMINGS, "eval_seconds")} for row in rows]


def main(folder: str, output: str, fields: str = "{}") -> int:
    """Run `train.py` with these settings; returns its exit code."""
    from dspark_jax.training import trainer

    values = json.loads(fields)
    if "mesh" in values:
        values["mesh"] = MeshShape(*values["mesh"])
    settings = tiny_settings(Path(folder), output, **values)
    trainer.parse = lambda argv: settings
    return trainer.main([])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
