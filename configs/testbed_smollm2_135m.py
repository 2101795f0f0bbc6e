"""The testbed of the studies: small drafters for SmolLM2-135M-Instruct that train in minutes on two CPU cores.

`dspark ablate` changes single fields of this config: all drafters see the same data in the same order for the same
number of updates. A GPU or TPU takes the same with more records, `--steps`, and a larger batch.

Data: 640 answers that the target itself gave, half of them greedy and half at temperature 1, to odd lines of the
benchmark prompts (0.1 M tokens; LiveCodeBench's prompts are all longer than the limit):
    dspark data --output runs/testbed/records.jsonl --line-filter odd --max-tokens 192 --max-prompt-tokens 160 \
        --temperatures 0 1 --seed 7 --batch-size 64 --window 640 --limit 640 --prompts gsm8k.jsonl math500.jsonl \
        mbpp.jsonl humaneval.jsonl mt-bench.jsonl arena-hard-v2.jsonl aime25.jsonl livecodebench.jsonl
Command: dspark ablate --study main --config configs/testbed_smollm2_135m.py --prompts DIR --output runs/testbed/studies
Expected: see docs/reproduction.md.
"""

from __future__ import annotations

from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    records=("runs/testbed/records.jsonl",),
    cache="runs/testbed/cache",
    cache_kind="float32",  # of products in bfloat16 too, where the processor has them; kept whole, it is small
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
    steps=312,  # two epochs
    lr=1.2e-3,
    batch_size=4,
    num_anchors=96,
    max_length=352,
    checkpoint_every=52,
    eval_every=0,
)
