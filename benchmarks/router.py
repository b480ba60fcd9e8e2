"""What the router takes for each token it streams, and how late it makes them: python benchmarks/router.py MODEL_DIR.

Nodes whose model is a clock: each step ends on the node's own grid of 1 / --tokens-per-s, whatever its rows are, and
draws any token. So a token's due time is known, and what a stream's tokens are later than its quickest one is what
everything between the engine and the client has added: the node's event loop, the router, the client. The router has
the first core for itself; nodes and client share the others.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from pdserve.cluster.config import DecodeConfig, load_config
from pdserve.cluster.machine import current_cores
from pdserve.core.kv_spec import KVSpec
from pdserve.core.model_config import load_model_config
from pdserve.decode_node.node import serve
from pdserve.engine.checksum import block_checksum
from pdserve.engine.engine import Engine
from pdserve.engine.kv_pool import KVPool
from pdserve.engine.step import Draw, StepPlan, StepResult
from pdserve.kvtransfer.node_process import run_node
from pdserve.launch import lifeline
from pdserve.loadtest.deployment.server import Server, free_port, free_url, started

PDSERVE = (sys.executable, "-m", "pdserve.launch.cli")
FIRST_TOKEN, NUM_TOKENS = 1000, 5000
# Not PDSERVE_...: those are settings.
TOKENS_PER_S = "CLOCK_TOKENS_PER_S"
START_S = 120.0


class ClockEngine(Engine):
    """Has no weights; KV of a few bytes."""

    @classmethod
    def load_clock(cls, model_dir: Path, *, max_model_len: int | None, **_: object) -> "ClockEngine":
        """Called in the place of Engine.load; what a model needs besides is passed over."""
        config = load_model_config(model_dir)
        engine = cls(None, config, "float32", "cpu", max_model_len or config.max_position_embeddings)  # type: ignore[arg-type]
        engine._period_s = 1 / float(os.environ[TOKENS_PER_S])
        engine._due = time.monotonic()
        engine._drawn = 0
        return engine

    _period_s: float
    _due: float
    _drawn: int

    def kv_spec(self, block_size: int = 32) -> KVSpec:
        return KVSpec(1, 1, 16, self.dtype, block_size)

    def attach(self, pool: KVPool) -> None:
        self._pool = pool

    def step(self, plan: StepPlan) -> StepResult:
        assert self._pool is not None
        now = time.monotonic()
        # The next time on the grid, which was laid when the node started: nodes are not aligned.
        self._due += max(1, -int((self._due - now) // self._period_s)) * self._period_s
        time.sleep(max(0.0, self._due - now))
        draws = {row.key: tuple(self._draw() for _ in row.samples) for row in plan.rows if row.samples}
        view = self._pool.view
        checksums = {seal.block_id: block_checksum(view.block(seal.block_id), seal.block_hash) for seal in plan.seals}
        return StepResult(plan.step, draws, checksums, self._period_s)

    def _draw(self) -> Draw:
        self._drawn += 1
        return Draw(FIRST_TOKEN + self._drawn % NUM_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--num-nodes", type=int, default=8)
    parser.add_argument("--num-streams", type=int, default=256)
    parser.add_argument("--tokens-per-s", type=float, default=50.0, help="of each stream")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each stream is")
    parser.add_argument("--node", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--router", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node is not None:
        sys.exit(run_clock_node(options))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


def run_clock_node(options: argparse.Namespace) -> int:
    lifeline.hold()
    flags = {"name": options.node, "role": "both", "router": options.router, "model": str(options.model)}
    flags |= {"kv_memory": "64MiB", "max_running": "512"}
    config = load_config(DecodeConfig, flags).config
    return run_node(config, config.steps.max_running, serve, ClockEngine.load_clock)


async def measure(options: argparse.Namespace, folder: Path) -> None:
    num_tokens = round(options.seconds * options.tokens_per_s)
    report = folder / "run.json"
    async with cluster(options, folder) as (url, router):
        before_s = cpu_s(router)
        bench = await asyncio.create_subprocess_exec(
            *PDSERVE, "bench", "run", "--url", url, "--rate", "inf", "--num-requests", str(options.num_streams),
            "--ramp", "0", "--input-tokens", "16", "--output-tokens", str(num_tokens), "--json", str(report),
            "--selftest", "off", stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await bench.wait()
        taken_s = cpu_s(router) - before_s
    streams = [request["token_times_s"] for request in json.loads(report.read_text())["requests"]]
    print(describe(streams, 1 / options.tokens_per_s, taken_s))


def describe(streams: list[list[float]], period_s: float, router_s: float) -> str:
    """streams: arrival of each token, one list a stream; the first tokens wait for prefill and are left out."""
    num_tokens = sum(map(len, streams))
    late_s = []
    for times in streams:
        due = np.array(times[1:]) - period_s * np.arange(1, len(times))
        # Whole steps that a stream missed are no delay of a token but fewer tokens.
        late_s.append((due - due.min()) % period_s)
    p50, p99 = np.percentile(np.concatenate(late_s), (50, 99)) * 1e3
    span_s = max(times[-1] for times in streams) - min(times[0] for times in streams)
    return (
        f"{len(streams)} streams, {num_tokens / span_s:,.0f} tokens/s: {router_s / num_tokens * 1e6:.1f} us of the "
        f"router's core a token; tokens came {p50:.2f} ms (p50) and {p99:.2f} ms (p99) after their stream's quickest"
    )


@asynccontextmanager
async def cluster(options: argparse.Namespace, folder: Path) -> AsyncIterator[tuple[str, int]]:
    """URL and process id of the router, when all nodes are in."""
    cores = current_cores()
    control, url = f"tcp://127.0.0.1:{free_port()}", free_url()
    port = url.rsplit(":", 1)[1]
    router = (*PDSERVE, "router", "--model", str(options.model), "--control", control, "--port", port)
    os.environ[TOKENS_PER_S] = str(options.tokens_per_s)
    async with AsyncExitStack() as stack:
        first = Server("router", url, router, cores[:1])
        process = await stack.enter_async_context(started(first, folder / "router.log"))
        for index in range(options.num_nodes):
            name = f"D{index}"
            node = (sys.executable, __file__, str(options.model), "--node", name, "--router", control)
            await stack.enter_async_context(
                started(Server(name, url, node, cores[1:] or cores), folder / f"{name}.log")
            )
        async with asyncio.timeout(START_S):
            await wait_for_nodes(url, options.num_nodes)
        os.sched_setaffinity(0, cores[1:] or cores)
        yield url, process.pid


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
