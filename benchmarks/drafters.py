"""What drafting a block costs, by kind of drafter: the paper's round latency, and Eagle3's small steps.

All drafters have the target's sizes, random weights and the same reduced vocabulary; times hold, drafts mean nothing.
Eagle3 drafts gamma tokens in one compiled loop: its time is set against gamma single steps, each timed alone in a loop
on the device (layer, head, argmax), and its compiled program is searched for calls to the host.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from common import Case, load_models, machine, measure, of_turns, random_drafter, report, table
from decode import Body, Loop, draft_body, verify_body

from dspark_jax.checkpoints.load import Drafter, Target
from dspark_jax.decoding.generate import Generator
from dspark_jax.decoding.sampling import best_token
from dspark_jax.decoding.state import DecodeState, Program
from dspark_jax.drafters import eagle3, recurrent
from dspark_jax.drafters.dspark import to_target_ids
from dspark_jax.drafters.interface import init_params
from dspark_jax.models.attention import dense_packing
from dspark_jax.models.layers import linear, softcap
from dspark_jax.training.settings import DrafterSettings, drafter_config

GAMMAS = (1, 2, 4, 7)


@dataclass(frozen=True)
class Options:
    """Benchmark of drafting at batch size 1.

    Attributes:
        target: a folder, GGUF file or hub id; None: the embedded one. dtype: of the weights.
        context: tokens in the caches before the timed drafts. rounds: drafts of one timed call.
        repeats: timed calls of each case. json: file for the results as one JSON object.
    """

    target: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    context: int = 256
    rounds: int = 16
    repeats: int = 15
    json: str | None = None

    def __post_init__(self) -> None:
        for name in ("context", "rounds", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")


def one_layer_drafter(target: Target, shape: DrafterSettings, like: Drafter, dtype: str) -> Drafter:
    """A random Eagle3 or MTP drafter with the draft vocabulary of `like`."""
    config = drafter_config(replace(shape, draft_vocab_size=like.config.draft_vocab_size), target.config)
    params = init_params(config, jax.random.key(0), jnp.dtype(dtype))
    if config.trims_vocabulary:
        params["d2t"] = like.params["d2t"]
    return Drafter(config, params, Path("random"))


def single_step_body(program: Program) -> Body:
    """One of Eagle3's small steps: the layer on one token, the head, and the best draft token."""
    config: Any = program.drafter

    def body(target_params: Any, draft_params: Any, state: DecodeState, i: jax.Array) -> DecodeState:
        memory = state.draft_cache
        attend = recurrent._cached(config, memory.cache, state.start, dense_packing(1, 1))
        arguments = eagle3.MODEL, draft_params, config, state.anchor, memory.state.T, state.start, attend
        hidden, cache = recurrent.advance(*arguments)
        logits = linear(draft_params["head"], eagle3.MODEL.read(draft_params, config, hidden))
        token = to_target_ids(draft_params, best_token(softcap(logits, config.final_softcap)))
        return state._replace(draft_cache=recurrent.Memory(cache, hidden.T), anchor=token)

    return body


def loop_of(target: Target, drafter: Drafter, options: Options) -> Loop:
    """A state of this drafter's program, for timed loops."""
    fast = Generator(target, drafter, stop_ids=())
    return Loop(target.params, fast.draft_params, fast.program("greedy"), options.context, options.rounds)


def any_body(program: Program) -> Body:
    """A draft of any kind of drafter."""
    return draft_body(program, takes_in=False)


def host_calls(loop: Loop) -> dict[str, int]:
    """Loops and calls to the host in the compiled program that drafts one block."""
    body, state = any_body(loop.program), loop.holder["state"]
    run = jax.jit(lambda t, d, s: body(t, d, s, jnp.int32(0)))
    text = run.lower(loop.target_params, loop.draft_params, state).compile().as_text()
    return {"loops": text.count(" while("), "host_calls": text.count("callback") + text.count("infeed(")}


def main(options: Options) -> None:
    """Runs everything and prints it."""
    target, _ = load_models(options.target, None, options.dtype)
    dspark = random_drafter(target.config, options.dtype)
    layers = tuple(sorted(dspark.config.target_layer_ids))
    n = float(options.rounds)
    cases: dict[str, tuple[Case, float]] = {}
    plain = Generator(target, stop_ids=())
    alone = Loop(target.params, {}, plain.program("greedy"), options.context, options.rounds)
    cases["plain step"] = (alone.of(verify_body(alone.program, 1)), n)
    loops = {"DSpark, gamma 7": loop_of(target, dspark, options)}
    eagle = DrafterSettings(kind="eagle3", target_layer_ids=layers)
    for gamma in GAMMAS:
        drafter = one_layer_drafter(target, replace(eagle, block_size=gamma), dspark, options.dtype)
        loops[f"Eagle3, gamma {gamma}"] = loop_of(target, drafter, options)
    mtp = one_layer_drafter(target, DrafterSettings(kind="mtp", block_size=1), dspark, options.dtype)
    loops["MTP-1"] = loop_of(target, mtp, options)
    cases |= {name: (loop.of(any_body(loop.program)), n) for name, loop in loops.items()}
    top = loops[f"Eagle3, gamma {GAMMAS[-1]}"]
    program = host_calls(top)
    cases["Eagle3, single step"] = (top.of(single_step_body(top.program)), n)
    print("machine:", machine())
    samples = measure(cases, options.repeats)
    ms = {name: statistics.median(times) * 1e3 for name, times in samples.items()}
    in_plain = {name: of_turns(samples, [name, "plain step"], lambda a, b: a / b) for name in cases}
    print(table("Drafting a block", ["case", "ms", "plain steps"], [[k, ms[k], in_plain[k]] for k in cases]))
    small = {
        gamma: of_turns(samples, [f"Eagle3, gamma {gamma}", "Eagle3, single step"], lambda a, b, g=gamma: a / (g * b))
        for gamma in GAMMAS
    }
    rows = [[g, share] for g, share in small.items()]
    print(table("Eagle3's draft, in gamma single steps", ["gamma", "draft / (gamma x step)"], rows))
    print(f"\nprogram of Eagle3's draft: {program['loops']} loop(s), {program['host_calls']} calls to the host")
    result = {"machine": machine(), "ms": ms, "plain_steps": in_plain, "of_single_steps": small, "program": program}
    report(result, options.json)


if __name__ == "__main__":
    main(tyro.cli(Options, description=Options.__doc__))
