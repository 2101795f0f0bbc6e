"""What one run of `serve.py` is: the options of the command line, checked before anything is loaded.

Nothing here imports JAX until a dtype is asked for, so `--help` and refusals are quick.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dspark_jax.config import settings_as_json
from dspark_jax.data.prompts import sampling_fields
from dspark_jax.serving.http.settings import DEFAULT_SLOTS, HttpSettings

DTYPES = ("auto", "float32", "bfloat16")
SCHEDULES = ("fixed", "threshold", "causal", "async")
BUDGETED = ("causal", "async")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop")


@dataclass(frozen=True)
class ServeSettings:
    """Generate text with a target model and a drafter that speeds it up without changing its distribution.

    Give one of --prompt, --prompts with --output, --http, or --demo.

    Attributes:
        prompt: text to answer; the answer streams to the terminal.
        prompts: JSONL file of prompts to answer offline. Sampling fields of a line override the options.
        output: JSONL file that answers are appended to, one a line; a stopped run goes on where it was.
        line_filter: lines of --prompts to keep, by their 1-based number.
        limit: number of prompts to answer, the first ones that the filter keeps; all by default.
        shard: I/N: answer every N-th prompt only, from the I-th on, so that N hosts share a file (each with an --output
            of its own).
        order: answers are written as they end (completed), or in the order of the prompts (input).
        target: target model: a folder, a GGUF file or a hub id; the embedded one by default.
        draft: drafter: a folder or a hub id; the embedded one by default.
        drafter: dspark is what --draft holds, of any kind (DSpark, DFlash, Eagle3, MTP); ngram looks the last tokens up
            in the prompt and the answer; none is plain decoding by the same engine (--draft is then not loaded).
        ngram_tokens: with --drafter ngram: draft tokens of a round at most.
        ngram_longest: with --drafter ngram: length of the longest match looked for, in tokens.
        ngram_shortest: with --drafter ngram: length of the shortest match that counts, in tokens.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the smallest set of tokens with this probability, in (0, 1].
        top_k: keep this number of most likely tokens; 0 keeps all.
        min_p: drop tokens below this share of the most likely one's probability, in [0, 1).
        seed: seed of the run; each prompt draws from (seed, its id).
        max_tokens: tokens to generate at most for a prompt.
        stop: text that ends an answer and is not part of it; can be given several times.
        batch_size: prompts decoded together; 1 by default, and 8 with --http.
        schedule: which part of a block the target verifies: all of it (fixed); the tokens before the confidence falls
            below --threshold; or what pays by this machine's throughput curve, over all prompts of the batch, decided
            from this round's confidences (causal) or a budget from two rounds before (async).
        threshold: confidence of the threshold schedule, a probability in [0, 1].
        profile: file of the throughput curve (`dspark profile`) for causal and async; by default the one that is stored
            for this machine and these models, which is measured first where there is none.
        data: copies of the models on a mesh of devices, each with its share of the
            batch.
        tensor: devices that each copy of the models is cut into.
        compile_cache: folder that compiled programs are kept in, for the next start.
        dtype: dtype of the weights; auto is bfloat16 where the device multiplies it fast, else float32.
        compare: with --prompts: run plain decoding on the same prompts too and report the speed ratio; both are
            warmed up first, so that no compilation is timed.
        json: file for settings, totals (tokens, seconds, tokens per second) and the comparison, as one JSON object.
        demo: stream one fixed problem, then time plain and speculative decoding on it (greedy, medians of 3).
        server: options of --http.
    """

    prompt: str | None = None
    prompts: Path | None = None
    output: Path | None = None
    line_filter: Literal["all", "odd", "even"] = "all"
    limit: int | None = None
    shard: str | None = None
    order: Literal["completed", "input"] = "completed"
    target: str | None = None
    draft: str | None = None
    drafter: Literal["dspark", "ngram", "none"] = "dspark"
    ngram_tokens: int = 7
    ngram_longest: int = 3
    ngram_shortest: int = 2
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    batch_size: int | None = None
    schedule: Literal["fixed", "threshold", "causal", "async"] = "fixed"
    threshold: float = 0.5
    profile: Path | None = None
    data: int = 1
    tensor: int = 1
    compile_cache: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    compare: bool = False
    json: Path | None = None
    demo: bool = False
    server: Annotated[HttpSettings, tyro.conf.arg(name="")] = HttpSettings()

    @property
    def slots(self) -> int:
        """Prompts decoded together."""
        if self.batch_size is not None:
            return self.batch_size
        return 1 if self.server.http is None else DEFAULT_SLOTS

    def check(self) -> None:
        """Refuses what cannot run, before anything is loaded.

        (Not in `__post_init__`: the parser would wrap the message in a box of several lines.)

        Raises:
            ValueError: naming option, value and what would be right.
            FileNotFoundError: an input file or an output folder is missing.
        """
        self._check_numbers()
        self._check_modes()
        self.server.check()
        self._check_files()

    def _check_numbers(self) -> None:
        if self.profile is not None and self.schedule not in BUDGETED:
            raise ValueError(f"--profile: only goes with --schedule {' or '.join(BUDGETED)}, not {self.schedule}")
        for name in ("data", "tensor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1 device")
        sampling_fields(self.sampling())
        if self.slots < 1:
            raise ValueError(f"batch_size {self.slots}: must be at least 1")
        if self.slots % self.data:
            raise ValueError(f"batch_size {self.slots}: must be a multiple of data {self.data}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold}: a probability, must lie in [0, 1]")
        if self.ngram_tokens < 1:
            raise ValueError(f"ngram_tokens {self.ngram_tokens}: must be at least 1")
        if not 1 <= self.ngram_shortest <= self.ngram_longest:
            raise ValueError(
                f"ngram_shortest {self.ngram_shortest}: must lie in 1..ngram_longest ({self.ngram_longest})"
            )
        if self.shard is not None:
            parse_shard(self.shard)
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit {self.limit}: must be at least 1 (left out: all)")

    def _check_modes(self) -> None:
        served = self.server.http is not None
        modes = (self.prompt is not None) + (self.prompts is not None) + self.demo + served
        if modes != 1:
            raise ValueError(
                "give exactly one of --prompt TEXT, --prompts FILE.jsonl --output FILE.jsonl, --http HOST:PORT, "
                "or --demo"
            )
        if self.prompts is None:
            offline = {"output": self.output, "limit": self.limit, "compare": self.compare, "shard": self.shard}
            offline["order"] = self.order != "completed"
            offline["line-filter"] = self.line_filter != "all"
            for name in (name for name, value in offline.items() if value):
                raise ValueError(f"--{name}: only goes with --prompts FILE.jsonl")
            if self.slots != 1 and not served:
                raise ValueError(f"batch_size {self.slots}: only goes with --prompts FILE.jsonl, one prompt is 1")
        elif self.output is None:
            raise ValueError("--prompts: needs --output FILE.jsonl for the answers")
        if served:
            self._check_sampling_is_left_out()
        if self.drafter == "none" and (self.compare or self.demo):
            raise ValueError("drafter 'none': --compare and --demo set plain decoding against a drafter, give one")
        if self.drafter == "ngram":
            if self.draft is not None:
                raise ValueError(f"draft {self.draft!r}: --drafter ngram loads none, leave it out")
            if self.schedule != "fixed":
                raise ValueError(f"schedule {self.schedule!r}: --drafter ngram has no confidences, must be fixed")
        if self.demo and (self.temperature or self.stop):
            raise ValueError("--demo: decodes greedily to the model's own stop, leave out --temperature and --stop")

    def _check_sampling_is_left_out(self) -> None:
        for name in (name for name in _SAMPLING if name != "seed"):
            if getattr(self, name) != getattr(ServeSettings, name):
                option = name.replace("_", "-")
                raise ValueError(f"--{option}: does not go with --http, where each request brings its own")

    def _check_files(self) -> None:
        if self.prompt == "":
            raise ValueError("prompt '': must not be empty")
        if self.prompts is not None and not self.prompts.is_file():
            raise FileNotFoundError(f"prompts {self.prompts}: no such file, must be a JSONL file")
        if self.profile is not None and not self.profile.is_file():
            raise FileNotFoundError(f"profile {self.profile}: no such file, make one with `dspark profile --output`")
        if self.compile_cache is not None and self.compile_cache.is_file():
            raise ValueError(f"compile_cache {self.compile_cache}: is a file, must be a folder")
        for name, path in (("output", self.output), ("json", self.json)):
            if path is None:
                continue
            if path.is_dir():
                raise ValueError(f"{name} {path}: is a folder, must be a file")
            if not path.parent.is_dir():
                raise FileNotFoundError(f"{name} {path}: the folder {path.parent} does not exist, make it first")
        files = [path.resolve() for path in (self.prompts, self.output, self.json) if path is not None]
        if len(set(files)) < len(files):
            raise ValueError("--prompts, --output and --json: must be different files")

    def sampling(self) -> dict[str, Any]:
        """The sampling fields of the command line, by the names of an input line."""
        return {name: getattr(self, name) for name in _SAMPLING}

    def as_json(self) -> dict[str, Any]:
        """The settings with paths as text, for a report; keys stay secret."""
        own = settings_as_json(self)
        del own["server"]
        of_server = settings_as_json(self.server)
        del of_server["api_key"]
        return own | {"batch_size": self.slots} | of_server


def parse_shard(text: str) -> tuple[int, int]:
    """(i, n) of "i/n", i in 1..n.

    Raises:
        ValueError: it is something else.
    """
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        raise ValueError(f"shard {text!r}: must be I/N with I from 1 to N, as 2/8 for the second of eight parts")
    return number, count


def parse_settings(argv: list[str], program: str = "serve.py") -> ServeSettings:
    """Settings from command line words. Exits with code 2 (and usage on stderr) on unknown options, 0 after --help.

    Raises:
        ValueError, FileNotFoundError: an option has a value that cannot be, or a file is not there.
    """
    settings = tyro.cli(ServeSettings, args=argv, prog=program, config=(tyro.conf.FlagCreatePairsOff,))
    settings.check()
    return settings
