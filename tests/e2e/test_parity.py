"""Greedy answers of the real model through real processes equal transformers' in fp32, to the last token."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e.conftest import Connect, Start
from tests.e2e.oracle import Oracle
from tests.e2e.servers import Server

NUM_TOKENS = 16
BLOCK_SIZE = 32
LENGTHS_OF_EIGHT = (1, 17, 33, 64, 97, 130, 161, 220)


async def check_cold_and_warm(client, oracle: Oracle, prompt: list[int]) -> None:
    text, num_tokens = oracle.answer(prompt, NUM_TOKENS)
    # The last token is always computed: its logits give the next one.
    for num_cached in (0, min(len(prompt) // BLOCK_SIZE * BLOCK_SIZE, len(prompt) - 1)):
        answer = await client.complete(prompt, NUM_TOKENS)
        assert answer.text == text
        assert answer.body["usage"]["completion_tokens"] == num_tokens
        assert answer.body["metrics"]["cached_tokens"] == num_cached


@pytest.mark.parametrize("length", [127, 128, 129])
async def test_split_nodes_with_small_steps_answer_as_transformers_cold_and_warm(
    real_up: Server, connect: Connect, oracle: Oracle, length: int
):
    await check_cold_and_warm(connect(real_up), oracle, oracle.prompt(300 * (length - 126), length))


async def test_one_colocated_node_answers_as_transformers_cold_and_warm(
    start: Start, connect: Connect, real_model: Path, oracle: Oracle
):
    flags = ("--role-mode", "both", "--dtype", "float32", "--kv-memory", "64MiB")
    client = connect(start("up", "--model", real_model, "--port", 0, *flags).wait_ready())
    for index, length in enumerate((63, 64, 65)):
        await check_cold_and_warm(client, oracle, oracle.prompt(300 * index, length))


async def test_blocks_that_travel_in_frames_answer_as_transformers_cold_and_warm(
    start: Start, connect: Connect, real_model: Path, oracle: Oracle
):
    flags = ("--transport", "zmq", "--dtype", "float32", "--kv-memory", "64MiB")
    server = start("up", "--model", real_model, "--port", 0, *flags).wait_ready()
    assert any("linked to P0, transport ZeroMQ" in line for line in server.lines)
    client = connect(server)
    for index, length in enumerate((63, 64, 65)):
        await check_cold_and_warm(client, oracle, oracle.prompt(300 * index, length))


async def test_eight_streams_of_mixed_lengths_at_once_answer_as_transformers(
    real_up: Server, connect: Connect, oracle: Oracle
):
    prompts = [oracle.prompt(11 + 201 * index, length) for index, length in enumerate(LENGTHS_OF_EIGHT)]
    expected = [oracle.answer(prompt, NUM_TOKENS) for prompt in prompts]
    client = connect(real_up)
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(client.read_stream(prompt, NUM_TOKENS)) for prompt in prompts]
    answers = [stream.result() for stream in streams]
    assert [answer.text for answer in answers] == [text for text, _ in expected]
    assert [answer.closing["usage"]["completion_tokens"] for answer in answers] == [num for _, num in expected]
    # With so many at once the decode node computes some of the prompts, too.
    assert ("P0", "D0") in {tuple(answer.closing["metrics"]["nodes"].values()) for answer in answers}
