"""How true probabilities are: calibration error, AUROC, Brier score, log loss and reliability bins, in plain numpy.

Two readings of a drafter's confidences c_1..c_K (section 3): the conditional c_k, asked of rounds whose first k - 1
draft tokens were accepted, and the cumulative a_k = c_1 ... c_k, asked of every round. The scheduler ranks by a_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Binning = Literal["width", "mass"]
Reading = Literal["cumulative", "conditional"]
BINS = 15
_TINY = 1e-7  # log-likelihoods stay finite


class Bins(NamedTuple):
    """A reliability diagram: for each of b bins how many samples, their mean probability and the share of outcomes.

    `counts` int64 `[b]`; `probability` and `rate` float64 `[b]`, NaN in empty bins.
    """

    counts: np.ndarray
    probability: np.ndarray
    rate: np.ndarray


@dataclass(frozen=True)
class PositionMetrics:
    """What the probabilities of one block position are worth.

    Attributes:
        position: k, from 1. count: rounds asked. base_rate: share of them that were accepted. mean: mean probability.
        ece: equal-width bins. ece_mass: bins of equal numbers of rounds. floor: the `ece` that true probabilities would
            show at this number of rounds (`ece_floor`). auroc: NaN where only one outcome occurs. brier: mean squared
            error. Without rounds everything but `count` is NaN.
    """

    position: int
    count: int
    base_rate: float
    mean: float
    ece: float
    ece_mass: float
    floor: float
    auroc: float
    brier: float


def _checked(probability: np.ndarray, outcome: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 `[n]`.

    Raises:
        ValueError: other shapes, probabilities outside [0, 1], or outcomes that are not 0 or 1.
    """
    p, y = np.asarray(probability, np.float64), np.asarray(outcome, np.float64)
    if p.ndim != 1 or p.shape != y.shape:
        raise ValueError(f"probability {p.shape} and outcome {y.shape}: must be two arrays of one shape [n]")
    inside = (p >= 0) & (p <= 1)
    if not inside.all():
        raise ValueError(f"probability {p[~inside][0]}: must lie in [0, 1]")
    known = (y == 0) | (y == 1)
    if not known.all():
        raise ValueError(f"outcome {y[~known][0]}: must be 0 or 1")
    return p, y


def bin_numbers(probability: np.ndarray, bins: int = BINS, kind: Binning = "width") -> np.ndarray:
    """The bin, int64 in 0..bins-1, of each of `probability [n]`.

    `width` cuts [0, 1] into equal parts, a value on a border belongs above it; `mass` cuts at quantiles, so that equal
    probabilities share a bin and bins hold about equally many.

    Raises:
        ValueError: fewer than one bin, or an unknown kind.
    """
    if bins < 1:
        raise ValueError(f"bins {bins}: must be at least 1")
    p = np.asarray(probability, np.float64)
    if kind == "width":
        return np.minimum((p * bins).astype(np.int64), bins - 1)
    if kind != "mass":
        raise ValueError(f"binning {kind!r}: must be width or mass")
    if not p.size:
        return np.zeros(0, np.int64)
    borders = np.quantile(p, np.arange(1, bins) / bins, method="inverted_cdf")
    return np.searchsorted(borders, p, side="left")  # a border is the last value of its bin


def reliability(probability: np.ndarray, outcome: np.ndarray, bins: int = BINS, kind: Binning = "width") -> Bins:
    """Counts, mean probabilities and rates by bin, of `probability [n]` and `outcome [n]` (bool or 0/1).

    Raises:
        ValueError: arrays that do not fit (`_checked`), or a wrong binning.
    """
    p, y = _checked(probability, outcome)
    number = bin_numbers(p, bins, kind)
    counts = np.bincount(number, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(number, p, bins) / counts
        rate = np.bincount(number, y, bins) / counts
    return Bins(counts, mean, rate)


def ece(probability: np.ndarray, outcome: np.ndarray, bins: int = BINS, kind: Binning = "width") -> float:
    """Expected calibration error: |mean probability - rate| of each bin, weighted by its share. NaN without samples.

    Raises:
        ValueError: as `reliability`.
    """
    p, y = _checked(probability, outcome)
    if not p.size:
        return float("nan")
    return float(np.abs(np.bincount(bin_numbers(p, bins, kind), p - y, bins)).sum() / p.size)


def ece_floor(probability: np.ndarray, bins: int = BINS, kind: Binning = "width") -> float:
    """The `ece` to expect of n draws whose true probabilities are exactly these: what is left is chance.

    The sum of p - y over a bin has mean 0 and variance sum p (1 - p); its mean size is that of a normal variable. (Bins
    with a variance far below 1, where a normal is wrong, are bounded by the mean size 2 p (1 - p) of each term.)
    """
    p = np.asarray(probability, np.float64)
    if not p.size:
        return float("nan")
    variance = np.bincount(bin_numbers(p, bins, kind), p * (1 - p), bins)
    return float(np.minimum(np.sqrt(2 / np.pi * variance), 2 * variance).sum() / p.size)


def brier(probability: np.ndarray, outcome: np.ndarray) -> float:
    """Mean squared difference between probability and outcome; NaN without samples.

    Raises:
        ValueError: as `reliability`.
    """
    p, y = _checked(probability, outcome)
    return float(np.mean((p - y) ** 2)) if p.size else float("nan")


def log_loss(probability: np.ndarray, outcome: np.ndarray) -> float:
    """Mean negative log-likelihood, in nats, of probabilities kept 1e-7 from 0 and 1; NaN without samples.

    Raises:
        ValueError: as `reliability`.
    """
    p, y = _checked(probability, outcome)
    if not p.size:
        return float("nan")
    of_what_came = np.clip(np.where(y == 1, p, 1 - p), _TINY, 1 - _TINY)
    return float(-np.mean(np.log(of_what_came)))


def auroc(score: np.ndarray, outcome: np.ndarray) -> float:
    """Chance that a positive has a higher score than a negative, ties counting half; NaN without one of either.

    Args:
        score: `[n]`, any real numbers. outcome: `[n]`, bool or 0/1.
    """
    s, y = np.asarray(score, np.float64), np.asarray(outcome).astype(bool)
    positives, negatives = int(y.sum()), int((~y).sum())
    if not positives or not negatives:
        return float("nan")
    _, where, count = np.unique(s, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # mean rank, from 1, of each distinct score
    wins = rank[where][y].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def survival(confidence: np.ndarray) -> np.ndarray:
    """a_k = c_1 ... c_k, float64 `[n, K]`, of conditional confidences `[n, K]`."""
    return np.cumprod(np.asarray(confidence, np.float64), axis=1)


def asked(accepted: np.ndarray, verified: np.ndarray, position: int, reading: Reading = "cumulative") -> np.ndarray:
    """Which rounds tell about position k (from 1), bool `[n]`.

    Those that verified it: how many tokens a round verifies depends on the room that is left, never on its outcome, so
    leaving out the others does not bend the rates. For the conditional reading, only those whose prefix was accepted.

    Args:
        accepted, verified: `[n]`, draft tokens of each round.
    """
    known = np.asarray(verified) >= position
    return known & (np.asarray(accepted) >= position - 1) if reading == "conditional" else known


def position_metrics(
    confidence: np.ndarray,
    accepted: np.ndarray,
    verified: np.ndarray,
    reading: Reading = "cumulative",
    bins: int = BINS,
) -> list[PositionMetrics]:
    """Metrics of each block position.

    Args:
        confidence: conditional survival probabilities `[n, K]`. accepted, verified: `[n]`, draft tokens of each round.
        reading: `cumulative` asks a_k whether the first k tokens were accepted; `conditional` asks c_k the same of the
            rounds that accepted k - 1.

    Raises:
        ValueError: as `reliability`.
    """
    values = survival(confidence) if reading == "cumulative" else np.asarray(confidence, np.float64)
    found = []
    for k in range(1, values.shape[1] + 1):
        rows = asked(accepted, verified, k, reading)
        p, y = values[rows, k - 1], np.asarray(accepted)[rows] >= k
        nothing = float("nan")
        found.append(
            PositionMetrics(
                position=k,
                count=len(p),
                base_rate=float(y.mean()) if len(y) else nothing,
                mean=float(p.mean()) if len(p) else nothing,
                ece=ece(p, y, bins),
                ece_mass=ece(p, y, bins, "mass"),
                floor=ece_floor(p, bins),
                auroc=auroc(p, y),
                brier=brier(p, y),
            )
        )
    return found


def mean_ece(metrics: list[PositionMetrics]) -> float:
    """`ece` averaged over the positions that were asked of any round; NaN where there are none."""
    values = [m.ece for m in metrics if m.count]
    return float(np.mean(values)) if values else float("nan")
