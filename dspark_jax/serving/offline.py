"""Offline generation: a file of prompts in, a file of answers out, record by record, and again where it was stopped.

Also what every way of serving shares: loading the models, and turning prompts and settings into requests.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dspark_jax.checkpoints.load import (
    Drafter,
    Target,
    embedded_drafter_path,
    embedded_target_path,
    load_drafter,
    load_target,
)
from dspark_jax.checkpoints.tokenizer import Tokenizer, prompt_ids
from dspark_jax.config import keep_programs, log_to_stderr, named_dtype
from dspark_jax.data.prompts import PromptRecord
from dspark_jax.data.records import RecordWriter
from dspark_jax.decoding.batching import capacity_for
from dspark_jax.decoding.curve import Curve
from dspark_jax.decoding.generate import Completion, Generator, Request
from dspark_jax.decoding.requests import mode_of
from dspark_jax.decoding.sampling import Mode, SamplingParams
from dspark_jax.drafters.ngram import NgramConfig
from dspark_jax.serving import report
from dspark_jax.serving.corpus import open_corpus
from dspark_jax.serving.progress import Progress
from dspark_jax.serving.settings import BUDGETED, ServeSettings
from dspark_jax.serving.stream import TextStream
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
    dtype = named_dtype(settings.dtype)
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
    sampling = SamplingParams(settings.temperature, settings.top_p, settings.top_k, settings.min_p)
    drafter, sizes = None if plain else models.drafter, (settings.slots,)
    rounds = 1 if every_round else _STREAM_ROUNDS
    return _generator(models, settings, drafter, sizes, sampling.mode, stream_rounds=rounds)


def make_serving_generator(models: Models, settings: ServeSettings) -> Generator:
    """The engine for requests that come at any time: slots and caches that grow, traces and log-probabilities.

    Raises:
        ValueError: a throughput curve of another machine or other models.
    """
    return _generator(
        models,
        settings,
        models.drafter,
        slot_sizes(settings.slots, settings.data),
        "plain",
        max_context=settings.server.max_context,
        trace_rounds=settings.server.rounds,
        top_logprobs=settings.server.max_logprobs,
        switchable=True,
    )


def _generator(
    models: Models, settings: ServeSettings, drafter: Drafter | None, sizes: tuple[int, ...], mode: Mode, **options: Any
) -> Generator:
    """What all engines have in common. `sizes`: numbers of slots. `mode`: sampling program of the throughput curve."""
    budgeted = drafter is not None and settings.schedule in BUDGETED
    return Generator(
        models.target,
        drafter,
        batch_size=settings.slots,
        schedule=settings.schedule if drafter is not None else "fixed",
        threshold=settings.threshold,
        seed=settings.seed,
        stop_ids=models.stop_ids,
        slot_sizes=sizes,
        curve=throughput_curve(models, settings, sizes, mode) if budgeted else None,
        mesh=models.mesh,
        **options,
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


@dataclass(frozen=True)
class Plan:
    """What all jobs of a run share: the sampling program that serves them, and whether any has stop strings."""

    mode: Mode = "greedy"
    stops: bool = False


def make_plan(generator: Generator, jobs: Iterable[Job]) -> Plan:
    """Looks at all jobs once.

    Raises:
        ValueError: one that cannot run.
    """
    mode: Mode = "greedy"
    stops = False
    for job in jobs:
        generator.check(job.request)
        mode = mode_of([job.request], mode)
        stops = stops or bool(job.stop)
    return Plan(mode, stops)


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
    jobs: Iterable[Job],
    models: Models,
    plan: Plan,
    show: Callable[[str], object] | None = None,
) -> Iterator[dict[str, Any]]:
    """Output lines of jobs, in the order in which they end; jobs are taken as they get their turn.

    Without stop strings and `show` nobody listens, and the engine's loop stays on the device.

    Args:
        show: gets each piece of text as it comes (for one job).
    """
    at_work: dict[str, tuple[Job, TextStream]] = {}

    def requests() -> Iterator[Request]:
        for job in jobs:
            at_work[job.request.id] = job, TextStream(models.target.tokenizer, job.stop, models.stop_ids)
            yield job.request

    def listen(name: str, ids: list[int]) -> bool:
        stream = at_work[name][1]
        piece = stream.push(ids)
        if show and piece:
            show(piece)
        return stream.stopped

    listens = show is not None or plan.stops
    for completion in generator.stream(requests(), plan.mode, listen if listens else None):
        job, stream = at_work.pop(completion.id)
        if not listens:
            stream.push(completion.token_ids)
        before = len(stream.text)
        record = answer(job, completion, stream)
        if show and len(stream.text) > before:
            show(stream.text[before:])
        yield record


def in_order(records: Iterable[dict[str, Any]], names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Records in the order of `names`; those that come too early are held."""
    held: dict[str, dict[str, Any]] = {}
    wanted = iter(names)
    name = next(wanted, None)
    for record in records:
        held[record["id"]] = record
        while name in held:
            yield held.pop(name)
            name = next(wanted, None)


def timed(
    generator: Generator,
    jobs: Iterable[Job],
    models: Models,
    plan: Plan,
    keep: Callable[[dict[str, Any]], None],
    order: Iterable[str] | None = None,
) -> float:
    """Hands each answer to `keep` as it ends, or in this `order` of ids; the wall seconds that they took together."""
    began = time.perf_counter()
    done = answers(generator, jobs, models, plan)
    for record in done if order is None else in_order(done, order):
        keep(record)
    return time.perf_counter() - began


def generate_file(
    settings: ServeSettings, models_of: Callable[[ServeSettings], Models] = load_models
) -> dict[str, Any]:
    """Answers `settings.prompts` into `settings.output`; returns the report (see `report.make_report`).

    The file is read three times: its lines are checked, then that the models can take every prompt, then they are
    answered. Neither prompts nor answers are held, but for their ids and a comparison with plain decoding.

    Raises:
        FileNotFoundError, ValueError: a wrong line (by number), a wrong output file, models or prompts that cannot run.
    """
    assert settings.output is not None  # checked by ServeSettings
    corpus = open_corpus(settings)
    if corpus.skipped:
        there = f"{corpus.skipped} of {corpus.total} prompts are there already, {corpus.left} to do"
        print(f"{settings.output}: {there}", file=sys.stderr)
    models = models_of(settings)

    def jobs() -> Iterator[Job]:
        return (make_job(record, models.target.tokenizer, settings) for record in corpus.todo())

    generator = make_generator(models, settings)
    plan = make_plan(generator, jobs())
    if plan.stops:
        generator.stream_rounds = 1  # a stop string ends an answer in its round
    comparison, ordered, ledger = None, settings.order == "input", report.Ledger()
    with RecordWriter(settings.output) as writer, Progress(corpus.left) as progress:

        def keep(record: dict[str, Any]) -> None:
            writer.write(record)
            ledger.append(record)
            progress.add(record["completion_tokens"])

        if settings.compare and corpus.left:
            plain = make_generator(models, settings, every_round=plan.stops, plain=True)
            work = list(jobs())
            seconds, comparison = compare_with_plain(generator, plain, work, models, plan, keep, ordered)
        else:
            order = (record.id for record in corpus.todo()) if ordered else None
            seconds = timed(generator, jobs(), models, plan, keep, order)
    return report.make_report(settings, models.dtype, ledger, seconds, comparison=comparison, skipped=corpus.skipped)


def compare_with_plain(
    generator: Generator,
    plain: Generator,
    jobs: Sequence[Job],
    models: Models,
    plan: Plan,
    keep: Callable[[dict[str, Any]], None],
    ordered: bool = False,
) -> tuple[float, dict[str, Any]]:
    """Answers `jobs` with both engines, warmed up; prompt by prompt in turn where no batch is asked for, so that a
    machine whose speed drifts slows both alike.

    Returns:
        the seconds of `generator`, and the comparison (see `report.compare`).
    """
    for engine in (generator, plain):
        engine.warm_up(job.request for job in jobs)
    turns = [[job] for job in jobs] if generator.batch_size == 1 else [jobs]
    done: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    seconds = plain_seconds = 0.0
    for turn in turns:

        def take(record: dict[str, Any]) -> None:
            keep(record)
            done.append(record)

        order = [job.request.id for job in turn] if ordered else None
        seconds += timed(generator, turn, models, plan, take, order)
        plain_seconds += timed(plain, turn, models, plan, others.append)
    greedy = {job.request.id for job in jobs if job.request.sampling.mode == "greedy"}
    return seconds, report.compare(done, seconds, others, plain_seconds, greedy)
