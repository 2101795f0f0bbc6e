"""Recorded rounds as something to serve again: requests of known lengths, and what each round would have accepted.

A round of a simulated request at text position p is the recorded one whose anchor lies nearest at or before p, say d
tokens before: what its block says about the tokens behind p is replayed. Of l verified tokens min(accepted - d, l) are
accepted, so a request whose blocks are cut comes to each recorded rejection, as one whose blocks are not. (Were it
min(accepted, l), it would meet easy stretches more often than they are: by 8 % more tokens a round at l = 1.)

What a block says nothing about is drawn from its calibrated confidences, beyond its end from the last one: tokens
behind one that was accepted whole, and those that were not verified because the limit was near.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dspark_jax.calibration.collect import Records
from dspark_jax.calibration.sts import logits


@dataclass(frozen=True)
class Calibration:
    """Of confidences: c_k = sigmoid(z_k / T_k + b_k); empty temperatures are 1, empty biases 0."""

    temperatures: tuple[float, ...] = ()
    biases: tuple[float, ...] = ()

    def apply(self, confidence: np.ndarray) -> np.ndarray:
        """Calibrated confidences, float64 `[n, K]`, of recorded ones `[n, K]`.

        Raises:
            ValueError: not K temperatures or biases, or temperatures that are not positive.
        """
        block = confidence.shape[1]
        for name, values in (("temperatures", self.temperatures), ("biases", self.biases)):
            if values and len(values) != block:
                raise ValueError(f"calibration with {len(values)} {name}: records of blocks of {block} need {block}")
        if not all(0 < t < float("inf") for t in self.temperatures):
            raise ValueError(f"calibration temperatures {list(self.temperatures)}: must be positive, finite numbers")
        if not np.isfinite(self.biases).all():
            raise ValueError(f"calibration biases {list(self.biases)}: must be finite numbers")
        z = logits(confidence) / np.asarray(self.temperatures or 1.0) + np.asarray(self.biases or 0.0)
        return 1 / (1 + np.exp(-z))


class Moment(NamedTuple):
    """Where m requests are: int64 `[m]`, the number of each one's round, and how many tokens before its anchor lies."""

    rounds: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Replay:
    """Q requests and their n recorded rounds of blocks of K tokens.

    Attributes:
        confidence: float64 `[n, K]`, calibrated. accepted, verified: int64 `[n]`, draft tokens. position: int64 `[n]`,
            of the anchor.
        prompt, tokens: int64 `[Q]`, lengths of prompt and answer. limit: int64 `[Q]`, most tokens of the answer that a
            server would expect: what a stop token cut short had more.
        first: int64 `[Q]`, where each request's entries of `at` begin. at: int64, the round by tokens generated so far,
            from 1 to `tokens - 1`.
    """

    confidence: np.ndarray
    accepted: np.ndarray
    verified: np.ndarray
    position: np.ndarray
    prompt: np.ndarray
    tokens: np.ndarray
    limit: np.ndarray
    first: np.ndarray
    at: np.ndarray

    @property
    def block(self) -> int:
        """K."""
        return self.confidence.shape[1]

    @property
    def requests(self) -> int:
        """Q."""
        return len(self.prompt)

    def moment(self, request: np.ndarray, length: np.ndarray) -> Moment:
        """Where `request [m]` are with `length [m]` tokens generated."""
        rounds = self.at[self.first[request] + length - 1]
        return Moment(rounds, self.prompt[request] + length - 1 - self.position[rounds])

    def confidences(self, now: Moment) -> np.ndarray:
        """Conditional survival probabilities of the next K tokens, float64 `[m, K]`."""
        slot = np.minimum(now.offsets[:, None] + np.arange(self.block), self.block - 1)
        return self.confidence[now.rounds[:, None], slot]

    def accept(self, now: Moment, lengths: np.ndarray, draws: np.random.Generator) -> np.ndarray:
        """Accepted draft tokens, int64 `[m]`, when the next `lengths [m]` are verified."""
        told = self.accepted[now.rounds] - now.offsets
        accepted = np.minimum(told, lengths)
        open_ended = (self.accepted[now.rounds] == self.verified[now.rounds]) & (lengths > told)
        if open_ended.any():
            which = Moment(now.rounds[open_ended], now.offsets[open_ended])
            survives = draws.random((len(which.rounds), self.block)) < self.confidences(which)
            survives |= np.arange(self.block) < told[open_ended, None]
            run = np.cumprod(survives, axis=1).sum(axis=1)
            accepted[open_ended] = np.minimum(run, lengths[open_ended])
        return accepted


def make_replay(parts: Sequence[Records], calibration: Calibration, max_tokens: int | Sequence[int] = 0) -> Replay:
    """The requests of all `parts`.

    Args:
        parts: of one drafter. calibration: of their confidences. max_tokens: cuts longer answers, tokens: all of them,
            or each by its own number; 0: as recorded.

    Raises:
        ValueError: blocks of other sizes, a calibration for others, no rounds, or a request whose first is missing.
    """
    if not parts:
        raise ValueError("no records: give at least one file of `dspark calibrate --records-out`")
    blocks = sorted({part.block_size for part in parts})
    if len(blocks) > 1:
        raise ValueError(f"records of blocks of {' and '.join(map(str, blocks))} tokens: must be of one drafter")
    if not blocks[0] or not sum(len(part.accepted) for part in parts):
        raise ValueError("records without rounds: nothing to replay; record answers of more than one token")
    prompt, tokens, limit, tables = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    every = np.broadcast_to(max_tokens, sum(len(part.tokens) for part in parts))
    rounds_before = requests_before = 0
    for part in parts:
        recorded = part.tokens.astype(np.int64)
        allowed = np.maximum(int(part.about.get("max_tokens", 0)), recorded)
        most = every[requests_before : requests_before + len(recorded)]
        recorded, allowed = (np.where(most > 0, np.minimum(x, most), x) for x in (recorded, allowed))
        tables += [rounds_before + _table(part, q, int(count)) for q, count in enumerate(recorded)]
        prompt.append(part.prompt_tokens.astype(np.int64))
        tokens.append(recorded)
        limit.append(allowed)
        rounds_before += len(part.accepted)
        requests_before += len(recorded)
    return Replay(
        confidence=calibration.apply(np.concatenate([part.confidence for part in parts])),
        accepted=np.concatenate([part.accepted for part in parts]).astype(np.int64),
        verified=np.concatenate([part.verified for part in parts]).astype(np.int64),
        position=np.concatenate([part.position for part in parts]).astype(np.int64),
        prompt=np.concatenate(prompt),
        tokens=np.concatenate(tokens),
        limit=np.concatenate(limit),
        first=np.cumsum([0, *map(len, tables[:-1])]),
        at=np.concatenate(tables),
    )


def _table(part: Records, request: int, tokens: int) -> np.ndarray:
    """Numbers of the rounds within `part`, int64 `[tokens - 1]`, of a request by how many tokens it has."""
    if tokens < 2:
        return np.zeros(0, np.int64)  # the token of the prefill is all
    own = np.flatnonzero(part.request == request)
    begins = int(part.prompt_tokens[request])  # position of the first anchor
    if not len(own) or part.position[own[0]] != begins:
        there = f"its first round is at position {part.position[own[0]]}" if len(own) else "it has no round"
        raise ValueError(f"records: request {part.ids[request]!r}: {there}, must be at {begins}, behind its prompt")
    places = begins + np.arange(tokens - 1)
    return own[np.searchsorted(part.position[own], places, side="right") - 1]
