"""Which server's search to go on with while time is short: the run that tells most a second comes first. Pure.

A run is worth what is still open about its server, the logarithm of the ratio of the rates that its answer lies
between, for each second it takes. A server whose answer cannot be the best any more is measured last: successive
elimination, Even-Dar, Mannor and Mansour 2006 (J. Mach. Learn. Res. 7).
"""

import math
from dataclasses import dataclass

from pdserve.loadtest.search.attainment import points_of
from pdserve.loadtest.search.goodput import Ask, GoodputSearch
from pdserve.loadtest.search.sequential import Decision, decide

# What is open about a server before its first run, or while no rate bounds it: as if within this ratio.
_MAX_RATIO = 64.0


@dataclass(frozen=True, slots=True)
class Budget:
    """What runs cost.

    ramp        requests before and after the steady window, each as a share of it (Load.ramp)
    overhead_s  of a run beside its requests: preparing, draining
    switch_s    to stop one server and start another, which every run of several servers takes
    """

    ramp: float = 0.1
    overhead_s: float = 2.0
    switch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The next run of one server, and the seconds it is expected to take.

    is_behind: another server clearly keeps a rate at which this one clearly does not
    """

    name: str
    ask: Ask
    cost_s: float
    is_behind: bool = False


def cost_of(ask: Ask, budget: Budget) -> float:
    """Seconds of a run that is not ended early."""
    return ask.num_requests * (1 + 2 * budget.ramp) / ask.rate_per_s + budget.overhead_s


def rank(searches: dict[str, GoodputSearch], left_s: float, budget: Budget) -> list[Choice]:
    """The next run of each server that has one and fits in the time left, the most worth measuring first."""
    ranked = []
    for name, search in searches.items():
        ask = search.next()
        if ask is None:
            continue
        cost_s = cost_of(ask, budget) + budget.switch_s
        if cost_s <= left_s:
            is_behind = any(_is_behind(search, other, ask.share) for other in searches.values())
            ranked.append((is_behind, -_num_open(search, ask.share) / cost_s, Choice(name, ask, cost_s, is_behind)))
    # By what they are worth; of equals the one named first.
    return [choice for _, _, choice in sorted(ranked, key=lambda entry: entry[:2])]


def _num_open(search: GoodputSearch, share: float) -> float:
    """How much is open: the logarithm of a ratio of rates."""
    crossing = search.bracket(share)
    if crossing is None or crossing.above == 0 or math.isinf(crossing.below):
        return math.log(_MAX_RATIO)
    return math.log(crossing.below / crossing.above)


def _is_behind(search: GoodputSearch, other: GoodputSearch, share: float) -> bool:
    """Whether the other clearly keeps the share at a rate at which this one clearly does not."""
    fails, passes = _rates(search, share, Decision.FAILS), _rates(other, share, Decision.PASSES)
    return bool(fails and passes) and min(fails) <= max(passes)


def _rates(search: GoodputSearch, share: float, decision: Decision) -> list[float]:
    """Those that are decided so."""
    points = points_of(search.runs)
    return [point.rate_per_s for point in points if decide(point.num_kept, point.num_requests, share) is decision]
