"""Several runs of one load at one server, at rates that are listed or searched for.

Owns the runs made so far, so that a series that ends early, by a failing server or by its user, still has something to
say. Called by the commands `sweep` and `goodput`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.report.progress import Progress
from pdserve.loadtest.report.rates_report import RatesReport, Units, run_of
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.runner import SeenEnough, run
from pdserve.loadtest.search.answer import GoodputResult, describe_curve, find_rate
from pdserve.loadtest.search.attainment import points_of
from pdserve.loadtest.search.budget import Budget, cost_of
from pdserve.loadtest.search.goodput import GoodputSearch
from pdserve.loadtest.selftest import QUICK, measure

# What is read off a sweep: the shares that goodput is searched for.
SHARES = (0.9, 0.99)


class Series:
    """One series under way.

    on_progress  called with the run's rate while it is under way
    on_ended     called after each run, when the search knows it
    tests_itself whether the harness measures its own errors before the first run, for each to quote
    """

    def __init__(
        self,
        config: BenchConfig,
        on_progress: Callable[[float, Progress], None],
        on_ended: Callable[[Report], None],
        tests_itself: bool = False,
    ):
        self._config = config
        self._on_progress = on_progress
        self._on_ended = on_ended
        self._tests_itself = tests_itself
        self._harness: HarnessError | None = None
        self.runs: list[Report] = []

    async def sweep(self, rates: Sequence[float], num_seeds: int) -> None:
        """Run each rate with so many seeds. Raises what a run raises.

        No two runs have a seed in common: a server with a prefix cache would know the prompts.
        """
        seed = self._config.load.seed
        for rate in rates:
            for _ in range(num_seeds):
                self._on_ended(await self._run(rate, seed, None))
                seed += 1

    async def search(self, search: GoodputSearch, left_s: Callable[[], float]) -> None:
        """Make the runs that a search asks for, while they fit in the seconds left. Raises what a run raises."""
        config = self._config
        budget = Budget(ramp=config.load.ramp)
        while (ask := search.next()) is not None and cost_of(ask, budget) <= left_s():
            judge = search.judge(ask, config.load.num_warm_up, config.promises)
            report = await self._run(ask.rate_per_s, ask.seed, judge)
            search.add(run_of(report))
            self._on_ended(report)

    async def _run(self, rate_per_s: float, seed: int, judge: SeenEnough | None) -> Report:
        load = replace(self._config.load.at_rate(rate_per_s), seed=seed)

        def on_progress(progress: Progress) -> None:
            self._on_progress(rate_per_s, progress)

        if self._tests_itself and self._harness is None:
            self._harness = await measure(QUICK, self._config.num_processes)
        report = await run(replace(self._config, load=load), on_progress, judge, harness=self._harness)
        self.runs.append(report)
        return report

    def report(self, result: GoodputResult, units: Units) -> RatesReport:
        return RatesReport(self._config, tuple(self.runs), result, units)


def read_sweep(runs: Sequence[Report]) -> GoodputResult:
    """What a sweep, finished or not, says of the goodput rate."""
    read = [run_of(report) for report in runs]
    points = points_of(read)
    return GoodputResult(
        rates=tuple(find_rate(points, share) for share in SHARES),
        curve=describe_curve(points),
        num_runs=len(read),
        num_invalid=sum(not each.is_valid for each in read),
        is_finished=True,
    )
