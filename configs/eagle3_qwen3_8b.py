"""The Eagle3 baseline for Qwen3-8B: one layer on five target layers, training-time test of 7 steps weighted 0.8^s.

Expected: not reported by benchmark. DSpark's macro gain of 26.7 % over it implies a mean accepted length of about
    3.80 over the nine benchmarks, at temperature 1.
Released constants: five layers (DSpark's: 1 9 17 25 33 of 36), 7 steps, step decay 0.8, full vocabulary, 10 epochs,
    learning rate 6e-4 with 4 % warm-up, global batch 512. 302 M trainable parameters.
Data: the target's own answers to open-perfectblend, 1.3 M samples, non-thinking:
    dspark data --target Qwen/Qwen3-8B --output runs/qwen3_8b/records.jsonl \
        --prompts hf:mlabonne/open-perfectblend --max-tokens 4096 --max-prompt-tokens 4096 \
        --temperatures 0.7 --top-p 0.8 --top-k 20
Cost, estimated and not measured: 2.7e21 FLOP, 4,160 chip-hours at 40 % of a v5p chip's 459 TFLOP/s. 5.3e10 tokens (10
    epochs of 1.3 M samples, each padded to 4096), of 15.1 GFLOP in the target's forward pass (hidden states computed
    online) and 36.5 GFLOP in the drafter's forward and backward pass.
Command: python train.py --config configs/eagle3_qwen3_8b.py
"""

from __future__ import annotations

import math

from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    target="Qwen/Qwen3-8B",
    records=("runs/qwen3_8b/records.jsonl",),
    output="runs/qwen3_8b/eagle3",
    states="online",
    drafter=DrafterSettings(kind="eagle3", block_size=7, target_layer_ids=(1, 9, 17, 25, 33)),
    loss=LossConfig(ce=1.0, tv=0.0, confidence=0.0, decay=-1 / math.log(0.8)),
    epochs=10,
    batch_size=512,
    max_length=4096,
    lr=6e-4,
    warmup=0.04,
)
