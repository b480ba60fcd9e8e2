"""What a search, or a sweep, says in the end: the curve of attainment and the rates read from it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.loadtest.measures.bootstrap import Interval, wilson
from pdserve.loadtest.search.attainment import Point, cross, crossing_interval, curve_of

# A share is reported only from so many requests up that at least six of them may break a promise: 60 for 90 %,
# 600 for 99 %. With fewer, one slow request more or less is the whole difference.
_MIN_BROKEN = 6


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What is known at one rate. interval is Wilson's; fitted is the monotone curve's value."""

    rate_per_s: float
    num_runs: int
    num_requests: int
    num_kept: int
    attainment: float
    interval: Interval
    fitted: float


@dataclass(frozen=True, slots=True)
class GoodputRate:
    """The highest rate at which a share of requests keeps every promise.

    rate_per_s  None where it cannot be told, and `reason` says why
    interval    0 below or infinity above where no visited rate bounds it
    reason      also where the rate is only a bound
    """

    share: float
    rate_per_s: float | None
    interval: Interval
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class GoodputResult:
    rates: tuple[GoodputRate, ...]
    curve: tuple[CurvePoint, ...]
    num_runs: int
    num_invalid: int
    is_finished: bool


def num_needed(share: float) -> int:
    """Requests at a rate from which on it can be said to keep the share."""
    return math.ceil(_MIN_BROKEN / (1 - share) - 1e-6)


def describe_curve(points: Sequence[Point]) -> tuple[CurvePoint, ...]:
    """The points and the monotone curve through them."""
    return tuple(
        CurvePoint(
            rate_per_s=point.rate_per_s,
            num_runs=len(point.runs),
            num_requests=point.num_requests,
            num_kept=point.num_kept,
            attainment=point.num_kept / point.num_requests,
            interval=wilson(point.num_kept, point.num_requests),
            fitted=float(fitted),
        )
        for point, fitted in zip(points, curve_of(points), strict=True)
    )


def find_rate(points: Sequence[Point], share: float) -> GoodputRate:
    """The highest rate at which the curve through the points keeps a share, as far as it may be told."""
    if not points:
        return GoodputRate(share, None, Interval(0.0, math.inf), "nothing was measured that may be believed")
    found, interval = cross(points, share), crossing_interval(points, share)
    if found.above == 0:
        reason = f"already at {found.below:g} requests/s, the lowest rate tried, fewer kept every promise"
        return GoodputRate(share, None, interval, reason)
    resting_on = next(point for point in points if point.rate_per_s == found.above)
    if resting_on.num_requests < num_needed(share):
        reason = f"not enough requests: {resting_on.num_requests} of {num_needed(share)} at {found.above:g} requests/s"
        return GoodputRate(share, None, interval, reason)
    is_bounded = math.isfinite(found.below)
    return GoodputRate(share, found.rate, interval, None if is_bounded else "at least: no rate tried was too high")
