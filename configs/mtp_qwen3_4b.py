"""The MTP-1 baseline for Qwen3-4B: DeepSeek-V3's module, one layer behind the target's final state, one draft token.

Data: answers that Qwen3-4B itself gave (`dspark data`, temperature 0.7, top-p 0.8, top-k 20).
Expected: no published figure for this target; with one draft token the accepted length is below 2.
Cost: not measured.
Command: python train.py --config configs/mtp_qwen3_4b.py
"""

from __future__ import annotations

from dspark_jax.training.losses import LossConfig
from dspark_jax.training.settings import DrafterSettings, TrainSettings

config = TrainSettings(
    target="Qwen/Qwen3-4B",
    records=("runs/qwen3_4b/records.jsonl",),
    output="runs/qwen3_4b/mtp",
    online=True,
    drafter=DrafterSettings(kind="mtp", block_size=1),
    loss=LossConfig(ce=1.0, tv=0.0, confidence=0.0),
    epochs=10,
    batch_size=512,
    max_length=4096,
)
