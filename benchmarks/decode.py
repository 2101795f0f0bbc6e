"""Where the time of decoding goes: memory bandwidth, plain steps, verification, speculative rounds, whole answers.

All cases of a run are warmed up, then timed in turn (forwards, then backwards, and so on), so that a machine whose
speed drifts slows all of them alike. Times are medians; ratios and shares are medians of the ratios within one turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from common import Case, Samples, load_models, machine, measure, of_turns, random_w2, report, table

from dspark_jax.checkpoints.load import Drafter, Target
from dspark_jax.data.prompts import read_prompts
from dspark_jax.decoding.batching import run_many
from dspark_jax.decoding.generate import Completion, Generator, Request, capacity_for
from dspark_jax.decoding.sampling import SamplingParams, best_token
from dspark_jax.decoding.state import DecodeState, Program, init_state, mask_padding
from dspark_jax.decoding.step import draft
from dspark_jax.drafters.backbone import block_states, ingest
from dspark_jax.drafters.dspark import block_ids
from dspark_jax.models import transformer
from dspark_jax.models.attention import dense_packing
from dspark_jax.models.layers import take_rows

Array = jax.Array
Params = dict[str, Any]
Body = Callable[[Params, Params, DecodeState, Array], DecodeState]
ROWS = (1, 2, 4, 8, 16)
PRODUCT_ROWS = (1, 2, 8, 16)


@dataclass(frozen=True)
class Options:
    """Benchmark of decoding at batch size 1.

    Attributes:
        target, drafter: a folder, GGUF file or hub id; None: the embedded ones.
        dtype: of the weights; both runs them in turn.
        context: tokens in the caches before the timed steps. rounds: steps or rounds of one timed call.
        repeats: timed calls of each case. bandwidth_mib: size of the array that the bandwidth is measured with.
        prompts: JSONL file of prompts to answer at temperature 0. limit: prompts to read at most.
        even_lines: read even lines only. max_tokens: of an answer. threshold: of the threshold schedule.
        prompt_repeats: timed answers of each prompt. json: file for the results as one JSON object.
    """

    target: str | None = None
    drafter: str | None = None
    dtype: Literal["float32", "bfloat16", "both"] = "both"
    context: int = 256
    rounds: int = 16
    repeats: int = 15
    bandwidth_mib: int = 1024
    prompts: str | None = None
    limit: int | None = None
    even_lines: bool = False
    max_tokens: int = 128
    threshold: float = 0.5
    prompt_repeats: int = 3
    json: str | None = None

    def __post_init__(self) -> None:
        for name in ("context", "rounds", "repeats", "bandwidth_mib", "max_tokens", "prompt_repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes to run."""
        return ("float32", "bfloat16") if self.dtype == "both" else (self.dtype,)


def weight_bytes(params: Params) -> int:
    """Bytes of weights that one step reads: everything, a tied embedding once as the head, an untied one not at all."""
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    return total - (params["embed"].nbytes if "head" in params else 0)


def matrices(params: Params) -> list[Array]:
    """All weights of a step as `[out, in]`."""
    flat = lambda name, w: w.reshape(w.shape[0], -1) if name == "o" else w.reshape(-1, w.shape[-1])  # noqa: E731
    layers = [flat(name, w) for layer in params["layers"] for name, w in layer.items() if w.ndim > 1]
    return [*layers, transformer.head_weight(params)]


# --- bandwidth and bare products ---


def bandwidth_cases(mib: int) -> dict[str, tuple[Case, float]]:
    """Reads of one float32 array by sums over its middle axis, its last axis, and a product with ones; units are GB."""
    x = jnp.ones((64, mib * 4, 1024), jnp.float32)  # 64 rows of mib * 16 KiB each: mib MiB
    reads = {
        "sum over rows": lambda x: jnp.sum(x, axis=1),  # [64, 1024]
        "sum over columns": lambda x: jnp.sum(x, axis=2),
        "product with ones": lambda x: x.reshape(-1, 1024) @ jnp.ones((1024,)),
    }
    return {f"read {name}": (partial(jax.jit(f), x), x.nbytes / 1e9) for name, f in reads.items()}


def product_case(weights: list[Array], rows: int, left: bool) -> Case:
    """One pass over all weights, each product waiting for the one before: `W @ x` or (not left) `x @ W.T`."""

    @jax.jit
    def run(weights: list[Array]) -> Array:
        link = jnp.float32(0)
        for w in weights:
            shape = (w.shape[1], rows) if left else (rows, w.shape[1])
            x = jnp.full(shape, 1e-3, jnp.float32) + link * 1e-6
            dims = (((1,), (0,)), ((), ())) if left else (((1,), (1,)), ((), ()))
            operands = (w, x.astype(w.dtype)) if left else (x.astype(w.dtype), w)
            link = jax.lax.dot_general(*operands, dims, preferred_element_type=jnp.float32)[0, 0]
        return link

    return partial(run, weights)


# --- steps on the device ---


@dataclass
class Loop:
    """Runs N turns of a body on the device, over a state that is donated and comes back; its lengths start anew."""

    target_params: Params
    draft_params: Params
    program: Program
    context: int
    rounds: int
    holder: dict[str, DecodeState] = field(default_factory=dict)  # the one state of all cases of this loop

    def __post_init__(self) -> None:
        reach = max(self.rounds * 8, self.rounds * self.program.slots) + max(ROWS)
        capacity = capacity_for(self.context + reach)  # as generation would grow it, with and without a drafter alike
        self.holder["state"] = init_state(self.program, 1, capacity)

    def take(self) -> DecodeState:
        """The state at the loop's beginning: one active request of `context` tokens that reaches no limit."""
        ints = lambda value: jnp.full((1,), value, jnp.int32)  # noqa: E731
        state = self.holder.pop("state")
        limit = state.tokens.shape[1] - self.program.slots
        fresh = {"anchor": ints(1), "start": ints(self.context), "length": ints(1), "limit": ints(limit)}
        return state._replace(**fresh, active=jnp.ones((1,), bool))

    def real(self, buckets: tuple[int, ...]) -> Case:
        """The program that `Generator` runs."""

        def call() -> DecodeState:
            rounds, until_free = jnp.int32(self.rounds), jnp.bool_(False)
            state, _ = run_many(
                self.target_params, self.draft_params, self.take(), rounds, until_free, None,
                program=self.program, buckets=buckets,
            )  # fmt: skip
            self.holder["state"] = state
            return state.tokens

        return call

    def of(self, body: Body, draft_params: Params | None = None) -> Case:
        """`body` alone, in place of a round."""
        params = self.draft_params if draft_params is None else draft_params

        @partial(jax.jit, donate_argnums=2)
        def run(target_params: Params, draft_params: Params, state: DecodeState) -> DecodeState:
            def turn(i: Array, now: DecodeState) -> DecodeState:
                start = jnp.full((1,), self.context, jnp.int32) + i % 2  # so that nothing can be moved out of the loop
                return body(target_params, draft_params, now._replace(start=start), i)

            return jax.lax.fori_loop(0, self.rounds, turn, state)

        def call() -> DecodeState:
            state = self.holder["state"] = run(self.target_params, params, self.take())
            return state.tokens

        return call


def verify_body(program: Program, rows: int) -> Body:
    """The target's pass over `rows` rows, and the best token of each, which are the next turn's rows."""
    packing = dense_packing(1, rows)

    def body(target_params: Params, draft_params: Params, state: DecodeState, i: Array) -> DecodeState:
        ids = state.tokens[0, :rows]
        hidden, cache = transformer.extend(
            target_params, program.target, state.target_cache, ids, state.start, packing, program.capture
        )
        logits = mask_padding(transformer.logits(target_params, hidden.final), program.target)  # [V, B]
        best = best_token(logits)
        return state._replace(target_cache=cache, tokens=state.tokens.at[0, :rows].set(best))

    return body


def draft_body(program: Program, takes_in: bool) -> Body:
    """A draft, whose last token is the next turn's anchor; `takes_in` adds the ingestion of S rows of features."""
    config = program.drafter
    assert config is not None

    def body(target_params: Params, draft_params: Params, state: DecodeState, i: Array) -> DecodeState:
        proposal = draft(draft_params, state, program)
        cache = proposal.cache
        if takes_in:
            width = len(config.target_layer_ids) * config.hidden_size
            features = jnp.full((width, program.slots), 1e-3) + proposal.tokens[0, 0] * 1e-9  # [m * D, S]
            cache = ingest(draft_params, config, cache, features, state.start, dense_packing(1, program.slots))
        return state._replace(draft_cache=cache, anchor=proposal.tokens[:, -1])

    return body


def backbone_body(program: Program) -> Body:
    """The drafter's parallel pass without its heads."""
    config = program.drafter
    assert config is not None

    def body(target_params: Params, draft_params: Params, state: DecodeState, i: Array) -> DecodeState:
        ids = block_ids(state.anchor, config.block_size, config.mask_token_id).reshape(-1)
        x = take_rows(draft_params["embed"], ids)  # [D, K]
        packing = dense_packing(1, config.block_size)
        hidden, cache = block_states(draft_params, config, state.draft_cache, x, state.start, packing)
        return state._replace(draft_cache=cache, anchor=jnp.argmax(hidden[:, -1]).astype(jnp.int32)[None])

    return body


def step_cases(target: Target, drafter: Drafter, options: Options) -> dict[str, tuple[Case, float]]:
    """Bare products, plain steps, verification and the parts of a round; units are passes, steps and rounds."""
    weights, n = matrices(target.params), float(options.rounds)
    cases = {f"W @ x, {r} rows": (product_case(weights, r, True), 1.0) for r in PRODUCT_ROWS}
    cases["x @ W.T, 1 row"] = (product_case(weights, 1, False), 1.0)
    plain, fast = Generator(target, stop_ids=()), Generator(target, drafter, stop_ids=())
    alone = Loop(target.params, {}, plain.program("greedy"), options.context, options.rounds)
    cases["plain"] = (alone.real(plain.buckets_of(1)), n)
    cases |= {f"verify {r}": (alone.of(verify_body(alone.program, r)), n) for r in ROWS}
    program, bound = fast.program("greedy"), fast.draft_params
    loop = Loop(target.params, bound, program, options.context, options.rounds)
    cases["round"] = (loop.real(fast.buckets_of(1)), n)
    cases["round target"] = (loop.of(verify_body(program, program.slots)), n)
    cases["backbone"] = (loop.of(backbone_body(program)), n)
    cases["draft"] = (loop.of(draft_body(program, False)), n)
    cases["drafter"] = (loop.of(draft_body(program, True)), n)
    if drafter.config.trims_vocabulary:
        whole = {k: v for k, v in bound.items() if k != "ids"} | {"head": transformer.head_weight(target.params)}
        if "markov" in whole:
            w2 = random_w2(drafter.config.vocab_size, drafter.config.markov_rank, bound["markov"]["w2"].dtype)
            whole["markov"] = whole["markov"] | {"w2": w2}
        full = replace(program, drafter=replace(drafter.config, draft_vocab_size=drafter.config.vocab_size))
        cases["draft, full head"] = (loop.of(draft_body(full, False), whole), n)
    return cases


def step_results(samples: Samples, dtype: str, num_bytes: int, block: int, reads: Sequence[str]) -> dict[str, Any]:
    """The numbers of one dtype: times in ms, percentages, ratios in plain steps."""
    at = lambda name: f"{dtype} {name}"  # noqa: E731
    names = [name.removeprefix(dtype + " ") for name in samples if name.startswith(dtype + " ")]
    ms = {name: statistics.median(samples[at(name)]) * 1e3 for name in names}
    limit = of_turns(samples, [at("plain"), *reads], lambda t, *r: 100 * num_bytes / 1e9 * min(r) / t)
    steps = {r: of_turns(samples, [at(f"verify {r}"), at("plain")], lambda a, b: a / b) for r in ROWS}
    parts = [at(name) for name in ("round", "backbone", "draft", "drafter", "round target")]
    shares = {
        "draft backbone": of_turns(samples, parts, lambda r, b, d, a, t: 100 * b / r),
        "draft head": of_turns(samples, parts, lambda r, b, d, a, t: 100 * (d - b) / r),
        "draft ingestion": of_turns(samples, parts, lambda r, b, d, a, t: 100 * (a - d) / r),
        "target": of_turns(samples, parts, lambda r, b, d, a, t: 100 * t / r),
        "outside": of_turns(samples, parts, lambda r, b, d, a, t: 100 * (r - a - t) / r),
    }
    result = {
        "ms": ms,
        "weight_bytes": num_bytes,
        "percent_of_bandwidth": limit,
        "verify_in_plain_steps": steps,
        "block_size": block,
        "round_in_plain_steps": of_turns(samples, [at("round"), at("plain")], lambda a, b: a / b),
        "round_shares_percent": shares,
    }
    if "draft, full head" in ms:
        result["full_head_over_reduced"] = of_turns(samples, [at("draft, full head"), at("draft")], lambda a, b: a / b)
    return result


# --- whole answers ---


def answer(generators: dict[str, Generator], request: Request, repeats: int) -> tuple[dict[str, Completion], Samples]:
    """The completion and the seconds of each generator for one prompt; times cover prefill and decoding."""
    done: dict[str, Completion] = {}
    samples: Samples = {name: [] for name in generators}
    for turn in range(-1, repeats):  # the first one compiles
        for name in list(generators)[:: 1 if turn % 2 == 0 else -1]:
            done[name] = next(iter(list(generators[name].generate([request]))))
            if turn >= 0:
                samples[name].append(done[name].seconds)
    return done, samples


def prompt_results(target: Target, drafter: Drafter, options: Options) -> dict[str, Any]:
    """Speed-up of each schedule over plain decoding, by prompt and in total, and the accepted length."""
    generators = {"plain": Generator(target), "fixed": Generator(target, drafter)}
    if drafter.config.confidence:
        generators["threshold"] = Generator(target, drafter, schedule="threshold", threshold=options.threshold)
    lines = "even" if options.even_lines else "all"
    rows = []
    for record in read_prompts(options.prompts or "", line_filter=lines, limit=options.limit):
        ids = tuple(target.tokenizer.apply_chat_template(list(record.messages)))
        request = Request(record.id, ids, SamplingParams(max_tokens=options.max_tokens))
        done, samples = answer(generators, request, options.prompt_repeats)
        row: dict[str, Any] = {"id": record.id, "tokens": len(done["plain"].token_ids)}
        row["seconds"] = {name: statistics.median(times) for name, times in samples.items()}
        row["rounds"] = {name: c.rounds for name, c in done.items()}
        row["committed"] = {name: len(c.token_ids) - 1 for name, c in done.items()}
        row["speedup"] = {name: of_turns(samples, ["plain", name], lambda a, b: a / b) for name in generators}
        row["same_tokens"] = all(c.token_ids == done["plain"].token_ids for c in done.values())
        rows.append(row)
    totals = {}
    for name in generators:
        total = lambda key, name=name: sum(row[key][name] for row in rows)  # noqa: E731
        totals[name] = {
            "speedup": sum(row["seconds"]["plain"] for row in rows) / total("seconds"),
            "slowest_prompt": min(row["speedup"][name] for row in rows),
            "accepted_length": total("committed") / max(total("rounds"), 1),
            "tokens_per_second": (total("committed") + len(rows)) / total("seconds"),
        }
    same = sum(row["same_tokens"] for row in rows)
    return {"prompts": rows, "totals": totals, "same_tokens": same}


# --- output ---


def print_steps(results: dict[str, Any], gigabytes: float) -> None:
    """Tables of `step_results`, a column for each dtype."""
    dtypes = list(results)
    row = lambda label, get: [label, *(get(results[d]) for d in dtypes)]  # noqa: E731
    names = [n for n in results[dtypes[0]]["ms"]]
    rows = [row(f"{name}, ms", lambda x, name=name: x["ms"][name]) for name in names]
    print(table("Times of one pass, step or round", ["case", *dtypes], rows))
    rows = [
        ["memory bandwidth, GB/s", *[gigabytes] * len(dtypes)],
        row("weights read per plain step, MB", lambda x: x["weight_bytes"] / 1e6),
        row("plain step, % of the bandwidth limit", lambda x: x["percent_of_bandwidth"]),
        *(row(f"verify {r} rows, plain steps", lambda x, r=r: x["verify_in_plain_steps"][r]) for r in ROWS),
        row("round, plain steps", lambda x: x["round_in_plain_steps"]),
        *(
            row(f"round: {part}, %", lambda x, part=part: x["round_shares_percent"][part])
            for part in results[dtypes[0]]["round_shares_percent"]
        ),
        row("draft with the full head, in drafts with the reduced one", lambda x: x.get("full_head_over_reduced", "")),
    ]
    print(table("Derived", ["row", *dtypes], rows))


def print_prompts(result: dict[str, Any], dtype: str) -> None:
    """Tables of `prompt_results`."""
    names = list(result["totals"])[1:]
    rows = [[p["id"], p["tokens"], *(p["speedup"][n] for n in names), p["same_tokens"]] for p in result["prompts"]]
    print(table(f"Speed-up by prompt, {dtype}", ["prompt", "tokens", *names, "same tokens"], rows))
    keys = ("speedup", "slowest_prompt", "accepted_length", "tokens_per_second")
    rows = [[name, *(total[key] for key in keys)] for name, total in result["totals"].items()]
    print(table(f"Speed-up in total, {dtype}", ["schedule", *keys], rows))


def main(options: Options) -> None:
    """Runs everything and prints it."""
    models = {dtype: load_models(options.target, options.drafter, dtype) for dtype in options.dtypes}
    drafter = models[options.dtypes[0]][1]
    print("machine:", machine())
    if drafter.path == Path("random"):
        print("drafter: none found, RANDOM weights of the embedded shape; times hold, accepted lengths do not")
    cases = bandwidth_cases(options.bandwidth_mib)
    reads = list(cases)
    for dtype, pair in models.items():
        cases |= {f"{dtype} {name}": case for name, case in step_cases(*pair, options).items()}
    samples = measure(cases, options.repeats)
    speeds = {name: 1 / statistics.median(samples[name]) for name in reads}
    block = drafter.config.block_size
    steps = {d: step_results(samples, d, weight_bytes(models[d][0].params), block, reads) for d in models}
    print_steps(steps, max(speeds.values()))
    result: dict[str, Any] = {"machine": machine(), "drafter": str(drafter.path), "context": options.context}
    result |= {"gigabytes_per_second": speeds, "steps": steps}
    if options.prompts:
        result["prompts"] = {dtype: prompt_results(*pair, options) for dtype, pair in models.items()}
        for dtype, answers in result["prompts"].items():
            print_prompts(answers, dtype)
    report(result, options.json)


if __name__ == "__main__":
    main(tyro.cli(Options, description=Options.__doc__))
