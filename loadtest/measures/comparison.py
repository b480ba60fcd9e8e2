"""Two servers' answers to the same requests: ratios of percentiles, and how far chance could have moved them. Pure.

Both were sent the same requests at the same times, so the same requests are drawn into each resample of both (a paired
bootstrap): what a hard prompt or a burst did to both alike does not widen the interval. A ratio is b's over a's, so
below 1 b is the faster one. Called by the command `compare`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.loadtest.measures.bootstrap import (
    Interval,
    draw_counts,
    interval_of,
    num_resamples_for,
    resampled_percentiles,
)
from pdserve.loadtest.measures.distribution import percentile
from pdserve.loadtest.measures.kept import is_kept
from pdserve.loadtest.measures.latencies import values_of
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.record import Record

COMPARED = ("ttft", "second", "tpot", "gap", "max_gap", "e2e")
PERCENTS = (50.0, 90.0, 99.0)

# Of fewer requests beyond a percentile chance picks the few that it rests on, and resampling those shows too narrow an
# interval: 60 requests for p90, 600 for p99, as for goodput (search/answer.py).
_MIN_BEYOND = 6

# Records of one run of each server, of the same requests in the same order.
Pair = tuple[Sequence[Record], Sequence[Record]]


@dataclass(frozen=True, slots=True)
class PercentileRatio:
    """One percentile of one latency, in seconds, over the requests of all pairs.

    ratio     None where a's percentile is 0
    interval  None there, too, and where there are too few requests for one
    """

    latency: str
    percent: float
    a: float
    b: float
    ratio: float | None
    interval: Interval | None

    @property
    def is_shown(self) -> bool:
        """Whether chance alone does not explain the difference."""
        return self.interval is not None and 1.0 not in self.interval


@dataclass(frozen=True, slots=True)
class AttainmentDifference:
    """The shares of requests that kept every promise; difference is b's less a's."""

    a: float
    b: float
    difference: float
    interval: Interval

    @property
    def is_shown(self) -> bool:
        return 0.0 not in self.interval


def compare_latencies(pairs: Sequence[Pair]) -> tuple[PercentileRatio, ...]:
    """Every percentile of every latency that both servers have."""
    ratios: list[PercentileRatio] = []
    for name in COMPARED:
        ratios += _compare(name, pairs)
    return tuple(ratios)


def compare_attainment(pairs: Sequence[Pair], promises: Sequence[Promise]) -> AttainmentDifference:
    """Of at least one request."""
    kept_a, kept_b = (
        np.array([is_kept(record, promises) for pair in pairs for record in pair[side]], dtype=float) for side in (0, 1)
    )
    sizes = [len(records) for records, _ in pairs]
    change = kept_b - kept_a
    resampled = np.concatenate([counts @ change / len(change) for counts in draw_counts(sizes)])
    return AttainmentDifference(
        float(kept_a.mean()), float(kept_b.mean()), float(change.mean()), interval_of(resampled)
    )


def _compare(name: str, pairs: Sequence[Pair]) -> Iterator[PercentileRatio]:
    a, b = _values(name, pairs, 0), _values(name, pairs, 1)
    if not (len(a[0]) and len(b[0])):
        return
    num_requests = sum(len(records) for records, _ in pairs)
    num_resamples = num_resamples_for(len(a[0]) + len(b[0]))
    resampled = np.concatenate(
        [
            _ratios(resampled_percentiles(*b, counts, PERCENTS), resampled_percentiles(*a, counts, PERCENTS))
            for counts in draw_counts([len(records) for records, _ in pairs], num_resamples)
        ]
    )
    for i, percent in enumerate(PERCENTS):
        of_a, of_b = percentile(a[0], percent), percentile(b[0], percent)
        is_enough = of_a > 0 and num_requests * (100 - percent) >= 100 * _MIN_BEYOND
        yield PercentileRatio(
            name,
            percent,
            of_a,
            of_b,
            of_b / of_a if of_a > 0 else None,
            interval_of(resampled[:, i]) if is_enough else None,
        )


def _values(name: str, pairs: Sequence[Pair], side: int) -> tuple[np.ndarray, np.ndarray]:
    """The values of one server's complete requests, and which request of all pairs each is of."""
    values: list[float] = []
    owners: list[int] = []
    owner = 0
    for pair in pairs:
        for record in pair[side]:
            own = list(values_of(name, [record])) if record.is_complete else []
            values += own
            owners += [owner] * len(own)
            owner += 1
    return np.array(values), np.array(owners, dtype=np.int64)


def _ratios(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """NaN where the denominator is 0: tokens that came in one event have gaps of 0."""
    return np.divide(numerators, denominators, out=np.full_like(numerators, np.nan), where=denominators > 0)
