"""The Eagle3 baseline for Qwen3-4B: one layer on five target layers, training-time test of 7 steps weighted 0.8^s.

Data: answers that Qwen3-4B itself gave (`dspark data`, temperature 0.7, top-p 0.8, top-k 20).
Expected: accepted length 5.14 on GSM8K, 3.69 on MBPP, 2.39 on MT-Bench (the paper's table, temperature 1).
Cost: not measured; the paper's runs take 10 epochs of 1.3 M samples at a global batch of 512.
Command: python train.py --config configs/eagle3_qwen3_4b.py
"""

from __future__ import annotations

import math

from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    target="Qwen/Qwen3-4B",
    records=("runs/qwen3_4b/records.jsonl",),
    output="runs/qwen3_4b/eagle3",
    online=True,
    drafter=DrafterSettings(kind="eagle3", block_size=7, target_layer_ids=(1, 9, 17, 25, 33)),
    loss=LossConfig(ce=1.0, tv=0.0, confidence=0.0, decay=-1 / math.log(0.8)),
    epochs=10,
    batch_size=512,
    max_length=4096,
)
