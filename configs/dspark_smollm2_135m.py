"""The embedded drafter: DSpark for SmolLM2-135M-Instruct, block size 7, two layers, a reduced draft vocabulary.

Data: answers that the target itself gave, `runs/smollm2/records.jsonl`.
Cost: the cache takes 7 kB a token (7 GB for a million tokens); training runs on a CPU, best one with bf16 matrix units.
Command: python train.py --config configs/dspark_smollm2_135m.py
"""

from __future__ import annotations

from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    records=("runs/smollm2/records.jsonl",),
    output="runs/smollm2/train",
    cache="runs/smollm2/cache",
    drafter=DrafterSettings(
        block_size=7,
        num_layers=2,
        target_layer_ids=(1, 8, 15, 22, 28),
        mask_token_id=16,  # <empty_output>, which no text contains
        draft_vocab_size=8192,
        markov_rank=64,
        markov_kind="vanilla",
    ),
    loss=LossConfig(),
    epochs=10,
    batch_size=16,
    num_anchors=96,
    max_length=384,
)
