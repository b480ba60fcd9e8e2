"""Percentiles that are exact: every one is a value that was observed. Pure; called by summary.py and the reports.

A percentile is the smallest value that at least the given share of values does not exceed (Hyndman and Fan 1996,
definition 1), so "p90 <= limit" says exactly that 90 % kept the limit. Nothing is binned, sketched or interpolated.
numpy's "inverted_cdf" means the same, but its rounding takes the 1,999th of 2,000 values for p99.9.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a measure over requests (or over gaps), in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    p99_9: float
    max: float


def rank_of(percent: float, count: int) -> int:
    """Which of `count` values in ascending order is the percentile, from 1; percents to the thousandth, exactly."""
    return max(1, -(-count * round(percent * 1000) // 100_000))


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """The smallest observed value that at least `percent` % of the values do not exceed; values is not empty."""
    return float(np.sort(values)[rank_of(percent, len(values)) - 1])


def describe(values: Iterable[float]) -> Distribution | None:
    """The distribution of values, None for no values."""
    observed = np.sort(np.fromiter(values, dtype=np.float64))
    count = len(observed)
    if not count:
        return None
    p50, p90, p99, p99_9 = (float(observed[rank_of(percent, count) - 1]) for percent in (50, 90, 99, 99.9))
    return Distribution(count, float(observed.mean()), p50, p90, p99, p99_9, float(observed[-1]))
