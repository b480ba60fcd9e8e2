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
from pdserve.loadtest.search.attainment import Point, cross, points_of, resample_crossings, resample_shares
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
class SharedPoint:
    """Both servers at a rate that both were measured at; difference is a's attainment less b's."""

    promise: str
    rate_per_s: float
    attainment_a: float
    attainment_b: float
    difference: Interval
    winner: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """promises has EVERY first; shared is by promise, then by rate."""

    name_a: str
    name_b: str
    share: float
    promises: tuple[PromiseVerdict, ...]
    shared: tuple[SharedPoint, ...]

    @property
    def winner(self) -> str | None:
        """Whoever serves more while every promise is kept; None where no difference is shown."""
        return self.promises[0].winner


@dataclass(frozen=True, slots=True)
class Ranking:
    """The server with the highest rate, and how it compares with each other one."""

    best: str
    verdicts: tuple[Verdict, ...]

    @property
    def is_shown(self) -> bool:
        """Whether the best is shown to be better than every other."""
        return all(verdict.winner == self.best for verdict in self.verdicts)


def compare_servers(
    a: Side, b: Side, promises: Sequence[str], share: float = 0.9, confidence: float = CONFIDENCE
) -> Verdict:
    """The verdict on two servers; promises are the names of those that were judged by."""
    points_a, points_b = points_of(a.runs), points_of(b.runs)
    verdicts, shared = [], []
    for name in (None, *promises):
        verdicts.append(_compare_rates(a.name, b.name, points_a, points_b, name, share, confidence))
        shared += _compare_shared(a.name, b.name, points_a, points_b, name, confidence)
    return Verdict(a.name, b.name, share, tuple(verdicts), tuple(shared))


def highest_rate(side: Side, share: float) -> float:
    """The highest rate at which a share keeps every promise, 0 where even the lowest one tried was too high."""
    return cross(points_of(side.runs), share).rate


def rank_servers(sides: Sequence[Side], promises: Sequence[str], share: float = 0.9) -> Ranking:
    """The verdicts on the best of at least two servers against each other one.

    With more than two the intervals are widened so that all of them hold at once (Bonferroni).
    """
    rates = [highest_rate(side, share) for side in sides]
    best = sides[int(np.argmax(rates))]
    others = [side for side in sides if side is not best]
    confidence = 1 - (1 - CONFIDENCE) / len(others)
    return Ranking(best.name, tuple(compare_servers(best, other, promises, share, confidence) for other in others))


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


def _compare_shared(
    name_a: str,
    name_b: str,
    points_a: Sequence[Point],
    points_b: Sequence[Point],
    promise: str | None,
    confidence: float,
) -> list[SharedPoint]:
    shared = []
    by_rate = {point.rate_per_s: point for point in points_b}
    for a in points_a:
        b = by_rate.get(a.rate_per_s)
        if b is None:
            continue
        difference = resample_shares([a], promise)[:, 0] - resample_shares([b], promise)[:, 0]
        interval = interval_of(difference, confidence)
        shared.append(
            SharedPoint(
                promise=EVERY if promise is None else promise,
                rate_per_s=a.rate_per_s,
                attainment_a=a.attainment(promise),
                attainment_b=b.attainment(promise),
                difference=interval,
                winner=name_a if interval.low > 0 else name_b if interval.high < 0 else None,
            )
        )
    return shared
