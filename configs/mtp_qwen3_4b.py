"""The MTP-1 baseline for Qwen3-4B: DeepSeek-V3's module, one layer behind the target's final state, one draft token.

Expected: not reported; with one draft token the accepted length is below 2.
Released constants: none; gamma 1, and the rest as the other drafters of this target: 10 epochs, learning rate 6e-4
    with 4 % warm-up, global batch 512. 114 M trainable parameters.
Data: the target's own answers to open-perfectblend, 1.3 M samples, non-thinking:
    dspark data --target Qwen/Qwen3-4B --output runs/qwen3_4b/records.jsonl \
        --prompts hf:mlabonne/open-perfectblend --max-tokens 4096 --max-prompt-tokens 4096 \
        --temperatures 0.7 --top-p 0.8 --top-k 20
Cost, estimated and not measured: 6.2e20 FLOP, 930 chip-hours at 40 % of a v5p chip's 459 TFLOP/s. 5.3e10 tokens (10
    epochs of 1.3 M samples, each padded to 4096), of 8.5 GFLOP in the target's forward pass (hidden states computed
    online) and 3.1 GFLOP in the drafter's forward and backward pass.
Command: python train.py --config configs/mtp_qwen3_4b.py
"""

from __future__ import annotations

from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    target="Qwen/Qwen3-4B",
    records=("runs/qwen3_4b/records.jsonl",),
    output="runs/qwen3_4b/mtp",
    states="online",
    drafter=DrafterSettings(kind="mtp", block_size=1),
    loss=LossConfig(ce=1.0, tv=0.0, confidence=0.0),
    epochs=10,
    batch_size=512,
    max_length=4096,
    lr=6e-4,
    warmup=0.04,
)
