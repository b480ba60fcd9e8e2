"""Client processes: the schedule is dealt out to them, they measure, and what they tell is handed on.

    spawned -> told its share -> ready -> started (one time for all) -> done

The parent draws, parses and judges; it never works in a loop that measures, also when there is one process. A worker
that dies or falls silent ends the run with a WorkerError, and however a run ends, no process is left. Called by the
runner.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import IO, Any

from pdserve.loadtest.client.driver import Job
from pdserve.loadtest.client.exchange import Exchange, sender_of
from pdserve.loadtest.client.frames import Done, Message, Ready, Sent, Start, Stop, Task, pack, read_messages
from pdserve.loadtest.errors import WorkerError

# From the order to the first send: time for each worker to be told, so that the first requests are not late.
_START_DELAY_S = 0.1
# A worker says something each second; before it is ready it starts Python and reads its share.
_SILENCE_S = 20.0
_READY_S = 60.0

# Starts a worker that talks on the given socket, owns that socket, and is ended with the context, which
# gives a function that says why the worker is gone.
Launch = Callable[[socket.socket], AbstractAsyncContextManager[Callable[[], str]]]


@contextlib.asynccontextmanager
async def worker_process(connection: socket.socket) -> AsyncIterator[Callable[[], str]]:
    """A worker as a program of its own."""
    with tempfile.TemporaryFile() as stderr:
        with connection:
            process = _spawn(connection.fileno(), stderr)

        def describe_end() -> str:
            # Its socket is closed, so it has ended or is about to.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)
            stderr.seek(0)
            lines = [line.strip(" |+-") for line in stderr.read().decode(errors="replace").splitlines()]
            last = next(filter(None, reversed(lines)), None)
            return f"exit code {process.returncode}" + ("" if last is None else f", {last}")

        try:
            yield describe_end
        finally:
            # Whoever said Done has told everything, and of the others nothing more is wanted.
            process.kill()
            process.wait()


def _spawn(fd: int, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "pdserve.loadtest.client.worker", str(fd)],
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
    )


async def drive_fleet(
    job: Job,
    num_processes: int,
    on_sent: Callable[[int], None],
    on_exchange: Callable[[Exchange, float], None],
    is_over: Callable[[float], bool] = lambda start: False,
    launch: Launch = worker_process,
    silence_s: float = _SILENCE_S,
) -> tuple[float, tuple[tuple[float, ...], ...]]:
    """Send the job from num_processes processes; returns the monotonic start of the run and each loop's lags.

    on_sent      gets the index of each request that was begun
    on_exchange  gets each exchange and the start, some 50 ms after the exchange ended
    is_over      asked with the start after whatever a process says, which is something each second; True ends the run:
                 nothing more is sent, and on_exchange gets what is open as abandoned

    max_concurrency is divided among the processes. Raises WorkerError.
    """
    async with contextlib.AsyncExitStack() as stack:
        links = [await stack.enter_async_context(_open_link(number, launch)) for number in range(num_processes)]
        await _all(link.prepare(share) for link, share in zip(links, _deal(job, num_processes), strict=True))
        start = time.monotonic() + _START_DELAY_S
        lags: list[tuple[float, ...]] = [()] * num_processes
        is_stopped = False

        async def listen(number: int, link: _Link) -> None:
            nonlocal is_stopped
            while True:
                match await link.hear(silence_s):
                    case Sent(index):
                        on_sent(index)
                    case Exchange() as exchange:
                        on_exchange(exchange, start)
                    case Done(lags_s):
                        lags[number] = lags_s
                        return
                if not is_stopped and is_over(start):
                    is_stopped = True
                    for each in links:
                        each.tell(Stop())

        for link in links:
            link.tell(Start(start))
        await _all(listen(number, link) for number, link in enumerate(links))
    return start, tuple(lags)


def _deal(job: Job, num_processes: int) -> list[Job]:
    shares = []
    for number in range(num_processes):
        limit = job.max_concurrency
        if limit is not None:
            limit = limit // num_processes + (number < limit % num_processes)
        requests = tuple(request for request in job.requests if sender_of(request.index, num_processes) == number)
        shares.append(replace(job, requests=requests, max_concurrency=limit))
    return shares


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them side by side; the first error ends them all and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


@contextlib.asynccontextmanager
async def _open_link(number: int, launch: Launch) -> AsyncIterator["_Link"]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        async with launch(theirs) as describe_end:
            reader, writer = await asyncio.open_connection(sock=ours)
            async with contextlib.aclosing(read_messages(reader)) as messages:
                try:
                    yield _Link(number, messages, writer, describe_end)
                finally:
                    writer.transport.abort()


class _Link:
    """The parent's end of the line to one worker."""

    def __init__(
        self,
        number: int,
        messages: AsyncIterator[Message],
        writer: asyncio.StreamWriter,
        describe_end: Callable[[], str],
    ):
        self._number = number
        self._messages = messages
        self._writer = writer
        self._describe_end = describe_end

    def tell(self, message: Message) -> None:
        self._writer.write(pack(message))

    async def prepare(self, share: Job) -> None:
        """Tell a worker its share and wait until it is ready."""
        self.tell(Task(share.endpoint, share.timeout_s, share.max_concurrency, len(share.requests)))
        # One that dies meanwhile is noticed below.
        with contextlib.suppress(ConnectionError):
            for request in share.requests:
                self.tell(request)
                await self._writer.drain()
        while not isinstance(await self.hear(_READY_S), Ready):
            pass

    async def hear(self, silence_s: float) -> Message:
        """The worker's next message. Raises WorkerError when it is gone or says nothing for silence_s."""
        try:
            async with asyncio.timeout(silence_s):
                return await anext(self._messages)
        except StopAsyncIteration:
            raise WorkerError(f"client process {self._number} ended during the run: {self._describe_end()}") from None
        except TimeoutError:
            raise WorkerError(
                f"client process {self._number} has said nothing for {silence_s:g} s: it is stopped or gets no "
                "processor time; free a core for it"
            ) from None
