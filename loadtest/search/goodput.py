"""The highest rate at which a share of the requests keeps every promise, found by asking for runs. Pure.

That rate is DistServe's goodput (Zhong et al., OSDI 2024, section 2). The caller does what `next` asks for, one run at
a time, and `add`s what came of it:

    no rate known to pass      halve       \
    no rate known to fail      double       > one run each, on the grid start * step^k
    both, more than a step     bisect      /
    both, one step apart       ask for further seeds there until it is clear on which side each of them is
                               (sequential.py), or all seeds are spent
    not clear on either side   further out, until a rate is clear there, so that the answer has bounds; then done

Passing and failing is read from the monotone curve through all points (attainment.py), which every run moves: if the
further seeds turn a verdict round, the bracket opens again and the bisection goes on from there. On a shared grid two
servers visit the same rates, with the same seeds; each rate has seeds of its own, since a server with a prefix cache
would answer prompts that it has seen at another rate faster.

A run whose client was late decides nothing: it is made again with another seed. Where no seed is left, the search
ends there, unfinished.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.search.answer import GoodputResult, describe_curve, find_rate, num_needed
from pdserve.loadtest.search.attainment import Crossing, Point, cross, points_of
from pdserve.loadtest.search.judge import Judge
from pdserve.loadtest.search.runs import Run
from pdserve.loadtest.search.sequential import Decision, decide
from pdserve.loadtest.workload.load import MAX_RATE_PER_S, MIN_RATE_PER_S

# How much further out than the last rate one looks for a bound, and how near to the answer one should be.
_BOUND_STEPS = 2
_NEAR_STEPS = 4
# Digits that a rate is written with: enough to tell steps apart, few enough to be read.
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class GoodputConfig:
    """How to search.

    start_rate_per_s  the first guess, which the grid contains
    shares            of requests that must keep every promise, each searched for, in this order
    step              ratio of neighbouring rates of the grid: how exact the answer is
    num_seeds         runs at a rate at most, more where a share needs more requests
    num_requests      of the steady window of a run
    max_doublings     how far from the start a rate may be, in either direction
    max_runs          the search ends after so many, whatever it knows
    """

    start_rate_per_s: float
    shares: tuple[float, ...] = (0.9, 0.99)
    step: float = 1.05
    num_seeds: int = 3
    num_requests: int = 150
    first_seed: int = 0
    max_doublings: int = 6
    max_runs: int = 60

    def __post_init__(self) -> None:
        if not MIN_RATE_PER_S <= self.start_rate_per_s <= MAX_RATE_PER_S:
            raise OptionError(
                f"--rate {self.start_rate_per_s}: the search starts within {MIN_RATE_PER_S} and {MAX_RATE_PER_S:.0f}"
            )
        for share in self.shares:
            if not 0.5 <= share < 1:
                raise OptionError(f"--shares {share}: must be within 0.5 and 1, 1 not included")
        if not 1.005 <= self.step <= 2:
            raise OptionError(f"--tolerance {self.step - 1:g}: must be within 0.005 and 1")
        for flag, value in (("--seeds", self.num_seeds), ("--num-requests", self.num_requests)):
            if value < 1:
                raise OptionError(f"{flag} {value}: must be at least 1")

    @property
    def steps_per_doubling(self) -> int:
        return max(1, round(math.log(2) / math.log(self.step)))

    @property
    def places(self) -> range:
        """The places of the grid, the start's being 0, whose rates a load can have."""
        most = self.max_doublings * self.steps_per_doubling
        down = math.floor(math.log(self.start_rate_per_s / MIN_RATE_PER_S) / math.log(self.step))
        up = math.floor(math.log(MAX_RATE_PER_S / self.start_rate_per_s) / math.log(self.step))
        return range(-min(most, down), min(most, up) + 1)

    def rate_at(self, place: int) -> float:
        return float(f"{self.start_rate_per_s * self.step**place:.{_DIGITS}g}")

    def num_seeds_for(self, share: float) -> int:
        """Runs at a rate that have enough requests for a share, when none of them ends early."""
        return max(self.num_seeds, math.ceil(num_needed(share) / self.num_requests))

    def most_seeds_for(self, share: float) -> int:
        """Runs at a rate at most: some may have ended early, clear for a lower share but not for this one."""
        return 2 * self.num_seeds_for(share)

    @property
    def most_seeds(self) -> int:
        """Runs at a rate at most, those included whose client was late."""
        return max(self.most_seeds_for(share) for share in self.shares)

    def seed_at(self, place: int, run: int) -> int:
        """Of the run-th run at a place: no other place has it."""
        return self.first_seed + self.most_seeds * (place % len(self.places)) + run


@dataclass(frozen=True, slots=True)
class Ask:
    """A run that the search would learn most from; share is the one it is asked for."""

    rate_per_s: float
    seed: int
    num_requests: int
    share: float


class GoodputSearch:
    """Owns the runs of one server. No clocks, no sockets: the same runs lead to the same questions."""

    def __init__(self, config: GoodputConfig):
        self.config = config
        self._places = {config.rate_at(place): place for place in config.places}
        self._runs: list[Run] = []
        self._points: dict[int, Point] = {}

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(self._runs)

    def add(self, run: Run) -> None:
        """What came of an Ask, or of a run at another rate of the grid. Raises OptionError for a rate beside it."""
        if run.rate_per_s not in self._places:
            raise OptionError(f"a run at {run.rate_per_s:g} requests/s is none of this search's rates")
        self._runs.append(run)
        self._points = {self._places[point.rate_per_s]: point for point in points_of(self._runs)}

    def next(self) -> Ask | None:
        """The run to make next; None when the search is over."""
        if len(self._runs) >= self.config.max_runs:
            return None
        for share in self.config.shares:
            place = self._next_place(share)
            if place is not None and self._num_runs(place) < self.config.most_seeds:
                return self._ask(place, share)
        return None

    def judge(self, ask: Ask, first_index: int, promises: Sequence[Promise]) -> Judge:
        """Who may end the asked run early, once it is clear on which side its rate is."""
        earlier = [run for run in self._runs if run.rate_per_s == ask.rate_per_s and run.counts]
        return Judge(
            share=ask.share,
            num_kept=sum(sum(run.kept()) for run in earlier),
            num_requests=sum(run.num_requests for run in earlier),
            first_index=first_index,
            promises=tuple(promises),
            step=self.config.step,
        )

    def bracket(self, share: float) -> Crossing | None:
        """Between which rates the answer is by now; None before the first run."""
        return cross(tuple(self._points.values()), share) if self._points else None

    def result(self) -> GoodputResult:
        """What is known by now, whether or not the search is over."""
        points = tuple(self._points.values())
        return GoodputResult(
            rates=tuple(find_rate(points, share) for share in self.config.shares),
            curve=describe_curve(points),
            num_runs=len(self._runs),
            num_invalid=sum(not run.is_valid for run in self._runs),
            is_finished=all(self._next_place(share) is None for share in self.config.shares),
        )

    def _ask(self, place: int, share: float) -> Ask:
        config = self.config
        seed = config.seed_at(place, self._num_runs(place))
        return Ask(config.rate_at(place), seed, config.num_requests, share)

    def _num_runs(self, place: int) -> int:
        """Those included that do not count."""
        rate = self.config.rate_at(place)
        return sum(run.rate_per_s == rate for run in self._runs)

    def _next_place(self, share: float) -> int | None:
        crossing = self.bracket(share)
        if crossing is None:
            return 0
        lowest, highest = self.config.places[0], self.config.places[-1]
        doubling = self.config.steps_per_doubling
        passing = self._places.get(crossing.above)
        failing = self._places.get(crossing.below)
        if failing is None and passing is not None and passing < highest:
            return min(highest, passing + doubling)
        if passing is None and failing is not None and failing > lowest:
            return max(lowest, failing - doubling)
        if passing is not None and failing is not None and failing - passing > 1:
            return (passing + failing) // 2
        sides = [place for place in (passing, failing) if place is not None]
        place = self._next_unclear(share, sides)
        if place is None and passing is not None:
            place = self._next_bound(share, passing, -1)
        if place is None and failing is not None:
            place = self._next_bound(share, failing, 1)
        return place

    def _next_unclear(self, share: float, places: Sequence[int]) -> int | None:
        """Of visited places the least known one that further seeds may settle."""
        unclear = [(self._points[place].num_requests, place) for place in places if self._may_settle(place, share)]
        return min(unclear)[1] if unclear else None

    def _next_bound(self, share: float, side: int, direction: int) -> int | None:
        """Where to look for a rate that is clear, from one side of the answer on outwards: near it first, then as far
        as it takes. None where there is one."""
        outer = [place for place in self._points if (place - side) * direction >= 0]
        near = [place for place in outer if abs(place - side) <= _NEAR_STEPS]
        for visited, most in ((near, _NEAR_STEPS), (outer, len(self.config.places))):
            if any(_is_clear(self._points[place], share) for place in visited):
                return None
            outermost = max(visited, key=lambda place: place * direction)
            if self._may_settle(outermost, share):
                return outermost
            further = outermost + direction * _BOUND_STEPS
            if abs(further - side) <= most and further in self.config.places:
                return further
        return None

    def _may_settle(self, place: int, share: float) -> bool:
        """Whether further seeds are worth it at a place that has a point."""
        point = self._points[place]
        if _is_clear(point, share) or self._num_runs(place) >= self.config.most_seeds_for(share):
            return False
        return len(point.runs) < self.config.num_seeds_for(share) or point.num_requests < num_needed(share)


def _is_clear(point: Point, share: float) -> bool:
    """Whether it is certain enough on which side of the share a rate is; to pass it takes enough requests, too."""
    decision = decide(point.num_kept, point.num_requests, share)
    return decision is Decision.FAILS or (decision is Decision.PASSES and point.num_requests >= num_needed(share))
