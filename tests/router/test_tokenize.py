"""POST /tokenize: the ids that a prompt becomes, without generating anything."""

import pytest

from pdserve.router.app import FrontDoorLimits
from tests.router.door import CONTEXT, MODEL, open_door, says

HI = [{"role": "user", "content": "hi"}]


async def tokenize(door, **body):
    return await door.send("POST", "/tokenize", json=body)


async def test_a_text_becomes_the_ids_that_a_completion_would_run(text):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        response = await tokenize(door, model=MODEL, prompt="hello world")
        await door.complete("hello world")
    ids = service.requests[0].prompt_ids
    assert response.status == 200
    assert response.json == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}


async def test_a_conversation_becomes_the_ids_that_a_chat_would_run(text):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        response = await tokenize(door, messages=HI)
        await door.chat(HI)
    assert response.json["tokens"] == service.requests[0].prompt_ids


async def test_nothing_is_generated(text):
    service = says(text, "ok")
    async with open_door(service, text) as door:
        await tokenize(door, prompt="hello")
    assert service.requests == []


async def test_special_tokens_are_left_out_on_request(text):
    async with open_door(says(text, "ok"), text) as door:
        response = await tokenize(door, prompt="hello", add_special_tokens=False)
    assert response.json["tokens"] == text.encode_rendered("hello")


async def test_an_empty_text_is_no_error(text):
    async with open_door(says(text, "ok"), text) as door:
        assert (await tokenize(door, prompt="")).json["count"] == len(text.encode(""))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "x", "messages": HI}, "prompt"),
        ({"messages": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HI, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ({"prompt": "x", "return_token_strs": True}, "return_token_strs"),
        ({"prompt": "x", "temperature": 0}, "temperature"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_field(text, body, param):
    async with open_door(says(text, "ok"), text) as door:
        response = await tokenize(door, **body)
    assert response.status == 400
    assert response.error["param"] == param


async def test_another_model_is_not_served(text):
    async with open_door(says(text, "ok"), text) as door:
        response = await tokenize(door, model="other", prompt="x")
    assert (response.status, response.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "prompt", [{"prompt": "x" * 100_000}, {"messages": [{"role": "user", "content": "x" * 100_000}]}]
)
async def test_a_text_far_beyond_the_context_is_not_tokenized(text, prompt):
    async with open_door(says(text, "ok"), text) as door:
        response = await tokenize(door, **prompt)
    assert (response.status, response.error["code"]) == (400, "context_length_exceeded")


async def test_a_text_of_more_tokens_than_the_context_is_refused_as_it_would_be_of_a_completion(text):
    prompt = "7 " * CONTEXT
    assert len(prompt) < text.max_characters(CONTEXT)
    async with open_door(says(text, "ok"), text) as door:
        refused = [await tokenize(door, prompt=prompt), await tokenize(door, messages=[{**HI[0], "content": prompt}])]
    assert [(each.status, each.error["code"], each.error["param"]) for each in refused] == [
        (400, "context_length_exceeded", "prompt"),
        (400, "context_length_exceeded", "messages"),
    ]


async def test_a_body_may_not_be_larger_than_that_of_a_completion(text):
    limits = FrontDoorLimits(max_body_bytes=100)
    async with open_door(says(text, "ok"), text, limits=limits) as door:
        assert (await tokenize(door, prompt="x" * 200)).status == 413
