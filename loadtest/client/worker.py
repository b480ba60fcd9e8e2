"""A client process: it is told what to send, sends it on time, and tells its parent what came back.

`python -m pdserve.loadtest.client.worker FD`, where FD is the inherited socket to the parent (frames.py). It does
nothing but measure, and it ends when its parent does: the socket closes then. Started by fleet.py.
"""

import asyncio
import contextlib
import gc
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

from pdserve.loadtest.client.driver import Job, PreparedRequest, drive
from pdserve.loadtest.client.frames import Alive, Done, Message, Ready, Sent, Start, Stop, Task, pack, read_messages
from pdserve.loadtest.client.lag import LagCanary
from pdserve.loadtest.client.precise_loop import new_precise_loop
from pdserve.loadtest.client.priority import wake_at_once

# How long news waits for company: a wake-up of the parent for each piece would cost the server some of its core.
_FLUSH_S = 0.05
# An Alive at least this often; a parent that hears nothing for far longer believes its worker stuck (fleet.py).
ALIVE_S = 1.0


async def serve(connection: socket.socket) -> None:
    """Do what the parent on the other end of the connection asks for, until that is done or the parent is gone."""
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        async with contextlib.aclosing(read_messages(reader)) as messages:
            job = await _read_job(messages)
            gc.collect()  # while there is time for it
            writer.write(pack(Ready()))
            start = await anext(messages, Stop())
            if job is not None and isinstance(start, Start):
                await _perform(job, start.at, messages, _Outbox(writer))
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _read_job(messages: AsyncIterator[Message]) -> Job | None:
    """None where the parent left before it had told all of it."""
    task = await anext(messages, None)
    if not isinstance(task, Task):
        return None
    requests: list[PreparedRequest] = []
    while len(requests) < task.num_requests:
        request = await anext(messages, None)
        if not isinstance(request, PreparedRequest):
            return None
        requests.append(request)
    return Job(task.endpoint, task.timeout_s, task.max_concurrency, tuple(requests))


async def _perform(job: Job, start: float, messages: AsyncIterator[Message], outbox: "_Outbox") -> None:
    canary = LagCanary()
    async with asyncio.TaskGroup() as tasks:
        driving = tasks.create_task(
            drive(job, start, canary, lambda index: outbox.tell(Sent(index)), outbox.tell), name="drive"
        )
        # Whatever the parent says now is Stop, and so is its end.
        listening = tasks.create_task(_wait_for_any(messages), name="listen")
        flushing = tasks.create_task(outbox.flush_on_time(), name="flush")
        await asyncio.wait((driving, listening), return_when=asyncio.FIRST_COMPLETED)
        for task in (driving, listening, flushing):
            task.cancel()
    outbox.tell(Done(tuple(canary.lags_s)))
    outbox.flush()


async def _wait_for_any(messages: AsyncIterator[Message]) -> None:
    await anext(messages, None)


class _Outbox:
    """What is to be told, gathered for a while."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self._frames: list[bytes] = []
        self._flushed_at = 0.0

    def tell(self, message: Message) -> None:
        self._frames.append(pack(message))

    async def flush_on_time(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            if not self._frames and time.monotonic() - self._flushed_at >= ALIVE_S:
                self.tell(Alive())
            self.flush()

    def flush(self) -> None:
        if self._frames:
            self._writer.write(b"".join(self._frames))
            self._frames.clear()
            self._flushed_at = time.monotonic()


def main() -> None:
    # An interrupt goes to the whole process group; the parent says what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each request in flight
    wake_at_once()
    connection = socket.socket(fileno=int(sys.argv[1]))
    with asyncio.Runner(loop_factory=new_precise_loop) as runner:
        runner.run(serve(connection))


if __name__ == "__main__":
    main()
