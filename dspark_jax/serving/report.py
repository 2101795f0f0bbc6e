"""Numbers of a run: totals, accepted length with a bootstrap interval over prompts, and speculative against plain.

Seconds are wall time; tokens are generated tokens, stop token included.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any, overload

import numpy as np

from dspark_jax.serving.settings import ServeSettings

Record = Mapping[str, Any]
_COUNTS = ("prompt_tokens", "completion_tokens", "rounds", "drafted", "verified", "accepted")
_LISTED = 10_000  # prompts that a report lists at most
_RESAMPLED = 10_000  # prompts, or groups of prompts, that are resampled at most
_PROMPT_FIELDS = ("id", "finish_reason", "prompt_tokens", "completion_tokens", "rounds", "accepted_length", "seconds")
_RESAMPLES = 2000


class Ledger(Sequence[dict[str, Any]]):
    """The numbers of output lines, without texts and tokens: some 150 bytes a line, however many there are."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._reasons: list[str] = []
        kinds = dict.fromkeys(_COUNTS, "q") | dict.fromkeys(("accepted_length", "seconds"), "d")
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in kinds.items()}

    def append(self, record: Record) -> None:
        """Takes the numbers of an output line."""
        self._ids.append(record["id"])
        self._reasons.append(sys.intern(record["finish_reason"]))
        for name, column in self._columns.items():
            column.append(record[name])

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        words = {"id": self._ids[index], "finish_reason": self._reasons[index]}
        return words | {name: column[index] for name, column in self._columns.items()}


def rate(tokens: float, seconds: float) -> float:
    """Tokens per second; 0 where no time passed."""
    return tokens / seconds if seconds > 0 else 0.0


def ratio(one: float, other: float) -> float:
    """`one / other` to four places; 0 where the other is 0."""
    return round(one / other, 4) if other else 0.0


def accepted_length(records: Sequence[Record]) -> float:
    """Committed tokens per round over all prompts together; the token from the prefill belongs to no round."""
    rounds = sum(record["rounds"] for record in records)
    committed = sum(max(record["completion_tokens"] - 1, 0) for record in records if record["rounds"])
    return committed / rounds if rounds else 0.0


def accepted_length_interval(records: Sequence[Record], seed: int = 0) -> list[float] | None:
    """95 % interval of `accepted_length` by resampling prompts; None with fewer than two prompts that have rounds."""
    kept = [record for record in records if record["rounds"]]
    if len(kept) < 2:
        return None
    group = np.arange(len(kept)) % _RESAMPLED  # of very many prompts, groups are drawn
    rounds = np.bincount(group, [record["rounds"] for record in kept])
    committed = np.bincount(group, [record["completion_tokens"] - 1 for record in kept])
    draws = np.random.default_rng(seed)
    ratios = []
    for _ in range(_RESAMPLES):
        pick = draws.integers(0, len(rounds), len(rounds))
        ratios.append(committed[pick].sum() / rounds[pick].sum())
    return [round(float(x), 4) for x in np.quantile(ratios, (0.025, 0.975))]


def totals(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    """Sums over the prompts of a run that took `seconds`."""
    sums: dict[str, Any] = {name: sum(record[name] for record in records) for name in _COUNTS}
    return {
        "prompts": len(records),
        **sums,
        "seconds": round(seconds, 6),
        "tokens_per_second": round(rate(sums["completion_tokens"], seconds), 3),
        "accepted_length": round(accepted_length(records), 4),
        "accepted_length_ci95": accepted_length_interval(records),
    }


def compare(
    records: Sequence[Record],
    seconds: float,
    plain: Sequence[Record],
    plain_seconds: float,
    greedy: Collection[str],
) -> dict[str, Any]:
    """Speculative `records` against `plain` ones of the same ids.

    Speed-ups are ratios of tokens per second, above 1 where speculation is faster. Texts are compared where they must
    be equal: for the ids in `greedy`; elsewhere `equal` is None, and so is `equal_texts` where nothing is greedy.
    """
    plain_by_id = {record["id"]: record for record in plain}
    prompts = []
    for record in records:
        other = plain_by_id[record["id"]]
        mine, theirs = (rate(r["completion_tokens"], r["seconds"]) for r in (record, other))
        equal = record["token_ids"] == other["token_ids"] if record["id"] in greedy else None
        prompts.append(
            {"id": record["id"], "speedup": ratio(mine, theirs), "plain_seconds": other["seconds"], "equal": equal}
        )
    mine, theirs = (
        rate(sum(record["completion_tokens"] for record in group), taken)
        for group, taken in ((records, seconds), (plain, plain_seconds))
    )
    checked = [prompt for prompt in prompts if prompt["equal"] is not None]
    return {
        "speedup": ratio(mine, theirs),
        "equal_texts": all(prompt["equal"] for prompt in checked) if checked else None,
        "different": [prompt["id"] for prompt in checked if not prompt["equal"]],
        "plain": totals(plain, plain_seconds),
        "prompts": prompts,
    }


def make_report(
    settings: ServeSettings,
    dtype: str,
    records: Sequence[Record],
    seconds: float,
    *,
    comparison: Mapping[str, Any] | None = None,
    skipped: int = 0,
) -> dict[str, Any]:
    """The object that `--json` writes. It lists the first 10,000 prompts; its totals are of all.

    Args:
        dtype: the one in use. seconds: of the whole run; with a comparison no compilation is in it.
        skipped: prompts that an earlier run had answered; they are in no total.
    """
    import jax

    device = jax.devices()[0]
    return {
        "settings": {**settings.as_json(), "dtype": dtype},
        "device": {"platform": device.platform, "kind": device.device_kind, "jax": jax.__version__},
        "skipped": skipped,
        "compilation_timed": comparison is None,
        "totals": totals(records, seconds),
        "prompts": [{name: record[name] for name in _PROMPT_FIELDS} for record in records[:_LISTED]],
        "comparison": comparison,
    }


def statistics_line(summary: Mapping[str, Any]) -> str:
    """One line about a report, for the terminal."""
    total = summary["totals"]
    interval = total["accepted_length_ci95"]
    spread = f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    line = (
        f"{total['prompts']} prompt{'s' if total['prompts'] != 1 else ''}, {total['completion_tokens']} tokens in "
        f"{total['seconds']:.2f} s, {total['tokens_per_second']:.1f} tokens/s"
        f"{', compilation included' if summary['compilation_timed'] else ''}; accepted length "
        f"{total['accepted_length']:.2f}{spread} over {total['rounds']} rounds"
    )
    found = summary["comparison"]
    if found is None:
        return line
    same = {
        True: "texts equal to plain decoding",
        False: f"texts differ from plain decoding for {', '.join(found['different'][:5])}",
        None: "texts sampled, not compared",
    }[found["equal_texts"]]
    return f"{line}; plain {found['plain']['tokens_per_second']:.1f} tokens/s, speed-up {found['speedup']:.2f}; {same}"
