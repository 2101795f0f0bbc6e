"""Sequential temperature scaling (section 3): one temperature per block position, left to right.

For k = 1..K a grid search finds the T_k > 0 for which the cumulative product sigmoid(z_1/T_1) ... sigmoid(z_k/T_k),
with the earlier temperatures held, has the least calibration error against "the first k drafts were accepted". Within a
position the order of requests stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark_jax.calibration.metrics import BINS, asked, ece

_TINY = 1e-7  # confidences are kept this far from 0 and 1: float32 has no more digits there
_SAME = 1e-12  # errors that differ by less are equal


@dataclass(frozen=True)
class STSSettings:
    """How temperatures are searched.

    Attributes:
        low, high: smallest and largest temperature. points: of the first, log-spaced grid; 1 is always tried too.
        refinements: grids of the same size between the best point's neighbours that follow.
        bins: equal-width bins of the calibration error.
        minimum: rounds with an accepted prefix of k - 1 tokens that position k needs, at least `minimum_each` of them
            with and without token k accepted. With fewer the position takes the temperature before it (the first: 1).

    Raises:
        ValueError: a range that does not hold 1, or counts below their least.
    """

    low: float = 0.2
    high: float = 5.0
    points: int = 65
    refinements: int = 2
    bins: int = BINS
    minimum: int = 50
    minimum_each: int = 5

    def __post_init__(self) -> None:
        if not 0 < self.low < 1 < self.high < float("inf"):
            raise ValueError(f"low {self.low}, high {self.high}: temperatures must lie around 1, 0 < low < 1 < high")
        for name, least in (("points", 3), ("refinements", 0), ("bins", 1), ("minimum", 1), ("minimum_each", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {least}")


@dataclass(frozen=True)
class STSFit:
    """The outcome of a fit.

    Attributes:
        temperatures: T_1..T_K. counts: rounds with an accepted prefix that told about each position. fitted: whether
            they were enough; where not, the temperature is the one before.
    """

    temperatures: tuple[float, ...]
    counts: tuple[int, ...]
    fitted: tuple[bool, ...]


def logits(confidence: np.ndarray) -> np.ndarray:
    """z = log(c / (1 - c)), float64, of confidences of any shape; 0 and 1 count as 1e-7 from there."""
    c = np.clip(np.asarray(confidence, np.float64), _TINY, 1 - _TINY)
    return np.log(c) - np.log1p(-c)


def scaled(confidence: np.ndarray, temperatures: tuple[float, ...] | np.ndarray) -> np.ndarray:
    """sigmoid(logit(c_k) / T_k), float64 `[n, K]`, of confidences `[n, K]`.

    Raises:
        ValueError: not K temperatures, or one that is not positive.
    """
    t = np.asarray(temperatures, np.float64)
    if t.shape != np.shape(confidence)[1:] or not (t > 0).all():
        raise ValueError(f"temperatures {t.tolist()}: must be {np.shape(confidence)[1]} positive numbers")
    return 1 / (1 + np.exp(-logits(confidence) / t))


def fit_temperatures(
    confidence: np.ndarray, accepted: np.ndarray, verified: np.ndarray, settings: STSSettings | None = None
) -> STSFit:
    """Fits T_1..T_K.

    Args:
        confidence: `[n, K]`, sigmoid of the confidence head's own logits. accepted, verified: `[n]`, draft tokens of
            each round; rounds that verified fewer than k tokens say nothing about position k.

    Raises:
        ValueError: arrays of other shapes.
    """
    settings = settings or STSSettings()
    z, accepted, verified = logits(confidence), np.asarray(accepted), np.asarray(verified)
    if z.ndim != 2 or accepted.shape != z.shape[:1] or verified.shape != z.shape[:1]:
        raise ValueError(
            f"confidence {z.shape}, accepted {accepted.shape}, verified {verified.shape}: must be [n, K], [n] and [n]"
        )
    before = np.ones(len(z))  # a_{k-1} of each round
    last = 1.0
    temperatures, counts, fitted = [], [], []
    for k in range(1, z.shape[1] + 1):
        told = accepted[asked(accepted, verified, k, "conditional")] >= k
        each = min(int(told.sum()), int((~told).sum()))
        enough = len(told) >= settings.minimum and each >= settings.minimum_each
        if enough:
            rows = asked(accepted, verified, k)
            last = _search(z[rows, k - 1], before[rows], accepted[rows] >= k, settings)
        temperatures.append(last)
        counts.append(len(told))
        fitted.append(enough)
        before = before / (1 + np.exp(-z[:, k - 1] / last))
    return STSFit(tuple(temperatures), tuple(counts), tuple(fitted))


def _search(z: np.ndarray, before: np.ndarray, outcome: np.ndarray, settings: STSSettings) -> float:
    """The temperature with the least error of `before * sigmoid(z / T)` against `outcome`; of equals, nearest to 1."""

    def error(log_t: float) -> float:
        return ece(before / (1 + np.exp(-z / np.exp(log_t))), outcome, settings.bins)

    best, least = 0.0, error(0.0)  # log T
    low, high = np.log(settings.low), np.log(settings.high)
    for _ in range(settings.refinements + 1):
        grid = np.linspace(low, high, settings.points)
        for point in sorted(grid, key=abs):
            now = error(point)
            if now < least - _SAME:
                best, least = point, now
        step = grid[1] - grid[0]
        low, high = max(best - step, low), min(best + step, high)
    return float(np.exp(best))
