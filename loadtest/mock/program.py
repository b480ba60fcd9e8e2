"""The mock as a program of its own: `python -m pdserve.loadtest.mock.program SETTINGS`, started by selftest.py.

SETTINGS is JSON: the fields of a Behaviour, and `cpus` to run on (all for none). Prints its URL, and ends when its
standard input does.
"""

import asyncio
import json
import os
import signal
import sys

from pdserve.loadtest.client.precise_loop import new_precise_loop
from pdserve.loadtest.client.priority import wake_at_once
from pdserve.loadtest.mock.behaviour import Behaviour
from pdserve.loadtest.mock.server import MockServer


async def serve(behaviour: Behaviour) -> None:
    async with MockServer([behaviour], remembers=False) as server:
        print(server.url, flush=True)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        await reader.read()
        transport.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when
    settings = json.loads(sys.argv[1])
    cpus = settings.pop("cpus")
    if cpus:
        os.sched_setaffinity(0, cpus)
    wake_at_once()  # so that a time it tells is the time at which it wrote
    with asyncio.Runner(loop_factory=new_precise_loop) as runner:
        runner.run(serve(Behaviour(**settings)))


if __name__ == "__main__":
    main()
