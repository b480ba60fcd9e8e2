"""kill -9 of any node while streams run loses, repeats and changes no token; SIGTERM ends everything."""

import asyncio
import os
import tempfile
from pathlib import Path

from tests.e2e.client import Client, Stream
from tests.e2e.conftest import Connect, Start
from tests.e2e.oracle import Oracle
from tests.e2e.servers import Server, all_pids, command_line, pools

NUM_TOKENS = 32
LONG_TOKENS = 400


async def kill_while_streaming(server: Server, client: Client, oracle: Oracle, node: str, offset: int) -> None:
    """Kill a node under two streams and a prompt that is being computed; all must end as if nothing had been."""
    prompts = [oracle.prompt(offset, 40), oracle.prompt(offset + 50, 70), oracle.prompt(offset + 130, LONG_TOKENS)]
    expected = [oracle.answer(prompt, NUM_TOKENS) for prompt in prompts]
    async with (
        client.stream(prompts[0], NUM_TOKENS) as first,
        client.stream(prompts[1], NUM_TOKENS) as second,
        asyncio.TaskGroup() as group,
    ):
        streams: list[Stream] = [await first.read(num_events=4), await second.read(num_events=2)]
        prefilling = group.create_task(client.read_stream(prompts[2], NUM_TOKENS))
        await client.until_blocks(lambda blocks: blocks["P0"] > 0, 10)
        before = server.kill(node)
        await first.read()
        await second.read()
    streams.append(prefilling.result())
    assert [(s.text, s.closing["usage"]["completion_tokens"]) for s in streams] == expected
    await asyncio.to_thread(server.wait_for, rf"^{node} was ended by SIGKILL; restart in", since=before)
    await asyncio.to_thread(server.wait_for, r"\bserving$", since=before)
    again = await client.complete(prompts[0], NUM_TOKENS)
    assert again.text == expected[0][0]
    assert again.body["metrics"]["nodes"] == {"prefill": "P0", "decode": "D0"}


async def test_killing_the_prefill_node_costs_no_token_and_it_comes_back(
    real_up: Server, connect: Connect, oracle: Oracle
):
    await kill_while_streaming(real_up, connect(real_up), oracle, "P0", offset=7)


async def test_killing_the_decode_node_costs_no_token_and_it_comes_back(
    real_up: Server, connect: Connect, oracle: Oracle
):
    await kill_while_streaming(real_up, connect(real_up), oracle, "D0", offset=600)


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
