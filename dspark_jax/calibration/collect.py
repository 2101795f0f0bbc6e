"""What the confidences said and what was accepted, round by round, from real decoding with whole blocks verified.

Recorded are the confidence head's own probabilities, before any calibration, and acceptance by the lossless rule,
before stop tokens and limits cut the round. Rounds after a request's end do not count. The file is an `.npz`, which a
simulator of serving can replay.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dspark_jax.decoding.batching import Batch
from dspark_jax.decoding.generate import Completion, Generator, Request
from dspark_jax.decoding.requests import mode_of
from dspark_jax.decoding.rounds import Totals
from dspark_jax.decoding.state import Program
from dspark_jax.decoding.step import StepOutput, step
from dspark_jax.drafters.config import DrafterConfig

_step = jax.jit(step, static_argnames=("program", "bucket"), donate_argnames=("state",))
FORMAT = 1


@dataclass(frozen=True)
class Records:
    """n rounds of Q requests, those of a request one after another.

    Attributes:
        confidence: float32 `[n, K]`, sigmoid of the confidence head's logits (not calibrated).
        accepted: int8 `[n]`, leading draft tokens that the target accepted, whether or not a stop token or the limit
            came before. verified: int8 `[n]`, draft tokens that it looked at: K, or less near a limit.
        request: int32 `[n]`, number of the request, 0..Q-1. round: int32 `[n]`, number of the round within it, from 0.
        position: int32 `[n]`, position of the anchor in the text.
        ids: Q names of the requests. domain: int16 `[Q]`, number of each one's domain. domains: names of the domains.
        held_out: bool `[Q]`, requests that nothing is fitted on. prompt_tokens, tokens: int32 `[Q]`, prompt and answer.
        about: how they were made (temperature, models, fingerprint of the confidence head ...), JSON values.
    """

    confidence: np.ndarray
    accepted: np.ndarray
    verified: np.ndarray
    request: np.ndarray
    round: np.ndarray
    position: np.ndarray
    ids: tuple[str, ...]
    domain: np.ndarray
    domains: tuple[str, ...]
    held_out: np.ndarray
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.confidence.ndim != 2:
            raise ValueError(f"confidence {self.confidence.shape}: must be [rounds, block size]")
        rounds, requests = len(self.confidence), len(self.ids)
        for name, count in _ROUNDS_AND_REQUESTS.items():
            wanted = ({"n": rounds, "Q": requests}[count],)
            if getattr(self, name).shape != wanted:
                raise ValueError(f"{name} {getattr(self, name).shape}: must be {wanted}")

    @property
    def block_size(self) -> int:
        """K."""
        return self.confidence.shape[1]

    def rows(self, chosen: np.ndarray) -> Records:
        """The rounds for which bool `chosen [n]` holds; the requests stay."""
        per_round = [name for name, count in _ROUNDS_AND_REQUESTS.items() if count == "n"]
        return replace(self, confidence=self.confidence[chosen], **{n: getattr(self, n)[chosen] for n in per_round})

    def split(self, held_out: bool) -> Records:
        """The rounds of held-out requests, or of the others."""
        return self.rows(self.held_out[self.request] == held_out)


_ROUNDS_AND_REQUESTS = {
    "accepted": "n", "verified": "n", "request": "n", "round": "n", "position": "n",
    "domain": "Q", "held_out": "Q", "prompt_tokens": "Q", "tokens": "Q",
}  # fmt: skip


def save_records(path: str | Path, records: Records) -> None:
    """Writes one compressed `.npz`; a file that is there is replaced when the new one is whole."""
    path = Path(path)
    arrays: dict[str, Any] = {f.name: np.asarray(getattr(records, f.name)) for f in fields(records)}
    arrays["about"] = np.asarray(json.dumps({"format": FORMAT, **records.about}, sort_keys=True))
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    part.replace(path)


def load_records(path: str | Path) -> Records:
    """Reads what `save_records` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: damaged, or not such a file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"records {path}: no such file, must be an .npz of `dspark calibrate --records-out`")
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {f.name: file[f.name] for f in fields(Records)}
        about = json.loads(str(arrays["about"]))
        if about.pop("format") != FORMAT:
            raise ValueError("another format's number")
        texts = {name: tuple(map(str, arrays[name])) for name in ("ids", "domains")}
        return Records(**(arrays | texts | {"about": about}))
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"records {path}: no whole file of `dspark calibrate --records-out` ({error})") from error


def merge(parts: Sequence[Records]) -> Records:
    """The rounds of several runs of one drafter, in the given order; `about` is the first one's.

    Raises:
        ValueError: other block sizes or drafters, or a request that two of them have.
    """
    for name in ("block_size", "fingerprint"):
        values = {str(part.about.get(name)) for part in parts}
        if len(values) > 1:
            raise ValueError(f"records of drafters that differ: {name} {' and '.join(sorted(values))}")
    ids = tuple(name for part in parts for name in part.ids)
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ValueError(f"request {twice!r}: is in the records twice, each must be there once")
    offsets = np.cumsum([0, *(len(part.ids) for part in parts[:-1])])
    domains = tuple(sorted({name for part in parts for name in part.domains}))
    renumbered = [
        replace(
            part,
            request=(part.request + offset).astype(np.int32),
            domain=np.asarray([domains.index(part.domains[i]) for i in part.domain], np.int16),
        )
        for part, offset in zip(parts, offsets, strict=True)
    ]
    names = ("confidence", *_ROUNDS_AND_REQUESTS)
    arrays = {name: np.concatenate([getattr(part, name) for part in renumbered]) for name in names}
    return Records(**arrays, ids=ids, domains=domains, about=parts[0].about)


def fingerprint(params: dict[str, Any]) -> str:
    """16 hex digits of a drafter's confidence head in bfloat16: records belong to the weights they were made with."""
    head = [np.asarray(params["confidence"][name], np.float32).astype(ml_dtypes.bfloat16) for name in ("w", "b")]
    return hashlib.sha256(b"".join(array.tobytes() for array in head)).hexdigest()[:16]


@dataclass
class _Recording(Batch):
    """A batch that takes one round at a time and keeps what each said."""

    rounds_seen: list[dict[str, np.ndarray]] = field(default_factory=list)

    def _decode(self, rounds: int, program: Program) -> Totals:
        """One round of all slots, whole blocks; the rounds of those at work are kept."""
        g, buckets = self.generator, self.generator.buckets_of(self.size)
        active, start, taken = jax.device_get((self.state.active, self.state.start, self.state.counters.rounds))
        did = int(active.any())  # those that came in may have ended with their first token
        if did:
            self._state, output = _step(
                g.target.params, g.draft_params, self.state, program=program, bucket=buckets[-1]
            )
            self.keep(np.flatnonzero(active), start, taken, output)
        by_bucket = np.zeros(len(buckets), np.int32)
        by_bucket[-1] = did
        rows = jnp.int32(active.sum() * (program.slots if did else 0))
        return Totals(jnp.int32(did), jnp.int32(did), jnp.asarray(by_bucket), rows, jnp.int32(active.sum()))

    def keep(self, slots: np.ndarray, start: np.ndarray, taken: np.ndarray, output: StepOutput) -> None:
        confidence, accepted, verified = jax.device_get((output.confidence, output.accepted, output.verified))
        request = [self.slots[slot].ticket - 1 for slot in slots.tolist()]
        self.rounds_seen.append(
            {
                "confidence": confidence[slots].astype(np.float32),
                "accepted": accepted[slots].astype(np.int8),
                "verified": verified[slots].astype(np.int8),
                "request": np.asarray(request, np.int32),
                "round": taken[slots].astype(np.int32),
                "position": start[slots].astype(np.int32),
            }
        )


def check_drafter(config: Any) -> DrafterConfig:
    """The config of a drafter that can be calibrated.

    Raises:
        ValueError: no confidence head.
    """
    if not isinstance(config, DrafterConfig) or not config.confidence:
        kind = type(config).__name__.removesuffix("Config")
        raise ValueError(f"drafter of type {kind} without a confidence head: there is nothing to calibrate")
    return config


def collect(
    target: Any,
    drafter: Any,
    requests: Sequence[Request],
    domains: Sequence[str],
    held_out: Sequence[bool],
    *,
    batch_size: int = 16,
    seed: int = 0,
    stop_ids: tuple[int, ...] | None = None,
    about: dict[str, Any] | None = None,
    progress: Callable[[Completion], object] = lambda completion: None,
) -> Records:
    """Decodes `requests` with the whole block verified in every round, and records the rounds.

    Args:
        target, drafter, stop_ids: as `Generator`'s; a calibration that the drafter has already is not applied.
        domains: what kind of prompt each request is. held_out: whether nothing is to be fitted on it.
        batch_size: R, requests decoded together. seed: of requests that bring none.
        about: kept with the records. progress: called as requests end.

    Raises:
        ValueError: no confidence head, requests that cannot run, ids that come twice, or lists of other lengths.
    """
    config = replace(check_drafter(drafter.config), confidence_temperatures=(), confidence_biases=())
    ids = tuple(request.id for request in requests)
    if len(set(ids)) < len(ids) or not len(ids) == len(domains) == len(held_out):
        raise ValueError(
            f"{len(ids)} requests with {len(set(ids))} ids, {len(domains)} domains, {len(held_out)} held_out: "
            "ids must differ, and each request must have one of each"
        )
    plain = SimpleNamespace(config=config, params=drafter.params)
    generator = Generator(target, plain, batch_size=batch_size, seed=seed, stop_ids=stop_ids)
    run = _Recording(generator, mode_of(requests))
    for request in requests:
        generator.check(request)
        run.add(request)
    lengths = np.zeros((2, len(ids)), np.int32)  # of prompts and answers
    while run.busy:
        for event in run.advance(1):
            if event.completion is not None:
                done = event.completion
                lengths[:, event.ticket - 1] = done.prompt_tokens, len(done.token_ids)
                progress(done)
    return _as_records(run.rounds_seen, config, ids, domains, held_out, lengths, about or {}, fingerprint(plain.params))


def _as_records(
    seen: list[dict[str, np.ndarray]],
    config: Any,
    ids: tuple[str, ...],
    domains: Sequence[str],
    held_out: Sequence[bool],
    lengths: np.ndarray,
    about: dict[str, Any],
    head: str,
) -> Records:
    """Records of all rounds that were seen."""
    nothing = {name: np.zeros(0, np.int8 if name in ("accepted", "verified") else np.int32) for name in _ROUNDS}
    nothing["confidence"] = np.zeros((0, config.block_size), np.float32)
    rounds = {name: np.concatenate([empty, *(part[name] for part in seen)]) for name, empty in nothing.items()}
    order = np.lexsort((rounds["round"], rounds["request"]))
    names = tuple(sorted(set(domains)))
    return Records(
        **{name: array[order] for name, array in rounds.items()},
        ids=ids,
        domain=np.asarray([names.index(name) for name in domains], np.int16),
        domains=names,
        held_out=np.asarray(held_out, bool),
        prompt_tokens=lengths[0],
        tokens=lengths[1],
        about=about | {"block_size": config.block_size, "fingerprint": head},
    )


_ROUNDS = tuple(name for name, count in _ROUNDS_AND_REQUESTS.items() if count == "n")
