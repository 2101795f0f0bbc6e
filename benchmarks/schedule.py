"""What scheduling costs: the budget of a round, on the device, against a plain round of as many requests.

    python benchmarks/schedule.py --json schedule.json

A round's scheduling is: expected gains of all buckets from the past, whether to draft, verify lengths and the bucket
from this round's confidences, and the new past. It is timed in a loop on the device whose turns depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from common import Case, load_models, measure, of_turns, report, table

from dspark_jax.config import auto_dtype
from dspark_jax.decoding.budget import (
    Past,
    bucket_gains,
    budgeted_lengths,
    corrected,
    count_kept,
    forecast,
    init_past,
    make_round,
    pays_to_draft,
    remember,
)
from dspark_jax.decoding.generate import Generator
from dspark_jax.decoding.state import DecodeState, init_state
from dspark_jax.decoding.step import step

TURNS, STEPS = 200, 3  # of the two loops


@dataclass(frozen=True)
class Options:
    """Time the scheduler.

    Attributes:
        slots: numbers of requests.
        schedules: causal and async.
        repeats: turns of all cases.
        json: file for the results.
    """

    slots: tuple[int, ...] = (1, 8, 64)
    schedules: tuple[str, ...] = ("causal", "async")
    repeats: int = 9
    json: str | None = None


def scheduling(generator: Generator, schedule: str, slots: int) -> Case:
    """`TURNS` rounds of scheduling alone."""
    buckets, block = generator.buckets_of(slots), generator.block_size
    costs = generator.costs(slots, 256)
    assert costs is not None  # the generator has a budget
    costs = costs._replace(drafted=jnp.linspace(1.2, 3.0, len(buckets)), plain=jnp.float32(1.0))
    active, room = jnp.ones(slots, bool), jnp.full(slots, block)

    def turn(_: Any, carry: tuple[Past, jax.Array]) -> tuple[Past, jax.Array]:
        past, start = carry
        now = make_round(active, room, buckets, block)
        gains = bucket_gains(now, forecast(past, schedule))  # type: ignore[arg-type]
        drafts = pays_to_draft(now, gains, past, costs)
        raw = jnp.clip(past.newer * (0.8 + 0.05 * (start % 7))[:, None], 0, 1)  # of this turn
        survival = corrected(past, raw)
        lengths, index = budgeted_lengths(schedule, now, survival, gains, costs)  # type: ignore[arg-type]
        past = count_kept(past, raw, lengths, lengths // 2)
        return remember(past, survival, active, drafts), start + lengths + index

    run = jax.jit(lambda past, start: jax.lax.fori_loop(0, TURNS, turn, (past, start)))
    past, start = init_past(slots, block), jnp.full(slots, 100, jnp.int32)
    return lambda: run(past, start)[1]


def plain_round(generator: Generator, slots: int) -> Case:
    """`STEPS` rounds of plain decoding."""
    program = generator.program("greedy")

    def turn(_: Any, state: DecodeState) -> DecodeState:
        new, _ = step(generator.target.params, {}, state, program=program, bucket=slots)
        return new._replace(start=state.start, length=state.length)

    state = init_state(program, slots, 256)
    ints = lambda value: jnp.full(slots, value, jnp.int32)  # noqa: E731
    holder = {"state": state._replace(active=jnp.ones(slots, bool), start=ints(100), length=ints(1), limit=ints(200))}
    run = jax.jit(lambda now: jax.lax.fori_loop(0, STEPS, turn, now), donate_argnums=0)

    def call() -> Any:
        holder["state"] = run(holder["state"])
        return holder["state"].anchor

    return call


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    target, drafter = load_models(None, None, auto_dtype())
    results, rows = {}, []
    for slots in options.slots:
        plain = Generator(target, None, batch_size=slots)
        cases = {"plain round": (plain_round(plain, slots), STEPS)}
        for schedule in options.schedules:
            budgeted = Generator(target, drafter, batch_size=slots, schedule=schedule)  # type: ignore[arg-type]
            cases[schedule] = (scheduling(budgeted, schedule, slots), TURNS)
        samples = measure(cases, options.repeats)  # type: ignore[arg-type]
        seconds = {name: of_turns(samples, [name], lambda x: x) for name in cases}
        shares = {name: of_turns(samples, [name, "plain round"], lambda a, b: a / b) for name in options.schedules}
        results[str(slots)] = {"seconds": seconds, "share": shares}
        rows.append(
            [slots, seconds["plain round"] * 1e3, *(x for s in shares for x in (seconds[s] * 1e6, shares[s] * 100))]
        )
    header = ["slots", "plain round ms", *(x for s in options.schedules for x in (f"{s} us", f"{s} %"))]
    print(table("Scheduling against a plain round", header, rows))
    report(results, options.json)


if __name__ == "__main__":
    main()
