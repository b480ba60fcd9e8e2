"""How long a node's event loop keeps a message waiting while its engine runs: python benchmarks/loop_lag.py MODEL_DIR.

The node's two threads on one core, as `pdserve up` lays them out: the engine's takes step after step, a loop is
sent a stamp by a process on another core each 5 ms and looks at how old it is. Prints percentiles for decode steps and
for chunks of a prompt.
"""

import argparse
import asyncio
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from floors import attach_pool, make_row

from pdserve.cluster import event_loop
from pdserve.cluster.machine import current_cores
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.step import StepPlan, StepResult

PERIOD_S = 0.005
STAMP = struct.Struct("d")
SENDER = f"""
import socket, struct, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
try:
    while True:
        time.sleep({PERIOD_S})
        connection.send(struct.pack("d", time.monotonic()))
except OSError:
    pass
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="time spent on each line")
    options = parser.parse_args()
    cores = current_cores()
    os.sched_setaffinity(0, cores[-1:])
    thread = EngineThread(lambda: Engine.load(options.model))
    thread.call(lambda engine: attach_pool(engine, 16 * 512))
    plans = {
        "no step": None,
        "decode steps of 8 x 512 tokens": StepPlan(0, tuple(make_row(key, 1, 512) for key in range(8))),
        "chunks of 256 tokens": StepPlan(0, (make_row(0, 256, 512),)),
    }
    for name, plan in plans.items():
        with sender(cores[0]) as stamps:
            lags = event_loop.run(watch(thread, plan, options.seconds, stamps)) * 1e3
        p50, p99, p999 = np.percentile(lags, (50, 99, 99.9))
        print(f"{name:36} {p50:6.2f} ms p50 {p99:6.2f} ms p99 {p999:6.2f} ms p99.9", flush=True)
    thread.close()


async def watch(thread: EngineThread, plan: StepPlan | None, seconds: float, stamps: socket.socket) -> np.ndarray:
    """The lags of a loop, while the thread takes one step after the other, in seconds."""
    loop = asyncio.get_running_loop()
    ended, lags = loop.create_future(), list[float]()
    deadline = loop.time() + seconds

    def again(_: StepResult) -> None:
        if loop.time() > deadline:
            ended.set_result(None)
        elif plan is not None:
            thread.run(plan, loop.call_soon_threadsafe, again, ended.set_exception)

    def read() -> None:
        (sent,) = STAMP.unpack(stamps.recv(STAMP.size))
        lags.append(time.monotonic() - sent)

    with suppress(BlockingIOError):
        # What came before the loop ran.
        while stamps.recv(STAMP.size):
            pass
    loop.add_reader(stamps, read)
    if plan is None:
        loop.call_later(seconds, ended.set_result, None)
    else:
        thread.run(plan, loop.call_soon_threadsafe, again, ended.set_exception)
    await ended
    loop.remove_reader(stamps)
    return np.array(lags)


@contextmanager
def sender(core: int) -> Iterator[socket.socket]:
    """Where the stamps of a process on this core arrive."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    command = ["taskset", "-c", str(core), sys.executable, "-c", SENDER, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as process:
        try:
            yield ours
        finally:
            process.kill()


if __name__ == "__main__":
    main()
