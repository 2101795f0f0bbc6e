"""What a body asks of the engine, in the engine's words: prompts, sampling, and how answers are cut and told of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dspark_jax.decoding.requests import Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.serving.http.errors import ApiError, too_long
from dspark_jax.serving.http.schema import Body


@dataclass(frozen=True)
class Ask:
    """One HTTP request.

    Attributes:
        name: id of the answer. requests: of the engine, one for each choice: the n answers of the first prompt, those
            of the second, and so on.
        prompt_tokens: of all prompts, each counted once.
        stop: texts that end an answer. stop_ids: tokens that do, besides the model's own.
        detailed: whether the answers are told of token by token: log-probabilities or a trace.
    """

    name: str
    requests: tuple[Request, ...]
    prompt_tokens: int
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    detailed: bool = False


def make_ask(
    body: Body, name: str, prompts: Sequence[Sequence[int]], limit: int | None, logprobs: int | None, context: int
) -> Ask:
    """The requests of a body that has been checked.

    Args:
        name: the answer's id, which the engine's requests are named after. prompts: token ids. limit: tokens to
            generate at most; None: what the context leaves. logprobs: most likely tokens to tell of; None: no
            log-probabilities at all. context: tokens of prompt and answer together at most.

    Raises:
        ApiError: a prompt that is empty, or that the context does not hold, with or without the answer.
    """
    count, requests = body.n or 1, []
    for number, ids in enumerate(prompts):
        sampling = _sampling(body, _fitting(len(ids), limit, context))
        for i in range(count):
            one = sampling if body.seed is None else replace(sampling, seed=nth_seed(body.seed, i))
            speculative = body.speculative is not False
            requests.append(Request(f"{name}-{number}-{i}", tuple(ids), one, None, speculative, logprobs))
    return Ask(
        name,
        tuple(requests),
        sum(map(len, prompts)),
        tuple(body.stop),
        frozenset(body.stop_token_ids or ()),
        bool(body.trace) or logprobs is not None,
    )


def nth_seed(seed: int, number: int) -> int:
    """Seed of the answer `number` of a request with `seed`, in 0..2^63-1; the first one has the request's own."""
    if not number:
        return seed
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _sampling(body: Body, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        max_tokens=max_tokens,
    )


def _fitting(prompt: int, limit: int | None, context: int) -> int:
    """Tokens that an answer to a prompt of so many tokens may have."""
    room = context - prompt
    if prompt < 1:
        raise ApiError(400, "the prompt is empty: must have at least one token")
    if room < 1:
        raise too_long(f"the prompt has {prompt} tokens, the context {context}: must have at most {context - 1}")
    if limit is not None and limit > room:
        raise too_long(
            f"max_tokens {limit}: the prompt has {prompt} tokens and the context {context}, must be at most {room}",
            "max_tokens",
        )
    return limit or room
