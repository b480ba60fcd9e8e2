"""kill -9 of any node while streams run loses, repeats and changes no token; SIGTERM ends everything."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from tests.e2e.client import PATIENCE_S
from tests.e2e.conftest import Connect, Start
from tests.e2e.oracle import Oracle
from tests.e2e.servers import Server, all_pids, command_line, pools

NUM_TOKENS = 32
LONG_TOKENS = 800


@pytest.mark.parametrize(
    ("nodes", "offset"), [(("P0",), 137), (("D0",), 537), (("P0", "D0"), 937)], ids=["prefill", "decode", "both"]
)
async def test_killing_nodes_under_streams_costs_no_token_and_they_come_back(
    real_up: Server, connect: Connect, oracle: Oracle, nodes: tuple[str, ...], offset: int
):
    client = connect(real_up)
    # Two that decode, and one whose prompt is being computed.
    prompts = [oracle.prompt(7, 40), oracle.prompt(57, 70), oracle.prompt(offset, LONG_TOKENS)]
    expected = [oracle.answer(prompt, NUM_TOKENS) for prompt in prompts]
    async with (
        client.stream(prompts[0], NUM_TOKENS) as first,
        client.stream(prompts[1], NUM_TOKENS) as second,
        asyncio.TaskGroup() as group,
    ):
        await first.read(num_events=4)
        await second.read(num_events=2)
        prefilling = group.create_task(client.read_stream(prompts[2], NUM_TOKENS))
        await client.until_blocks(lambda blocks: blocks["P0"] > 0, PATIENCE_S)
        before = len(real_up.lines)
        for node in nodes:
            real_up.kill(node)
        await first.read()
        await second.read()
    answers = [
        (stream.text, stream.closing["usage"]["completion_tokens"]) for stream in (first, second, prefilling.result())
    ]
    assert answers == expected
    for node in nodes:
        await asyncio.to_thread(real_up.wait_for, rf"^{node} was ended by SIGKILL; restart in", since=before)
        await asyncio.to_thread(real_up.wait_for, rf"{node} joined as", since=before)
    await client.until_ready()
    # What a decode node still has of an earlier prompt it might compute itself.
    fresh = oracle.prompt(offset + 20, 60)
    again = await client.complete(fresh, NUM_TOKENS)
    assert again.text == oracle.answer(fresh, NUM_TOKENS)[0]
    assert again.body["metrics"]["nodes"] == {"prefill": "P0", "decode": "D0"}


async def test_sigterm_ends_everything_and_leaves_nothing(start: Start, connect: Connect, small_model: Path):
    with tempfile.TemporaryDirectory(prefix="e2e-") as folder:
        server = start("up", "--model", small_model, "--port", 0, "--kv-memory", "1MiB", TMPDIR=folder).wait_ready()
        processes = server.tree()
        memory = pools(list(processes))
        assert len(processes) == 4
        assert len(memory) == 2
        assert os.listdir(folder)
        async with connect(server).stream("Go on", 1000, ignore_eos=True) as stream:
            await stream.read(num_events=3)
            code = await asyncio.to_thread(server.stop)
        assert code == 0
        assert [pid for pid, line in processes.items() if command_line(pid) == line] == []
        assert memory & pools(all_pids()) == set()
        assert os.listdir(folder) == []
