"""The embedded drafter: DSpark for SmolLM2-135M-Instruct, block size 7, two layers, a reduced draft vocabulary.

Data: answers that the target itself gave, to odd lines of the benchmark prompts and to prompts that it wrote itself:
    dspark data --output runs/smollm2/records.jsonl --line-filter odd --max-tokens 176 --max-prompt-tokens 204 \
        --prompts gsm8k.jsonl math500.jsonl mbpp.jsonl humaneval.jsonl mt-bench.jsonl arena-hard-v2.jsonl aime25.jsonl
    dspark data --output runs/smollm2/self.jsonl --self-prompts 220 --max-tokens 176 --max-prompt-tokens 204 --seed 11
(2,685 and 338 answers, 0.49 M tokens: both were stopped, not finished.)
Expected: accepted length about 2.2 on held-out GSM8K prompts at temperature 0 after these 1,900 steps (1.46 M blocks).
Cost: the cache takes 7 kB a token, and 0.4 to 0.7 ms of computing; a step 1.4 seconds on two CPU cores with bf16 matrix
units (GLIBC_TUNABLES=glibc.malloc.hugetlb=1 saves some 8 % of it on Linux). The data took an hour there.
Command: python train.py --config configs/dspark_smollm2_135m.py
"""

from __future__ import annotations

from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    records=("runs/smollm2/records.jsonl", "runs/smollm2/self.jsonl"),
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
    steps=1900,
    lr=1.2e-3,
    batch_size=8,
    num_anchors=96,
    max_length=384,
    checkpoint_every=200,
    eval_every=0,
)
