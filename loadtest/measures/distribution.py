"""Percentiles that are exact: every one is a value that was observed. Pure; called by summary.py and the reports.

A percentile is numpy's "inverted_cdf", the smallest value that at least the given share of values does not exceed
(Hyndman and Fan 1996, definition 1), so "p90 <= limit" says exactly that 90 % kept the limit. Nothing is binned,
sketched or interpolated.
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


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """The smallest observed value that at least `percent` % of the values do not exceed; values is not empty."""
    return float(np.percentile(values, percent, method="inverted_cdf"))


def describe(values: Iterable[float]) -> Distribution | None:
    """The distribution of values, None for no values."""
    observed = np.fromiter(values, dtype=np.float64)
    if not observed.size:
        return None
    p50, p90, p99, p99_9 = np.percentile(observed, (50, 90, 99, 99.9), method="inverted_cdf")
    return Distribution(
        count=int(observed.size),
        mean=float(observed.mean()),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        p99_9=float(p99_9),
        max=float(observed.max()),
    )
