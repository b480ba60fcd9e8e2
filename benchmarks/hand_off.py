"""What a hand-off takes: python benchmarks/hand_off.py MODEL_DIR. Prints Markdown tables.

The first table is one thread copying the KV blocks of a prompt out of one pool in shared memory into another, with
and without looking at them; the pools are larger than the caches, so the blocks come from memory. The second is
whole servers, one prompt at a time, over every way blocks can travel: how long after the first token the decode
node had all of them verified. One server runs at a time. Keep the machine quiet meanwhile.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pdserve.cluster.machine import current_cores, split_cores
from pdserve.core.ids import BlockHash, BlockId
from pdserve.core.kv_spec import DTYPE_BYTES, KVSpec
from pdserve.core.model_config import load_model_config
from pdserve.engine.checksum import block_checksum
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.kvtransfer.copying import copy_and_verify
from pdserve.kvtransfer.pull import BlockCopy, Verdict
from pdserve.kvtransfer.shm import PoolMemory
from pdserve.loadtest.deployment.server import Server, free_port, running, started

WAYS = ("shm", "ipc", "tcp", "tcp+curve")
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="length of every prompt")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPE_BYTES))
    parser.add_argument("--rounds", type=int, default=50, help="runs of each line of the first table, in turns")
    parser.add_argument("--pool-mib", type=int, default=256, help="size of either pool")
    parser.add_argument("--num-requests", type=int, default=50, help="prompts for each server; 0: no servers")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="how blocks travel, one server each")
    parser.add_argument("--ttft-ms", type=float, default=660.0, help="what the cost of verification is compared with")
    parser.add_argument("--hand-off-ms", type=float, default=3.0, help="the same, beside --ttft-ms")
    options = parser.parse_args()
    config = load_model_config(options.model)
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, options.dtype)
    tables = [copies_table(spec, options)]
    if options.num_requests:
        exposed = {}
        for way in options.ways:
            exposed[way] = asyncio.run(hand_off(way, options, config.vocab_size))
        tables.append(exposed_table(exposed))
    print("\n\n".join(tables))


# ---- one thread, two pools -----------------------------------------------------------------------


class Bench:
    """Two pools with room for many prompts; every run takes blocks that the last ones did not."""

    def __init__(self, spec: KVSpec, pool_mib: int, num_tokens: int):
        self.num_blocks = spec.num_blocks_for(num_tokens)
        self.spec = spec
        size = max(self.num_blocks, (pool_mib << 20) // spec.block_bytes)
        self.memories = [PoolMemory.create("hand-off", buffer_bytes(spec, size)) for _ in range(2)]
        self.source, self.target = (KVPool(spec, size, memory.buffer) for memory in self.memories)
        rng = np.random.default_rng(0)
        self.checksums = []
        for block_id in range(size):
            block = self.source.view.block(BlockId(block_id))
            np.frombuffer(block, np.uint8)[:] = np.frombuffer(rng.bytes(spec.payload_bytes), np.uint8)
            self.checksums.append(block_checksum(block, self.name(block_id)))
        self._shuffle = random.Random(0)

    def name(self, block_id: int) -> BlockHash:
        return BlockHash(block_id.to_bytes(16, "little"))

    def pick(self) -> list[BlockCopy]:
        sources, targets = (self._shuffle.sample(range(self.source.num_blocks), self.num_blocks) for _ in range(2))
        return [
            BlockCopy(
                self.name(source),
                BlockId(source),
                int(self.source.view.generations[source]),
                self.checksums[source],
                BlockId(target),
            )
            for source, target in zip(sources, targets, strict=True)
        ]

    def checksum(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            block_checksum(self.source.view.block(copy.source), copy.hash)

    def copy(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            read = np.frombuffer(self.source.view.block(copy.source), np.uint8)
            np.copyto(np.frombuffer(self.target.view.block(copy.target), np.uint8), read)

    def copy_and_verify(self, copies: list[BlockCopy]) -> None:
        judged = copy_and_verify(self.source.view, self.target, copies)
        assert judged.verdicts == (Verdict.OK,) * len(copies)

    def copy_then_verify(self, copies: list[BlockCopy]) -> None:
        self.copy(copies)
        for copy in copies:
            assert block_checksum(self.target.view.block(copy.target), copy.hash) == copy.checksum

    def close(self) -> None:
        for pool, memory in zip((self.source, self.target), self.memories, strict=True):
            pool.view.release()
            memory.close()


def copies_table(spec: KVSpec, options: argparse.Namespace) -> str:
    bench = Bench(spec, options.pool_mib, options.tokens)
    runs: dict[str, Callable[[list[BlockCopy]], None]] = {
        "checksum at the source": bench.checksum,
        "copy alone": bench.copy,
        "copy and verify, one pass": bench.copy_and_verify,
        "copy all, then verify all": bench.copy_then_verify,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds):
        progress(f"copies, round {turn + 1} of {options.rounds}")
        # A different one goes first in each round.
        names = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
        for name in names:
            copies = bench.pick()
            started = time.perf_counter()
            runs[name](copies)
            times[name].append(time.perf_counter() - started)
    bench.close()
    taken = {name: median(values) for name, values in times.items()}
    num_bytes = bench.num_blocks * spec.payload_bytes
    lines = [
        f"{options.tokens} tokens: {bench.num_blocks} blocks of {spec.payload_bytes} bytes, "
        f"medians of {options.rounds} runs in turns",
        "",
        "| one thread | time | GB/s | of the speed of a copy |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {seconds * 1e3:.2f} ms | {num_bytes / seconds / 1e9:.1f} | {taken['copy alone'] / seconds:.0%} |"
        for name, seconds in taken.items()
    ]
    added = taken["checksum at the source"] + taken["copy and verify, one pass"] - taken["copy alone"]
    whole_ms = options.ttft_ms + options.hand_off_ms
    lines += ["", f"Verification adds {added * 1e3:.2f} ms: {added * 1e3 / whole_ms:.2%} of {whole_ms:g} ms."]
    return "\n".join(lines)


# ---- whole servers -------------------------------------------------------------------------------


@asynccontextmanager
async def server(way: str, model: Path, dtype: str) -> AsyncIterator[str]:
    """One prefill and one decode node that hand off this way; its URL, once it answers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    common = ["--model", str(model)]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-")))
        if way in ("shm", "ipc"):
            transport = "shm" if way == "shm" else "zmq"
            front, *nodes = [["up", *common, "--port", str(port), "--transport", transport, "--dtype", dtype]]
        else:
            front, *nodes = role_lines(common, port, dtype, keys_in(folder) if way == "tcp+curve" else [])
        progress(f"{way}: starting")
        for words in nodes:
            node = Server(words[0], url, (*pdserve(), *words))
            await stack.enter_async_context(started(node, folder / f"{words[0]}.log"))
        front_server = Server(front[0], url, (*pdserve(), *front))
        await stack.enter_async_context(running(front_server, folder / f"{front[0]}.log"))
        yield url


async def hand_off(way: str, options: argparse.Namespace, vocab_size: int) -> list[dict[str, Any]]:
    async with server(way, options.model, options.dtype) as url:
        return ledgers(way, url, options.tokens, vocab_size, options.num_requests)


def role_lines(common: list[str], port: int, dtype: str, keys: list[str]) -> list[list[str]]:
    """Router, prefill and decode node over loopback TCP, on the cores that `up` would give them."""
    control = f"tcp://127.0.0.1:{free_port()}"
    nodes = []
    for role, cores in zip(("prefill", "decode"), split_cores(current_cores(), 2), strict=True):
        on = ["--cores", ",".join(map(str, cores)), "--num-threads", str(len(cores)), "--dtype", dtype]
        nodes.append([role, *common, "--router", control, "--transport", "zmq", *on, *keys])
    return [["router", *common, "--port", str(port), "--control", control, *keys], *nodes]


def keys_in(folder: Path) -> list[str]:
    subprocess.run([*pdserve(), "keygen", str(folder / "keys")], check=True, stdout=subprocess.DEVNULL)
    return ["--key-file", str(folder / "keys")]


def pdserve() -> list[str]:
    return [sys.executable, "-m", "pdserve.launch.cli"]


def ledgers(way: str, url: str, num_tokens: int, vocab_size: int, num_requests: int) -> list[dict[str, Any]]:
    """The ledger of each request, all prompts different; those of the first few are left out."""
    rng = random.Random(0)
    with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
        model = json.load(answer)["data"][0]["id"]
    found = []
    for turn in range(-WARM_UP, num_requests):
        progress(f"{way}: {'warming up' if turn < 0 else f'request {turn + 1} of {num_requests}'}")
        prompt = [rng.randrange(vocab_size) for _ in range(num_tokens)]
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            ledger = json.load(answer)["metrics"]
        if turn >= 0:
            found.append(ledger)
    return found


def exposed_table(exposed: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| blocks travel by | exposed hand-off p50 / p99 | copy and verify p50 | TTFT p50 | MB moved | handed off |",
        "|---|---|---|---|---|---|",
    ]
    for way, all_ledgers in exposed.items():
        moved = [ledger for ledger in all_ledgers if ledger["exposed_transfer_s"] is not None]
        if not moved:
            lines.append(f"| {way} | - | - | - | - | 0 of {len(all_ledgers)} |")
            continue
        waits, ttfts = (sorted(ledger[key] * 1e3 for ledger in moved) for key in ("exposed_transfer_s", "ttft_s"))
        copies = [(ledger["copy_s"] + ledger["verify_s"]) * 1e3 for ledger in moved]
        lines.append(
            f"| {way} | {median(waits):.1f} / {waits[-(-99 * len(waits) // 100) - 1]:.1f} ms | {median(copies):.1f} ms "
            f"| {median(ttfts):.0f} ms | {median(ledger['bytes_moved'] for ledger in moved) / 1e6:.1f} "
            f"| {len(moved)} of {len(all_ledgers)} |"
        )
    return "\n".join(lines)


def progress(text: str) -> None:
    print(text, end="\033[K\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
