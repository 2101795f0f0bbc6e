"""What a training run is: the fields of `configs/*.py` and of the command line, and the drafter's config from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from dspark_jax.config import named_dtype
from dspark_jax.drafters.config import DrafterConfig, layer_fields
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.models.config import TransformerConfig
from dspark_jax.sharding import MeshShape
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.objectives import TrainableConfig

COMPUTE_DTYPES = ("auto", "bfloat16", "float32")
KINDS = ("dspark", "eagle3", "mtp")
STATES = ("online", "cache", "fill")
CACHE_KINDS = ("auto", "bfloat16", "float32", "int8", "fp8")


@dataclass(frozen=True)
class DrafterSettings:
    """Shape of the drafter; a size of 0 is the target's.

    Attributes:
        kind: dspark (DFlash too: markov_kind none, no confidence), eagle3 or mtp. The last two have one layer, no mask
            token, no sequential and no confidence head; mtp reads the target's final state and no other layer.
        block_size: gamma, draft tokens of a round.
        num_layers: backbone layers.
        target_layer_ids: target layers whose raw outputs are the context features, strictly increasing from -1 on.
        mask_token_id: token whose embedding fills the slots behind the anchor.
        draft_vocab_size: tokens of the draft head, the most frequent ones of the training answers; 0: all.
        markov_rank: r of the sequential head; 0: none.
        markov_kind: the sequential head: none (rank 0), vanilla, gated or rnn.
        confidence: whether there is a confidence head.
        confidence_with_markov: whether the confidence head reads W1[x_{k-1}] too.
        intermediate_size: F of the backbone's layers.
        num_heads: H of the backbone's layers.
        num_kv_heads: G of the backbone's layers.
        head_dim: of the backbone's layers.
    """

    kind: str = "dspark"
    block_size: int = 7
    num_layers: int = 5
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int = 0
    draft_vocab_size: int = 0
    markov_rank: int = 256
    markov_kind: str = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = True
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True)
class TrainSettings:
    """A training run.

    Attributes:
        records: JSONL files of regenerated answers.
        target: a folder, GGUF file or hub id; None: the embedded one.
        output: folder for checkpoints, logs and the drafter (OUTPUT/drafter; the best one of all evaluations is
            OUTPUT/best). Runs of several processes need one that all of them see.
        states: where the target's hidden states come from. online: computed inside the training step, nothing on disk;
            cache: computed first where the cache lacks them, and read from it; fill: the first epoch computes them
            online and writes the cache while it trains, later epochs read it.
        cache: folder of the hidden-state cache.
        cache_kind: how it stores states: bfloat16, float32, int8 or fp8 (with scales), or auto, the compute dtype.
        initial: a drafter's folder or hub id whose weights (and draft vocabulary) the run starts from; random without.
            A smaller drafter.draft_vocab_size keeps the drafter's tokens that the samples have most often.
        drafter: shape of the drafter.
        loss: weights of the loss terms.
        epochs: passes over the samples.
        steps: number of updates, in place of epochs; 0: by epochs.
        batch_size: N, sequences of an update (rows, where they are packed), over all devices.
        micro_batches: M, passes that an update is split into, N / M sequences each; gradients add up in float32.
        pack: put several samples into one row of max_length tokens; they do not see each other.
        buckets: lengths of batches, ascending; each batch has the shortest that its samples fit in, max_length being
            the last; none: all batches have max_length tokens. Each length is compiled once.
        num_anchors: A, blocks of a sequence.
        max_length: T, tokens of a sequence; the rest is cut.
        min_loss_tokens: samples with fewer supervised tokens are left out.
        lr: peak learning rate.
        warmup: share of the updates in which the learning rate rises.
        weight_decay: of AdamW.
        max_grad_norm: longer gradients are scaled down to it.
        ema: decay of the average of the weights that is exported and evaluated; 0: none, the weights themselves.
        compute_dtype: of the products: bfloat16, float32, or auto (bfloat16 where the device multiplies it fast).
        seed: of the weights, the order of the samples and the anchors.
        remat: compute the drafter's layers again in the backward pass in place of keeping what is in them: slower,
            with less memory.
        regather: with states online, on a mesh that cuts the target: bring its weights together anew in each
            micro-batch, a layer at a time, in place of once for all: less memory, more communication.
        checkpoint_every: updates between two checkpoints, each with an export of the drafter; 0: only at the end.
        keep_checkpoints: newest checkpoints that stay on the disk; the one of the best drafter stays too.
        eval_every: updates between two evaluations, each with a checkpoint; 0: only at the end.
        log_every: updates between two lines of the log.
        eval_samples: the last samples of the records, kept out of training: their losses, and the accepted length after
            their prompts (where one process has all devices), judge the drafter.
        eval_tokens: tokens generated for each of them.
        devices: number of devices to use at most; 0: all.
        mesh: devices along the axes data, fsdp and tensor.
        resume: go on from the output folder's last checkpoint, if there is one.
        distributed: one of several processes that train together (a TPU pod, GPU nodes). On TPU pods, and under Slurm
            or Open MPI, they find each other; else give the three fields below.
        coordinator: HOST:PORT of process 0, alike in all processes. process_count: number of processes.
        process_id: number of this one, from 0.
        json: file for settings, the drafter's folder, updates, tokens and seconds of this call, the best evaluation and
            the newest metrics, as one JSON object at the end.
    """

    records: tuple[str, ...] = ()
    target: str | None = None
    output: str = "runs/train"
    states: str = "cache"
    cache: str = "runs/cache"
    cache_kind: str = "auto"
    initial: str | None = None
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    loss: LossConfig = field(default_factory=LossConfig)
    epochs: int = 10
    steps: int = 0
    batch_size: int = 16
    micro_batches: int = 1
    pack: bool = False
    buckets: tuple[int, ...] = ()
    num_anchors: int = 96
    max_length: int = 512
    min_loss_tokens: int = 14
    lr: float = 6e-4
    warmup: float = 0.04
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    ema: float = 0.0
    compute_dtype: str = "auto"
    seed: int = 0
    remat: bool = False
    regather: bool = False
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    eval_every: int = 500
    log_every: int = 10
    eval_samples: int = 16
    eval_tokens: int = 128
    devices: int = 0
    mesh: MeshShape = field(default_factory=MeshShape)
    resume: bool = True
    distributed: bool = False
    coordinator: str = ""
    process_count: int = 0
    process_id: int = -1
    json: Path | None = None

    def __post_init__(self) -> None:
        for name, low in (
            ("epochs", 1),
            ("steps", 0),
            ("batch_size", 1),
            ("micro_batches", 1),
            ("num_anchors", 1),
            ("max_length", 2),
            ("min_loss_tokens", 0),
            ("checkpoint_every", 0),
            ("keep_checkpoints", 1),
            ("eval_every", 0),
            ("log_every", 1),
            ("eval_samples", 0),
            ("eval_tokens", 1),
            ("devices", 0),
            ("seed", 0),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {low}")
        if not self.lr > 0:
            raise ValueError(f"lr {self.lr}: the peak learning rate must be positive")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup {self.warmup}: a share of the updates, must lie in [0, 1]")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema {self.ema}: a decay, must lie in [0, 1); 0 switches the average off")
        for name, choices in (("compute_dtype", COMPUTE_DTYPES), ("states", STATES), ("cache_kind", CACHE_KINDS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r}: must be one of {choices}")
        self._check_batches()
        self._check_processes()

    def _check_batches(self) -> None:
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"micro_batches {self.micro_batches}: does not divide batch_size {self.batch_size}, the sequences of "
                "an update"
            )
        edges = self.buckets
        if any(low >= high for low, high in zip(edges, edges[1:], strict=False)):
            raise ValueError(f"buckets {list(edges)}: lengths must ascend")
        if edges and self.pack:
            raise ValueError(
                f"buckets {list(edges)} with pack: packed rows all have max_length tokens, drop one of them"
            )
        if edges and not 2 <= edges[0] <= edges[-1] <= self.max_length:
            raise ValueError(f"buckets {list(edges)}: lengths must lie in 2..max_length, {self.max_length}")

    def _check_processes(self) -> None:
        given = {"coordinator": self.coordinator != "", "process_count": self.process_count != 0}
        given["process_id"] = self.process_id != -1
        if any(given.values()) and not self.distributed:
            name = next(name for name, there in given.items() if there)
            raise ValueError(f"{name} {getattr(self, name)!r}: is for runs of several processes, set distributed too")
        if any(given.values()) and not all(given.values()):
            raise ValueError(
                f"coordinator {self.coordinator!r}, process_count {self.process_count}, process_id {self.process_id}: "
                "give all three, or none where the processes find each other"
            )
        if self.distributed and self.devices:
            raise ValueError(f"devices {self.devices} with distributed: every process needs all of its devices, give 0")
        if self.coordinator:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"coordinator {self.coordinator!r}: must be HOST:PORT of process 0")
            if not 0 <= self.process_id < self.process_count:
                raise ValueError(
                    f"process_id {self.process_id}: must lie in 0..process_count - 1, {self.process_count - 1}"
                )


def resolve_dtype(name: str) -> DTypeLike:
    """The compute dtype of `auto`, `bfloat16` or `float32`: auto is float32 only on a CPU without bf16 products."""
    chosen = named_dtype(name, rows=1 << 10)  # an update has thousands
    return jnp.bfloat16 if chosen == "bfloat16" else jnp.float32


def drafter_config(shape: DrafterSettings, target: TransformerConfig) -> TrainableConfig:
    """The drafter's config: the target's, with the fields of `shape` in place of its own.

    Raises:
        ValueError: a field that does not fit the target or another field; the message names it.
    """
    if shape.kind not in KINDS:
        raise ValueError(f"drafter.kind {shape.kind!r}: must be one of {KINDS}")
    sizes = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    own = {name: getattr(shape, name) for name in sizes if getattr(shape, name)}
    common: dict[str, Any] = layer_fields(target) | own
    common |= dict(
        block_size=shape.block_size,
        target_layer_ids=tuple(shape.target_layer_ids),
        draft_vocab_size=shape.draft_vocab_size or target.vocab_size,
        shares_embeddings=True,
        num_target_layers=target.num_layers,
    )
    if shape.kind != "dspark":
        return Eagle3Config(**common) if shape.kind == "eagle3" else MTPConfig(**common)
    return DrafterConfig(
        **common,
        num_layers=shape.num_layers,
        mask_token_id=shape.mask_token_id,
        markov_rank=shape.markov_rank,
        markov_kind=shape.markov_kind,
        confidence=shape.confidence,
        confidence_with_markov=shape.confidence_with_markov,
    )
