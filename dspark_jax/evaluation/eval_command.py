"""`dspark eval`: measures drafters on benchmarks; writes the paper's table, JSON, plots and TensorBoard events.

Every answer is kept as it comes: the same command goes on where it was stopped, and reports where all is there.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import tyro

from dspark_jax.checkpoints.tokenizer import Tokenizer, load_tokenizer
from dspark_jax.config import check_json, exit_code, log_to_stderr, named_dtype, settings_as_json, write_json
from dspark_jax.data.prompts import sampling_fields
from dspark_jax.evaluation.answering import (
    PLAIN,
    Answerer,
    Method,
    Protocol,
    System,
    ask,
    check_turns,
    expected_ids,
    reader_for,
)
from dspark_jax.evaluation.benchmarks import Benchmark, Conversation, read_benchmarks
from dspark_jax.evaluation.outcomes import Outcome
from dspark_jax.evaluation.plots import plot, write_board
from dspark_jax.evaluation.scores import Scores, score
from dspark_jax.evaluation.store import OutcomeStore, chat_digest, device, fingerprint, prompt_digests
from dspark_jax.evaluation.tables import accepted_lengths, report, speed
from dspark_jax.serving.progress import Progress

logger = logging.getLogger(__name__)
_PROGRAM = "dspark eval"
_NGRAM = "ngram"
_STOPPED = "stopped; the same command goes on where it was"
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class EvalSettings:
    """Measure drafters on benchmarks.

    Attributes:
        prompts: JSONL files with `turns`, named like a benchmark (gsm8k.jsonl), folders of such,
            hf:NAME[@CONFIG][:SPLIT], or names of benchmarks, which are read from the hub: gsm8k math500 aime25 mbpp
            humaneval livecodebench mt-bench alpaca arena-hard-v2.
        lines: lines of each source to ask, by their 1-based number.
        limit: conversations of each benchmark, the first ones; 0 for all.
        domains: BENCHMARK=DOMAIN: whose mean a benchmark counts in, as notes=chat; one that is not known is in other.
        max_prompt_tokens: conversations that begin with a longer prompt are left out, in tokens; 0 for none.
        drafters: NAME=PATH or PATH (a folder or a hub id), ngram or NAME=ngram; the embedded one by default.
        compare: in place of drafters: those that ship for the embedded target, and ngram.
        plain: whether to decode without a drafter too: speed-ups are against it, and --method forced follows it.
        target: target model: a folder, a GGUF file or a hub id; the embedded one by default.
        dtype: of the weights; auto is bfloat16 where the device multiplies it fast, else float32.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the smallest set of tokens with this probability, in (0, 1].
        top_k: keep this number of most likely tokens; 0 keeps all.
        min_p: drop tokens below this share of the most likely one's probability, in [0, 1).
        max_tokens: longest answer, in tokens.
        batch_size: conversations decoded together.
        seed: of the run; each answer draws from (seed, its benchmark, conversation and turn).
        method: decode runs every drafter in the engine. forced finds their rounds along plain decoding's answers: as
            many at temperature 0, distributed alike above, and much sooner, but without a wall-clock.
        schedule: which part of a block the target verifies: all of it, or the tokens before the confidence falls below
            --threshold.
        threshold: confidence of the threshold schedule, a probability in [0, 1].
        data: copies of the models on a mesh of devices, each with its share of the batch.
        tensor: devices that each copy of the models is cut into.
        output: folder for outcomes.jsonl, report.md, report.json, accepted.png, position.png and TensorBoard events.
        json: another file for what report.json says.
    """

    prompts: tuple[str, ...] = ()
    lines: Literal["all", "odd", "even"] = "all"
    limit: int = 0
    domains: tuple[str, ...] = ()
    max_prompt_tokens: int = 0
    drafters: tuple[str, ...] = ()
    compare: bool = False
    plain: bool = True
    target: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    batch_size: int = 8
    seed: int = 0
    method: Method = "decode"
    schedule: Literal["fixed", "threshold"] = "fixed"
    threshold: float = 0.5
    data: int = 1
    tensor: int = 1
    output: Path = Path("results/eval")
    json: Path | None = None

    def protocol(self) -> Protocol:
        """How conversations are answered."""
        return Protocol(
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            self.max_tokens,
            self.batch_size,
            self.seed,
            self.method,
        )

    def check(self) -> None:
        """Refuses what cannot run, before anything is loaded.

        Raises:
            ValueError, FileNotFoundError: naming the option, its value and what would be right.
        """
        sampling_fields({n: getattr(self, n) for n in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")})
        self.protocol().sampling()
        for name, least in (("limit", 0), ("max_prompt_tokens", 0), ("batch_size", 1), ("data", 1), ("tensor", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {least}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold}: a probability, must lie in [0, 1]")
        if not self.prompts:
            raise ValueError("give --prompts: JSONL files with turns, a folder of such, or names of benchmarks")
        if self.batch_size % self.data:
            raise ValueError(f"batch_size {self.batch_size}: must be a multiple of data {self.data}")
        if self.method == "forced" and self.data * self.tensor > 1:
            raise ValueError("method 'forced': runs on one device, leave out --data and --tensor")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output {self.output}: is a file, must be a folder")
        check_json(self.json)
        self._check_drafters()

    def _check_drafters(self) -> None:
        if self.compare and (self.drafters or self.target):
            raise ValueError("compare: takes the drafters that ship, leave out --drafters and --target")
        if not self.plain and self.method == "forced":
            raise ValueError("method 'forced': follows the answers of plain decoding, leave out --no-plain")
        if not self.plain and PLAIN in self.drafters:
            raise ValueError("drafters 'plain': contradicts --no-plain, leave out one of them")
        named_drafters(self.drafters)


# --- systems ---


def named_drafters(entries: Iterable[str]) -> dict[str, str]:
    """Names of systems to what drafts in them, a path, a hub id or `ngram`; `plain` is passed over.

    Raises:
        ValueError: a name that comes twice, is reserved, or could not be part of an id.
    """
    found: dict[str, str] = {}
    for entry in entries:
        if entry == PLAIN:
            continue
        name, equals, place = entry.partition("=")
        if not equals or Path(entry).exists():
            name, place = Path(entry).name, entry
        if not place or not _NAME.fullmatch(name):
            raise ValueError(
                f"drafters {entry!r}: must be NAME=PATH, PATH or ngram; a name has letters, digits and .-_"
            )
        if name == PLAIN:
            raise ValueError(f"drafters {entry!r}: the name {PLAIN!r} is taken by decoding without a drafter")
        if name in found:
            raise ValueError(f"drafters {entry!r}: the name {name!r} is used twice, give NAME=PATH with another name")
        found[name] = place
    return found


def shipped_drafters() -> dict[str, str]:
    """The drafters in this package, by the beginning of their folder's name; the embedded one first."""
    from dspark_jax.checkpoints.load import embedded_drafter_path

    embedded = Path(embedded_drafter_path())
    model = embedded.name.removeprefix("dspark")  # -smollm2-135m
    folders = [path.parent for path in sorted(embedded.parent.glob(f"*{model}/config.json"))]
    folders.sort(key=lambda folder: folder != embedded)
    return {folder.name.removesuffix(model): str(folder) for folder in folders}


@dataclass(frozen=True)
class _Models:
    """What a run answers with; `mesh`: the devices that parameters are spread over."""

    target: Any
    systems: tuple[System, ...]
    dtype: str
    mesh: Any


def load_systems(settings: EvalSettings) -> _Models:
    """Loads the target and the drafters.

    Raises:
        FileNotFoundError, ValueError: nothing there, a drafter of another target, or one without the confidences that
            the schedule asks for.
    """
    import jax

    from dspark_jax.checkpoints.load import Drafter, embedded_target_path, load_drafter, load_target
    from dspark_jax.drafters.ngram import NgramConfig
    from dspark_jax.sharding import MeshShape, make_mesh

    dtype = named_dtype(settings.dtype, rows=settings.batch_size)
    devices, mesh = settings.data * settings.tensor, None
    if devices > 1:
        if devices > len(jax.devices()):
            raise ValueError(f"data x tensor {devices}: there are {len(jax.devices())} devices here")
        mesh = make_mesh(MeshShape(settings.data, 1, settings.tensor), jax.devices()[:devices])
    target = load_target(settings.target or embedded_target_path(), dtype=dtype, mesh=mesh)
    systems = [System(PLAIN, None)] if settings.plain else []
    for name, place in _chosen(settings).items():
        if place == _NGRAM:
            drafter = Drafter(NgramConfig(), {}, Path(_NGRAM))
        else:
            drafter = load_drafter(place, dtype=dtype, mesh=mesh, target=target.config)
        try:
            drafter.config.check_target(target.config)
        except ValueError as error:
            hint = "" if settings.drafters else " (it is the embedded target's: name others with --drafters)"
            raise ValueError(f"drafter {name}: is of another target: {error}{hint}") from error
        if settings.schedule == "threshold" and not drafter.config.confidence:
            raise ValueError(f"drafter {name}: has no confidence head, --schedule threshold needs one; leave it out")
        systems.append(System(name, drafter, settings.schedule, settings.threshold))
    return _Models(target, tuple(systems), dtype, mesh)


def _chosen(settings: EvalSettings) -> dict[str, str]:
    """Names of the drafters of a run, to what they are."""
    if settings.compare:
        return shipped_drafters() | {_NGRAM: _NGRAM}
    if settings.drafters:
        return named_drafters(settings.drafters)
    name, place = next(iter(shipped_drafters().items()))
    return {name: place}


# --- prompts ---


def read_prompts(settings: EvalSettings) -> list[Benchmark]:
    """The benchmarks, without the conversations that begin with too long a prompt.

    Raises:
        FileNotFoundError, ValueError: as `read_benchmarks`; or several turns, where the target can be asked one only.
    """
    protocol, left_out = settings.protocol(), 0

    @cache
    def tokenizer() -> Tokenizer:
        from dspark_jax.checkpoints.hf import resolve
        from dspark_jax.checkpoints.load import embedded_target_path

        return load_tokenizer(resolve(settings.target or embedded_target_path()))

    def fits(one: Conversation) -> bool:
        nonlocal left_out
        short = len(ask(tokenizer(), protocol, PLAIN, one).prompt_ids) <= settings.max_prompt_tokens
        left_out += not short
        return short

    found = read_benchmarks(
        settings.prompts,
        lines=settings.lines,
        limit=settings.limit,
        domains=settings.domains,
        fits=fits if settings.max_prompt_tokens else None,
    )
    for conversation in (conversation for one in found for conversation in one.conversations):
        if len(conversation.turns) > 1:
            check_turns(tokenizer(), protocol, conversation)
    if left_out:
        logger.warning("%d prompts of more than %d tokens left out", left_out, settings.max_prompt_tokens)
    return found


# --- the run ---


def _about(settings: EvalSettings, models: _Models, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    """What outcomes depend on, as nested JSON objects."""
    from dspark_jax.data import cache_key

    systems: dict[str, dict[str, Any]] = {}
    for system in models.systems:
        systems[system.name] = {"schedule": system.schedule}
        if system.drafter is not None:
            systems[system.name]["fingerprint"] = fingerprint(system.drafter.config, system.drafter.params)
        if system.schedule == "threshold":
            systems[system.name]["threshold"] = system.threshold
    target = {
        "fingerprint": cache_key.fingerprint(models.target.config, models.target.params),
        "dtype": models.dtype,
        "chat": chat_digest(models.target.tokenizer),
    }
    about: dict[str, Any] = {"protocol": asdict(settings.protocol()), "target": target, "systems": systems}
    about["prompts"] = prompt_digests(benchmarks)
    if settings.method == "decode":  # what wall-clocks are of
        about["device"] = device() | {"data": settings.data, "tensor": settings.tensor}
    return about


def answer_all(settings: EvalSettings, models: _Models, benchmarks: Sequence[Benchmark]) -> dict[str, Outcome]:
    """Answers what the output folder does not hold yet; returns all outcomes in it by id.

    Systems take turns benchmark by benchmark, so that a machine whose speed drifts slows all of them.

    Raises:
        ValueError: the folder's outcomes were made otherwise, or a prompt does not fit into the context.
    """
    with OutcomeStore(settings.output, _about(settings, models, benchmarks)) as store:
        asked = [conversation for one in benchmarks for conversation in one.conversations]
        turns = set().union(*(expected_ids(system.name, asked) for system in models.systems))
        left = turns.difference(store.done)
        if len(left) < len(turns):
            logger.info("%s: %d of %d answers are there already", settings.output, len(turns) - len(left), len(turns))
        if not left:
            return store.done
        protocol = settings.protocol()
        reader = reader_for(models.systems, protocol)
        answerers = [Answerer(models.target, one, protocol, models.mesh, reader) for one in models.systems]
        try:
            for answerer in answerers:
                answerer.warm_up(asked)
        except ValueError as error:
            raise ValueError(f"{error}; --max-prompt-tokens leaves long prompts out") from error
        with Progress(len(left)) as progress:

            def keep(outcome: Outcome) -> None:
                store.keep(outcome)
                progress.add(len(outcome.token_ids))

            parts = [one.conversations for one in benchmarks]
            if settings.method == "forced":  # nothing is timed: no need to take turns
                parts = [tuple(asked)]
            for part in parts:
                for answerer in answerers:
                    answerer.answer(part, keep, store.done)
        return store.done


def evaluate(settings: EvalSettings) -> dict[str, Any]:
    """Does what the settings ask, writes the report and prints its table; returns it as JSON values.

    Raises:
        FileNotFoundError, ValueError: bad settings, prompts or models.
    """
    settings.check()
    benchmarks = read_prompts(settings)
    models = load_systems(settings)
    outcomes = answer_all(settings, models, benchmarks)
    names = [system.name for system in models.systems]
    scores = score(
        outcomes.values(), benchmarks, names, baseline=PLAIN, seed=settings.seed, clock=settings.protocol().clock
    )
    made: dict[str, Any] = {"settings": settings_as_json(settings) | {"dtype": models.dtype}, "versions": _versions()}
    made |= {"device": device(), "target": str(models.target.path)}
    made["drafters"] = {one.name: str(one.drafter.path) for one in models.systems if one.drafter is not None}
    write_report(settings.output, scores, made, _how(settings, made, benchmarks))
    print(accepted_lengths(scores) + "\n\n" + speed(scores))
    return made | scores.as_json()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    import jax

    return {"jax": jax.__version__, "dspark_jax": version("dspark_jax"), "python": sys.version.split()[0]}


def _how(settings: EvalSettings, made: Mapping[str, Any], benchmarks: Sequence[Benchmark]) -> list[str]:
    """Lines of the report that say how its figures were made."""
    verified = "whole blocks" if settings.schedule == "fixed" else f"blocks down to confidence {settings.threshold:g}"
    filters = "".join(
        f", {name} {getattr(settings, name)}" for name in ("top_p", "top_k", "min_p") if _set(settings, name)
    )
    counts = ", ".join(f"{one.title} {len(one.conversations)}" for one in benchmarks)
    most = f", prompts of at most {settings.max_prompt_tokens} tokens" if settings.max_prompt_tokens else ""
    here, versions = made["device"], made["versions"]
    return [
        f"target {made['target']}, {made['settings']['dtype']}",
        *(f"{name}: {path}" for name, path in made["drafters"].items() if path != _NGRAM),
        f"temperature {settings.temperature:g}{filters}, answers of at most {settings.max_tokens} tokens, seed "
        f"{settings.seed}, {verified} verified, method {settings.method}, batches of {settings.batch_size}",
        f"conversations, {settings.lines} lines{most}: {counts}",
        f"{here['platform']} {here['kind']}, jax {versions['jax']}, Python {versions['python']}",
    ]


def _set(settings: EvalSettings, name: str) -> bool:
    return getattr(settings, name) != getattr(EvalSettings, name)


def write_report(folder: Path, scores: Scores, made: Mapping[str, Any], how: Sequence[str]) -> None:
    """Writes report.md, report.json, the plots and TensorBoard events into `folder`."""
    (folder / "report.md").write_text(report(scores, how), encoding="utf-8")
    write_json(folder / "report.json", {**made, **scores.as_json()})
    plot(folder, scores)
    write_board(folder / "tensorboard", scores)
    logger.info("%s: report written", folder)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `dspark eval`: exit code 0, or 2 (bad input, one line on stderr), or 130 (stopped)."""
    settings = tyro.cli(EvalSettings, args=argv, prog=_PROGRAM, config=(tyro.conf.FlagCreatePairsOff,))
    return exit_code(_PROGRAM, lambda: _run(settings), stopped=_STOPPED)


def _run(settings: EvalSettings) -> None:
    with log_to_stderr():
        done = evaluate(settings)
    if settings.json is not None:
        write_json(settings.json, done)


if __name__ == "__main__":
    sys.exit(main())
