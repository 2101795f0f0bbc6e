"""The embedded drafter: DSpark for SmolLM2-135M-Instruct, block size 7, two layers, a reduced draft vocabulary.

Data: answers that the target itself gave, to odd lines of the benchmark prompts and to prompts that it wrote itself:
    dspark data --output runs/smollm2/records.jsonl --line-filter odd --max-tokens 176 --max-prompt-tokens 204 \
        --prompts gsm8k.jsonl math500.jsonl mbpp.jsonl humaneval.jsonl mt-bench.jsonl arena-hard-v2.jsonl aime25.jsonl
    dspark data --output runs/smollm2/self.jsonl --self-prompts 220 --max-tokens 176 --max-prompt-tokens 204 --seed 11
    dspark data --output runs/smollm2/more.jsonl --line-filter odd --max-tokens 200 --max-prompt-tokens 204 \
        --temperatures 0.4 1.0 --seed 5 --prompts gsm8k.jsonl
(2,685, 338 and 1,009 answers, 0.68 M tokens: all three were stopped, not finished.)
Command: python train.py --config configs/dspark_smollm2_135m.py
    and then, with the third file too, in smaller batches from where that ended:
    python train.py --config configs/dspark_smollm2_135m.py --initial runs/smollm2/train/drafter \
        --records runs/smollm2/more.jsonl runs/smollm2/records.jsonl runs/smollm2/self.jsonl \
        --output runs/smollm2/further --batch-size 4 --lr 6e-4 --warmup 0.02 --steps 5000
    and then on new answers, once W1 of the sequential head had a gradient in bfloat16 on CPUs (the data of
    configs/testbed_smollm2_135m.py, and 800 answers more by the same command with --temperatures 0.7 1 --seed 11
    --window 800 --limit 800, their ids made different by a prefix):
    python train.py --config configs/dspark_smollm2_135m.py --initial dspark_jax/assets/dspark-smollm2-135m \
        --records runs/testbed/records.jsonl runs/testbed/more.jsonl --cache runs/testbed/cache --cache-kind float32 \
        --output runs/smollm2/head --batch-size 4 --lr 1e-3 --warmup 0.03 --steps 800
    and last with half of the draft vocabulary and twice as many new answers (1,400 more by the same command with
    --temperatures 0.7 1 --seed 23 --max-prompt-tokens 204 --window 1400 --limit 1400, ids made different as well):
    python train.py --config configs/dspark_smollm2_135m.py --initial runs/smollm2/head/drafter \
        --drafter.draft-vocab-size 4096 --output runs/smollm2/cut --batch-size 4 --lr 8e-4 --warmup 0.03 --steps 1500 \
        --records runs/testbed/records.jsonl runs/testbed/more.jsonl runs/testbed/third.jsonl \
        --cache runs/testbed/cache --cache-kind float32
Expected: the figures of dspark_jax/assets/dspark-smollm2-135m.md. The second part of the drafter that ships was made in
two runs: 2,031 of 6,000 updates with --lr 8e-4, then 3,000 with --lr 6e-4.
Cost: the cache takes 7 kB a token, and 0.4 to 0.7 ms of computing; an update of 8 sequences 1.4 seconds on two CPU
cores with bf16 matrix units, of 4 sequences 0.7 (GLIBC_TUNABLES=glibc.malloc.hugetlb=1 saves some 8 % of it on Linux).
The data took an hour and a half there.
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
