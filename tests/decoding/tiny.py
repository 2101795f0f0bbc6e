"""Tiny random targets and drafters with lively distributions, for tests of decoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.drafters import interface
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import init_params as init_drafter
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.drafters.ngram import NgramConfig
from dspark_jax.models.config import RopeConfig, TransformerConfig
from dspark_jax.models.transformer import init_params

VOCAB, BLOCK, HIDDEN = 12, 3, 16
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(),
    "qk_norm": True,
    "family": "qwen3",
}


def tiny_target(padding: int = 0, max_positions: int = 64) -> SimpleNamespace:
    """A two-layer target; `padding` more vocabulary rows than tokens, with logits that would often win."""
    config = TransformerConfig(
        vocab_size=VOCAB + padding,
        num_layers=2,
        tie_embeddings=False,
        max_positions=max_positions,
        num_tokens=VOCAB,
        **SIZES,
    )
    params = jax.jit(init_params, static_argnames=("config",))(config, jax.random.key(3))
    scale = np.ones((VOCAB + padding, 1), np.float32)
    scale[:VOCAB], scale[VOCAB:] = 1.5, 6.0
    return SimpleNamespace(config=config, params=params | {"head": params["head"] * scale})


def tiny_drafter(
    draft_vocab: int = VOCAB, confidence: bool = True, padding: int = 0, max_positions: int = 64
) -> SimpleNamespace:
    """A one-layer drafter with a vanilla head and, by default, a confidence head that reads Markov features."""
    config = DrafterConfig(
        block_size=BLOCK,
        num_layers=1,
        target_layer_ids=(0,),
        mask_token_id=VOCAB - 1,
        vocab_size=VOCAB + padding,
        draft_vocab_size=draft_vocab + padding,
        markov_rank=4,
        markov_kind="vanilla",
        confidence=confidence,
        confidence_with_markov=confidence,
        shares_embeddings=True,
        num_target_layers=2,
        max_positions=max_positions,
        **SIZES,
    )
    rng = np.random.default_rng(1)

    def lively(x: jax.Array) -> jax.Array:
        return x if x.ndim == 1 and x.shape[0] in (8, HIDDEN) else jnp.asarray(rng.normal(size=x.shape) * 0.4, x.dtype)

    params = jax.tree.map(lively, init_drafter(config, jax.random.key(5)))
    if config.trims_vocabulary:
        kept = np.sort(rng.permutation(VOCAB)[:draft_vocab])
        params["d2t"] = jnp.asarray(kept - np.arange(draft_vocab), jnp.int32)
    return SimpleNamespace(config=config, params=params)


def other_drafter(kind: str, draft_vocab: int = VOCAB) -> SimpleNamespace:
    """A random Eagle3 or MTP drafter of the same sizes, or an n-gram one that matches single tokens."""
    if kind == "ngram":
        return SimpleNamespace(config=NgramConfig(BLOCK, longest=2, shortest=1), params={})
    config = {"eagle3": Eagle3Config, "mtp": MTPConfig}[kind](
        block_size=BLOCK,
        target_layer_ids=(0,) if kind == "eagle3" else (),
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        shares_embeddings=True,
        num_target_layers=2,
        max_positions=64,
        **SIZES,
    )
    rng = np.random.default_rng(1)

    def lively(x: jax.Array) -> jax.Array:
        return x if x.ndim == 1 else jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype)

    params = jax.tree.map(lively, interface.init_params(config, jax.random.key(5)))
    if config.trims_vocabulary:
        kept = np.sort(rng.permutation(VOCAB)[:draft_vocab])
        params["d2t"] = jnp.asarray(kept - np.arange(draft_vocab), jnp.int32)
    return SimpleNamespace(config=config, params=params)
