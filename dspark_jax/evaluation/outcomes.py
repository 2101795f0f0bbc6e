"""What became of one answer, round by round, and the sums over rounds that every figure of an evaluation comes from.

Letters: n rounds of an answer, K draft tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

NO_ROOM = "context"  # why a turn has no answer


@dataclass(frozen=True)
class Outcome:
    """One answered turn by one system.

    Attributes:
        id: "SYSTEM/BENCHMARK/CONVERSATION/TURN". system, benchmark, conversation: its parts. turn: from 0.
        prompt_tokens: length of the prompt, chat history included. token_ids: the answer, stop token included.
        finish_reason: "stop" or "length"; "context" of a later turn that the context had no room for: not answered.
        accepted: of each round, draft tokens that were committed. verified: draft tokens that the target looked at.
        reached: draft tokens whose acceptance was decided inside the answer: `verified`, or less in a last round whose
            stop token was an accepted draft.
        confidence: of each round, those of the whole block by the head (calibrated as the drafter is); () without one.
        wall: wall seconds since the answer before it, of the same run of the engine; None where it was not timed.
    """

    id: str
    system: str
    benchmark: str
    conversation: str
    turn: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str
    accepted: tuple[int, ...] = ()
    verified: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    confidence: tuple[tuple[float, ...], ...] = ()
    wall: float | None = None

    def __post_init__(self) -> None:
        if not len(self.accepted) == len(self.verified) == len(self.reached):
            raise ValueError(
                f"outcome {self.id!r}: {len(self.accepted)} accepted, {len(self.verified)} verified, "
                f"{len(self.reached)} reached: must be of the same rounds"
            )

    @property
    def answered(self) -> bool:
        """Whether there was room for an answer."""
        return self.finish_reason != NO_ROOM

    @property
    def rounds(self) -> int:
        """Rounds after the prefill."""
        return len(self.accepted)

    @property
    def committed(self) -> int:
        """Tokens that came from rounds: all but the first, which the prefill brings."""
        return max(len(self.token_ids) - 1, 0)

    def as_json(self) -> dict[str, Any]:
        """JSON values; confidences to seven digits."""
        values = asdict(self)
        values["confidence"] = [[float(f"{c:.7g}") for c in row] for row in self.confidence]
        return values


def outcome_id(system: str, benchmark: str, conversation: str, turn: int) -> str:
    """The id of an outcome."""
    return f"{system}/{benchmark}/{conversation}/{turn}"


def from_json(values: dict[str, Any]) -> Outcome:
    """The outcome that `as_json` wrote.

    Raises:
        ValueError: a field that is missing, or lengths that do not fit.
    """
    names = [field.name for field in fields(Outcome)]
    lost = [name for name in names if name not in values]
    if lost:
        raise ValueError(f"outcome {values.get('id')!r}: lacks {', '.join(lost)}, must be a line of an outcomes file")
    kept = {name: values[name] for name in names}
    for name in ("token_ids", "accepted", "verified", "reached"):
        kept[name] = tuple(kept[name])
    kept["confidence"] = tuple(tuple(row) for row in kept["confidence"])
    return Outcome(**kept)


@dataclass(frozen=True)
class Sums:
    """Sums over the rounds of some answers.

    Attributes:
        answers, tokens, committed, rounds, accepted, verified: totals. wall: seconds.
        reached_at, accepted_at: int64 `[K]`, rounds that decided on slot k with all slots before it accepted, and those
            that accepted it: their ratio is the acceptance conditional on the prefix.
    """

    answers: int
    tokens: int
    committed: int
    rounds: int
    accepted: int
    verified: int
    wall: float
    reached_at: np.ndarray
    accepted_at: np.ndarray

    @property
    def accepted_length(self) -> float:
        """Committed tokens per round, bonus token included; 0 without rounds."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted by verified draft tokens; None where nothing was verified."""
        return self.accepted / self.verified if self.verified else None


def add_up(outcomes: Iterable[Outcome], block: int) -> Sums:
    """Sums over `outcomes`, with positions up to K = `block`."""
    counts = dict.fromkeys(("answers", "tokens", "committed", "rounds", "accepted", "verified"), 0)
    reached_at, accepted_at, wall = np.zeros(block, np.int64), np.zeros(block, np.int64), 0.0
    for one in outcomes:
        wall += one.wall or 0.0
        values = (1, len(one.token_ids), one.committed, one.rounds, sum(one.accepted), sum(one.verified))
        for name, value in zip(counts, values, strict=True):
            counts[name] += value
        accepted, reached = np.asarray(one.accepted, int), np.asarray(one.reached, int)
        for slot in range(block):
            decided = (accepted >= slot) & (reached > slot)
            reached_at[slot] += decided.sum()
            accepted_at[slot] += (decided & (accepted > slot)).sum()
    return Sums(**counts, wall=wall, reached_at=reached_at, accepted_at=accepted_at)
