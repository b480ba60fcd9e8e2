"""What the router takes for each token it streams, and how late it makes them: python benchmarks/router.py MODEL_DIR.

Nodes without a model (mock_nodes.py) and a client that only looks at the clock share one process on one core, the
router has another for itself. A token is late by the time from its sending on the node to its reading by the client;
how late the node itself was is told beside it. Then streams that are open without a token, more and more of them: what
they take by themselves, and what they add to the tokens of busy ones.
"""

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from mock_nodes import IDLE, MockNode, run_nodes
from tokenizers import Tokenizer

from pdserve.cluster import event_loop
from pdserve.cluster.machine import current_cores
from pdserve.core.model_config import load_model_config
from pdserve.loadtest.deployment.server import Server, free_port, free_url, started

PDSERVE = (sys.executable, "-m", "pdserve.launch.cli")
START_S = 60.0
# Of every run, at its beginning: streams open and begin.
SETTLE_S = 1.5
IDLE_STREAMS = (1, 100, 1000, 5000)
BUSY_STREAMS = 32
MEASURED_S = 5.0
# Its text is one character, so that a client sees how many came.
LETTER = "a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--num-nodes", type=int, default=8)
    parser.add_argument("--num-streams", type=int, default=256)
    parser.add_argument("--tokens-per-s", type=float, default=50.0, help="of each stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each run is measured")
    parser.add_argument("--runs", type=int, default=3, help="medians are of so many")
    parser.add_argument("--idle", type=int, nargs="*", default=IDLE_STREAMS, help="streams without a token; none: skip")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        event_loop.run(measure(options, Path(folder)))


async def measure(options: argparse.Namespace, folder: Path) -> None:
    async with cluster(options, folder) as bench:
        runs = [await bench.run(options.num_streams, options.seconds) for _ in range(options.runs)]
        print(describe(f"{options.num_streams} streams", runs))
        if options.idle:
            await growth(bench, options)


async def growth(bench: "Bench", options: argparse.Namespace) -> None:
    print("\n| open without a token | router alone | of its memory | a token of 32 streams | late p50 / p99 |")
    print("|---|---|---|---|---|")
    empty = bench.resident_bytes()
    for num_idle in options.idle:
        async with bench.idle(num_idle):
            alone = await bench.cpu_share(MEASURED_S)
            each = (bench.resident_bytes() - empty) / num_idle / 1024
            run = await bench.run(BUSY_STREAMS, MEASURED_S)
            print(
                f"| {num_idle:,} | {alone:.1%} of a core | {each:,.0f} KiB each | {run.token_us:.1f} us "
                f"| {run.late_ms(50):.2f} / {run.late_ms(99):.2f} ms |",
                flush=True,
            )


@dataclass(frozen=True, slots=True)
class Run:
    """late_s: of each token that was sent while it was measured; node_late_s: what the node was late itself."""

    late_s: np.ndarray
    node_late_s: np.ndarray
    router_s: float
    seconds: float

    @property
    def token_us(self) -> float:
        return self.router_s / len(self.late_s) * 1e6

    def late_ms(self, percentile: float) -> float:
        return float(np.percentile(self.late_s, percentile)) * 1e3


def describe(name: str, runs: list[Run]) -> str:
    rate = median(len(run.late_s) / run.seconds for run in runs)
    token_us = median(run.token_us for run in runs)
    p50, p99 = (median(run.late_ms(percentile) for run in runs) for percentile in (50, 99))
    node_p99 = median(float(np.percentile(run.node_late_s, 99)) * 1e3 for run in runs)
    return (
        f"{name}, {rate:,.0f} tokens/s: {token_us:.1f} us of the router's core a token (at most 30); tokens came "
        f"{p50:.2f} ms (p50) and {p99:.2f} ms (p99, at most 5) after they were sent, "
        f"and were sent {node_p99:.2f} ms (p99) after they were due"
    )


@dataclass
class Clock:
    """When each token of each stream was due, was sent and came."""

    due: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    came: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def on_sent(self, stream: int, index: int, due: float) -> None:
        if index == len(self.sent[stream]):
            self.due[stream].append(due)
            self.sent[stream].append(time.monotonic())

    def lateness(self, since: float, until: float) -> tuple[np.ndarray, np.ndarray]:
        """Of tokens sent in this time: late after they were sent, and sent after they were due."""
        late, node_late = [], []
        for stream, came in self.came.items():
            for due, sent, read in zip(self.due[stream], self.sent[stream], came, strict=False):
                if since <= sent < until:
                    late.append(read - sent)
                    node_late.append(sent - due)
        return np.array(late), np.array(node_late)


class Reader(asyncio.Protocol):
    """One stream of the client: sends the request, and notes when each token came."""

    def __init__(self, request: bytes, came: list[float]):
        self._request = request
        self._came = came
        self._rest = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            begin = event.find(b'"text":"')
            if begin >= 0:
                num_tokens = event.index(b'"', begin + 8) - begin - 8
                self._came += [now] * num_tokens
            elif event.endswith(b"[DONE]"):
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Bench:
    """A router under load. stream numbers are never used twice."""

    def __init__(self, url: str, router: int, tokens_per_s: float, machines: list[MockNode], clock: Clock):
        self.clock = clock
        self._host, port = url.removeprefix("http://").rsplit(":", 1)
        self._port = int(port)
        self._router = router
        self._tokens_per_s = tokens_per_s
        self._machines = machines
        self._num_busy = 0

    async def run(self, num_streams: int, seconds: float) -> Run:
        num_tokens = round((seconds + 2 * SETTLE_S) * self._tokens_per_s)
        numbers = range(self._num_busy, self._num_busy + num_streams)
        self._num_busy += num_streams
        readers = [await self._open(number, num_tokens) for number in numbers]
        await asyncio.sleep(SETTLE_S)
        begin, before_s = time.monotonic(), cpu_s(self._router)
        await asyncio.sleep(seconds)
        end, after_s = time.monotonic(), cpu_s(self._router)
        await asyncio.gather(*(reader.ended for reader in readers))
        late_s, node_late_s = self.clock.lateness(begin, end)
        return Run(late_s, node_late_s, after_s - before_s, end - begin)

    @asynccontextmanager
    async def idle(self, num_streams: int) -> AsyncIterator[None]:
        """So many streams that are open, on nodes, and get no token."""
        readers = [await self._open(IDLE + index, 100) for index in range(num_streams)]
        await until(lambda: all(self.clock.came[IDLE + index] for index in range(num_streams)))
        try:
            yield
        finally:
            for reader in readers:
                reader.transport.close()
            await asyncio.gather(*(reader.ended for reader in readers))
            await until(lambda: not any(machine.streams for machine in self._machines))
            for index in range(num_streams):
                del self.clock.came[IDLE + index]

    async def cpu_share(self, seconds: float) -> float:
        before_s = cpu_s(self._router)
        await asyncio.sleep(seconds)
        return (cpu_s(self._router) - before_s) / seconds

    def resident_bytes(self) -> int:
        fields = Path(f"/proc/{self._router}/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()

    async def _open(self, number: int, num_tokens: int) -> Reader:
        body = {"prompt": [number] * 16, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
        text = json.dumps(body)
        request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\n\r\n{text}"
        )
        _, reader = await asyncio.get_running_loop().create_connection(
            lambda: Reader(request.encode(), self.clock.came[number]), self._host, self._port
        )
        return reader


@asynccontextmanager
async def cluster(options: argparse.Namespace, folder: Path) -> AsyncIterator[Bench]:
    """A router on the first core, its nodes in this process on the others."""
    cores = current_cores()
    control, url = f"tcp://127.0.0.1:{free_port()}", free_url()
    port = url.rsplit(":", 1)[1]
    command = (*PDSERVE, "router", "--model", str(options.model), "--control", control, "--port", port)
    token = Tokenizer.from_file(str(options.model / "tokenizer.json")).token_to_id(LETTER)
    max_model_len = load_model_config(options.model).max_position_embeddings
    clock, stop = Clock(), asyncio.Event()
    machines = [MockNode(token, clock.on_sent) for _ in range(options.num_nodes)]
    async with started(Server("router", url, command, cores[:1]), folder / "router.log") as process:
        os.sched_setaffinity(0, cores[1:] or cores)
        nodes = asyncio.create_task(run_nodes(machines, control, 1 / options.tokens_per_s, max_model_len, stop))
        try:
            async with asyncio.timeout(START_S):
                await wait_for_nodes(url, options.num_nodes)
            yield Bench(url, process.pid, options.tokens_per_s, machines, clock)
        finally:
            stop.set()
            await nodes


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_S):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)


async def wait_for_nodes(url: str, num_nodes: int) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/cluster") as answer:
                    if len((await answer.json()).get("nodes", [])) == num_nodes:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


def cpu_s(pid: int) -> float:
    """Of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
