"""The programs of this project as abstract values: a config's train step, and the speculative step of each bucket.

Nothing is allocated: parameters, optimizer state, caches and batches are shapes with shardings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dspark_jax import sharding
from dspark_jax.data.pipeline import HostBatch
from dspark_jax.data.quantized import quantize, scale_group
from dspark_jax.decoding.placement import places
from dspark_jax.decoding.sampling import Mode
from dspark_jax.decoding.schedule import Schedule, buckets_for
from dspark_jax.decoding.state import DecodeState, Program, init_state
from dspark_jax.decoding.step import step
from dspark_jax.drafters.interface import bind, init_params
from dspark_jax.models import transformer
from dspark_jax.models.config import TransformerConfig
from dspark_jax.training.objectives import TrainableConfig
from dspark_jax.training.optimizer import cosine_schedule, make_optimizer
from dspark_jax.training.settings import TrainSettings
from dspark_jax.training.step import abstract_state, batch_sharding, make_frozen, make_step

Params = dict[str, Any]
_PACKED = 32  # documents of a packed row; a run's own number depends on its data and hardly matters here
_UPDATES = 1000  # of a run that goes by epochs: a constant of the program


@dataclass(frozen=True)
class TrainJob:
    """A train step to compile: the run's settings, both models' configs, and the dtype of products and the target.

    For a run that fills a cache while it trains it is the first epoch's step, which gives its hidden states away.
    """

    settings: TrainSettings
    target: TransformerConfig
    drafter: TrainableConfig
    dtype: DTypeLike

    def check(self, mesh: Mesh, micro_batches: int) -> None:
        """Refuses a mesh or a number of micro-batches that does not divide what it cuts (ValueError)."""
        sharding.check_mesh(mesh, self.target, self.drafter, self.settings.batch_size, micro_batches)

    def arguments(self, mesh: Mesh, micro_batches: int) -> tuple[Any, ...]:
        """State, frozen parameters, batch and epoch, as `TrainStep` takes them."""
        run = self.settings
        state = abstract_state(self.drafter, self._optimizer(), run.ema > 0, mesh)
        return state, self._frozen(mesh), self._batch(mesh, micro_batches), jax.ShapeDtypeStruct((), jnp.int32)

    def lower(self, mesh: Mesh, micro_batches: int, remat: bool) -> Any:
        """The lowered step."""
        run = self.settings
        made = make_step(
            self.drafter,
            run.loss,
            self._optimizer(),
            mesh,
            num_anchors=run.num_anchors,
            seed=run.seed,
            ema=run.ema,
            compute_dtype=self.dtype,
            target=self.target if self._online else None,
            micro_batches=micro_batches,
            keep_states=run.states == "fill",
            remat=remat,
            regather=run.regather,
        )
        return made.lower(*self.arguments(mesh, micro_batches))

    @property
    def _online(self) -> bool:
        return self.settings.states != "cache"

    def _optimizer(self) -> Any:
        run = self.settings
        schedule = cosine_schedule(peak=run.lr, total=run.steps or _UPDATES, warmup_ratio=run.warmup)
        return make_optimizer(schedule, max_norm=run.max_grad_norm, weight_decay=run.weight_decay)

    def _frozen(self, mesh: Mesh) -> Params:
        shapes = target_shapes(self.target, self.dtype)
        d2t = None
        if self.drafter.trims_vocabulary:
            d2t = jax.ShapeDtypeStruct((self.drafter.draft_vocab_size,), jnp.int32)
        frozen = jax.eval_shape(lambda target, d2t: make_frozen(target, d2t, self._online), shapes, d2t)
        return sharding.abstract(frozen, sharding.shardings(frozen, mesh))

    def _batch(self, mesh: Mesh, micro_batches: int) -> HostBatch:
        run, where = self.settings, batch_sharding(mesh)
        passes, length = (micro_batches, run.batch_size // micro_batches), run.max_length

        def array(dtype: DTypeLike, *rest: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*passes, *rest), dtype, sharding=where)

        batch = HostBatch(
            array(jnp.int32, length), array(jnp.uint8, length), array(jnp.uint32, _PACKED if run.pack else 1)
        )
        if run.pack:
            batch = batch._replace(segments=array(jnp.int32, length))
        if self._online:
            return batch
        hidden = self.drafter.hidden_size
        cached = jax.eval_shape(
            lambda: (
                self._cached((*passes, length, hidden * len(self.drafter.target_layer_ids))),
                self._cached((*passes, length, hidden)),
            )
        )
        features, final = sharding.abstract(cached, jax.tree.map(lambda x: where, cached))
        return batch._replace(features=features, final=final, normalizer=array(jnp.float32, length))

    def _cached(self, shape: tuple[int, ...]) -> Any:
        """Hidden states as the run's cache stores them."""
        kind, states = self.settings.cache_kind, jnp.zeros(shape, jnp.float32)
        if kind in ("int8", "fp8"):
            return quantize(states, kind, scale_group(self.drafter.hidden_size))
        return states.astype(self.dtype if kind == "auto" else kind)


@dataclass(frozen=True)
class DecodeJob:
    """The speculative step to compile.

    Attributes:
        target, drafter: configs. dtype: of weights and caches. requests: R, decoded together. context: tokens that the
            caches hold for each. mode: the sampling program. schedule: of drafts.
    """

    target: TransformerConfig
    drafter: TrainableConfig
    dtype: DTypeLike
    requests: int
    context: int
    mode: Mode = "greedy"
    schedule: Schedule = "fixed"

    @property
    def buckets(self) -> tuple[int, ...]:
        """Rows of each program: R, doubling, up to R * (gamma + 1)."""
        return buckets_for(self.requests, self.drafter.block_size)

    def check(self, mesh: Mesh) -> None:
        """Refuses a mesh that does not divide what it cuts (ValueError)."""
        sharding.check_mesh(mesh, self.target, self.drafter)
        shares = mesh.shape["data"] * mesh.shape["fsdp"]
        if self.requests % shares:
            raise ValueError(f"requests {self.requests}: must be a multiple of data x fsdp = {shares} of the mesh")

    def arguments(self, mesh: Mesh) -> tuple[Any, ...]:
        """The target's parameters, what the drafter has of its own, and the state of the requests."""
        own = jax.eval_shape(self._own, target_shapes(self.target, self.dtype))
        weights = target_shapes(self.target, self.dtype), own
        placed = sharding.abstract(weights, sharding.shardings(weights, mesh))
        state = jax.eval_shape(partial(init_state, self._program, self.requests, self.context))
        return *placed, sharding.abstract(state, places(state, self.requests, mesh))

    def lower(self, mesh: Mesh, bucket: int) -> Any:
        """The lowered step with `bucket` rows; the state is donated."""

        def run(target: Params, own: Params, state: DecodeState) -> Any:
            bound = {"embed": target["embed"], "head": transformer.head_weight(target)} | own
            return step(target, bound, state, program=self._program, bucket=bucket)

        arguments = self.arguments(mesh)
        places = jax.tree.map(lambda x: x.sharding, arguments[-1])
        jitted = jax.jit(run, donate_argnums=2, out_shardings=(places, sharding.replicated(mesh)))
        with jax.set_mesh(mesh):
            return jitted.lower(*arguments)

    @property
    def _program(self) -> Program:
        return Program(self.target, self.drafter, self.schedule, self.mode, (), self.dtype)

    def _own(self, target: Params) -> Params:
        """The drafter's bound parameters without those that are the target's own arrays."""
        trained: Params = jax.tree.map(
            lambda x: x.astype(self.dtype), init_params(self.drafter, jax.random.key(0), jnp.float32)
        )
        if self.drafter.trims_vocabulary:
            trained["d2t"] = jnp.zeros((self.drafter.draft_vocab_size,), jnp.int32)
        bound = bind(trained, target["embed"], transformer.head_weight(target))
        shared = {"embed"} if self.drafter.trims_vocabulary else {"embed", "head"}
        return {name: part for name, part in bound.items() if name not in shared}


def target_shapes(config: TransformerConfig, dtype: DTypeLike) -> Params:
    """The target's parameters as abstract values."""
    return jax.eval_shape(partial(transformer.init_params, config, dtype=dtype), jax.random.key(0))


def device_bytes(arguments: Any) -> int:
    """Bytes of abstract values on one device."""

    def nbytes(leaf: jax.ShapeDtypeStruct) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return int(np.prod(shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize

    return sum(nbytes(leaf) for leaf in jax.tree.leaves(arguments))
