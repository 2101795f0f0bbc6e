"""DSpark for Gemma4-12B: parallel backbone, Markov head and confidence head (paper, section 3).

Expected, accepted length at temperature 1, whole block verified (the paper's table): GSM8K 6.05, MATH 5.78, AIME25
    5.12, MBPP 5.11, HumanEval 5.64, LCB 4.51, MT-Bench 3.49, Alpaca 3.35, Arena-Hard 2.92.
Released constants: layers 5 17 29 41 46 of 48, mask id 4, gamma 7, 5 draft layers, 512 anchors, Markov rank 256, 10
    epochs, learning rate 6e-4 with 4 % warm-up, global batch 512. 1,417 M trainable parameters.
Data: the target's own answers to open-perfectblend, 1.3 M samples, non-thinking; the paper names no sampling settings
    for Gemma4, these are Gemma's usual ones:
    dspark data --target google/gemma-4-12B-it --output runs/gemma4_12b/records.jsonl \
        --prompts hf:mlabonne/open-perfectblend --max-tokens 4096 --max-prompt-tokens 4096 \
        --temperatures 1.0 --top-p 0.95 --top-k 64
Cost, estimated and not measured: 1.9e21 FLOP, 2,930 chip-hours at 40 % of a v5p chip's 459 TFLOP/s. 5.3e10 tokens (10
    epochs of 1.3 M samples, each padded to 4096), of 23.0 GFLOP in the target's forward pass (hidden states computed
    online) and 13.4 GFLOP in the drafter's forward and backward pass.
Command: python train.py --config configs/dspark_gemma4_12b.py
"""

from __future__ import annotations

from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    target="google/gemma-4-12B-it",
    records=("runs/gemma4_12b/records.jsonl",),
    output="runs/gemma4_12b/dspark",
    states="online",
    drafter=DrafterSettings(
        kind="dspark",
        block_size=7,
        num_layers=5,
        target_layer_ids=(5, 17, 29, 41, 46),
        mask_token_id=4,
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
