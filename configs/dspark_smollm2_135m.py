"""The embedded drafter: DSpark for SmolLM2-135M-Instruct, block size 7, two layers, a reduced draft vocabulary.

Data: answers that the target itself gave, made by
    dspark data --output runs/smollm2/records.jsonl --line-filter odd --max-tokens 176 --max-prompt-tokens 204 \
        --prompts gsm8k.jsonl math500.jsonl mbpp.jsonl humaneval.jsonl mt-bench.jsonl arena-hard-v2.jsonl
Expected: accepted length about 1.9 on held-out prompts after these 480 steps (0.37 M blocks).
Cost: the cache takes 7 kB a token; a step is 3 seconds on two CPU cores with bf16 matrix units.
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
    loss=LossConfig(ce=0.3),  # a short run learns faster with more cross entropy than the paper's 0.1
    steps=480,
    lr=1.2e-3,
    batch_size=8,
    num_anchors=96,
    max_length=384,
    checkpoint_every=80,
    eval_every=0,
)
