"""A short greedy run with and without the drafter, and what is likely wrong where hardly a draft token is accepted.

The acceptance rule is lossless (paper section 3), so both texts must be equal whatever the drafter does: a drafter that
does not fit costs speed and says nothing. Where the accepted length is near 1 the usual causes are tried for real:
layer ids moved by one, the other slot convention, a vocabulary map that misses the text, untouched weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from dspark_jax.checkpoints.load import Drafter, Target
from dspark_jax.decoding.generate import Completion, Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.ngram import NgramConfig
from dspark_jax.serving.doctor_checks import OK, WARNING, WRONG, DrafterFiles, Finding

NEAR_ONE = 1.25  # accepted lengths below are near 1: not one draft token in four is accepted
_RISE, _RATIO = 0.2, 1.3  # a suspect is the cause where it accepts so much more: tokens a round, and draft tokens
_FEW_ROUNDS = 8  # fewer say nothing
_TEXT_COVERED = 0.8  # a draft vocabulary that has fewer of the text's tokens holds the accepted length down


@dataclass(frozen=True)
class Run:
    """One greedy generation: what came out, and how many tokens each round committed."""

    completion: Completion
    committed: tuple[int, ...]

    @property
    def length(self) -> float:
        """Accepted length, tokens a round."""
        return self.completion.accepted_length


def generate(target: Target, drafter: Drafter | None, prompt: Sequence[int], max_tokens: int) -> Run:
    """Greedy generation of one prompt with the fixed schedule.

    Raises:
        ValueError: the prompt does not fit the target, or the drafter does not.
    """
    generator = Generator(target, drafter, schedule="fixed", stream_rounds=1)
    committed: list[int] = []
    request = Request("doctor", tuple(prompt), SamplingParams(max_tokens=max_tokens))
    (done,) = generator.generate([request], lambda name, ids: committed.append(len(ids)))
    if committed:
        committed[0] -= 1  # the token from the prefill belongs to no round
    return Run(done, tuple(committed[-done.rounds :] if done.rounds else ()))


def acceptance_by_position(run: Run, block: int, limit: int) -> list[tuple[int, int]]:
    """For each of the `block` positions: rounds that accepted it, and rounds in which it was reached and verified.

    A round that a stop token ended is left out. `limit`: the run's most tokens.
    """
    reached, accepted = np.zeros(block, int), np.zeros(block, int)
    rounds = run.committed[:-1] if run.completion.finish_reason == "stop" else run.committed
    length = 1
    for kept in rounds:
        room = min(block, limit - length - 1)
        reached[: min(kept, room)] += 1
        accepted[: kept - 1] += 1
        length += kept
    return [(int(a), int(r)) for a, r in zip(accepted, reached, strict=True)]


def trial(
    target: Target,
    drafter: Drafter,
    files: DrafterFiles,
    prompt: Sequence[int],
    max_tokens: int,
    suspects: bool = False,
) -> tuple[list[Finding], dict]:
    """Runs plain and speculative decoding, and looks for causes where little is accepted (or `suspects` asks for it).

    Returns:
        Findings, and the numbers for a report.
    """
    limit = min(max_tokens, target.config.max_positions - len(prompt))
    plain, run = (generate(target, who, prompt, max_tokens) for who in (None, drafter))
    texts = plain.completion.token_ids, run.completion.token_ids
    findings = [_equality(*texts)]
    positions = acceptance_by_position(run, drafter.config.block_size, limit)
    rates = [round(a / r, 4) if r else None for a, r in positions]
    numbers = {
        "tokens": len(texts[1]),
        "rounds": run.completion.rounds,
        "accepted_length": round(run.length, 4),
        "acceptance_by_position": rates,
        "reached_by_position": [r for _, r in positions],
        "text": target.tokenizer.decode(texts[1]),
    }
    told = " ".join(f"{rate:.2f}" if rate is not None else "-" for rate in rates)
    findings.append(Finding("acceptance", OK, f"by position, of the rounds that got there: {told}"))
    length = f"{run.length:.2f} tokens a round over {run.completion.rounds} rounds"
    if run.completion.rounds < _FEW_ROUNDS and run.length < drafter.config.block_size:
        findings.append(
            Finding("accepted length", WARNING, f"{length}: too few to tell; give --max-tokens or --prompt")
        )
    elif run.length >= NEAR_ONE:
        findings.append(Finding("accepted length", OK, f"{length} (1 would be plain decoding)"))
    else:
        findings.append(
            Finding("accepted length", WRONG, f"{length}, plain decoding has 1; right would be 1.5 and more")
        )
    if suspects or findings[-1].status == WRONG:
        findings += diagnose(target, drafter, files, prompt, max_tokens, run)
    return findings, numbers


def _equality(plain: Sequence[int], speculative: Sequence[int]) -> Finding:
    if list(plain) == list(speculative):
        return Finding("same text", OK, f"plain and speculative decoding give the same {len(plain)} tokens")
    pairs = zip(plain, speculative, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(speculative)))
    right = "right would be none (in bfloat16 near ties may flip: try --dtype float32)"
    return Finding("same text", WRONG, f"plain and speculative decoding differ from token {at} on; {right}", at)


def diagnose(
    target: Target, drafter: Drafter, files: DrafterFiles, prompt: Sequence[int], max_tokens: int, run: Run
) -> list[Finding]:
    """Looks for what would explain the low accepted length of `run`; the last finding says so where nothing does."""
    findings = [_untouched(files), *_coverage(drafter, run.completion.token_ids)]
    for name, other, told in _suspects(drafter):
        if any(finding.status == WRONG for finding in findings):
            break  # each suspect costs a run
        length = generate(target, other, prompt, max_tokens).length
        if length >= run.length + _RISE and length - 1 >= _RATIO * (run.length - 1):
            message = f"{told} the accepted length is {length:.2f} in place of {run.length:.2f}: that would be right"
            findings.append(Finding(name, WRONG, message, run.length, length))
        else:
            findings.append(Finding(name, OK, f"{told} the accepted length is {length:.2f}: not the cause"))
    if run.length < NEAR_ONE and not any(finding.status == WRONG for finding in findings):
        causes = "trained too little, for another target (a fine-tune of it too), or on texts unlike this prompt"
        findings.append(Finding("likely cause", WARNING, f"none of those tried; it may have been {causes}"))
    return findings


def _suspects(drafter: Drafter) -> Iterator[tuple[str, Drafter, str]]:
    """The drafter with one thing changed that importers get wrong: a name, the drafter, and what was changed."""
    config = drafter.config
    if isinstance(config, NgramConfig):
        return
    for by in (1, -1) if config.target_layer_ids else ():
        ids = tuple(i + by for i in config.target_layer_ids)
        with suppress(ValueError):  # no such layers
            moved = replace(drafter, config=replace(config, target_layer_ids=ids))
            yield "layer ids off by one", moved, f"with target_layer_ids {list(ids)}"
    if isinstance(config, DrafterConfig):
        predicts = not config.anchor_predicts
        with suppress(ValueError):  # a block of one slot, or a head that has no such form
            size = config.block_slots - (not predicts)
            other = replace(drafter, config=replace(config, anchor_predicts=predicts, block_size=size))
            yield "slot convention", other, f"with an anchor slot that predicts {'a token' if predicts else 'nothing'}"


def _coverage(drafter: Drafter, text: Sequence[int]) -> Iterator[Finding]:
    if "d2t" not in drafter.params:
        return
    offsets = np.asarray(drafter.params["d2t"])
    share = float(np.mean(np.isin(np.asarray(text), offsets + np.arange(len(offsets)))))
    told = f"the draft vocabulary has {share:.0%} of the text's tokens"
    if share >= _TEXT_COVERED:
        yield Finding("vocabulary map", OK, f"{told}: not the cause, unless its order is another one")
        return
    yield Finding(
        "vocabulary map", WRONG, f"{told}; right would be nearly all: another text's, or the wrong map", share
    )


def _untouched(files: DrafterFiles) -> Finding:
    """Norm weights that are all exactly their initial value: nothing was trained."""
    unit = 1.0 - (files.sizes.traits.norm_offset if files.sizes else 0.0)
    norms = [name for name in files.shapes if name.endswith("norm.weight")]
    if norms and all(bool((files.store.read(name) == unit).all()) for name in norms):
        return Finding("training", WRONG, f"all {len(norms)} norm weights are exactly {unit:g}: an untrained drafter")
    return Finding("training", OK, "the norm weights have moved from their initial value")
