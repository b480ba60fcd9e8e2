"""Several samples and many streams at once, as a client of real processes sees them, on a pool that is too small."""

import asyncio
import random
from typing import Any

import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.e2e.client import Client, Stream
from tests.e2e.conftest import Connect
from tests.e2e.servers import Server
from tests.soak.answer import Answer
from tests.soak.catalogue import ASCII_ONLY

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
BLOCK_SIZE = 32
DRAINED_WITHIN_S = 10.0


@pytest.fixture
async def client(small_up: Server, connect: Connect) -> Client:
    return connect(small_up)


async def ask(client: Client, path: str, stream: bool = False, **body: Any) -> Answer:
    if not stream:
        found = await client.post(path, **body)
        assert found.status == 200, found.body
        return Answer.of(found.body)
    answer = Answer()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.session.post(path, json=body) as response:
        for event in (await Stream(response).read()).events:
            answer.add(event)
    return answer


async def test_sixteen_requests_for_four_stories_each_answer_as_one_alone_and_free_all_blocks(client: Client):
    messages = [{"role": "user", "content": "Hello, write a short story."}]
    story = {"messages": messages, "temperature": 0.8, "seed": 1, "max_tokens": 50}
    alone = await ask(client, CHAT, n=4, **story)
    assert sorted(alone.choices) == [0, 1, 2, 3]
    assert len({choice.text for choice in alone.choices.values()}) == 4
    assert all(choice.finish in ("stop", "length") for choice in alone.choices.values())
    first = await ask(client, CHAT, **story)
    assert first.choices[0] == alone.choices[0]
    assert first.usage is not None
    assert alone.usage is not None
    assert alone.usage["prompt_tokens"] == first.usage["prompt_tokens"]
    assert alone.usage["completion_tokens"] > first.usage["completion_tokens"]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(client, CHAT, stream=bool(i % 2), n=4, **story)) for i in range(16)]
    assert [task.result().difference(alone) for task in tasks] == [None] * 16
    await client.until_blocks(lambda blocks: not any(blocks.values()), DRAINED_WITHIN_S)


async def test_as_many_bytes_move_for_four_samples_as_for_one(client: Client):
    moved = []
    for n in (1, 4):
        prompt = make_prompt(5 * BLOCK_SIZE + 3, seed=100 + n)
        found = await client.complete(prompt, 4, n=n, ignore_eos=True)
        assert found.body["usage"]["completion_tokens"] == 4 * n
        moved.append(found.body["metrics"]["bytes_moved"])
    assert moved[0] == moved[1] > 0


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, VOCAB_SIZE) for _ in range(num_tokens)]


NUM_STREAMS = 6
# Each starts with 8 of the 63 blocks, so all can, and ends with 13: only four can at the same time.
NUM_PROMPT = 200
NUM_OUTPUTS = 200


async def num_preemptions(client: Client) -> float:
    return sum((await client.gauges("pdserve_preemptions")).values())


async def test_six_streams_in_a_pool_for_four_show_what_they_show_alone_up_to_their_stop_strings(client: Client):
    draws: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7, "top_p": 0.95},
        {"temperature": 0.7, "seed": -1, "min_p": 0.02, "frequency_penalty": 0.4, "min_tokens": 20},
    )
    bodies, alone = [], []
    for number in range(NUM_STREAMS):
        body = {"prompt": make_prompt(NUM_PROMPT, number), "max_tokens": NUM_OUTPUTS, "ignore_eos": True, "logprobs": 1}
        body |= {"logit_bias": ASCII_ONLY} | draws[number % len(draws)]
        plain = await ask(client, COMPLETION, **body)
        stop = plain.choices[0].text[-12:-8]
        bodies.append(body | {"stop": [stop, stop + " and more"]})
        alone.append(await ask(client, COMPLETION, **bodies[-1]))
        assert alone[-1].choices[0].finish == "stop"
        assert plain.choices[0].text.startswith(alone[-1].choices[0].text)
    before = await num_preemptions(client)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(client, COMPLETION, stream=True, **body)) for body in bodies]
    assert [task.result().difference(answer) for task, answer in zip(tasks, alone, strict=True)] == [None] * NUM_STREAMS
    # Nodes tell of it in their next beat.
    await client.until_blocks(lambda blocks: not any(blocks.values()), DRAINED_WITHIN_S)
    assert await num_preemptions(client) > before
