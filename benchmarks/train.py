"""Where the time and memory of a training step go, at the embedded config's sizes on a synthetic batch.

The pieces are jitted one by one and timed in turn with the whole step; a share is a difference of two pieces (backward
= gradients - forward), taken within one turn, as a percentage of the step that reads cached hidden states.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from common import Case, Samples, load_models, machine, measure, of_turns, planned_memory, report, table

from dspark_jax.checkpoints.load import Target
from dspark_jax.data.pipeline import HostBatch
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.models import transformer
from dspark_jax.sharding import make_mesh
from dspark_jax.training.anchors import block_targets, sample_anchors
from dspark_jax.training.forward import block_forward
from dspark_jax.training.losses import Batch, block_loss
from dspark_jax.training.optimizer import make_optimizer
from dspark_jax.training.settings import TrainSettings, drafter_config
from dspark_jax.training.step import TrainState, init_state, make_frozen, make_step, place_batch, place_frozen
from dspark_jax.training.trainer import read_config

Array = jax.Array
Params = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Benchmark of a training step.

    Attributes:
        config: training config whose drafter, loss and sizes are used. target: a folder, GGUF file or hub id; None: the
            embedded one.
        dtype: of the products and of the cached states; both runs them in turn.
        batch_size, max_length, num_anchors: N, T and A in place of the config's; 0: the config's.
        online: also time the target's forward pass, which training without a cache adds.
        repeats: timed calls of each piece. json: file for the results as one JSON object.
    """

    config: str = str(Path(__file__).resolve().parents[1] / "configs" / "dspark_smollm2_135m.py")
    target: str | None = None
    dtype: Literal["float32", "bfloat16", "both"] = "both"
    batch_size: int = 0
    max_length: int = 0
    num_anchors: int = 0
    online: bool = True
    repeats: int = 5
    json: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 0), ("max_length", 0), ("num_anchors", 0), ("repeats", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {low}")


@dataclass(frozen=True)
class Setup:
    """One dtype's models, batch and sizes: everything that the pieces read."""

    settings: TrainSettings
    config: DrafterConfig
    target: Target
    frozen: Params
    batch: HostBatch
    anchors: Array
    keep: Array
    num_anchors: int
    dtype: Any


def synthetic_batch(config: DrafterConfig, sequences: int, length: int, dtype: Any) -> HostBatch:
    """Random tokens and states; the first eighth of each sequence is an unsupervised prompt, nothing is padded."""
    rng = np.random.default_rng(0)
    mask = np.ones((sequences, length), np.uint8)
    mask[:, : length // 8] = 0
    states = lambda width: rng.standard_normal((sequences, length, width), np.float32).astype(jnp.dtype(dtype))  # noqa: E731
    width = config.hidden_size
    return HostBatch(
        rng.integers(0, config.vocab_size, (sequences, length), dtype=np.int32),
        mask,
        np.arange(sequences, dtype=np.uint32)[:, None],
        states(len(config.target_layer_ids) * width),
        states(width),
        np.full((sequences, length), 20.0, np.float32),
    )


def setup(options: Options, settings: TrainSettings, dtype: str) -> Setup:
    """Loads the target and makes the batch."""
    target, _ = load_models(options.target, None, dtype)
    config = drafter_config(settings.drafter, target.config)
    sequences, length = options.batch_size or settings.batch_size, options.max_length or settings.max_length
    count = options.num_anchors or settings.num_anchors
    frozen = {"embed": target.params["embed"], "head": transformer.head_weight(target.params)}
    if config.trims_vocabulary:
        frozen["d2t"] = jnp.zeros(config.draft_vocab_size, jnp.int32)
    batch = jax.tree.map(jnp.asarray, synthetic_batch(config, sequences, length, dtype))
    anchors, keep = sample_anchors(batch.sample_ids, batch.loss_mask, count, 0, 0)  # [N, A]
    return Setup(settings, config, target, frozen, batch, anchors, keep, count, jnp.dtype(dtype))


def whole_step(s: Setup, online: bool) -> tuple[Callable, TrainState, tuple[Any, ...]]:
    """The trainer's step, a fresh state, and the step's other arguments."""
    mesh = make_mesh(devices=jax.devices()[:1])
    optimizer = make_optimizer(s.settings.lr, max_norm=s.settings.max_grad_norm, weight_decay=s.settings.weight_decay)
    step = make_step(
        s.config,
        s.settings.loss,
        optimizer,
        mesh,
        num_anchors=s.num_anchors,
        seed=0,
        ema=s.settings.ema,
        compute_dtype=s.dtype,
        target=s.target.config if online else None,
    )
    state = init_state(s.config, optimizer, 0, s.settings.ema > 0, mesh)
    frozen = place_frozen(make_frozen(s.target.params, s.frozen.get("d2t"), online), mesh)
    batch = HostBatch(*s.batch[:3]) if online else s.batch
    return step, state, (frozen, place_batch(batch, mesh), jnp.int32(0))


def keeping(run: Callable[..., tuple[TrainState, Any]], state: Any, arguments: tuple[Any, ...]) -> Case:
    """Calls `run(state, *arguments)` with the state that the last call gave back."""
    holder = [state]

    def call() -> Any:
        holder[0], rest = run(holder[0], *arguments)
        return holder[0], rest

    return call


def pieces(s: Setup) -> dict[str, Case]:
    """The step's parts: forward passes, gradients and the optimiser."""
    optimizer = make_optimizer(s.settings.lr, max_norm=s.settings.max_grad_norm, weight_decay=s.settings.weight_decay)
    state = init_state(s.config, optimizer, 0, False, make_mesh(devices=jax.devices()[:1]))
    inputs = Batch(s.batch.input_ids, s.batch.loss_mask, s.batch.features, s.batch.final, s.batch.normalizer)
    arguments = (state.params, s.frozen, inputs, s.anchors, s.keep)

    def backbone(params: Params, frozen: Params, batch: Batch, anchors: Array, keep: Array) -> Any:
        params = jax.tree.map(lambda x: x.astype(s.dtype), params)
        targets = block_targets(batch.input_ids, batch.loss_mask, anchors, keep, s.config.block_size)
        features = batch.features.astype(s.dtype)
        return block_forward(params, frozen["embed"].astype(s.dtype), s.config, features, anchors, keep, targets)

    def loss(params: Params, frozen: Params, batch: Batch, anchors: Array, keep: Array) -> Any:
        return block_loss(params, frozen, s.config, s.settings.loss, batch, anchors, keep, s.dtype)

    def update(pair: tuple[Params, Any], grads: Params) -> tuple[tuple[Params, Any], Array]:
        updates, opt_state = optimizer.update(grads, pair[1], pair[0])
        return (optax.apply_updates(pair[0], updates), opt_state), jnp.zeros(())

    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-3), state.params)
    copy = jax.tree.map(jnp.copy, (state.params, state.opt_state))
    return {
        "backbone": partial(jax.jit(backbone), *arguments),
        "forward": partial(jax.jit(loss), *arguments),
        "gradients": partial(jax.jit(jax.value_and_grad(loss, has_aux=True)), *arguments),
        "optimizer": keeping(jax.jit(update, donate_argnums=0), copy, (grads,)),
    }


def target_forward(s: Setup) -> Case:
    """The target over the batch, with the features that the drafter reads."""

    @jax.jit
    def run(params: Params, ids: Array) -> Any:
        hidden = transformer.forward(params, s.target.config, ids, s.config.target_layer_ids)
        return hidden.features.astype(s.dtype), hidden.final.astype(s.dtype)

    return partial(run, s.target.params, s.batch.input_ids)


def peak_memory() -> float:
    """Most memory that this process has held so far, MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def cases_of(s: Setup, online: bool) -> tuple[dict[str, Case], dict[str, Any]]:
    """All timed pieces of one dtype, and what is known of the step without timing it."""
    step, state, arguments = whole_step(s, False)
    facts: dict[str, Any] = {"compiled_memory_mb": planned_memory(step.lower(state, *arguments).compile())}
    run = keeping(step, state, arguments)
    metrics = jax.device_get(run()[1])
    facts["peak_rss_mb"] = peak_memory()  # before any other piece of this dtype has run
    facts["blocks"] = float(metrics["sampled_anchors"][0])
    facts["supervised_slots"] = float(metrics["block_supervised_tokens"][0])
    facts["supervised_tokens"] = float(np.sum(np.asarray(s.batch.loss_mask)))
    cases: dict[str, Case] = {"step": run, **pieces(s)}
    if online:
        cases["target"] = target_forward(s)
        online_step = keeping(*whole_step(s, True))
        cases["online step"] = online_step
    return cases, facts


def results_of(samples: Samples, dtype: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Throughput and shares of one dtype."""
    mine = {name.removeprefix(dtype + " "): s for name, s in samples.items() if name.startswith(dtype + " ")}
    names = ["step", "backbone", "forward", "gradients", "optimizer"]
    share = lambda formula: of_turns(mine, names, lambda s, b, f, g, o: 100 * formula(b, f, g, o, s) / s)  # noqa: E731
    shares = {
        "context features and backbone, forward": share(lambda b, f, g, o, s: b),
        "heads and losses, forward": share(lambda b, f, g, o, s: f - b),
        "backward": share(lambda b, f, g, o, s: g - f),
        "optimizer": share(lambda b, f, g, o, s: o),
        "rest": share(lambda b, f, g, o, s: s - g - o),
    }
    seconds = {name: statistics.median(times) for name, times in mine.items()}
    result = {"seconds": seconds, "shares_percent": shares, **facts}
    for name in ("supervised_tokens", "supervised_slots", "blocks"):
        result[f"{name}_per_second"] = facts[name] / seconds["step"]
    if "target" in mine:
        result["target_share_of_online_percent"] = of_turns(mine, ["target", "online step"], lambda t, s: 100 * t / s)
    return result


def print_results(results: dict[str, Any]) -> None:
    """A table of all results, a column for each dtype."""
    dtypes = list(results)
    first = results[dtypes[0]]
    rows: list[list[Any]] = []
    for group, unit in (("seconds", "s"), ("shares_percent", "% of the step"), ("compiled_memory_mb", "MB planned")):
        rows += [[f"{name}, {unit}", *(results[d][group].get(name, "") for d in dtypes)] for name in first[group]]
    rest = [name for name, value in first.items() if not isinstance(value, dict)]
    rows += [[name.replace("_", " "), *(results[d][name] for d in dtypes)] for name in rest]
    print(table("Training step", ["row", *dtypes], rows))


def main(options: Options) -> None:
    """Runs everything and prints it."""
    settings = read_config(options.config)
    dtypes = ("bfloat16", "float32") if options.dtype == "both" else (options.dtype,)
    cases: dict[str, tuple[Case, float]] = {}
    facts = {}
    for dtype in dtypes:
        mine, facts[dtype] = cases_of(setup(options, settings, dtype), options.online)
        cases |= {f"{dtype} {name}": (call, 1.0) for name, call in mine.items()}
    print("machine:", machine())
    samples = measure(cases, options.repeats)
    results = {dtype: results_of(samples, dtype, facts[dtype]) for dtype in dtypes}
    print_results(results)
    report({"machine": machine(), "steps": results}, options.json)


if __name__ == "__main__":
    main(tyro.cli(Options, description=Options.__doc__))
