"""The load test's own errors: the mock as a child process, driven like any server, and both sides' times compared.

Both are processes of one machine and share its monotonic clock, so the errors are exact. Where there are two cores the
mock has one to itself. Called by `pdserve bench selftest`, and for about a second before each measured run.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass

from pdserve.loadtest.client.endpoint import find_endpoint
from pdserve.loadtest.client.exchange import Exchange
from pdserve.loadtest.client.fleet import Launch, drive_fleet, worker_process
from pdserve.loadtest.client.request import prepare_job
from pdserve.loadtest.client.target import Target
from pdserve.loadtest.deployment.cores import confined
from pdserve.loadtest.errors import WorkerError
from pdserve.loadtest.measures.distribution import Distribution, describe
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.measures.latencies import values_of
from pdserve.loadtest.measures.record import Record, read_exchange
from pdserve.loadtest.measures.validity import CLIENT_LAG, LOOP_LAG, describe_lags, judge_lags
from pdserve.loadtest.mock.behaviour import Behaviour
from pdserve.loadtest.workload.lengths import DrawnLengths, Span
from pdserve.loadtest.workload.load import Load
from pdserve.loadtest.workload.schedule import plan_requests

TOKENS_PER_S = 50.0
_PROMPT_TOKENS = 64
_TIMEOUT_S = 60.0
_MAX_STREAMS = 16_384


@dataclass(frozen=True, slots=True)
class Size:
    """How much is driven.

    num_streams  in flight at a time, once the first have ended
    stream_s     how long each lasts
    duration_s   for how long new ones are sent
    """

    num_streams: int
    stream_s: float = 1.0
    duration_s: float = 2.0


QUICK = Size(num_streams=32, stream_s=0.4, duration_s=0.6)
SIZES = (Size(1, duration_s=4.0), Size(16), Size(64), Size(256))


async def measure(size: Size, num_processes: int = 1, launch: Launch = worker_process) -> HarnessError:
    """Drive the mock at a size. Raises WorkerError where a process of the harness cannot be started or dies."""
    gap_s = 1 / TOKENS_PER_S
    num_tokens = round(size.stream_s * TOKENS_PER_S)
    rate_per_s = size.num_streams / size.stream_s
    lengths = DrawnLengths(Span(_PROMPT_TOKENS, _PROMPT_TOKENS), Span(num_tokens, num_tokens))
    load = Load(rate_per_s, max(1, round(rate_per_s * size.duration_s)), lengths, ramp=0.0)
    with _cores_apart() as mock_cpus:
        async with _mock_process(Behaviour(first_token_s=gap_s, gap_s=gap_s), mock_cpus) as url:
            target = Target(url, timeout_s=_TIMEOUT_S)
            return await compare_times(target, load, size.num_streams, num_processes, launch)


async def measure_all(num_processes: int, on_measured: Callable[[HarnessError], None]) -> tuple[HarnessError, ...]:
    """Every size of SIZES, the smallest first."""
    errors = []
    for size in SIZES:
        errors.append(await measure(size, num_processes))
        on_measured(errors[-1])
    return tuple(errors)


async def find_limit(num_processes: int, on_measured: Callable[[HarnessError], None]) -> int:
    """The highest number of streams whose lag is believed, to 1/16: doubled until it is not, then bisected."""
    low, high = 0, 64
    while high <= _MAX_STREAMS and await _is_driven(high, num_processes, on_measured):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if await _is_driven(middle, num_processes, on_measured):
            low = middle
        else:
            high = middle
    return low


async def _is_driven(num_streams: int, num_processes: int, on_measured: Callable[[HarnessError], None]) -> bool:
    error = await measure(Size(num_streams), num_processes)
    on_measured(error)
    return error.lag_is_valid and not error.num_failed


async def compare_times(
    target: Target, load: Load, num_streams: int, num_processes: int, launch: Launch
) -> HarnessError:
    """The errors of driving a mock that runs on this machine."""
    schedule = plan_requests(load, target.api)
    job = prepare_job(await find_endpoint(target), target, "mock", schedule, load.seed)
    exchanges: list[Exchange] = []

    def keep(exchange: Exchange, start: float) -> None:
        exchanges.append(exchange)

    start, lags_s = await drive_fleet(job, num_processes, lambda index: None, keep, launch=launch)
    records = [read_exchange(schedule[exchange.index], exchange, start) for exchange in exchanges]
    complete = [record for record in records if record.is_complete]
    if not complete:
        raise WorkerError(f"the self-test got no answer from its own server: {records[0].error}: {records[0].detail}")
    lags = describe_lags(records, lags_s)
    validity = judge_lags(lags.values(), describe(values_of("service_ttft", complete)))
    return HarnessError(
        num_streams=num_streams,
        num_processes=num_processes,
        tokens_per_s=TOKENS_PER_S,
        num_failed=len(records) - len(complete),
        stamps=_known(describe(error for record in complete for error in _stamp_errors(record, start))),
        sends=_known(describe(_arrived_at(record) - start - record.intended_s for record in complete)),
        lags=_known(lags[CLIENT_LAG]),
        loop_lag=lags[LOOP_LAG],
        lag_is_valid=validity.is_valid,
    )


def _stamp_errors(record: Record, start: float) -> Iterable[float]:
    """How long after the mock's write of each token the client read it."""
    assert record.server_metrics is not None
    written = record.server_metrics["written_at"]
    return (read_s + start - at for read_s, at in zip(record.token_times_s, written, strict=True))


def _arrived_at(record: Record) -> float:
    assert record.server_metrics is not None
    return record.server_metrics["arrived_at"]


def _known(values: Distribution | None) -> Distribution:
    assert values is not None, "there are complete requests"
    return values


@contextlib.contextmanager
def _cores_apart() -> Iterator[list[int]]:
    """Leave the last core to the mock, where there are two: yields the cores it is to run on, all for none.

    Child processes inherit where this thread may run.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        yield []
        return
    with confined(tuple(cpus[:-1])):
        yield cpus[-1:]


@contextlib.asynccontextmanager
async def _mock_process(behaviour: Behaviour, cpus: list[int]) -> AsyncIterator[str]:
    """The mock's URL while it runs."""
    settings = json.dumps(dataclasses.asdict(behaviour) | {"cpus": cpus})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdserve.loadtest.mock.program", settings, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise WorkerError(f"the self-test's own server ended at once, exit code {await process.wait()}")
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
