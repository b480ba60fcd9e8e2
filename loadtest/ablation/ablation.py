"""The ablation: a server as it is and without one technique, one after the other on the same load.

    each round, of each technique:  with it, without it; in the next one the other way round

One round at least, then more while the budget lasts. Every run starts its server anew; another round has another seed.
A technique whose run fails is left alone, and the others go on. Owns what has been measured, so that an ablation that
its user ends still has something to say. Called by `pdserve bench ablate`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pdserve.loadtest.ablation.readings import Contrast, Reading, Seen, too_many_failures
from pdserve.loadtest.ablation.techniques import Technique, limit_scale
from pdserve.loadtest.client.target import Target
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.deployment.server import Server, free_url, running
from pdserve.loadtest.errors import LoadtestError, TargetError
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.report.ablation_report import AblationConfig, AblationReport, Measured
from pdserve.loadtest.report.environment import describe_environment
from pdserve.loadtest.report.json_file import write_json
from pdserve.loadtest.report.progress import Progress
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.runner import run
from pdserve.loadtest.selftest import QUICK, measure

# What a pair of runs may take with all of its requests, servers' starts included: four such pairs fit into 15 minutes,
# and the loads are made to take less on the reference machine. With less time there are fewer requests.
WHOLE_PAIR_S = 220.0
# Of `pdserve up`, where no technique says otherwise.
BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class EndedHalf:
    """A run of a pair that is over, for whoever watches. words: what was read first, or why it says nothing."""

    name: str
    words: str
    elapsed_s: float


@dataclass(slots=True)
class _Found:
    """What is known of a technique; contrasts by the title of their reading.

    scale  of its requests, the same in each round
    """

    contrasts: dict[str, list[Contrast]]
    scale: float = 1.0
    pair_s: float = 0.0
    num_pairs: int = 0
    failure: str | None = None
    late_runs: list[str] = field(default_factory=list)


class Ablation:
    """One ablation under way.

    on_progress   called with the name of the run under way, and how far it is
    on_ended      called after each run
    tests_itself  whether the harness measures its own errors before the first run, for each to quote
    """

    def __init__(
        self,
        config: AblationConfig,
        on_progress: Callable[[str, Progress], None],
        on_ended: Callable[[EndedHalf], None],
        tests_itself: bool = False,
    ):
        self._config = config
        self._on_progress = on_progress
        self._on_ended = on_ended
        self._tests_itself = tests_itself
        self._harness: HarnessError | None = None
        self._found = {
            technique.name: _Found({reading.title: [] for reading in technique.readings})
            for technique in config.techniques
        }
        self._began, self._started_at = time.monotonic(), datetime.now(UTC)

    async def run(self) -> None:
        """Measure every technique at least once. Raises WorkerError for a harness that cannot measure itself."""
        config = self._config
        self._began, self._started_at = time.monotonic(), datetime.now(UTC)
        if self._tests_itself:
            self._harness = await measure(QUICK)
        slowness = 1.0
        for index, technique in enumerate(config.techniques):
            share_s = self._left_s() / (len(config.techniques) - index)
            found = self._found[technique.name]
            found.scale = limit_scale(share_s / (WHOLE_PAIR_S * slowness))
            await self._try(technique, 0)
            # On a slower machine, or a busy one, the others get fewer requests.
            slowness = max(slowness, found.pair_s / (WHOLE_PAIR_S * found.scale))
        for round_ in range(1, config.max_rounds):
            for technique in config.techniques:
                found = self._found[technique.name]
                if found.failure is None and found.pair_s <= self._left_s():
                    await self._try(technique, round_)

    def report(self) -> AblationReport:
        """What has been measured so far."""
        return AblationReport(
            config=self._config,
            started_at=self._started_at,
            environment=describe_environment(),
            elapsed_s=time.monotonic() - self._began,
            measured=tuple(map(self._measured, self._config.techniques)),
            harness=self._harness,
        )

    def _left_s(self) -> float:
        return self._config.budget_s - (time.monotonic() - self._began)

    async def _try(self, technique: Technique, round_: int) -> None:
        """One pair of runs; what goes wrong in it is noted."""
        found, began = self._found[technique.name], time.monotonic()
        try:
            await self._compare(technique, round_)
        except LoadtestError as error:
            found.failure = str(error)
            self._tell(technique.name, f"failed: {error}")
        else:
            found.num_pairs += 1
        found.pair_s = max(found.pair_s, time.monotonic() - began)

    async def _compare(self, technique: Technique, round_: int) -> None:
        """The two runs of a pair, one after the other."""
        seed, found = self._config.seed + round_, self._found[technique.name]
        flags = {"with": (), "without": technique.before}
        seen = {}
        for way in sorted(flags, reverse=round_ % 2 == 1):
            seen[way] = await self._see(technique, f"{technique.name}-{way}-{seed}", flags[way], seed)
        for reading in technique.readings:
            now, before = reading.read(seen["with"]), reading.read(seen["without"])
            if now is not None and before is not None:
                found.contrasts[reading.title].append(Contrast(now, before))

    async def _see(self, technique: Technique, name: str, flags: tuple[str, ...], seed: int) -> Seen:
        """One run at a server started for it; its log and its report are kept in the folder."""
        config, found = self._config, self._found[technique.name]
        url = free_url()
        command = config.layout.up_command(url, (*technique.common, *config.up_flags, *flags))
        server = Server(name, url, command, environ=technique.environ)
        target = Target(url, max_concurrency=technique.max_concurrency)
        bench = BenchConfig(target, technique.load_of(seed, found.scale))
        async with running(server, config.folder / f"{name}.log"):
            report = await run(bench, lambda progress: self._on_progress(name, progress), harness=self._harness)
        write_json(report, config.folder / f"{name}.json")
        trouble = too_many_failures(report.records)
        if trouble is not None:
            raise TargetError(f"{name}: {trouble}")
        if not report.summary.validity.is_valid:
            found.late_runs.append(name)
        seen = _seen(report)
        self._tell(name, _say(technique.readings[0], seen))
        return seen

    def _tell(self, name: str, words: str) -> None:
        self._on_ended(EndedHalf(name, words, time.monotonic() - self._began))

    def _measured(self, technique: Technique) -> Measured:
        found = self._found[technique.name]
        gains = {reading.title: reading.gain_of(found.contrasts[reading.title]) for reading in technique.readings}
        return Measured(technique, found.num_pairs, gains, tuple(found.late_runs), found.failure)


def _seen(report: Report) -> Seen:
    last = report.gauges[-1].nodes if report.gauges else ()
    return Seen(report.records, BLOCK_TOKENS * sum(node.num_blocks for node in last if node.role != "prefill"))


def _say(reading: Reading, seen: Seen) -> str:
    value = reading.read(seen)
    return f"{reading.title} {math.nan if value is None else value:.3g}"
