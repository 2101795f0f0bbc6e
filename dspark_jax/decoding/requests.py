"""What goes into a batch and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dspark_jax.decoding.sampling import MODES, Mode, SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt, tokenised, with its sampling settings.

    Attributes:
        stream: names the random numbers (63 bits) of a request without a seed of its own, in place of its place in the
            queue.
        speculative: False: this request decodes plainly, whatever the others do, and nothing counts as drafted for it.
        logprobs: log-probabilities of its tokens, with so many of the most likely ones beside; None: none. They need a
            generator that traces.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    stream: int | None = None
    speculative: bool = True
    logprobs: int | None = None


def mode_of(requests: Iterable[Request], least: Mode = "greedy") -> Mode:
    """The cheapest sampling program that serves all of `requests`, `least` or above."""
    return max((least, *(request.sampling.mode for request in requests)), key=MODES.index)


@dataclass
class Completion:
    """What came out of one request.

    Attributes:
        token_ids: generated tokens, the stop token included. finish_reason: "stop", "length" or "cancelled".
        rounds: steps after the prefill. drafted, verified, accepted: draft tokens proposed, looked at by the target,
            and committed. seconds: wall time from admission to the end, prefill included.
    """

    id: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    rounds: int
    drafted: int
    verified: int
    accepted: int
    seconds: float

    @property
    def accepted_length(self) -> float:
        """Committed tokens per round, bonus token included; the token from prefill belongs to no round."""
        return (len(self.token_ids) - 1) / self.rounds if self.rounds else 0.0
