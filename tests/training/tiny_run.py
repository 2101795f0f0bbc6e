"""A training run that takes seconds: a tiny golden target, random answers, float32, one device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from dspark_jax.training.settings import DrafterSettings, TrainSettings

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
