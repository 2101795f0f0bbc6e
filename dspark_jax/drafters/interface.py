"""One interface for all drafters: decoding and training choose nothing by kind, they ask here by the config's type.

    dspark      DSpark and DFlash: a parallel backbone and a sequential head      `DrafterConfig`
    eagle3      autoregressive, one layer on fused features                       `Eagle3Config`
    mtp         DeepSeek-V3's module, chained                                     `MTPConfig`
    ngram       prompt lookup, no weights                                         `NgramConfig`

A drafter keeps a `memory` per request slot: any pytree that a prefill makes, a round reads and writes, and a commit
extends. All functions are pure; params are bound ones (`bind`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.drafters import backbone, dspark, eagle3, mtp, ngram, recurrent
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import Proposal, bind, spread
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.drafters.ngram import NgramConfig
from dspark_jax.drafters.recurrent import Committed, Draw
from dspark_jax.models.cache import insert as insert_cache

__all__ = [
    "AnyConfig", "Committed", "Proposal", "bind", "draft_distribution", "ingest", "init_memory", "init_params",
    "insert", "may_abstain", "propose", "proposed",
]  # fmt: skip

Array = jax.Array
Params = dict[str, Any]
AnyConfig = DrafterConfig | Eagle3Config | MTPConfig | NgramConfig


class Kind(NamedTuple):
    """The functions of one kind of drafter; signatures as the public functions below."""

    init_memory: Callable
    insert: Callable
    ingest: Callable
    propose: Callable
    init_params: Callable


def _ingest_context(params: Params, config: DrafterConfig, memory: Any, new: Committed) -> Any:
    return backbone.ingest(params, config, memory, new.hidden.features, new.start, new.packing)


def _recurrent(module: Any) -> Kind:
    ingest, propose = partial(recurrent.ingest, module.MODEL), partial(recurrent.propose, module.MODEL)
    return Kind(recurrent.init_memory, recurrent.insert, ingest, propose, module.init_params)


def _nothing(config: NgramConfig, key: Array, dtype: DTypeLike) -> Params:
    raise ValueError("an n-gram drafter has no weights: there is nothing to train")


_KINDS: dict[type, Kind] = {
    DrafterConfig: Kind(backbone.init_draft_cache, insert_cache, _ingest_context, dspark.propose, dspark.init_params),
    Eagle3Config: _recurrent(eagle3),
    MTPConfig: _recurrent(mtp),
    NgramConfig: Kind(ngram.init_memory, ngram.insert, ngram.ingest, ngram.propose, _nothing),
}


def init_params(config: AnyConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random trainable parameters; embedding, head and vocabulary map are not among them.

    Raises:
        ValueError: a drafter without weights.
    """
    return _KINDS[type(config)].init_params(config, key, dtype)


def init_memory(config: AnyConfig, requests: int, capacity: int, dtype: DTypeLike) -> Any:
    """Empty memory of `requests` requests of up to `capacity` tokens; caches have `dtype`."""
    return _KINDS[type(config)].init_memory(config, requests, capacity, dtype)


def insert(config: AnyConfig, memory: Any, other: Any, slots: Array) -> Any:
    """Puts the P requests of `other` (of at most this capacity) into `slots [P]`; a slot of R or more drops one."""
    return _KINDS[type(config)].insert(memory, other, slots)


def ingest(config: AnyConfig, params: Params, memory: Any, new: Committed) -> Any:
    """Takes in what the target has seen: prompts, or the rows of a verification."""
    return _KINDS[type(config)].ingest(params, config, memory, new)


def propose(config: AnyConfig, params: Params, memory: Any, anchor: Array, start: Array, draw: Draw) -> Proposal:
    """Drafts a block for each request.

    Args:
        anchor: int32 `[R]`, last committed token. start: int32 `[R]`, its position.
        draw: `(logits [Vd, R], slot) -> (draft ids [R], their probabilities [R], distribution [Vd or 0, R])`.
    """
    return _KINDS[type(config)].propose(params, config, memory, anchor, start, draw)


def draft_distribution(config: AnyConfig, params: Params, proposal: Proposal, slot: Array, vocab_size: int) -> Array:
    """p_d at `slot [R]` of each request over the target's vocabulary, `[V, R]`; not for greedy proposals."""
    requests = jnp.arange(proposal.tokens.shape[0])
    if isinstance(config, NgramConfig):
        return ngram.distribution(proposal.tokens[requests, slot], vocab_size)
    drafted = proposal.probs[slot, :, requests].T  # [Vd, R]
    return spread(params, drafted, vocab_size)


def may_abstain(config: AnyConfig | None) -> bool:
    """Whether a request may have no proposal in a round: its confidences are 0 then, and nothing is verified."""
    return isinstance(config, NgramConfig)


def proposed(config: AnyConfig | None, proposal: Proposal) -> int | Array:
    """Tokens that each request drafted: K, or int32 `[R]` where requests may abstain."""
    if may_abstain(config):
        return jnp.sum(proposal.confidence > 0, axis=1).astype(jnp.int32)
    return proposal.tokens.shape[1]
