"""A client that hangs up gives back what it held on both nodes, and nobody else notices.

The promise is 0.5 s. A node counts its blocks in its answer to each beat, and beats come each 0.5 s, so
/metrics may be that much older; the step in flight, which is short here, ends first. Hence WITHIN_S.
"""

import asyncio

import pytest

from tests.e2e.client import PATIENCE_S, Client
from tests.e2e.conftest import STEP_TOKENS, Connect
from tests.e2e.oracle import Oracle
from tests.e2e.servers import Server

WITHIN_S = 1.2
LONG_TOKENS = 20 * STEP_TOKENS
NUM_TOKENS = 24


@pytest.fixture
async def client(real_up: Server, connect: Connect) -> Client:
    client = connect(real_up)
    await client.until_blocks(holds_nothing, PATIENCE_S)
    return client


def holds_nothing(blocks: dict[str, int]) -> bool:
    return len(blocks) == 2 and not any(blocks.values())


def prefills(blocks: dict[str, int]) -> bool:
    return blocks["P0"] > 0


def decodes(blocks: dict[str, int]) -> bool:
    return blocks["D0"] > 0


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_hanging_up_while_the_prompt_is_computed_frees_its_blocks(
    real_up: Server, client: Client, oracle: Oracle, is_stream: bool
):
    prompt = oracle.prompt(31 if is_stream else 32, LONG_TOKENS)
    before = len(real_up.lines)
    asking = asyncio.create_task(client.complete(prompt, NUM_TOKENS, stream=is_stream))
    await client.until_blocks(prefills, PATIENCE_S)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await client.until_blocks(holds_nothing, WITHIN_S)
    ended = rf"{LONG_TOKENS} prompt \+ 0 output tokens, .* finish cancelled"
    await asyncio.to_thread(real_up.wait_for, ended, since=before)


async def test_hanging_up_on_a_stream_frees_its_blocks(client: Client, oracle: Oracle):
    async with client.stream(oracle.prompt(33, 40), 1000, ignore_eos=True) as stream:
        await stream.read(num_events=3)
        await client.until_blocks(decodes, PATIENCE_S)
    await client.until_blocks(holds_nothing, WITHIN_S)


async def test_hanging_up_on_a_whole_answer_frees_its_blocks(client: Client, oracle: Oracle):
    asking = asyncio.create_task(client.complete(oracle.prompt(34, 40), 1000, ignore_eos=True))
    await client.until_blocks(decodes, PATIENCE_S)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await client.until_blocks(holds_nothing, WITHIN_S)


async def test_others_go_on_undisturbed_when_a_client_hangs_up(client: Client, oracle: Oracle):
    prompts = [oracle.prompt(35, 50), oracle.prompt(36, 90)]
    expected = [oracle.answer(prompt, NUM_TOKENS)[0] for prompt in prompts]
    async with asyncio.TaskGroup() as group, client.stream(oracle.prompt(37, 40), 1000, ignore_eos=True) as leaving:
        others = [group.create_task(client.read_stream(prompt, NUM_TOKENS)) for prompt in prompts]
        prefilling = group.create_task(client.complete(oracle.prompt(38, LONG_TOKENS), NUM_TOKENS))
        await leaving.read(num_events=2)
        prefilling.cancel()
    assert [other.result().text for other in others] == expected
    await client.until_blocks(holds_nothing, WITHIN_S)
