"""What a DSpark (or DFlash) drafter is: its backbone's sizes, the target layers it reads, and its heads (section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark_jax.models.config import AttentionConfig, RopeConfig, TransformerConfig
from dspark_jax.models.families import FAMILIES, Family

_LAYER_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope",
    "qk_norm", "max_positions", "family", "shared_kv", "attention_scale", "final_softcap",
)  # fmt: skip
HEAD_KINDS = ("none", "vanilla", "gated", "rnn")
CALIBRATION = ("confidence_temperatures", "confidence_biases")  # fields of inference only: no weight depends on them


class DraftLayers:
    """What follows from the fields that all drafters with layers have (`layer_fields` and the draft vocabulary)."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_target_layers: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    family: str
    shared_kv: bool
    attention_scale: float | None
    final_softcap: float

    @property
    def traits(self) -> Family:
        """The family's switches."""
        return FAMILIES[self.family]

    @property
    def attention(self) -> AttentionConfig:
        """The attention of every layer."""
        return AttentionConfig(self.num_kv_heads, self.head_dim, self.rope, self.shared_kv)

    @property
    def score_scale(self) -> float:
        """What multiplies the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def trims_vocabulary(self) -> bool:
        """Whether the draft head covers only part of the target's vocabulary (then `d2t` maps draft ids)."""
        return self.draft_vocab_size != self.vocab_size

    def check_target(self, target: TransformerConfig) -> None:
        """Refuses a target that this drafter was not made for.

        Raises:
            ValueError: hidden size, vocabulary, number of layers or the soft cap on logits differ; the message names
                both values.
        """
        for name, mine, theirs in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
            ("final_logit_softcapping", self.final_softcap, target.final_softcap),
        ):
            if mine != theirs:
                raise ValueError(
                    f"drafter and target do not belong together: {name} is {mine} in the drafter, "
                    f"{theirs} in the target"
                )


@dataclass(frozen=True)
class DrafterConfig(DraftLayers):
    """Sizes and switches of a block drafter.

    Attributes:
        block_size: gamma, the number of draft tokens of one round.
        anchor_predicts: whether the anchor is the first prediction slot (DSpark, DeepSpec), so that gamma slots give
            gamma drafts; otherwise slot 0 predicts nothing (z-lab's DFlash) and gamma + 1 slots do. A property of the
            weights: neither kind runs as the other.
        num_layers: backbone layers.
        target_layer_ids: target decoder layers whose raw outputs are the context features; strictly increasing, -1 is
            the embedding output, the last layer is not allowed.
        mask_token_id: token whose embedding fills every slot but the anchor's.
        vocab_size: V of the target. draft_vocab_size: rows of the draft head; equal to V when nothing is trimmed.
        markov_rank: r of the sequential head; 0 for none. markov_kind: none, vanilla, gated or rnn.
        confidence: whether there is a confidence head. confidence_with_markov: whether it reads W1[x_{k-1}] too.
        shares_embeddings: the checkpoint brings no embedding and head of its own, the target's are used.
        num_target_layers: L of the target it was made for.
        max_positions: positions that the drafter was built for, in tokens.
        confidence_temperatures: T_1..T_K that divide the confidence head's logits (sequential temperature scaling,
            `dspark calibrate`); empty: not calibrated, all 1.
        confidence_biases: b_1..b_K, added to the logits after that (`dspark calibrate --biases`); empty: all 0.
        hidden_size .. rope, shared_kv .. final_softcap: as in `TransformerConfig`; every layer of a drafter attends to
            the whole context, so it has the form of the target's full layers.
    """

    block_size: int
    num_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    vocab_size: int
    draft_vocab_size: int
    markov_rank: int
    markov_kind: str
    confidence: bool
    confidence_with_markov: bool
    shares_embeddings: bool
    num_target_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    max_positions: int
    family: str
    shared_kv: bool = False
    attention_scale: float | None = None
    final_softcap: float = 0.0
    anchor_predicts: bool = True
    confidence_temperatures: tuple[float, ...] = ()
    confidence_biases: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size {self.block_size}: a block has at least one slot")
        if self.num_layers < 1:
            raise ValueError(f"num_hidden_layers {self.num_layers}: a drafter has at least one layer")
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be positive")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: RoPE rotates pairs, so it must be even")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads}: must be a multiple of num_kv_heads {self.num_kv_heads}")
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id}: outside the vocabulary, must lie in 0..{self.vocab_size - 1}"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size}: must lie in 1..vocab_size ({self.vocab_size})")
        if self.markov_kind not in HEAD_KINDS:
            raise ValueError(f"markov_head_type {self.markov_kind!r}: must be one of {HEAD_KINDS}")
        if (self.markov_rank > 0) != (self.markov_kind != "none"):
            raise ValueError(
                f"markov_rank {self.markov_rank} with markov_head_type {self.markov_kind!r}: "
                "rank 0 and none go together"
            )
        if self.markov_kind == "rnn" and not self.anchor_predicts:
            raise ValueError(
                "markov_head_type 'rnn' with anchor_predicts false: whether the recurrence passes the anchor's slot is "
                "not known, must be vanilla, gated or none"
            )
        if self.confidence and self.confidence_with_markov and self.markov_rank == 0:
            raise ValueError(
                "confidence_head_with_markov true with markov_rank 0: there are no Markov features to read"
            )
        check_calibration(self.confidence_temperatures, self.confidence_biases, self.block_size, self.confidence)

    @property
    def block_slots(self) -> int:
        """Slots of a block, the anchor's included."""
        return self.block_size + (not self.anchor_predicts)


def layer_fields(sizes: TransformerConfig) -> dict[str, Any]:
    """The fields that a drafter's config has in common with a model's, with that model's values."""
    return {name: getattr(sizes, name) for name in _LAYER_FIELDS}


def check_calibration(
    temperatures: Sequence[float], biases: Sequence[float], block_size: int, confidence: bool
) -> None:
    """Checks temperatures and biases of the confidence head: of each one a position of `block_size`, or none.

    Raises:
        ValueError: another number of them, a temperature that is not positive and finite, a bias that is not finite
            (both within float32), or no `confidence` head.
    """
    for field, values in zip(CALIBRATION, (temperatures, biases), strict=True):
        name = f"{field} {list(values)}"
        if values and not confidence:
            raise ValueError(f"{name}: there is no confidence head (enable_confidence_head) that they could scale")
        if values and len(values) != block_size:
            raise ValueError(f"{name}: must be one for each of block_size {block_size} positions, or none")
    if not all(math.isfinite(t) and 1e-30 < t < 1e30 for t in temperatures):
        raise ValueError(f"{CALIBRATION[0]} {list(temperatures)}: must be positive, finite numbers")
    if not all(math.isfinite(b) and abs(b) < 1e30 for b in biases):
        raise ValueError(f"{CALIBRATION[1]} {list(biases)}: must be finite numbers")


def check_target_layer_ids(ids: Sequence[int], num_target_layers: int) -> None:
    """Checks layer ids against a target of `num_target_layers` layers (facts: ids count decoder layers from 0).

    Raises:
        ValueError: empty, not strictly increasing, out of range, or naming the last layer.
    """
    if not ids:
        raise ValueError("target_layer_ids is missing or empty: name at least one target layer")
    if any(b <= a for a, b in zip(ids, ids[1:], strict=False)):
        raise ValueError(f"target_layer_ids {list(ids)}: must be strictly increasing")
    for i in ids:
        if i < -1 or i >= num_target_layers:
            raise ValueError(
                f"target_layer_ids {list(ids)}: layer {i} does not exist, the target has {num_target_layers} layers "
                f"(0..{num_target_layers - 1}, or -1 for the embedding)"
            )
    if ids[-1] == num_target_layers - 1:
        raise ValueError(
            f"target_layer_ids {list(ids)}: layer {ids[-1]} is the last one, whose raw output is not a feature; "
            f"use at most {num_target_layers - 2}"
        )
