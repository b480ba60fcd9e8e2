"""The ablation: a server as it is and as it was, one setting apart, one after the other on the same load.

    each round, of each step:  as it is, as it was; in the next one the other way round

until the budget is spent, one round at least.
Every run starts its server anew. Another round has another seed. Called by `pdserve bench ablate`.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pdserve.loadtest.client.target import Target
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.deployment.server import Server, free_url, running
from pdserve.loadtest.errors import TargetError
from pdserve.loadtest.report.ablation_report import AblationConfig, AblationReport, Measured
from pdserve.loadtest.report.environment import describe_environment
from pdserve.loadtest.report.json_file import write_json
from pdserve.loadtest.report.progress import Progress
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.runner import run
from pdserve.loadtest.search.ablation import Measure, Pair, Seen, Step, gain_of, too_many_failures

# With less time for each step, its runs have fewer requests.
WHOLE_STEP_S = 225.0
# Of `pdserve up`, where no step says otherwise.
BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that is over, for whoever watches. words: what was measured first."""

    name: str
    words: str
    elapsed_s: float


class Ablation:
    """One ablation under way. on_progress: called with the name of the run; on_ended: after each run."""

    def __init__(
        self,
        config: AblationConfig,
        on_progress: Callable[[str, Progress], None],
        on_ended: Callable[[Ended], None],
    ):
        self._config = config
        self._on_progress = on_progress
        self._on_ended = on_ended
        self._pairs: dict[tuple[str, str], list[Pair]] = defaultdict(list)
        self._invalid: set[str] = set()
        self._began = 0.0

    async def run(self) -> AblationReport:
        """Measure every step at least once. Raises TargetError for a server that cannot be measured."""
        config = self._config
        self._began, started_at = time.monotonic(), datetime.now(UTC)
        took_s: dict[str, float] = {}
        for round_ in range(config.max_rounds):
            for step in config.steps:
                left_s = config.budget_s - (time.monotonic() - self._began)
                if round_ and took_s[step.name] > left_s:
                    continue
                began = time.monotonic()
                await self._compare(step, round_)
                took_s[step.name] = time.monotonic() - began
        elapsed_s = time.monotonic() - self._began
        return AblationReport(
            config, started_at, describe_environment(), elapsed_s, tuple(map(self._measured, config.steps))
        )

    async def _compare(self, step: Step, round_: int) -> None:
        """The two runs of a pair, one after the other."""
        flags = {"with": (), "without": step.before}
        seen = {}
        for way in sorted(flags, reverse=round_ % 2 == 1):
            seen[way] = _see(await self._serve(step, way, flags[way], self._config.seed + round_))
        for measure in step.measures:
            now, before = measure.read(seen["with"]), measure.read(seen["without"])
            if now is not None and before is not None:
                self._pairs[step.name, measure.title].append(Pair(now, before))

    async def _serve(self, step: Step, way: str, flags: Sequence[str], seed: int) -> Report:
        """One run at a server started for it; its log and its report are kept in the folder."""
        config, name = self._config, f"{step.name}-{way}-{seed}"
        server = _make_server(config, step, name, flags)
        load = step.load_of(seed, config.budget_s / (WHOLE_STEP_S * len(config.steps)))
        target = Target(server.url, max_concurrency=step.max_concurrency)
        async with running(server, config.folder / f"{name}.log"):
            report = await run(BenchConfig(target, load), lambda progress: self._on_progress(name, progress))
        write_json(report, config.folder / f"{name}.json")
        trouble = too_many_failures(report.records)
        if trouble is not None:
            raise TargetError(f"{name}: {trouble}")
        if not report.summary.validity.is_valid:
            self._invalid.add(step.name)
        first = step.measures[0]
        self._on_ended(Ended(name, _say(first, report), time.monotonic() - self._began))
        return report

    def _measured(self, step: Step) -> Measured:
        pairs = {measure: self._pairs[step.name, measure.title] for measure in step.measures}
        gains = {measure.title: gain_of(measure, found) for measure, found in pairs.items()}
        num_rounds = max(map(len, pairs.values()))
        return Measured(step, num_rounds, gains, step.name not in self._invalid)


def _make_server(config: AblationConfig, step: Step, name: str, flags: Sequence[str]) -> Server:
    url = free_url()
    command = config.layout.up_command(url, (*step.common, *config.up_flags, *flags))
    return Server(name, url, command, environ=step.environ)


def _see(report: Report) -> Seen:
    last = report.gauges[-1].nodes if report.gauges else ()
    return Seen(report.records, BLOCK_TOKENS * sum(node.num_blocks for node in last if node.role != "prefill"))


def _say(measure: Measure, report: Report) -> str:
    value = measure.read(_see(report))
    return f"{measure.title} {math.nan if value is None else value:.3g}"
