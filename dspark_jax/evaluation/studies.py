"""The studies: which drafters each compares, on which axis, and what the paper reports beside it (section 5).

A variant is a name and what differs from the config of a run, as dotted fields of `TrainSettings`. All else is shared:
data, seed, updates, batch and, where the layers are the same, the cache of hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from dspark_jax.training.settings import TrainSettings

Changes = Mapping[str, Any]
Kind = Literal["drafters", "main", "positions", "threshold", "calibration", "latency", "load"]

ALL = "all"  # stands for all studies
DSPARK, DFLASH, EAGLE3, MTP, NGRAM, PLAIN = "dspark", "dflash", "eagle3", "mtp", "ngram", "plain"
UNTRAINED = (NGRAM, PLAIN)

_CE_ONLY: Changes = {"loss.ce": 1.0, "loss.tv": 0.0, "loss.confidence": 0.0}
_NO_HEAD: Changes = {
    "drafter.markov_kind": "none",
    "drafter.markov_rank": 0,
    "drafter.confidence_with_markov": False,
}
_DFLASH: Changes = {**_NO_HEAD, "drafter.confidence": False, **_CE_ONLY}
_EAGLE3: Changes = {"drafter.kind": "eagle3", **_CE_ONLY, "loss.decay": -1 / math.log(0.8)}  # 0.8^s
_MTP: Changes = {"drafter.kind": "mtp", "drafter.block_size": 1, "drafter.target_layer_ids": (), **_CE_ONLY}


@dataclass(frozen=True)
class Variant:
    """A drafter of a study.

    Attributes:
        name: unique in its study. changes: dotted fields of `TrainSettings`, in place of the config's.
        series, x: where it stands in the figure: its line, and its place on the axis.
    """

    name: str
    changes: Changes = field(default_factory=dict)
    series: str = ""
    x: float | None = None

    @property
    def trained(self) -> bool:
        """Whether there are weights to train."""
        return self.name not in UNTRAINED


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        name, title, question: of the report. kind: which report is made of it.
        variants: in the order of the tables.
        pairs: (one, other): paired differences of the accepted length that are shown. axis: label of x in the figure.
        measures: what is told of each drafter beside accepted lengths: `cost` (seconds of an update, bytes of hidden
            states), `draft` (seconds of a draft), `coverage` (of the draft vocabulary).
        paper: what the paper reports, as Markdown.
    """

    name: str
    title: str
    question: str
    variants: tuple[Variant, ...]
    paper: str
    kind: Kind = "drafters"
    pairs: tuple[tuple[str, str], ...] = ()
    axis: str = ""
    measures: tuple[str, ...] = ()


def changed(settings: TrainSettings, changes: Changes) -> TrainSettings:
    """`settings` with dotted fields in place of its own.

    Raises:
        ValueError: a field that there is not, or a value that cannot be.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        group, _, last = name.rpartition(".")
        place = getattr(settings, group, None) if group else settings
        if not hasattr(place, last):
            raise ValueError(f"{name}: no field of a training run")
        groups.setdefault(group, {})[last] = value
    top = groups.pop("", {})
    nested = {group: replace(getattr(settings, group), **values) for group, values in groups.items()}
    return replace(settings, **top, **nested)


# --- the variants ---

_FIVE = (
    Variant(DSPARK),
    Variant(DFLASH, _DFLASH),
    Variant(EAGLE3, _EAGLE3),
    Variant(MTP, _MTP),
)
_HEADS: dict[str, Changes] = {
    "vanilla": {"drafter.markov_kind": "vanilla"},
    "gated": {"drafter.markov_kind": "gated"},
    "rnn": {"drafter.markov_kind": "rnn"},
    "none": _NO_HEAD,
}
_DEPTHS, _BLOCKS, _VOCABULARIES = (1, 2, 3, 4, 5), (3, 7, 11, 15), (2048, 8192, 16384, 0)
_KINDS: dict[str, Changes] = {DSPARK: {}, DFLASH: _DFLASH}
_LOSSES: dict[str, Changes] = {
    "CE": {"loss.ce": 1.0, "loss.tv": 0.0},
    "TV": {"loss.ce": 0.0, "loss.tv": 1.0},
    "0.1 CE + 0.9 TV": {"loss.ce": 0.1, "loss.tv": 0.9},
    "0.3 CE + 0.9 TV": {"loss.ce": 0.3, "loss.tv": 0.9},
    "CE + TV": {"loss.ce": 1.0, "loss.tv": 1.0},
    "LK, -log acceptance": {"loss.ce": 0.0, "loss.tv": 0.0, "loss.lk": 1.0},
    "LK, KL to TV": {"loss.ce": 0.0, "loss.tv": 0.0, "loss.lk_hybrid": 1.0},
    "0.1 CE + 0.9 LK": {"loss.ce": 0.1, "loss.tv": 0.0, "loss.lk": 0.9},
}
_CACHES: dict[str, Changes] = {
    "bfloat16": {"states": "cache", "cache_kind": "bfloat16"},
    "int8": {"states": "cache", "cache_kind": "int8"},
    "online": {"states": "online"},
}


def _vocabulary_name(size: int) -> str:
    return str(size) if size else "full"


# --- what the paper reports (accepted length, temperature 1, whole blocks verified) ---

_BENCHMARKS = "GSM8K MATH AIME25 MBPP HumanEval LCB MT-Bench Alpaca Arena-Hard"
_ACCEPTED = """\
Qwen3-4B Eagle3 5.14 4.62 3.92 3.69 4.16 3.77 2.39 2.26 2.55
Qwen3-4B DFlash 5.40 4.85 4.15 4.40 4.74 4.18 3.07 2.96 2.83
Qwen3-4B DSpark 6.11 5.70 4.89 5.13 5.38 4.86 3.64 3.54 3.29
Qwen3-8B DSpark 6.17 5.78 5.01 5.16 5.52 5.17 3.72 3.58 3.21
Qwen3-14B DSpark 6.21 5.74 4.94 5.26 5.43 5.02 3.70 3.58 3.13
Gemma4-12B DSpark 6.05 5.78 5.12 5.11 5.64 4.51 3.49 3.35 2.92"""


def _paper_table() -> str:
    heads = ["target", "drafter", *_BENCHMARKS.split()]
    rows = [heads, ["---"] * 2 + ["---:"] * (len(heads) - 2), *(line.split() for line in _ACCEPTED.splitlines())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


_NO_FIGURE = "The paper shows this comparison as a picture; no figures of it are known here."

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study(
            "main",
            "Drafters compared",
            "How many tokens does a round commit, by drafter?",
            (Variant(PLAIN), Variant(NGRAM), *_FIVE[::-1]),
            f"{_paper_table()}\n\nMacro gain of DSpark over Eagle3 30.9, 26.7 and 30.0 %, over DFlash 16.3, 18.4 and "
            "18.3 % (Qwen3-4B, 8B, 14B). MTP-1 and prompt lookup are not in that table.",
            "main",
            ((DSPARK, DFLASH), (DSPARK, EAGLE3), (DSPARK, MTP), (DSPARK, NGRAM)),
        ),
        Study(
            "depth",
            "Depth of the drafter",
            "What do layers of the backbone bring, with and without the sequential head?",
            tuple(
                Variant(f"{kind}, {layers} layers", {**changes, "drafter.num_layers": layers}, kind, layers)
                for kind, changes in _KINDS.items()
                for layers in _DEPTHS
            ),
            "DSpark with 2 layers has longer accepted lengths than DFlash with 5.",
            pairs=(
                ("dspark, 2 layers", "dflash, 5 layers"),
                *((f"dspark, {n} layers", f"dflash, {n} layers") for n in _DEPTHS),
                ("dspark, 5 layers", "dspark, 1 layers"),
                ("dflash, 5 layers", "dflash, 1 layers"),
            ),
            axis="layers of the drafter",
        ),
        Study(
            "head",
            "Sequential heads",
            "Which sequential head is best, with all else the same (loss and confidence head too)?",
            tuple(Variant(head, changes) for head, changes in _HEADS.items()),
            _NO_FIGURE + " The released drafters have a vanilla (Markov) head of rank 256.",
            pairs=(("vanilla", "none"), ("gated", "vanilla"), ("rnn", "vanilla")),
        ),
        Study(
            "block",
            "Block size",
            "What do longer blocks bring, by sequential head? The position weights of the loss stay as they are.",
            tuple(
                Variant(f"{head}, gamma {gamma}", {**_HEADS[head], "drafter.block_size": gamma}, head, gamma)
                for head in ("vanilla", "rnn", "none")
                for gamma in _BLOCKS
            ),
            _NO_FIGURE + " Its proposal lengths 4, 8, 12 and 16 count the anchor: gamma 3, 7, 11 and 15.",
            pairs=tuple(
                (f"{head}, gamma {gamma}", f"none, gamma {gamma}") for head in ("vanilla", "rnn") for gamma in _BLOCKS
            ),
            axis="gamma, draft tokens of a block",
        ),
        Study(
            "positions",
            "Acceptance by position",
            "How often is the draft token at position k accepted, given that all before it were?",
            _FIVE[:3],
            _NO_FIGURE,
            "positions",
        ),
        Study(
            "threshold",
            "Confidence threshold",
            "What share of the verified drafts is accepted, when only those before the first confidence below a "
            "threshold are verified?",
            _FIVE[:1],
            "From whole blocks to the highest threshold the acceptance rises from 45.7 to 95.7 % in chat, 76.9 to 92.5 "
            "% in math and 67.6 to 92.0 % in code.",
            "threshold",
        ),
        Study(
            "calibration",
            "Calibration of the confidences",
            "How true are confidences, before and after sequential temperature scaling (STS)?",
            _FIVE[:1],
            "Calibration error 3 to 8 % before and about 1 % after; AUROC 0.81 to 0.90.",
            "calibration",
        ),
        Study(
            "vocab",
            "Draft vocabulary",
            "What does a reduced draft vocabulary cost in acceptance, and save in drafting?",
            tuple(
                Variant(_vocabulary_name(size), {"drafter.draft_vocab_size": size}, "draft vocabulary", size)
                for size in _VOCABULARIES
            ),
            "Not in the paper, whose drafters have the whole vocabulary.",
            pairs=tuple((_vocabulary_name(size), "full") for size in _VOCABULARIES[:-1]),
            axis="tokens of the draft vocabulary",
            measures=("coverage", "draft"),
        ),
        Study(
            "loss",
            "Loss terms",
            "Which loss trains the best drafter? The confidence term is the same in all of them.",
            tuple(Variant(name, changes) for name, changes in _LOSSES.items()),
            "The paper trains with 0.1 CE + 0.9 TV + 1.0 confidence. The LK terms are those of arXiv 2602.23881, which "
            "reports accepted lengths longer by up to 8 to 10 % than with KL, for other drafters.",
            pairs=tuple((name, "0.1 CE + 0.9 TV") for name in _LOSSES if name != "0.1 CE + 0.9 TV"),
        ),
        Study(
            "cache",
            "Where hidden states come from",
            "What do stored hidden states cost in acceptance, and what do they save?",
            tuple(Variant(name, changes) for name, changes in _CACHES.items()),
            "Not in the paper. DeepSpec's cache has six states of two bytes a channel for each token, for Qwen3-4B "
            "38 TB in all.",
            pairs=(("int8", "bfloat16"), ("online", "bfloat16")),
            measures=("cost",),
        ),
        Study(
            "latency",
            "Round latency of the sequential head",
            "How much longer does a round take with a sequential head than without?",
            tuple(Variant(head, changes) for head, changes in _HEADS.items()),
            "0.2 to 1.3 % of a round at batch size 128.",
            "latency",
        ),
        Study(
            "load",
            "Serving under load",
            "What do schedules bring at each load, and how much do they verify?",
            (_FIVE[0], _FIVE[3]),
            "For DeepSeek-V4-Flash, against MTP-1: 51 % more throughput at 80 tokens/s per user, and 60 to 85 % faster "
            "per user at matched throughput. Verify budgets of 4 to 6 tokens a request at moderate load (gamma 5), "
            "shrinking smoothly with concurrency.",
            "load",
        ),
    )
}


def chosen(names: tuple[str, ...]) -> list[Study]:
    """The studies of these names, in the order of STUDIES; `all` stands for all of them.

    Raises:
        ValueError: no name, or an unknown one.
    """
    unknown = [name for name in names if name not in (*STUDIES, ALL)]
    if unknown or not names:
        wrong = f"study {unknown[0]!r}: unknown" if unknown else "study: none is named"
        raise ValueError(f"{wrong}, must be of {', '.join(STUDIES)}, or {ALL}")
    return [study for study in STUDIES.values() if ALL in names or study.name in names]


def only(study: Study, patterns: tuple[str, ...]) -> Study:
    """A study with those of its variants whose names match a pattern (as of file names), all without patterns.

    Studies whose figures need all of their variants stay whole.

    Raises:
        ValueError: there is none.
    """
    if not patterns or study.kind not in ("drafters", "positions"):
        return study
    variants = tuple(one for one in study.variants if any(fnmatchcase(one.name, pattern) for pattern in patterns))
    if not variants:
        known = "; ".join(one.name for one in study.variants)
        raise ValueError(f"variants {' '.join(patterns)}: match none of study {study.name}, which has {known}")
    left = {one.name for one in variants}
    return replace(study, variants=variants, pairs=tuple(pair for pair in study.pairs if left.issuperset(pair)))
