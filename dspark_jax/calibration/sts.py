"""Sequential temperature scaling (section 3): one temperature per block position, left to right.

For k = 1..K a grid search finds the T_k > 0 for which the cumulative product sigmoid(z_1/T_1) ... sigmoid(z_k/T_k),
with the earlier temperatures held, has the least calibration error against "the first k drafts were accepted". Within a
position the order of requests stays as it was.

A temperature leaves sigmoid(0) = 1/2 where it is, so a head whose confidences are all too high stays wrong. The variant
with biases, sigmoid(z_k/T_k + b_k), can shift them and keeps the order too. It is searched in the same way, but for the
least log loss: a constant at the mean rate has no calibration error either, and a large T with a bias is nearly that. A
proper score is least where the probabilities are true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from dspark_jax.calibration.metrics import BINS, asked, ece, log_loss

_TINY = 1e-7  # confidences are kept this far from 0 and 1: float32 has no more digits there
_SAME = 1e-12  # errors that differ by less are equal


@dataclass(frozen=True)
class STSSettings:
    """How temperatures are searched.

    Attributes:
        low, high: smallest and largest temperature. points: of the first, log-spaced grid; 1 is always tried too.
        bias: largest bias, either way. pair_points: of the grid along each axis, where temperature and bias are
            searched together; (1, 0) is always tried too.
        refinements: grids of the same size between the best point's neighbours that follow.
        bins: equal-width bins of the calibration error.
        minimum: rounds with an accepted prefix of k - 1 tokens that position k needs, at least `minimum_each` of them
            with and without token k accepted. With fewer the position takes what the one before has (the first: 1, 0).

    Raises:
        ValueError: temperatures that do not lie around 1, a bias that is not positive, or counts below their least.
    """

    low: float = 0.2
    high: float = 5.0
    points: int = 65
    bias: float = 3.0
    pair_points: int = 25
    refinements: int = 2
    bins: int = BINS
    minimum: int = 50
    minimum_each: int = 5

    def __post_init__(self) -> None:
        if not 0 < self.low < 1 < self.high < float("inf"):
            raise ValueError(f"low {self.low}, high {self.high}: temperatures must lie around 1, 0 < low < 1 < high")
        if not 0 < self.bias < float("inf"):
            raise ValueError(f"bias {self.bias}: must be positive and finite")
        least_of = {"points": 3, "pair_points": 3, "refinements": 0, "bins": 1, "minimum": 1, "minimum_each": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {least}")


@dataclass(frozen=True)
class STSFit:
    """The outcome of a fit.

    Attributes:
        temperatures: T_1..T_K. counts: rounds with an accepted prefix that told about each position. fitted: whether
            they were enough; where not, temperature and bias are those before.
        biases: b_1..b_K; empty where none were fitted.
    """

    temperatures: tuple[float, ...]
    counts: tuple[int, ...]
    fitted: tuple[bool, ...]
    biases: tuple[float, ...] = ()


def logits(confidence: np.ndarray) -> np.ndarray:
    """z = log(c / (1 - c)), float64, of confidences of any shape; 0 and 1 count as 1e-7 from there."""
    c = np.clip(np.asarray(confidence, np.float64), _TINY, 1 - _TINY)
    return np.log(c) - np.log1p(-c)


def scaled(confidence: np.ndarray, temperatures: Sequence[float], biases: Sequence[float] = ()) -> np.ndarray:
    """sigmoid(logit(c_k) / T_k + b_k), float64 `[n, K]`, of confidences `[n, K]`; without `biases` they are 0.

    Raises:
        ValueError: not K temperatures, or one that is not positive; not K biases and not none.
    """
    t, b = np.asarray(temperatures, np.float64), np.asarray(biases, np.float64)
    shape = np.shape(confidence)[1:]
    if t.shape != shape or not (t > 0).all():
        raise ValueError(f"temperatures {t.tolist()}: must be {shape[0]} positive numbers")
    if b.size and b.shape != shape:
        raise ValueError(f"biases {b.tolist()}: must be {shape[0]} numbers or none")
    return _sigmoid(logits(confidence) / t + (b if b.size else 0.0))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


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
    return _fit(confidence, accepted, verified, settings or STSSettings(), biases=False)


def fit_with_biases(
    confidence: np.ndarray, accepted: np.ndarray, verified: np.ndarray, settings: STSSettings | None = None
) -> STSFit:
    """Fits T_1..T_K and b_1..b_K, both of a position at once; arguments and errors as `fit_temperatures`'."""
    return _fit(confidence, accepted, verified, settings or STSSettings(), biases=True)


def _fit(
    confidence: np.ndarray, accepted: np.ndarray, verified: np.ndarray, settings: STSSettings, biases: bool
) -> STSFit:
    z, accepted, verified = logits(confidence), np.asarray(accepted), np.asarray(verified)
    if z.ndim != 2 or accepted.shape != z.shape[:1] or verified.shape != z.shape[:1]:
        raise ValueError(
            f"confidence {z.shape}, accepted {accepted.shape}, verified {verified.shape}: must be [n, K], [n] and [n]"
        )
    search = _search_pair if biases else _search_temperature
    before = np.ones(len(z))  # a_{k-1} of each round
    last = (1.0, 0.0)  # T, b
    found, counts, fitted = [], [], []
    for k in range(1, z.shape[1] + 1):
        told = accepted[asked(accepted, verified, k, "conditional")] >= k
        each = min(int(told.sum()), int((~told).sum()))
        enough = len(told) >= settings.minimum and each >= settings.minimum_each
        if enough:
            rows = asked(accepted, verified, k)
            last = search(z[rows, k - 1], before[rows], accepted[rows] >= k, settings)
        found.append(last)
        counts.append(len(told))
        fitted.append(enough)
        before = before * _sigmoid(z[:, k - 1] / last[0] + last[1])
    temperatures, fitted_biases = zip(*found, strict=True)
    return STSFit(temperatures, tuple(counts), tuple(fitted), fitted_biases if biases else ())


def _search_temperature(
    z: np.ndarray, before: np.ndarray, outcome: np.ndarray, settings: STSSettings
) -> tuple[float, float]:
    """The T with the least calibration error of `before * sigmoid(z / T)` against `outcome`, and 0."""

    def error(log_t: float) -> float:
        return ece(before * _sigmoid(z / np.exp(log_t)), outcome, settings.bins)

    (log_t,) = _least(error, [_temperature_range(settings)], settings.points, settings.refinements)
    return float(np.exp(log_t)), 0.0


def _search_pair(z: np.ndarray, before: np.ndarray, outcome: np.ndarray, settings: STSSettings) -> tuple[float, float]:
    """The (T, b) with the least log loss of `before * sigmoid(z / T + b)` against `outcome`."""

    def error(log_t: float, b: float) -> float:
        return log_loss(before * _sigmoid(z / np.exp(log_t) + b), outcome)

    ranges = [_temperature_range(settings), (-settings.bias, settings.bias)]
    log_t, b = _least(error, ranges, settings.pair_points, settings.refinements)
    return float(np.exp(log_t)), b


def _temperature_range(settings: STSSettings) -> tuple[float, float]:
    """Of log T."""
    return float(np.log(settings.low)), float(np.log(settings.high))


def _least(
    error: Callable[..., float], ranges: list[tuple[float, float]], points: int, refinements: int
) -> tuple[float, ...]:
    """Where `error` is least, on a grid over `ranges` and its refinements; of equals the nearest to 0, also tried."""
    best = (0.0,) * len(ranges)
    least = error(*best)
    for _ in range(refinements + 1):
        axes = [np.linspace(low, high, points) for low, high in ranges]
        for place in sorted(product(*axes), key=lambda place: float(np.hypot.reduce(place))):
            now = error(*place)
            if now < least - _SAME:
                best, least = place, now
        steps = [axis[1] - axis[0] for axis in axes]
        ranges = [
            (max(middle - step, low), min(middle + step, high))
            for middle, step, (low, high) in zip(best, steps, ranges, strict=True)
        ]
    return tuple(float(value) for value in best)
