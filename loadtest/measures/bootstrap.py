"""How far a number of a run could be off, had other requests of the same kind been sent. Pure, seeded, vectorised.

Requests are resampled, never gaps: the tokens of one request share its fate. Where several runs (seeds) are pooled,
each is resampled by itself, so that every resample has as many requests of each. Percentile intervals: Efron and
Tibshirani 1993, An Introduction to the Bootstrap, chapter 13. Called by summary.py, the comparison and the search.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
# Numbers held at once: 2,000 resamples of 450 requests fit, those of all their gaps go in several parts.
_MAX_CELLS = 4_000_000
# Above so many values in all resamples together, fewer resamples tell as well how narrow the interval is.
_MAX_DRAWS = 40_000_000
_MIN_RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def wilson(num_kept: int, num_requests: int, confidence: float = CONFIDENCE) -> Interval:
    """The interval of a share, good for small numbers and for shares near 0 and 1, too.

    Wilson 1927, Probable inference, the law of succession, and statistical inference (J. Am. Stat. Assoc. 22);
    recommended over others by Brown, Cai and DasGupta 2001 (Statistical Science 16). num_requests >= 1.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = num_kept / num_requests
    centre = share + z * z / (2 * num_requests)
    spread = z * math.sqrt(share * (1 - share) / num_requests + z * z / (4 * num_requests**2))
    scale = 1 + z * z / num_requests
    # Rounding may leave 0 and 1 by an ulp.
    return Interval(max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale))


def interval_of(resampled: np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """The percentile interval of a statistic over resamples [num_resamples]; resamples without it (NaN) say nothing."""
    share = (1 - confidence) / 2
    known = resampled[~np.isnan(resampled)]
    if not known.size:
        return Interval(-math.inf, math.inf)
    # Observed values rather than interpolated ones: some statistics are infinite.
    low, high = np.quantile(known, (share, 1 - share), method="inverted_cdf")
    return Interval(float(low), float(high))


def num_resamples_for(num_values: int) -> int:
    """As many resamples as can be had in about a second; the rule for all intervals of measures."""
    return min(NUM_RESAMPLES, max(_MIN_RESAMPLES, _MAX_DRAWS // max(1, num_values)))


def draw_counts(sizes: Sequence[int], num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Iterator[np.ndarray]:
    """How often each request is in each resample, in parts [some resamples, sum(sizes)] that fit in memory.

    sizes   requests of each run; a run is resampled by itself
    """
    rng = np.random.default_rng(seed)
    part = max(1, min(num_resamples, _MAX_CELLS // max(1, sum(sizes))))
    for start in range(0, num_resamples, part):
        rows = min(part, num_resamples - start)
        yield np.concatenate([_count_draws(rng, rows, size) for size in sizes], axis=1)


def resampled_percentiles(
    values: np.ndarray, owners: np.ndarray, counts: np.ndarray, percents: Sequence[float]
) -> np.ndarray:
    """Percentiles of values in each resample, [num_resamples, num_percents]; NaN where a resample has no value.

    values   [num_values], several of one request (gaps) or one
    owners   [num_values], the request of each, a column of counts
    counts   [num_resamples, num_requests] of `draw_counts`
    """
    order = np.argsort(values, kind="stable")
    ordered, columns = values[order], owners[order]
    result = np.full((len(counts), len(percents)), np.nan)
    if not len(values):
        return result
    part = max(1, _MAX_CELLS // len(values))
    for start in range(0, len(counts), part):
        ranks = np.cumsum(counts[start : start + part, columns], axis=1, dtype=np.int32)
        totals = ranks[:, -1].astype(np.int64)
        for i, percent in enumerate(percents):
            # rank_of of distribution.py, for all resamples at once.
            needed = np.maximum(1, -(-totals * round(percent * 1000) // 100_000))
            places = (ranks >= needed[:, None]).argmax(axis=1)
            result[start : start + part, i] = np.where(totals > 0, ordered[places], np.nan)
    return result


def percentile_intervals(
    values: Sequence[np.ndarray], percents: Sequence[float], num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> list[Interval]:
    """The interval of each percentile of a measure with one value a request, of one or several runs."""
    pooled = np.concatenate(values)
    owners = np.arange(len(pooled))
    sizes = [len(of_run) for of_run in values]
    resampled = np.concatenate(
        [resampled_percentiles(pooled, owners, counts, percents) for counts in draw_counts(sizes, num_resamples, seed)]
    )
    return [interval_of(resampled[:, i]) for i in range(len(percents))]


def _count_draws(rng: np.random.Generator, rows: int, size: int) -> np.ndarray:
    """Counts of `size` draws with replacement out of `size` requests, [rows, size]."""
    if size == 0:
        return np.zeros((rows, 0), dtype=np.int32)
    drawn = rng.integers(0, size, size=(rows, size)) + np.arange(rows)[:, None] * size
    return np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size).astype(np.int32)
