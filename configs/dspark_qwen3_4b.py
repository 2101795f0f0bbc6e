"""DSpark for Qwen3-4B: parallel backbone, Markov head and confidence head (paper, section 3).

Expected, accepted length at temperature 1, whole block verified (the paper's table): GSM8K 6.11, MATH 5.70, AIME25
    4.89, MBPP 5.13, HumanEval 5.38, LCB 4.86, MT-Bench 3.64, Alpaca 3.54, Arena-Hard 3.29.
Released constants: layers 1 9 17 25 33 of 36, mask id 151669 (above the tokenizer, inside the padded vocabulary),
    gamma 7, 5 draft layers, 512 anchors, Markov rank 256, 10 epochs, learning rate 6e-4 with 4 % warm-up, global
    batch 512. 615 M trainable parameters.
Data: the target's own answers to open-perfectblend, 1.3 M samples, non-thinking:
    dspark data --target Qwen/Qwen3-4B --output runs/qwen3_4b/records.jsonl \
        --prompts hf:mlabonne/open-perfectblend --max-tokens 4096 --max-prompt-tokens 4096 \
        --temperatures 0.7 --top-p 0.8 --top-k 20
Cost, estimated and not measured: 7.5e20 FLOP, 1,140 chip-hours at 40 % of a v5p chip's 459 TFLOP/s. 5.3e10 tokens (10
    epochs of 1.3 M samples, each padded to 4096), of 8.5 GFLOP in the target's forward pass (hidden states computed
    online) and 5.7 GFLOP in the drafter's forward and backward pass.
Command: python train.py --config configs/dspark_qwen3_4b.py
"""

from __future__ import annotations

from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    target="Qwen/Qwen3-4B",
    records=("runs/qwen3_4b/records.jsonl",),
    output="runs/qwen3_4b/dspark",
    states="online",
    drafter=DrafterSettings(
        kind="dspark",
        block_size=7,
        num_layers=5,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151669,
        markov_rank=256,
        markov_kind="vanilla",
        confidence=True,
        confidence_with_markov=True,
    ),
    loss=LossConfig(ce=0.1, tv=0.9, confidence=1.0, decay=4.0),
    epochs=10,
    batch_size=512,
    num_anchors=512,
    max_length=4096,
    lr=6e-4,
    warmup=0.04,
)
