"""A prompt that is shown, scored or listed: echo, max_tokens 0 and prompt_logprobs, and the tokens of an answer."""

import dataclasses
import json

import pytest

from pdserve.router.tokenizer import TextModel
from tests.checkpoints import EOS_ID
from tests.router.door import (
    CARD,
    CONTEXT,
    Script,
    ScriptedService,
    assembled,
    open_door,
    says,
    scripted_row,
    whole_choices,
)
from tests.router.test_tokenizer import BOS_ID, make_model_dir

PROMPT = "Hello é world"


async def both_modes(door, path="complete", prompt=PROMPT, **fields):
    """Choices and usage of the same request, not streamed and streamed."""
    args = [prompt] if path == "complete" else []
    whole = (await getattr(door, path)(*args, **fields)).json
    streamed = await getattr(door, path)(*args, stream=True, stream_options={"include_usage": True}, **fields)
    *chunks, usage, _ = streamed.events
    assert assembled(chunks) == whole_choices(whole)
    assert usage["usage"] == whole["usage"]
    return whole_choices(whole), whole["usage"]


def logprob(token_id):
    return scripted_row(token_id, 0)[0].logprob


# The answer's tokens


@pytest.mark.parametrize("merge", [1, 3, 50])
@pytest.mark.parametrize(("stop", "num_listed"), [(None, 7), ("b", 6), ("👧", 5)])
async def test_every_token_that_is_counted_is_listed_once_streamed_or_not(text, merge, stop, num_listed):
    token_ids = [*text.encode("a👧b"), EOS_ID]
    async with open_door(says(text, "a👧b", merge=merge), text) as door:
        [choice], usage = await both_modes(door, logprobs=2, stop=stop)
        [chat], chat_usage = await both_modes(door, "chat", logprobs=True, top_logprobs=2, stop=stop)
    told = choice["logprobs"]
    assert usage["completion_tokens"] == chat_usage["completion_tokens"] == num_listed == len(told["tokens"])
    assert told["token_logprobs"] == [logprob(token_id) for token_id in token_ids[:num_listed]]
    assert told["text_offset"] == [0, 1, 1, 1, 1, 2, 3][:num_listed]
    assert told["tokens"][:2] == ["a", "bytes:\\xf0"]
    content = chat["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == told["token_logprobs"]
    shown = bytes(byte for entry in content for byte in entry["bytes"])
    assert shown == "a👧b<|im_end|>".encode()[: len(shown)]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_the_token_that_stopped_an_answer_is_listed_though_it_does_not_show(text):
    async with open_door(ScriptedService(Script([EOS_ID])), text) as door:
        [choice], usage = await both_modes(door, logprobs=0)
        [chat], _ = await both_modes(door, "chat", logprobs=True)
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("", ["<|im_end|>"])
    assert [entry["token"] for entry in chat["logprobs"]["content"]] == ["<|im_end|>"]
    assert usage["completion_tokens"] == 1


async def test_nothing_is_listed_where_nothing_was_asked_for(text):
    async with open_door(says(text, "ab"), text) as door:
        for path, fields in (("complete", {}), ("chat", {"logprobs": False, "top_logprobs": 0})):
            [choice], _ = await both_modes(door, path, **fields)
            assert choice["logprobs"] is None


async def test_numbers_that_json_has_no_word_for_are_floored(text):
    async with open_door(says(text, "ab", logprob=float("-inf")), text) as door:
        response = await door.complete(logprobs=0)
    assert response.json["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0] * 3


# Echo


@pytest.mark.parametrize("as_ids", [False, True])
async def test_an_echo_opens_every_choice_with_the_prompts_text(text, as_ids):
    prompt = text.encode(PROMPT) if as_ids else PROMPT
    async with open_door(says(text, "!ab"), text) as door:
        choices, usage = await both_modes(door, prompt=prompt, echo=True, n=2)
    assert [choice["text"] for choice in choices] == [PROMPT + "!ab"] * 2
    assert [choice["logprobs"] for choice in choices] == [None, None]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT.encode()), 8)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_an_echo_lists_the_prompts_tokens_before_the_answers(text, as_ids):
    token_ids = text.encode(PROMPT)
    prompt = token_ids if as_ids else PROMPT
    async with open_door(says(text, "!"), text) as door:
        choices, _ = await both_modes(door, prompt=prompt, echo=True, logprobs=1, n=2)
    assert choices[0] == choices[1]
    told = choices[0]["logprobs"]
    listed = [*token_ids, *text.encode("!"), EOS_ID]
    assert told["token_logprobs"] == [None, *map(logprob, listed[1:])]
    assert [None if top is None else max(top.values()) for top in told["top_logprobs"]] == [None] + [-0.25] * 15
    assert told["tokens"][5:9] == [" ", "bytes:\\xc3", "bytes:\\xa9", " "]
    assert told["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12, 13, 14]


async def test_a_stop_string_is_not_looked_for_in_an_echo(text):
    async with open_door(says(text, "!ab"), text) as door:
        [choice], _ = await both_modes(door, echo=True, stop="world!")
    assert choice["text"] == PROMPT + "!ab"


async def test_special_tokens_of_a_prompt_of_ids_are_echoed_and_those_that_the_tokenizer_adds_are_not(
    model_dir, tmp_path
):
    text = TextModel.load(make_model_dir(model_dir, tmp_path / "model", adds_bos=True))
    async with open_door(says(text, ""), text) as door:
        [choice], usage = await both_modes(door, prompt="ab", echo=True, logprobs=0)
        [of_ids], _ = await both_modes(door, prompt=[BOS_ID, *text.encode("ab")[1:]], echo=True, logprobs=0)
    assert usage["prompt_tokens"] == 3
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"][:3] == of_ids["logprobs"]["tokens"][:3] == ["<|im_start|>", "a", "b"]
    assert choice["logprobs"]["text_offset"][:3] == [0, 0, 1]
    assert (of_ids["text"], of_ids["logprobs"]["text_offset"][:3]) == ("<|im_start|>ab", [0, 12, 13])


# Scoring


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_a_prompt_is_scored_without_a_token_generated(text, num_samples):
    service = says(text, "never shown")
    async with open_door(service, text) as door:
        choices, usage = await both_modes(
            door, prompt="Hello world", max_tokens=0, echo=True, logprobs=1, n=num_samples
        )
    assert len(choices) == num_samples
    for choice in choices:
        assert (choice["text"], choice["finish_reason"]) == ("Hello world", "length")
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == "Hello world"
        assert told["token_logprobs"] == [None, *map(logprob, text.encode("Hello world")[1:])]
        assert [len(told[key]) for key in ("top_logprobs", "text_offset")] == [11, 11]
    assert usage == {"prompt_tokens": 11, "completion_tokens": 0, "total_tokens": 11}
    assert service.requests[0].params.max_tokens == 1


async def test_a_score_is_none_of_the_stop_rules_business(text):
    async with open_door(ScriptedService(Script([EOS_ID])), text) as door:
        [choice], usage = await both_modes(door, max_tokens=0, echo=True, stop="H")
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (PROMPT, "length", None)
    assert usage["completion_tokens"] == 0


async def test_a_prompt_that_fills_the_context_is_scored_and_one_token_more_is_not(text):
    async with open_door(says(text, "x"), text) as door:
        for prompt in ("x" * CONTEXT, text.encode("x") * CONTEXT):
            response = await door.complete(prompt, max_tokens=0, echo=True, logprobs=1)
            assert len(response.json["choices"][0]["logprobs"]["tokens"]) == CONTEXT
            assert (await door.complete(prompt, max_tokens=1, echo=True)).error["code"] == "context_length_exceeded"
        assert (await door.complete("x" * (CONTEXT + 1), max_tokens=0, echo=True)).status == 400


async def test_no_tokens_without_an_echo_are_a_clear_400(text):
    async with open_door(says(text, "ok"), text) as door:
        for fields in ({}, {"stream": True}, {"echo": False}, {"logprobs": 1}):
            response = await door.complete("Hello world", max_tokens=0, **fields)
            assert (response.status, response.error["param"]) == (400, "max_tokens")
        for value in (-1, 1.5, "3", True):
            assert (await door.complete(max_tokens=value, echo=True)).error["param"] == "max_tokens"


async def test_a_long_prompt_is_scored_in_one_body(text):
    card = dataclasses.replace(CARD, max_model_len=4096)
    async with open_door(says(text, "x"), text, card=card) as door:
        response = await door.complete("ab" * 2000, max_tokens=0, echo=True, logprobs=20)
        events = (await door.complete("ab" * 2000, max_tokens=0, echo=True, logprobs=20, stream=True)).events
    [choice] = whole_choices(response.json)
    assert choice == assembled(events)[0]
    assert len(choice["logprobs"]["top_logprobs"]) == 4000


# prompt_logprobs


async def test_a_completion_has_the_prompts_log_probabilities_in_each_choice(text):
    token_ids = text.encode("abc")
    async with open_door(says(text, "x"), text) as door:
        body = (await door.complete("abc", prompt_logprobs=1, n=2)).json
    for choice in body["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [next(iter(entries)) for entries in others] == [str(token_id) for token_id in token_ids[1:]]
        assert [next(iter(entries.values()))["decoded_token"] for entries in others] == ["b", "c"]
        assert choice["logprobs"] is None
    assert "prompt_logprobs" not in body


async def test_a_chat_has_the_prompts_log_probabilities_beside_its_choices(text):
    service = says(text, "x")
    async with open_door(service, text) as door:
        body = (await door.chat(prompt_logprobs=0)).json
    assert len(body["prompt_logprobs"]) == len(service.requests[0].prompt_ids)
    assert all("prompt_logprobs" not in choice for choice in body["choices"])


async def test_an_echo_and_the_prompts_log_probabilities_each_show_as_many_as_they_were_asked_for(text):
    async with open_door(says(text, "x"), text) as door:
        [choice] = (await door.complete("abc", prompt_logprobs=4, echo=True, logprobs=1)).json["choices"]
    assert [len(entries) for entries in choice["prompt_logprobs"][1:]] == [5, 4]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [2, 1, 2, 1]


async def test_the_prompts_log_probabilities_are_json_whatever_the_token(text):
    prompt = [*range(CARD.vocab_size - 10, CARD.vocab_size)]
    async with open_door(says(text, "x"), text) as door:
        response = await door.complete(prompt, prompt_logprobs=20, echo=True, logprobs=20)
    json.loads(response.raw, parse_constant=pytest.fail)
    assert response.status == 200
