"""Sends a schedule on time, within one process, and records every exchange.

The loop is open: a request is sent at its intended time whatever became of those before it. Called by worker.py.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdserve.loadtest.client.endpoint import Endpoint, open_tls
from pdserve.loadtest.client.exchange import Exchange
from pdserve.loadtest.client.lag import LagCanary
from pdserve.loadtest.client.wire import exchange


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to be written. at_s counts from the start of the run."""

    index: int
    at_s: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class Job:
    """All that one client process sends, ordered by time.

    timeout_s        from the actual send of a request to the end of its stream
    max_concurrency  requests of this process in flight at most; None is the open loop
    """

    endpoint: Endpoint
    timeout_s: float
    max_concurrency: int | None
    requests: tuple[PreparedRequest, ...]


async def drive(
    job: Job,
    start: float,
    canary: LagCanary,
    on_sent: Callable[[int], None],
    on_exchange: Callable[[Exchange], None],
) -> None:
    """Send all requests of the job, the run starting at the monotonic time start, and watch the loop's lag meanwhile.

    Both callbacks run on the loop that measures, so they must be quick. Cancelling it abandons what is open, and
    on_exchange is told of that, too.
    """
    tls = open_tls(job.endpoint)
    slots = contextlib.nullcontext() if job.max_concurrency is None else asyncio.Semaphore(job.max_concurrency)

    async def perform(request: PreparedRequest) -> None:
        woke_at = time.monotonic()
        async with slots:
            on_sent(request.index)
            result = await exchange(
                job.endpoint, tls, request.index, request.payload, job.timeout_s, woke_at, on_exchange
            )
        on_exchange(result)

    with _without_collections():
        async with asyncio.TaskGroup() as background:
            watching = background.create_task(canary.watch())
            async with asyncio.TaskGroup() as requests:
                for request in job.requests:
                    await _wait_until(start + request.at_s)
                    requests.create_task(perform(request))
            watching.cancel()


async def _wait_until(due: float) -> None:
    """Gives the loop a turn also when it is late already. A loop with a coarser clock than ours may wake early."""
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if time.monotonic() >= due:
            return


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """A garbage collection over all prepared requests takes milliseconds; reference counts free what exchanges hold."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
