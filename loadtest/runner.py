"""One run from the plan to the report: find the model, try it, send everything on time, then read it.

Client processes send and measure (client/fleet.py); this process plans, parses and reports. Called by the commands,
and by programs through `run`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

from pdserve.loadtest.client.endpoint import Endpoint, find_endpoint, open_tls
from pdserve.loadtest.client.exchange import ABANDONED, Exchange, Failure
from pdserve.loadtest.client.fleet import Launch, drive_fleet, worker_process
from pdserve.loadtest.client.gauges import GaugeSampler
from pdserve.loadtest.client.models import ServedModel, find_model
from pdserve.loadtest.client.request import encode_request, name_request, prepare_job
from pdserve.loadtest.client.target import Api, Target
from pdserve.loadtest.client.wire import exchange
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.errors import OptionError, TargetError
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.measures.kept import broken_promises, latest_end_s
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.record import Record, read_exchange
from pdserve.loadtest.measures.summary import summarize
from pdserve.loadtest.report.environment import describe_environment
from pdserve.loadtest.report.progress import Progress
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.search.runs import comparable
from pdserve.loadtest.workload.load import Load, PromptFormat
from pdserve.loadtest.workload.notes import describe_plan
from pdserve.loadtest.workload.schedule import PlannedRequest, digest_schedule, plan_preflight, plan_requests
from pdserve.loadtest.workload.tokenizer import choose_tokenizer
from pdserve.loadtest.workload.trace import Trace

SeenEnough = Callable[[Record], bool]

# How old the last word of a client process may be (client/worker.py), with time to spare: an answer may be on its way.
_NEWS_MAX_AGE_S = 1.0


def ignore_progress(progress: Progress) -> None:
    pass


async def run(
    config: BenchConfig,
    on_progress: Callable[[Progress], None] = ignore_progress,
    judge: SeenEnough | None = None,
    harness: HarnessError | None = None,
    launch: Launch = worker_process,
) -> Report:
    """Run one load test.

    on_progress  called whenever a request is sent or ends
    judge        asked for each record as its request ends, some 50 ms later, and for an open request once no end of it
                 could keep the promises any more; True ends the run early: nothing more is sent, open requests are
                 abandoned, and of the steady window only those are records that come, in the schedule, before the first
                 whose promises are still open: of the later ones just the fast would be
    harness      what a self-test just before found, for the report to quote
    launch       how client processes are started

    Raises OptionError for a load that cannot be made or does not fit the model, TargetError for a server that cannot
    be reached, does not serve the model or refuses the preflight, WorkerError for a client process that died.
    """
    load, target = config.load, config.target
    model = await find_model(target)
    _check_fits(load, target, model)
    # In a thread: a long schedule takes seconds, and the tokenizer may be the server's.
    tokenizer = await asyncio.to_thread(choose_tokenizer, load, target, model.name)
    schedule = await asyncio.to_thread(plan_requests, load, target.api, tokenizer)
    preflight = await asyncio.to_thread(plan_preflight, load, target.api, target.preflight, tokenizer)
    endpoint = await find_endpoint(target)
    started_at = datetime.now(UTC)
    await _preflight(endpoint, preflight, target, model.name, load.seed)
    job = prepare_job(endpoint, target, model.name, schedule, load.seed)
    exchanges = _Exchanges(schedule, config.promises, on_progress, judge)
    gauges = GaugeSampler(target)
    async with _watched(gauges):
        start, lags_s = await drive_fleet(
            job, config.num_processes, exchanges.note_sent, exchanges.take, exchanges.is_enough, launch
        )
    records = exchanges.finish(start)
    if len(records) < len(schedule):
        records = comparable(records, load.num_warm_up)
    return Report(
        config=config,
        model=model.name,
        started_at=started_at,
        environment=describe_environment(),
        schedule_digest=digest_schedule(schedule),
        summary=summarize(records, config.promises, lags_s),
        records=records,
        gauges=gauges.read(start),
        harness=harness,
        notes=describe_plan(load, target.api, tokenizer, schedule),
    )


def _check_fits(load: Load, target: Target, model: ServedModel) -> None:
    # The tokens of a prompt that is text only the server can count.
    is_exact = target.api is Api.COMPLETIONS and load.prompt_format is PromptFormat.IDS
    if is_exact and model.max_model_len is not None and load.longest > model.max_model_len:
        knobs = f"--input-tokens {load.input_tokens} --output-tokens {load.output_tokens}"
        if isinstance(load.lengths, Trace):
            knobs = f"--trace {load.lengths.name}"
        raise OptionError(
            f"{knobs}: up to {load.longest} tokens a request, but {model.name} takes {model.max_model_len} "
            "(max_model_len); --max-request-tokens fits a trace to it"
        )


async def _preflight(
    endpoint: Endpoint, preflight: tuple[PlannedRequest, ...], target: Target, model: str, seed: int
) -> None:
    """Send the preflight requests one after the other, unmeasured; the first that fails ends the run."""
    tls = open_tls(endpoint)
    for planned in preflight:
        payload = encode_request(target, model, planned, name_request(seed, planned.index, is_preflight=True))
        start = time.monotonic()
        answered = await exchange(endpoint, tls, planned.index, payload, target.timeout_s, start)
        record = read_exchange(planned, answered, start)
        if record.error is not None:
            raise TargetError(
                f"the preflight request failed: {record.error}: {record.detail} (--preflight 0 measures regardless)"
            )


@contextlib.asynccontextmanager
async def _watched(gauges: GaugeSampler) -> AsyncIterator[None]:
    watching = asyncio.create_task(gauges.watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait((watching,))


class _Exchanges:
    """The exchanges of a run on their way to records.

    Without a judge nothing is parsed before the run is over: parsing takes time from whoever shares the core.
    """

    def __init__(
        self,
        schedule: tuple[PlannedRequest, ...],
        promises: tuple[Promise, ...],
        on_progress: Callable[[Progress], None],
        judge: SeenEnough | None,
    ):
        self._schedule = schedule
        self._promises = promises
        self._on_progress = on_progress
        self._judge = judge
        self._progress = Progress(total=len(schedule))
        self._exchanges: list[Exchange] = []
        self._news: list[Record] = []
        self._records: list[Record] = []
        # The open requests that the judge was not told of, by when they must have ended to keep every promise.
        self._latest_end_s: dict[int, float] = {}

    def note_sent(self, index: int) -> None:
        self._progress.sent += 1
        self._on_progress(self._progress)
        if self._judge is not None:
            planned = self._schedule[index]
            self._latest_end_s[index] = latest_end_s(planned.at_s, planned.output_tokens, self._promises)

    def take(self, ended: Exchange, start: float) -> None:
        if self._judge is None:
            self._exchanges.append(ended)
        else:
            record = self._read(ended, start)
            self._records.append(record)
            if self._latest_end_s.pop(ended.index, None) is not None:
                self._news.append(record)
        if not ended.is_abandoned:
            self._progress.ended += 1
            self._progress.failed += ended.looks_failed
            self._on_progress(self._progress)

    def is_enough(self, start: float) -> bool:
        """Tell the judge what is new; returns whether it has seen enough."""
        if self._judge is None:
            return False
        now_s = time.monotonic() - start
        overdue = [index for index, end_s in self._latest_end_s.items() if now_s > end_s + _NEWS_MAX_AGE_S]
        for index in overdue:
            del self._latest_end_s[index]
            self._news.append(self._read_open(index, now_s))
        news, self._news = self._news, []
        return any([self._judge(record) for record in news])

    def finish(self, start: float) -> tuple[Record, ...]:
        """The records of all that has ended or had broken a promise when the run was, in the schedule's order."""
        self._records += [self._read(ended, start) for ended in self._exchanges]
        settled = (
            record for record in self._records if not record.is_abandoned or broken_promises(record, self._promises)
        )
        return tuple(sorted(settled, key=lambda record: record.index))

    def _read(self, ended: Exchange, start: float) -> Record:
        return read_exchange(self._schedule[ended.index], ended, start)

    def _read_open(self, index: int, now_s: float) -> Record:
        """For the judge alone: what has come of an open request only its client process knows."""
        at = self._schedule[index].at_s
        failure = Failure(ABANDONED, "open")
        return read_exchange(self._schedule[index], Exchange(index, at, at, now_s, (), failure), 0.0)
