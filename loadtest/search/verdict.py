"""Which of several servers serves more, at which promise, by how much, and whether that is shown at all. Pure.

Servers are compared by the highest rate at which a share of requests keeps a promise, or all of them. The interval of
the ratio is a paired bootstrap: runs of the same rate and seed sent the same requests, and the same of them count more
for both servers (attainment.py), which leaves out what a hard prompt or a burst does to both alike. Each
resample's ratio is taken at its worst and at its best within the two rates that each answer lies between, so nothing
finer than the grid is ever claimed. "No difference shown" is the verdict when the interval reaches beyond 1
on both sides; where it ends at 1, one server keeps a rate that the other does not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.loadtest.measures.bootstrap import CONFIDENCE, Interval, interval_of
from pdserve.loadtest.search.attainment import Point, cross, points_of, resample_crossings
from pdserve.loadtest.search.runs import Run

# The name of the verdict on all promises at once.
EVERY = "every promise"


@dataclass(frozen=True, slots=True)
class Side:
    """A server and the runs that it served, of which there is at least one that counts."""

    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class PromiseVerdict:
    """The first server's highest rate over the second's.

    rate_a, rate_b  0 where even the lowest rate tried was too high
    ratio           None where either rate is only bounded
    interval        of the ratio, with 0 and infinity where nothing bounds it
    winner          None: no difference shown
    """

    promise: str
    rate_a: float
    rate_b: float
    ratio: float | None
    interval: Interval
    winner: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """promises has EVERY first."""

    name_a: str
    name_b: str
    share: float
    promises: tuple[PromiseVerdict, ...]

    @property
    def winner(self) -> str | None:
        """Whoever serves more while every promise is kept; None where no difference is shown."""
        return self.promises[0].winner


def compare_servers(
    a: Side, b: Side, promises: Sequence[str], share: float = 0.9, confidence: float = CONFIDENCE
) -> Verdict:
    """The verdict on two servers; promises are the names of those that were judged by."""
    points_a, points_b = points_of(a.runs), points_of(b.runs)
    names = (None, *promises)
    verdicts = (_compare_rates(a.name, b.name, points_a, points_b, name, share, confidence) for name in names)
    return Verdict(a.name, b.name, share, tuple(verdicts))


def highest_rate(side: Side, share: float) -> float:
    """The highest rate at which a share keeps every promise, 0 where even the lowest one tried was too high."""
    return cross(points_of(side.runs), share).rate


def _compare_rates(
    name_a: str,
    name_b: str,
    points_a: Sequence[Point],
    points_b: Sequence[Point],
    promise: str | None,
    share: float,
    confidence: float,
) -> PromiseVerdict:
    found_a, found_b = cross(points_a, share, promise), cross(points_b, share, promise)
    above_a, below_a = resample_crossings(points_a, share, promise)
    above_b, below_b = resample_crossings(points_b, share, promise)
    lowest = _ratios(np.append(above_a, found_a.above), np.append(below_b, found_b.below))
    highest = _ratios(np.append(below_a, found_a.below), np.append(above_b, found_b.above))
    # The last is what was measured, which the interval always holds.
    interval = Interval(
        min(float(lowest[-1]), interval_of(lowest[:-1], confidence).low),
        max(float(highest[-1]), interval_of(highest[:-1], confidence).high),
    )
    is_bounded = all(found.above > 0 and math.isfinite(found.below) for found in (found_a, found_b))
    return PromiseVerdict(
        promise=EVERY if promise is None else promise,
        rate_a=found_a.rate,
        rate_b=found_b.rate,
        ratio=found_a.rate / found_b.rate if is_bounded else None,
        interval=interval,
        winner=name_a if interval.low >= 1 else name_b if interval.high <= 1 else None,
    )


def _ratios(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Ratios of rates that may be 0, then the numerator is not, or infinite, then the numerator is finite."""
    with np.errstate(divide="ignore"):
        ratios: np.ndarray = numerators / denominators
    return ratios
