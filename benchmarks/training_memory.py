"""How the pieces of a training step grow: time and compiled memory of the block attention by context and anchors.

    python benchmarks/training_memory.py

A piece whose time for each (context position x anchor) stays the same is linear in both. Memory is what the compiler
plans beside arguments and results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import Case, machine, measure, planned_memory, report, table

from dspark_jax.training.block_attention import block_attention

Array = jax.Array


@dataclass(frozen=True)
class Options:
    """Benchmark of what training holds in memory.

    Attributes:
        pieces: what to measure. contexts: T, tokens of a sequence, each with `anchors` blocks.
        anchors: A of the contexts. more_anchors: A, blocks of a sequence, each with `context` tokens.
        context: T of those. sequences: N. slots: K, of a block. kv_heads, heads, head_dim: of the attention.
        dtype: of the products. repeats: timed calls of each case. json: file for the results as one JSON object.
    """

    pieces: tuple[str, ...] = ("attention",)
    contexts: tuple[int, ...] = (512, 1024, 2048, 4096)
    anchors: int = 128
    more_anchors: tuple[int, ...] = (64, 128, 256, 512)
    context: int = 1024
    sequences: int = 1
    slots: int = 7
    kv_heads: int = 3
    heads: int = 9
    head_dim: int = 64
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    repeats: int = 5
    json: str | None = None

    def __post_init__(self) -> None:
        for name in ("anchors", "context", "sequences", "slots", "kv_heads", "heads", "head_dim", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads}: must be a multiple of kv_heads {self.kv_heads}")
        unknown = [name for name in self.pieces if name not in PIECES]
        if unknown:
            raise ValueError(f"pieces {unknown}: unknown, there are {', '.join(PIECES)}")


def attention_case(options: Options, context: int, anchors: int) -> tuple[Case, dict[str, float]]:
    """Value and gradients of the block attention for T = `context` and A = `anchors`, and its planned memory.

    Anchors are uniform behind a prompt of an eighth of the context, as in training.
    """
    rng = np.random.default_rng(0)
    groups, per_group = options.kv_heads, options.heads // options.kv_heads
    rows, width = options.sequences * anchors * options.slots, options.head_dim
    shapes = [(groups, per_group, width, rows), *[(groups, width, rows)] * 2]
    shapes += [(groups, width, options.sequences * context)] * 2
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    places = np.sort(rng.integers(context // 8, context - 1, (options.sequences, anchors)), axis=1)
    where = (jnp.zeros(places.shape, jnp.int32), jnp.asarray(places, jnp.int32), jnp.ones(places.shape, bool))

    def run(arrays: list[Array], cotangent: Array, where: tuple[Array, ...]) -> Any:
        attend = lambda arrays: block_attention(*arrays, *where, width**-0.5, jnp.dtype(options.dtype))  # noqa: E731
        out, pull = jax.vjp(attend, arrays)
        return out, pull(cotangent)

    arguments = (arrays, arrays[0], where)
    compiled = jax.jit(run).lower(*arguments).compile()
    plan = planned_memory(compiled)
    memory = {"arguments_and_results_mb": plan["peak"] - plan["temp"], "temporary_mb": plan["temp"]} if plan else {}
    return partial(compiled, *arguments), memory


def measure_attention(options: Options) -> list[dict[str, Any]]:
    """Time and memory of the block attention as the context grows, then as the anchors do."""
    sizes = [("context", context, options.anchors) for context in options.contexts]
    sizes += [("anchors", options.context, anchors) for anchors in options.more_anchors]
    cases = {size: attention_case(options, *size[1:]) for size in sizes}
    samples = measure({str(size): (call, 1.0) for size, (call, _) in cases.items()}, options.repeats)
    results = []
    for size, (_, memory) in cases.items():
        seconds = statistics.median(samples[str(size)])
        pairs = options.sequences * size[1] * size[2]
        row = {"grows": size[0], "context": size[1], "anchors": size[2], "milliseconds": 1e3 * seconds}
        results.append(row | {"nanoseconds_a_pair": 1e9 * seconds / pairs, **memory})
    return results


def print_attention(results: list[dict[str, Any]]) -> None:
    """A table of what `measure_attention` gives."""
    print(table("Block attention, forward and gradient", list(results[0]), [list(row.values()) for row in results]))


# what can be measured: its name -> its measurement, and the printing of what that gives
PIECES: dict[str, tuple[Callable[[Options], Any], Callable[[Any], None]]] = {
    "attention": (measure_attention, print_attention),
}


def main(options: Options) -> None:
    """Measures every piece and prints it."""
    print("machine:", machine())
    results = {}
    for name in options.pieces:
        run, show = PIECES[name]
        results[name] = run(options)
        show(results[name])
    report({"machine": machine(), **results}, options.json)


if __name__ == "__main__":
    main(tyro.cli(Options, description=Options.__doc__))
