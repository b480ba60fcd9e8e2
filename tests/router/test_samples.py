"""Several samples of one prompt, as a client sees them."""

import asyncio
import dataclasses

import pytest

from pdserve.router.exchange import WRITE_BYTES
from pdserve.router.generation import GenerationError
from tests.checkpoints import EOS_ID
from tests.router.door import (
    CARD,
    METRICS,
    Script,
    ScriptedService,
    assembled,
    open_door,
    says,
    whole_choices,
)

STORY = [{"role": "user", "content": "Hello, write a short story."}]
ANSWERS = ("one.", "two, longer", "", "삼겹살 👩‍👧")


def says_each(text, answers, **fields):
    """A service whose samples say one of these each, and then EOS."""
    first, *others = [[*text.encode(answer), EOS_ID] for answer in answers]
    return ScriptedService(Script(first, others=others, **fields))


async def both_modes(door, path="complete", **fields):
    """Choices and usage of the same request, not streamed and streamed."""
    whole = (await getattr(door, path)(**fields)).json
    events = (await getattr(door, path)(stream=True, stream_options={"include_usage": True}, **fields)).events
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert assembled(chunks) == whole_choices(whole)
    assert (usage["choices"], usage["usage"], usage["metrics"]) == ([], whole["usage"], METRICS)
    assert all(chunk["usage"] is None for chunk in chunks)
    return whole_choices(whole), whole["usage"]


@pytest.mark.parametrize("merge", [1, 5, 100])
@pytest.mark.parametrize("path", ["complete", "chat"])
async def test_every_sample_is_a_choice_with_its_own_text_and_finish(text, path, merge):
    service = says_each(text, ANSWERS, merge=merge)
    async with open_door(service, text) as door:
        choices, usage = await both_modes(door, path, n=4, max_tokens=15)
    assert [choice["text"] for choice in choices] == ["one.", "two, longer", "", "삼겹살 👩\ufffd"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop", "stop", "length"]
    assert usage["prompt_tokens"] == len(service.requests[0].prompt_ids)
    assert usage["completion_tokens"] == sum(map(len, service.script.others)) + 5 - len(service.script.others[2]) + 15
    assert all(request.num_samples == 4 for request in service.requests)


async def test_one_request_of_many_samples_is_submitted_once(text):
    service = says(text, "hi")
    async with open_door(service, text) as door:
        choices, usage = await both_modes(door, n=128, temperature=0)
    assert len(service.requests) == 2
    assert choices == [choices[0]] * 128
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 3 * 128)


async def test_chunks_of_the_samples_take_turns_and_each_names_its_role_once(text):
    async with open_door(says_each(text, ["ab", "c"]), text) as door:
        events = (await door.chat(n=2, stream=True)).events
    told = [
        (choice["index"], choice["delta"], choice["finish_reason"])
        for event in events[:-1]
        for choice in event["choices"]
    ]
    role = {"role": "assistant", "content": ""}
    assert told == [
        (0, role, None),
        (1, role, None),
        (0, {"content": "a"}, None),
        (1, {"content": "c"}, None),
        (0, {"content": "b"}, None),
        (1, {}, "stop"),
        (0, {}, "stop"),
    ]


@pytest.mark.parametrize("merge", [1, 3])
async def test_a_stop_string_ends_its_sample_and_the_others_go_on(text, merge):
    service = says_each(text, ["abcSTOPxyz", "abcdefghijklmnop"], merge=merge)
    async with open_door(service, text) as door:
        choices, usage = await both_modes(door, n=2, stop="STOP", max_tokens=12)
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("abc", "stop"),
        ("abcdefghijkl", "length"),
    ]
    assert usage["completion_tokens"] == 7 + 12
    assert [stream.stopped for stream in service.streams] == [[0], [0]]


async def test_a_sample_that_the_service_has_ended_is_not_stopped_again(text):
    service = says_each(text, ["a", "bSTOP"])
    async with open_door(service, text) as door:
        await both_modes(door, n=2, stop="STOP", max_tokens=9)
    assert service.streams[0].stopped == [1]


@pytest.mark.parametrize(("max_tokens", "finish"), [(20, "stop"), (3, "length")])
async def test_a_request_whose_samples_have_all_ended_is_counted_by_how_the_last_one_did(text, max_tokens, finish):
    service = says_each(text, ["a", "bcdefgh"])
    async with open_door(service, text) as door:
        await both_modes(door, n=2, max_tokens=max_tokens, stop="g")
    assert [stream.finish for stream in service.streams] == [finish] * 2


async def test_a_client_that_hangs_up_cancels_all_samples_those_that_go_on_after_others_have_ended(text):
    service = says_each(text, ["", "abc"], waits_at=3)
    async with open_door(service, text) as door:
        asked = asyncio.create_task(door.complete(n=2))
        await service.submitted.wait()
        assert not service.streams[0].cancelled.is_set()
        asked.cancel()
        async with asyncio.timeout(5):
            await service.streams[0].cancelled.wait()
        assert service.streams[0].finish == "cancelled"
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_failure_of_one_sample_ends_all_of_them(text):
    error = GenerationError(502, "decode_failed", "lost")
    service = says_each(text, ["abcdef", "ghijkl"], error=error, error_at=5)
    async with open_door(service, text) as door:
        *chunks, last = (await door.complete(n=2, stream=True)).events
        whole = await door.complete(n=2)
    assert [choice["text"] for choice in assembled(chunks)] == ["abc", "gh"]
    assert last["error"]["code"] == "decode_failed"
    assert (whole.status, whole.error["code"]) == (502, "decode_failed")
    assert all(stream.cancelled.is_set() for stream in service.streams)


async def test_a_sample_without_a_finish_is_no_answer(text):
    service = ScriptedService(Script([*text.encode("a"), EOS_ID], others=[text.encode("b")]))
    async with open_door(service, text) as door:
        assert (await door.complete(n=2)).error["code"] == "internal_error"


async def test_sixteen_requests_for_four_stories_each_are_answered_at_once_streamed_or_not(text):
    service = says_each(text, ANSWERS)
    fields = {"messages": STORY, "n": 4, "temperature": 0.8, "seed": 1, "max_tokens": 50}
    async with open_door(service, text) as door:
        answers = await asyncio.gather(*(both_modes(door, "chat", **fields) for _ in range(16)))
    for choices, usage in answers:
        assert [choice["text"] for choice in choices] == list(ANSWERS)
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        assert usage["prompt_tokens"] == len(service.requests[0].prompt_ids)
    assert len(service.requests) == 32
    assert {(request.num_samples, request.params.seed) for request in service.requests} == {(4, 1)}
    assert all(stream.cancelled.is_set() for stream in service.streams)


async def test_a_body_of_many_writes_arrives_whole(text):
    async with open_door(says(text, "x" * 600), text, card=dataclasses.replace(CARD, max_model_len=1024)) as door:
        response = await door.complete(n=4, max_tokens=600, logprobs=20)
    assert len(response.raw) > 4 * WRITE_BYTES
    assert [choice["text"] for choice in response.json["choices"]] == ["x" * 600] * 4
    assert all(len(choice["logprobs"]["tokens"]) == 600 for choice in response.json["choices"])
