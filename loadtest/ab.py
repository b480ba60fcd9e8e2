"""The A/B: servers over the same cores, one at a time and in turn, each searched for the rate it can promise.

Every run starts its server anew, so that none finds prompts in a cache that another run has left. A server that cannot
be run leaves the contest with its reason. Owns the contest, so that an A/B that ends early still has something to say.
Called by `pdserve bench ab`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pdserve.loadtest.client.target import Target
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.deployment.server import Server, running
from pdserve.loadtest.errors import LoadtestError, TargetError
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.report.ab_report import AbConfig, AbReport, Contestant
from pdserve.loadtest.report.environment import describe_environment
from pdserve.loadtest.report.json_file import write_json
from pdserve.loadtest.report.progress import Progress
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.runner import run
from pdserve.loadtest.search.answer import GoodputResult, find_rate
from pdserve.loadtest.search.attainment import points_of
from pdserve.loadtest.search.budget import Budget, Choice
from pdserve.loadtest.search.conclusion import Candidate, conclude
from pdserve.loadtest.search.contest import Contest
from pdserve.loadtest.search.diagnosis import Diagnosis, diagnose
from pdserve.loadtest.search.goodput import GoodputConfig
from pdserve.loadtest.search.runs import Run, read_run
from pdserve.loadtest.search.verdict import Side
from pdserve.loadtest.selftest import QUICK, measure
from pdserve.loadtest.workload.arrivals import Poisson
from pdserve.loadtest.workload.load import Load

# Requests of the first look at a server, one at a time.
NUM_ALONE = 3
# Of the rate at which each core serves one request at a time: near what a server can promise, so that few runs are
# spent on finding the right order of magnitude.
START_SHARE = 0.75
# Of requests that must keep every promise: the share that is searched for, and one that is read from the same runs.
SHARE = 0.9
STRICT_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run of the A/B that is over, for whoever watches. run: None where it failed, and why."""

    name: str
    rate_per_s: float
    elapsed_s: float
    run: Run | None
    failure: str = ""


class Ab:
    """One A/B under way.

    on_progress   called with the name and rate of the run under way, and how far it is
    on_ended      called after each run
    tests_itself  whether the harness measures its own errors first, for each report to quote
    """

    def __init__(
        self,
        config: AbConfig,
        on_progress: Callable[[str, float, Progress], None],
        on_ended: Callable[[EndedRun], None],
        tests_itself: bool = True,
    ):
        self._config = config
        self._servers = {server.name: server for server in config.servers}
        self._on_progress = on_progress
        self._on_ended = on_ended
        self._tests_itself = tests_itself
        self._started_at = datetime.now(UTC)
        self._began = time.monotonic()
        self._contest: Contest | None = None
        self._harness: HarnessError | None = None
        self._start_s = 0.0
        self._failures: dict[str, str] = {}
        self._reports: dict[str, list[Report]] = {name: [] for name in self._servers}

    async def run(self) -> None:
        """Search until all is known, the budget is spent or no server can be run. Raises TargetError, WorkerError."""
        config = self._config
        deadline = self._began + config.budget_s
        if self._tests_itself:
            self._harness = await measure(QUICK)
        first_rate = config.first_rate_per_s or await self._first_rate()
        search = GoodputConfig(
            first_rate,
            (SHARE,),
            config.step,
            num_requests=config.load.num_requests,
            first_seed=config.load.seed,
            max_runs=config.max_runs,
        )
        contest = self._contest = Contest(list(self._servers), search)
        while (choice := contest.next(deadline - time.monotonic(), self._budget)) is not None:
            rate = choice.ask.rate_per_s
            try:
                ended = await self._run(contest, choice, deadline)
            except LoadtestError as error:
                contest.drop(choice.name)
                self._failures[choice.name] = str(error)
                self._on_ended(EndedRun(choice.name, rate, self._elapsed_s, None, str(error)))
            else:
                contest.add(choice, ended)
                self._on_ended(EndedRun(choice.name, rate, self._elapsed_s, ended))

    def report(self) -> AbReport | None:
        """What is known by now; None before the first run."""
        contest = self._contest
        if contest is None or not any(search.runs for search in contest.searches.values()):
            return None
        results = contest.results()
        contestants = tuple(
            Contestant(
                server,
                results[name],
                find_rate(points_of(contest.searches[name].runs), STRICT_SHARE),
                contest.searches[name].runs,
                self._diagnose(results[name], name),
                self._failures.get(name),
            )
            for name, server in self._servers.items()
        )
        candidates = [
            Candidate(Side(each.server.name, each.runs), each.server.is_split, each.diagnosis)
            for each in contestants
            if points_of(each.runs)
        ]
        return AbReport(
            config=self._config,
            started_at=self._started_at,
            environment=describe_environment(),
            elapsed_s=self._elapsed_s,
            contestants=contestants,
            conclusion=conclude(candidates, [str(each.measure) for each in self._config.promises], SHARE),
            is_finished=all(result.is_finished for result in results.values()),
            harness=self._harness,
            shown={name: run for name in self._servers if (run := self._shown(results[name], name)) is not None},
        )

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def _budget(self) -> Budget:
        return Budget(ramp=self._config.load.ramp, switch_s=self._start_s)

    async def _first_rate(self) -> float:
        """Near what the first server can promise, from a few requests one at a time."""
        server = self._config.servers[0]
        alone = replace(self._config.load, arrivals=Poisson(), num_requests=NUM_ALONE, ramp=0.0).at_rate(float("inf"))
        report = await self._serve(server, alone, replace(self._config.target, max_concurrency=1), None)
        taken = sorted(record.service_e2e_s for record in report.records if record.is_complete)
        if not taken:
            raise TargetError(f"{server.name}: none of {NUM_ALONE} requests sent one at a time was answered in full")
        num_cores = max(1, len(server.cores))
        return float(f"{START_SHARE * num_cores / taken[len(taken) // 2]:.2g}")

    async def _run(self, contest: Contest, choice: Choice, deadline: float) -> Run:
        config, ask, server = self._config, choice.ask, self._servers[choice.name]
        load = replace(config.load, seed=ask.seed, num_requests=ask.num_requests).at_rate(ask.rate_per_s)
        judge = contest.searches[choice.name].judge(ask, load.num_warm_up, config.promises)

        def seen_enough(record: Record) -> bool:
            return judge(record) or time.monotonic() > deadline

        report = await self._serve(server, load, config.target, seen_enough)
        ended = read_run(
            ask.rate_per_s,
            ask.seed,
            load.num_warm_up,
            report.records,
            config.promises,
            report.summary.validity.is_valid,
        )
        if ended.counts:
            self._reports[choice.name].append(report)
        return ended

    async def _serve(
        self, server: Server, load: Load, target: Target, judge: Callable[[Record], bool] | None
    ) -> Report:
        """One run at a server started for it; its log and its report are kept in the folder."""
        name = f"{server.name.replace(' ', '_').replace(',', '')}-{load.rate_per_s:g}-{load.seed}"

        def on_progress(progress: Progress) -> None:
            self._on_progress(server.name, load.rate_per_s, progress)

        placed = server.placed()
        config = BenchConfig(replace(target, url=placed.url), load, self._config.promises)
        async with running(placed, self._config.folder / f"{name}.log") as start_s:
            self._start_s = max(self._start_s, start_s)
            report = await run(config, on_progress, judge, harness=self._harness)
        write_json(report, self._config.folder / f"{name}.json")
        return report

    def _shown(self, result: GoodputResult, name: str) -> Report | None:
        """The run at the highest rate that is not above the one that was found."""
        found = result.rates[0].rate_per_s or 0.0
        below = [report for report in self._reports[name] if report.config.load.rate_per_s <= found]
        return max(below, key=lambda report: report.config.load.rate_per_s, default=None)

    def _diagnose(self, result: GoodputResult, name: str) -> Diagnosis | None:
        """Of the runs at the lowest rate that is above the one that was found."""
        found = result.rates[0].rate_per_s or 0.0
        above = [report for report in self._reports[name] if report.config.load.rate_per_s > found]
        if not above:
            return None
        lowest = min(report.config.load.rate_per_s for report in above)
        records = [record for each in above if each.config.load.rate_per_s == lowest for record in each.records]
        return diagnose(records, self._config.promises)
