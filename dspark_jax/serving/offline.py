"""Offline generation: a file of prompts in, a file of answers out, record by record, and again where it was stopped.

Also what every way of serving shares: loading the models, and turning prompts and settings into requests.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from dspark_jax.checkpoints.load import (
    Drafter,
    Target,
    embedded_drafter_path,
    embedded_target_path,
    load_drafter,
    load_target,
)
from dspark_jax.checkpoints.tokenizer import Tokenizer
from dspark_jax.config import auto_dtype, keep_programs, log_to_stderr
from dspark_jax.data.prompts import PromptRecord, read_prompts
from dspark_jax.data.records import RecordWriter, read_records
from dspark_jax.decoding.batching import capacity_for
from dspark_jax.decoding.curve import Curve
from dspark_jax.decoding.generate import Completion, Generator, Request
from dspark_jax.decoding.sampling import Mode, SamplingParams
from dspark_jax.drafters.ngram import NgramConfig
from dspark_jax.serving import report
from dspark_jax.serving.settings import BUDGETED, ServeSettings
from dspark_jax.serving.stream import TextStream, prompt_ids
from dspark_jax.sharding import MeshShape, make_mesh

_STREAM_ROUNDS = 4  # steps between two looks of the host


@dataclass(frozen=True)
class Models:
    """What a run generates with: the target, its drafter or None, the dtype's name, and the mesh that they lie on."""

    target: Target
    drafter: Drafter | None
    dtype: str
    mesh: Mesh | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return tuple(self.target.tokenizer.eos_ids)


@dataclass(frozen=True)
class Job:
    """One prompt to answer: the request, the prompt's text for the output, and its stop strings."""

    request: Request
    prompt: str
    stop: tuple[str, ...]


def load_models(settings: ServeSettings) -> Models:
    """Loads target and drafter as the settings say, the embedded ones by default.

    Raises:
        FileNotFoundError, ValueError: nothing there, damaged, unsupported, or drafter and target do not go together.
    """
    if settings.compile_cache is not None:
        keep_programs(settings.compile_cache)
    dtype = auto_dtype() if settings.dtype == "auto" else settings.dtype
    devices = settings.data * settings.tensor
    mesh = None
    if devices > 1:
        mesh = make_mesh(MeshShape(settings.data, 1, settings.tensor), jax.devices()[:devices])
    target = load_target(settings.target or embedded_target_path(), dtype=dtype, mesh=mesh)
    if settings.drafter == "none":
        return Models(target, None, dtype, mesh)
    if settings.drafter == "ngram":
        lookup = NgramConfig(settings.ngram_tokens, settings.ngram_longest, settings.ngram_shortest)
        return Models(target, Drafter(lookup, {}, Path("ngram")), dtype, mesh)
    drafter = load_drafter(settings.draft or embedded_drafter_path(), dtype=dtype, mesh=mesh, target=target.config)
    try:
        drafter.config.check_target(target.config)
    except ValueError as error:
        hint = "" if settings.draft else " (the embedded drafter: give --draft for this target, or --drafter none)"
        raise ValueError(f"{error}{hint}") from error
    return Models(target, drafter, dtype, mesh)


def make_generator(
    models: Models, settings: ServeSettings, *, every_round: bool = False, plain: bool = False
) -> Generator:
    """The engine for these models.

    Args:
        every_round: hand over tokens after each round: for a terminal, and so that a stop string ends an answer in its
            round. plain: without the drafter.

    Raises:
        ValueError: a throughput curve of another machine or other models.
    """
    drafter = None if plain else models.drafter
    budgeted = drafter is not None and settings.schedule in BUDGETED
    sampling = SamplingParams(settings.temperature, settings.top_p, settings.top_k, settings.min_p)
    return Generator(
        models.target,
        drafter,
        batch_size=settings.slots,
        schedule=settings.schedule if drafter is not None else "fixed",
        threshold=settings.threshold,
        seed=settings.seed,
        stop_ids=models.stop_ids,
        stream_rounds=1 if every_round else _STREAM_ROUNDS,
        curve=throughput_curve(models, settings, (settings.slots,), sampling.mode) if budgeted else None,
        mesh=models.mesh,
    )


def make_serving_generator(models: Models, settings: ServeSettings) -> Generator:
    """The engine for requests that come at any time: slots and caches that grow, traces and log-probabilities.

    Raises:
        ValueError: a throughput curve of another machine or other models.
    """
    budgeted = models.drafter is not None and settings.schedule in BUDGETED
    sizes = slot_sizes(settings.slots, settings.data)
    return Generator(
        models.target,
        models.drafter,
        batch_size=settings.slots,
        schedule=settings.schedule if models.drafter is not None else "fixed",
        threshold=settings.threshold,
        seed=settings.seed,
        stop_ids=models.stop_ids,
        slot_sizes=sizes,
        max_context=settings.server.max_context,
        curve=throughput_curve(models, settings, sizes, "plain") if budgeted else None,
        mesh=models.mesh,
        trace_rounds=settings.server.rounds,
        top_logprobs=settings.server.max_logprobs,
        switchable=True,
    )


def slot_sizes(most: int, least: int = 1) -> tuple[int, ...]:
    """Numbers of slots to compile for: `least`, doubling, and `most`."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return (*sizes, most)


def throughput_curve(models: Models, settings: ServeSettings, slots: Sequence[int], mode: Mode) -> Curve:
    """The curve that budgets are chosen by: the file of the settings, or the stored one, measured where it is missing.

    Args:
        slots: numbers of slots that must be in it. mode: the sampling program that it is of.

    Raises:
        ValueError: the file is of another machine or other models, lacks a number of slots, or is damaged.
    """
    from dspark_jax.profiling.measure import Models as Profiled
    from dspark_jax.profiling.provide import curve_for

    profiled = Profiled(models.target, models.drafter, mode, models.mesh, models.stop_ids)
    measure = settings.profile is None
    with log_to_stderr():
        return curve_for(profiled, slots, (capacity_for(1),), file=settings.profile, measure=measure)


# --- prompts to requests ---


def request_seed(seed: int, name: str) -> int:
    """Seed of the prompt `name` in a run with `seed`, in 0..2^63-1: the same whatever else runs, and after a resume."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def make_job(record: PromptRecord, tokenizer: Tokenizer, settings: ServeSettings) -> Job:
    """The request of a prompt: its own sampling fields before those of the command line.

    Raises:
        ValueError: naming the prompt's id, the field, and what would be right.
    """
    fields = settings.sampling() | {"seed": None} | record.sampling
    stop = tuple(fields.pop("stop"))
    stream = request_seed(settings.seed, record.id)
    try:
        request = Request(record.id, prompt_ids(tokenizer, record.messages), SamplingParams(**fields), stream)
    except ValueError as error:
        raise ValueError(f"prompt {record.id!r}: {error}") from error
    return Job(request, record.prompt_text, stop)


def left_to_do(records: Sequence[PromptRecord], output: Path) -> list[PromptRecord]:
    """Prompts without an answer in `output` yet.

    Raises:
        ValueError: an id of the file was answered for another prompt, or the file is something else.
    """
    if not output.exists():
        return list(records)
    done = {record.get("id"): record.get("prompt") for record in read_records(output)}
    for record in records:
        if record.id in done and done[record.id] != record.prompt_text:
            raise ValueError(
                f"output {output}: id {record.id!r} is there for another prompt, {str(done[record.id])[:40]!r} and not "
                f"{record.prompt_text[:40]!r}; choose another --output"
            )
    return [record for record in records if record.id not in done]


# --- running ---


def answer(job: Job, completion: Completion, stream: TextStream) -> dict[str, Any]:
    """The output line of a completion (design, "Fixed"); what lies behind a stop string is in no count.

    `stream` has seen all tokens of the completion.
    """
    stream.finish()
    kept, rounds, accepted = len(stream.token_ids), completion.rounds, completion.accepted
    if kept < len(completion.token_ids):  # cut in the last round, which then ends with an accepted draft token
        accepted = max(kept - rounds, 0)
    return {
        "id": job.request.id,
        "prompt": job.prompt,
        "text": stream.text,
        "token_ids": stream.token_ids,
        "finish_reason": "stop" if stream.stopped else completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": kept,
        "rounds": rounds,
        "drafted": completion.drafted,
        "verified": completion.verified,
        "accepted": accepted,
        "accepted_length": round((kept - 1) / rounds, 4) if rounds else 0.0,
        "seconds": round(completion.seconds, 6),
    }


def answers(
    generator: Generator,
    jobs: Sequence[Job],
    models: Models,
    show: Callable[[str], object] | None = None,
) -> Iterator[dict[str, Any]]:
    """Output lines of jobs, in the order in which they end.

    Without stop strings and `show` nobody listens, and the engine's loop stays on the device.

    Args:
        show: gets each piece of text as it comes (for one job).
    """
    by_id = {job.request.id: job for job in jobs}
    streams = {job.request.id: TextStream(models.target.tokenizer, job.stop, models.stop_ids) for job in jobs}

    def listen(name: str, ids: list[int]) -> bool:
        piece = streams[name].push(ids)
        if show and piece:
            show(piece)
        return streams[name].stopped

    listens = show is not None or any(job.stop for job in jobs)
    for completion in generator.generate([job.request for job in jobs], listen if listens else None):
        job, stream = by_id[completion.id], streams.pop(completion.id)
        if not listens:
            stream.push(completion.token_ids)
        before = len(stream.text)
        record = answer(job, completion, stream)
        if show and len(stream.text) > before:
            show(stream.text[before:])
        yield record


def timed(
    generator: Generator, jobs: Sequence[Job], models: Models, keep: Callable[[dict[str, Any]], None] | None = None
) -> tuple[list[dict[str, Any]], float]:
    """All answers, each handed to `keep` as it ends, and the wall seconds that they took together."""
    began = time.perf_counter()
    records = []
    for record in answers(generator, jobs, models) if jobs else ():
        records.append(record)
        if keep:
            keep(record)
    return records, time.perf_counter() - began


def generate_file(
    settings: ServeSettings, models_of: Callable[[ServeSettings], Models] = load_models
) -> dict[str, Any]:
    """Answers `settings.prompts` into `settings.output`; returns the report (see `report.make_report`).

    Raises:
        FileNotFoundError, ValueError: a wrong line (by number), a wrong output file, models or prompts that cannot run.
    """
    assert settings.prompts is not None and settings.output is not None  # checked by ServeSettings
    records = read_prompts(settings.prompts, line_filter=settings.line_filter, limit=settings.limit)
    todo = left_to_do(records, settings.output)
    skipped = len(records) - len(todo)
    if skipped:
        there = f"{skipped} of {len(records)} prompts are there already, {len(todo)} to do"
        print(f"{settings.output}: {there}", file=sys.stderr)
    models = models_of(settings)
    jobs = [make_job(record, models.target.tokenizer, settings) for record in todo]
    stops = any(job.stop for job in jobs)
    generator = make_generator(models, settings, every_round=stops)
    for job in jobs:
        generator.check(job.request)
    with RecordWriter(settings.output) as writer, tqdm(total=len(jobs), disable=not sys.stderr.isatty()) as progress:

        def keep(record: dict[str, Any]) -> None:
            writer.write(record)
            progress.update()

        if settings.compare and jobs:
            plain = make_generator(models, settings, every_round=stops, plain=True)
            done, seconds, comparison = compare_with_plain(generator, plain, jobs, models, keep)
        else:
            done, seconds = timed(generator, jobs, models, keep)
            comparison = None
    return report.make_report(settings, models.dtype, done, seconds, comparison=comparison, skipped=skipped)


def compare_with_plain(
    generator: Generator, plain: Generator, jobs: Sequence[Job], models: Models, keep: Callable[[dict[str, Any]], None]
) -> tuple[list[dict[str, Any]], float, dict[str, Any]]:
    """Answers `jobs` with both engines, warmed up; prompt by prompt in turn where no batch is asked for, so that a
    machine whose speed drifts slows both alike.

    Returns:
        the records, their seconds, and the comparison (see `report.compare`).
    """
    for engine in (generator, plain):
        engine.warm_up(job.request for job in jobs)
    turns = [[job] for job in jobs] if generator.batch_size == 1 else [jobs]
    done: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    seconds = plain_seconds = 0.0
    for turn in turns:
        records, taken = timed(generator, turn, models, keep)
        done, seconds = done + records, seconds + taken
        records, taken = timed(plain, turn, models)
        others, plain_seconds = others + records, plain_seconds + taken
    greedy = {job.request.id for job in jobs if job.request.sampling.mode == "greedy"}
    return done, seconds, report.compare(done, seconds, others, plain_seconds, greedy)
