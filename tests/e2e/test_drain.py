"""SIGTERM on a node: its streams end where they are, new ones go elsewhere, and then it ends by itself."""

import asyncio
import os
import signal
from pathlib import Path

from tests.e2e.client import PATIENCE_S
from tests.e2e.conftest import Connect, Start


async def test_a_decode_node_ends_when_its_stream_has(start: Start, connect: Connect, small_model: Path):
    server = start("up", "--model", small_model, "--port", 0, "--kv-memory", "1MiB", "--decode", 2).wait_ready()
    client = connect(server)
    # Ready is a cluster with its first decode node; the other one may still be starting.
    await client.until_blocks(lambda blocks: len(blocks) == 3, PATIENCE_S)
    async with client.stream("Go on", 1000, ignore_eos=True) as stream:
        await stream.read(num_events=3)
        held = await client.until_blocks(lambda blocks: blocks.get("D0", 0) + blocks.get("D1", 0) > 0, PATIENCE_S)
        leaving, staying = ("D0", "D1") if held.get("D0") else ("D1", "D0")
        before = len(server.lines)
        os.kill(server.pid_of(leaving), signal.SIGTERM)
        await asyncio.to_thread(server.wait_for, "leaving: no new work", since=before)
        others = [await client.complete("Elsewhere", 4, ignore_eos=True) for _ in range(3)]
        assert [answer.body["metrics"]["nodes"]["decode"] for answer in others] == [staying] * 3
        await stream.read()
    assert stream.closing["usage"]["completion_tokens"] == 1000
    assert (stream.closing["metrics"]["nodes"]["decode"], stream.closing["metrics"]["attempts"]) == (leaving, 1)
    await asyncio.to_thread(server.wait_for, rf"^{leaving} .*restart in", since=before)
    await asyncio.to_thread(server.wait_for, f"{leaving} joined as decode", since=before)
