"""Every field of a drafter's config that a round reads changes what the round drafts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.models.config import RopeConfig
from tests.decoding.tiny import SIZES
from tests.drafters.one_round import differ, drafted

COMMON: dict[str, Any] = {"vocab_size": 12, "draft_vocab_size": 12, "shares_embeddings": True, "max_positions": 64}
COMMON |= SIZES | {"num_target_layers": 4, "num_kv_heads": 1}
HEADS: dict[str, Any] = {"markov_rank": 4, "markov_kind": "vanilla", "confidence": True, "confidence_with_markov": True}
CONFIGS: dict[str, Any] = {
    "dspark": DrafterConfig(3, 1, (0, 1), 11, **HEADS, **COMMON),
    "eagle3": Eagle3Config(3, (0, 1), **COMMON),
    "mtp": MTPConfig(3, (), **COMMON),
}
ELSEWHERE = {"shares_embeddings", "num_target_layers", "vocab_size", "max_positions"}  # for files, checks, engines
OTHER: dict[str, Any] = {
    "block_size": 2, "num_layers": 2, "target_layer_ids": (0, 2), "mask_token_id": 10, "draft_vocab_size": 7,
     "markov_rank": 3, "markov_kind": "gated", "confidence": False,
    "confidence_with_markov": False, "hidden_size": 20, "intermediate_size": 16, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 12, "rms_norm_eps": 0.1, "rope": RopeConfig(theta=3.0), "qk_norm": False, "family": "gemma4",
    "shared_kv": True, "attention_scale": 2.0, "final_softcap": 1.0, "anchor_predicts": False,
    "confidence_temperatures": (2.0, 1.0, 1.0), "confidence_biases": (0.0, 1.0, 0.0), "norm_before_residual": True,
}  # fmt: skip


def read_by_rounds(kind: str) -> list[str]:
    names = [f.name for f in fields(CONFIGS[kind]) if f.name not in ELSEWHERE]
    return [name for name in names if (kind, name) != ("mtp", "target_layer_ids")]  # which is always empty there


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in CONFIGS for name in read_by_rounds(kind)])
def test_every_field_changes_the_draft(kind: str, name: str) -> None:
    assert differ(CONFIGS[kind], replace(CONFIGS[kind], **{name: OTHER[name]}))


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_same_config_drafts_the_same(kind: str) -> None:
    assert not differ(CONFIGS[kind], replace(CONFIGS[kind]))
    assert drafted(CONFIGS[kind])[0].shape == (1, 3)
