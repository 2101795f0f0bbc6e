"""The loss in chunks against the plain one that holds the vocabulary for all slots: memory as planned, and time.

Both give CE and TV of the same slots and their gradients with respect to the hidden states, the Markov vectors and W2.
The chunked one's memory beyond its inputs and results does not grow with the number of slots.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from common import Case, machine, measure, of_turns, planned_memory, report, table

from dspark_jax.training.forward import BlockStates
from dspark_jax.training.losses import SlotWeights, all_slot_terms, slot_terms

Array = jax.Array


@dataclass(frozen=True)
class Options:
    """Benchmark of the loss over the vocabulary.

    Attributes:
        vocab: rows of the head. hidden: D. rank: r of the Markov head.
        slots: block slots (anchors x gamma) of the batch, several: memory should not depend on them. sequences: N.
        dtype: of the products. repeats: timed calls of each case. json: file for the results as one JSON object.
    """

    vocab: tuple[int, ...] = (49152, 151936)
    hidden: int = 576
    rank: int = 64
    slots: tuple[int, ...] = (1024, 2048)
    sequences: int = 4
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    repeats: int = 5
    json: str | None = None


def inputs(options: Options, vocab: int, slots: int) -> tuple[Any, ...]:
    """Random head, W2, states and targets: head [V, D], W2 [V, r], hidden [D, S], vectors [r, S], final [S, D]."""
    dtype = jnp.dtype(options.dtype)
    keys = iter(jax.random.split(jax.random.key(0), 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
    head, w2 = (normal(vocab, options.hidden) * 0.1).astype(dtype), (normal(vocab, options.rank) * 0.1).astype(dtype)
    hidden, vectors = normal(options.hidden, slots), normal(options.rank, slots)
    labels = jax.random.randint(next(keys), (slots,), 0, vocab)
    return head, w2, hidden, vectors, normal(slots, options.hidden).astype(dtype), labels


def plain(head: Array, w2: Array, hidden: Array, vectors: Array, final: Array, labels: Array) -> Array:
    """0.1 CE + 0.9 TV, everything at once."""
    terms = slot_terms({"markov": {"w2": w2}}, head, hidden, vectors, final, None, labels)
    return jnp.mean(0.1 * terms.ce + 0.9 * terms.l1)


def chunked(
    sequences: int, head: Array, w2: Array, hidden: Array, vectors: Array, final: Array, labels: Array
) -> Array:
    """The same by the training step's loss."""
    slots = labels.shape[0]
    weights = SlotWeights(jnp.full(slots, 0.1 / slots), jnp.full(slots, 0.9 / slots))
    states = BlockStates(hidden, vectors)
    return all_slot_terms({"markov": {"w2": w2}}, head, states, final, None, labels, weights, sequences)[0]


def case(loss: Any, arguments: tuple[Any, ...]) -> tuple[Case, float]:
    """A call of the loss and its gradients, and the temporaries that the compiler plans for it, in MB."""
    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)))
    return partial(run, *arguments), planned_memory(run.lower(*arguments).compile())["temp"]


def main(options: Options) -> None:
    """Runs everything and prints it."""
    print("machine:", machine())
    rows = []
    for vocab in options.vocab:
        for slots in options.slots:
            arguments = inputs(options, vocab, slots)
            pair = {"plain": case(plain, arguments), "chunked": case(partial(chunked, options.sequences), arguments)}
            value = {name: float(call()[0]) for name, (call, _) in pair.items()}
            samples = measure({name: (call, 1.0) for name, (call, _) in pair.items()}, options.repeats)
            seconds = {name: statistics.median(times) for name, times in samples.items()}
            ratio = of_turns(samples, ["chunked", "plain"], lambda a, b: a / b)
            memory = {name: size for name, (_, size) in pair.items()}
            row = {"vocab": vocab, "slots": slots, "temporaries_mb": memory, "seconds": seconds, "time_ratio": ratio}
            rows.append(row | {"relative_difference": abs(value["chunked"] / value["plain"] - 1)})
    columns = ["vocabulary", "slots", "plain MB", "chunked MB", "plain s", "chunked s", "time ratio", "difference"]
    shown = [
        [r["vocab"], r["slots"], *r["temporaries_mb"].values(), *r["seconds"].values(), r["time_ratio"]]
        + [r["relative_difference"]]
        for r in rows
    ]
    print(table(f"Loss over the vocabulary, {options.dtype}", columns, shown))
    report({"machine": machine(), "options": vars(options), "rows": rows}, options.json)


if __name__ == "__main__":
    main(tyro.cli(Options, description=Options.__doc__))
