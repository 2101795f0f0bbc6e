"""The Eagle3 baseline for Qwen3-4B: one layer on five target layers, training-time test of 7 steps weighted 0.8^s.

Expected, accepted length at temperature 1, whole block verified (the paper's table): GSM8K 5.14, MATH 4.62, AIME25
    3.92, MBPP 3.69, HumanEval 4.16, LCB 3.77, MT-Bench 2.39, Alpaca 2.26, Arena-Hard 2.55.
Released constants: five layers (DSpark's: 1 9 17 25 33 of 36), 7 steps, step decay 0.8, full vocabulary, 10 epochs,
    learning rate 6e-4 with 4 % warm-up, global batch 512. 149 M trainable parameters.
Data: the target's own answers to open-perfectblend, 1.3 M samples, non-thinking:
    dspark data --target Qwen/Qwen3-4B --output runs/qwen3_4b/records.jsonl \
        --prompts hf:mlabonne/open-perfectblend --max-tokens 4096 --max-prompt-tokens 4096 \
        --temperatures 0.7 --top-p 0.8 --top-k 20
Cost, estimated and not measured: 1.6e21 FLOP, 2,470 chip-hours at 40 % of a v5p chip's 459 TFLOP/s. 5.3e10 tokens (10
    epochs of 1.3 M samples, each padded to 4096), of 8.5 GFLOP in the target's forward pass (hidden states computed
    online) and 22.1 GFLOP in the drafter's forward and backward pass.
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
    states="online",
    drafter=DrafterSettings(kind="eagle3", block_size=7, target_layer_ids=(1, 9, 17, 25, 33)),
    loss=LossConfig(ce=1.0, tv=0.0, confidence=0.0, decay=-1 / math.log(0.8)),
    epochs=10,
    batch_size=512,
    max_length=4096,
    lr=6e-4,
    warmup=0.04,
)
