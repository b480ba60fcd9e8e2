"""The share of requests that keep their promises, over the rate: points, the curve through them, where it crosses.

The true share cannot rise with the rate, but measured ones do, by chance. The curve is the non-increasing one nearest
to the points (isotonic regression, weighted by requests): Robertson, Wright and Dykstra 1988, Order Restricted
Statistical Inference, whose min-max formulas, in theorem 1.4.4, take all resamples at once here. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.loadtest.measures.bootstrap import NUM_RESAMPLES, Interval, interval_of
from pdserve.loadtest.search.runs import Run

# Requests weighted at once, so that a long run's resamples fit in memory.
_ROWS = 1000
# Shares that are equal on paper differ by rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a curve falls below a share, in requests a second.

    rate   between the two rates it is known to lie between, on the straight line over the logarithm of the rate
    above  the highest visited rate at which the curve is not below the share; 0 where there is none
    below  the lowest at which it is; infinite where there is none
    """

    rate: float
    above: float
    below: float


@dataclass(frozen=True, slots=True)
class Point:
    """All runs that count at one rate."""

    rate_per_s: float
    runs: tuple[Run, ...]

    @property
    def num_requests(self) -> int:
        return sum(run.num_requests for run in self.runs)

    @property
    def num_kept(self) -> int:
        return sum(sum(run.kept()) for run in self.runs)

    def attainment(self, promise: str | None = None) -> float:
        """The share of requests that kept one promise, or all of them for None."""
        return sum(sum(run.kept(promise)) for run in self.runs) / self.num_requests


def points_of(runs: Sequence[Run]) -> tuple[Point, ...]:
    """Runs by rate, ascending; those that do not count are left out."""
    counted = [run for run in runs if run.counts]
    rates = sorted({run.rate_per_s for run in counted})
    return tuple(Point(rate, tuple(run for run in counted if run.rate_per_s == rate)) for rate in rates)


def fit_curve(shares: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The non-increasing curve through each row's points.

    shares   [num_rows, num_points], in ascending order of the rate
    weights  [num_points], above 0
    """
    num_points = len(weights)
    total = np.concatenate([[0.0], np.cumsum(weights)])
    kept = np.concatenate([np.zeros((len(shares), 1)), np.cumsum(shares * weights, axis=1)], axis=1)
    curve = np.full(shares.shape, np.inf)
    for first in range(num_points):
        # The highest mean of first..last over all last >= i, for each i from first on.
        means = (kept[:, first + 1 :] - kept[:, [first]]) / (total[first + 1 :] - total[first])
        highest = np.maximum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
        curve[:, first:] = np.minimum(curve[:, first:], highest)
    return curve


def curve_of(points: Sequence[Point]) -> np.ndarray:
    """The curve through points, [num_points]."""
    if not points:
        return np.zeros(0)
    _, weights, shares = _columns(points, None)
    return fit_curve(shares[None, :], weights)[0]


def find_crossings(rates: np.ndarray, curves: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """The rates `above` and `below` of Crossing for each row of curves [num_rows, num_points], each [num_rows]."""
    num_above = (curves >= threshold - _ROUNDING).sum(axis=1)
    return np.concatenate([[0.0], rates])[num_above], np.concatenate([rates, [np.inf]])[num_above]


def cross(points: Sequence[Point], threshold: float, promise: str | None = None) -> Crossing:
    """Where the curve of at least one point crosses the threshold. An end of the curve is the rate where it has no
    crossing: the highest rate where it is never below, 0 where it always is."""
    rates, weights, shares = _columns(points, promise)
    curve = fit_curve(shares[None, :], weights)
    above, below = (float(found[0]) for found in find_crossings(rates, curve, threshold))
    if above == 0 or math.isinf(below):
        return Crossing(above, above, below)
    place = int(np.searchsorted(rates, above))
    high, low = float(curve[0, place]), float(curve[0, place + 1])
    return Crossing(above * (below / above) ** ((high - threshold) / (high - low)), above, below)


def resample_shares(points: Sequence[Point], promise: str | None, num_resamples: int = NUM_RESAMPLES) -> np.ndarray:
    """The points' shares in each resample, [num_resamples, num_points].

    Each request counts with a random weight, exponentially distributed (Rubin 1981, The Bayesian bootstrap, Ann.
    Stat. 9), each run by itself. The weights depend on the rate, the seed and the place in the schedule alone: two
    servers that were sent the same requests have the same ones count more.
    """
    shares = np.empty((num_resamples, len(points)))
    for i, point in enumerate(points):
        kept = np.zeros(num_resamples)
        for run in point.runs:
            kept += run.num_requests * _resample_run(run, promise, num_resamples)
        shares[:, i] = kept / point.num_requests
    return shares


def crossing_interval(points: Sequence[Point], threshold: float) -> Interval:
    """The interval of the rate at which the curve crosses; at least the two rates between which it does.

    0 below and infinity above say that no visited rate bounds it.
    """
    above, below = resample_crossings(points, threshold, None)
    here = cross(points, threshold)
    return Interval(min(here.above, interval_of(above).low), max(here.below, interval_of(below).high))


def resample_crossings(
    points: Sequence[Point], threshold: float, promise: str | None, num_resamples: int = NUM_RESAMPLES
) -> tuple[np.ndarray, np.ndarray]:
    """The rates `above` and `below` of Crossing in each resample, each [num_resamples]."""
    rates, weights, _ = _columns(points, promise)
    curves = fit_curve(resample_shares(points, promise, num_resamples), weights)
    return find_crossings(rates, curves, threshold)


def _columns(points: Sequence[Point], promise: str | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rates, numbers of requests and shares, each [num_points]."""
    rates = np.array([point.rate_per_s for point in points])
    weights = np.array([float(point.num_requests) for point in points])
    shares = np.array([point.attainment(promise) for point in points])
    return rates, weights, shares


def _resample_run(run: Run, promise: str | None, num_resamples: int) -> np.ndarray:
    """The share kept of one run in each resample, [num_resamples]."""
    rng = np.random.default_rng([run.seed, *run.rate_per_s.as_integer_ratio()])
    kept = np.array(run.kept(promise), dtype=np.float32)
    weight, weight_kept = np.zeros(num_resamples), np.zeros(num_resamples)
    # A request a row: the first requests' weights are the same however many follow.
    for start in range(0, len(kept), _ROWS):
        part = kept[start : start + _ROWS]
        weights = rng.standard_exponential((len(part), num_resamples), dtype=np.float32)
        weight += weights.sum(axis=0)
        weight_kept += part @ weights
    # Single precision may leave a run that kept all just below 1.
    return np.round(weight_kept / weight, 6)
