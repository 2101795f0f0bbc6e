"""The demonstration: one fixed word problem, streamed speculatively, then timed against plain decoding.

Greedy, so both must give the same tokens (the acceptance rule is lossless, paper section 3). Medians over repeats that
alternate, so that a change of the machine's speed meets both.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dspark_jax.data.prompts import prompt_record
from dspark_jax.decoding.generate import Generator
from dspark_jax.serving import report
from dspark_jax.serving.offline import Job, Models, answers, load_models, make_generator, make_job, make_plan, timed
from dspark_jax.serving.settings import ServeSettings

PROBLEM = (
    "A gardener plants 6 rows of tulips with 14 tulips in each row. A storm breaks 19 of them, and she sells the rest "
    "in bunches of 5 for 4 dollars a bunch. How much money does she get? Explain step by step."
)
REPEATS = 3


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that only one has); None where both are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def measure(generators: dict[str, Generator], job: Job, models: Models) -> dict[str, tuple[dict[str, Any], float]]:
    """(output line, median wall seconds of REPEATS runs) by generator, after one untimed run of each."""
    plan = make_plan(next(iter(generators.values())), [job])
    seconds: dict[str, list[float]] = {name: [] for name in generators}
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in generators}
    for _ in range(1 + REPEATS):
        for name, generator in generators.items():
            seconds[name].append(timed(generator, [job], models, plan, records[name].append))
    return {name: (records[name][-1], statistics.median(seconds[name][1:])) for name in generators}


def run_demo(
    settings: ServeSettings, models_of: Callable[[ServeSettings], Models] = load_models
) -> tuple[dict[str, Any], int]:
    """Streams the answer, prints both speeds; returns the report and the exit code (1 where the tokens differ)."""
    models = models_of(settings)
    job = make_job(prompt_record({"prompt": PROBLEM}, "demo"), models.target.tokenizer, settings)
    speculative = make_generator(models, settings, every_round=True)
    print(f"{PROBLEM}\n")
    for _ in answers(speculative, [job], models, make_plan(speculative, [job]), show_piece):
        pass
    print("\n")
    print(f"Timing plain and speculative decoding, {REPEATS} runs each ...", file=sys.stderr)
    found = measure({"plain": make_generator(models, settings, plain=True), "speculative": speculative}, job, models)
    (plain, plain_seconds), (record, seconds) = found["plain"], found["speculative"]
    comparison = report.compare(
        [{**record, "seconds": seconds}], seconds, [{**plain, "seconds": plain_seconds}], plain_seconds, {"demo"}
    )
    summary = report.make_report(settings, models.dtype, [record], seconds, comparison=comparison)
    print(demo_lines(summary))
    at = first_difference(record["token_ids"], plain["token_ids"])
    if at is not None:
        print(f"the outputs differ from token {at} on (0-based); they must be equal", file=sys.stderr)
    return summary, 0 if at is None else 1


def demo_lines(summary: dict[str, Any]) -> str:
    """The result as a small table."""
    total, found, device = summary["totals"], summary["comparison"], summary["device"]
    return "\n".join(
        (
            f"device           {device['kind']} ({device['platform']}), {summary['settings']['dtype']}",
            f"tokens           {total['completion_tokens']}",
            f"plain            {found['plain']['tokens_per_second']:.1f} tokens/s",
            f"speculative      {total['tokens_per_second']:.1f} tokens/s",
            f"speed-up         {found['speedup']:.2f}",
            f"accepted length  {total['accepted_length']:.2f} tokens a round",
            f"same tokens      {'yes' if found['equal_texts'] else 'NO'}",
        )
    )


def show_piece(piece: str) -> None:
    """Prints a piece of an answer at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()
