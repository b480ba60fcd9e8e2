import asyncio
import json

import pytest
from aiohttp import web

from pdserve.core.model_config import GenerationDefaults
from pdserve.router.generation import GenerationError
from tests.checkpoints import EOS_ID
from tests.router.door import METRICS, MODEL, Script, ScriptedService, open_door, says, shown_text

ALPHABET = "ABCDEFGHIJKLMNOP"
CHARACTERS = "삼겹살 世界 👩‍👩‍👧 ď é"


def frame(event):
    """The event without what differs from run to run."""
    assert event.pop("id").startswith(("cmpl-", "chatcmpl-"))
    assert isinstance(event.pop("created"), int)
    assert event.pop("model") == MODEL
    return event


async def both_modes(door, **fields):
    """Text, finish reason and usage of the same completion, not streamed and streamed."""
    whole = (await door.complete(**fields)).json
    choice = whole["choices"][0]
    response = await door.complete(stream=True, stream_options={"include_usage": True}, **fields)
    *chunks, usage, done = response.events
    assert done == "[DONE]"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    streamed = (shown_text(chunks), reasons[-1], usage["usage"])
    assert streamed == (choice["text"], choice["finish_reason"], whole["usage"])
    return streamed


async def test_a_chat_stream_has_openais_chunks(text):
    async with open_door(says(text, "ab"), text) as door:
        events = (await door.chat(stream=True)).events
    kind = {"object": "chat.completion.chunk"}

    def choice(delta, finish=None):
        return kind | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}

    assert events.pop() == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    assert list(map(frame, events)) == [
        choice({"role": "assistant", "content": ""}),
        choice({"content": "a"}),
        choice({"content": "b"}),
        choice({}, "stop"),
    ]


async def test_a_completion_stream_ends_with_usage_and_metrics_on_request(text):
    async with open_door(says(text, "ab"), text) as door:
        response = await door.complete("xyz", max_tokens=2, stream=True, stream_options={"include_usage": True})
    assert response.headers["Cache-Control"] == "no-cache"
    *events, done = response.events
    assert done == "[DONE]"
    kind = {"object": "text_completion"}

    def choice(piece, finish=None):
        return {"choices": [{"index": 0, "text": piece, "logprobs": None, "finish_reason": finish}], "usage": None}

    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert list(map(frame, events)) == [
        kind | choice("a"),
        kind | choice("b", "length"),
        kind | {"choices": [], "usage": usage, "metrics": METRICS},
    ]


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
async def test_exactly_max_tokens_tokens_are_answered_and_counted(text, num_tokens):
    async with open_door(says(text, ALPHABET), text) as door:
        shown, finish, usage = await both_modes(door, max_tokens=num_tokens, temperature=0)
    assert (shown, finish) == (ALPHABET[:num_tokens], "length")
    assert usage["completion_tokens"] == num_tokens


async def test_a_first_token_that_stops_is_an_empty_answer_of_one_token(text):
    async with open_door(ScriptedService(Script([EOS_ID])), text) as door:
        shown, finish, usage = await both_modes(door)
        chat = (await door.chat()).json
    assert (shown, finish, usage["completion_tokens"]) == ("", "stop", 1)
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("merge", [1, 2, 7, 100])
async def test_no_character_is_split_however_the_tokens_arrive(text, merge):
    async with open_door(says(text, CHARACTERS, merge=merge), text) as door:
        shown, finish, _ = await both_modes(door, max_tokens=100)
        events = (await door.complete(stream=True, max_tokens=100)).events
    assert (shown, finish) == (CHARACTERS, "stop")
    assert not any("\ufffd" in json.dumps(event, ensure_ascii=False) for event in events)


async def test_a_character_cut_by_max_tokens_ends_in_one_replacement_character_in_both_modes(text):
    async with open_door(says(text, "a👧"), text) as door:
        for num_tokens, expected in ((2, "a\ufffd"), (3, "a\ufffd"), (4, "a\ufffd"), (5, "a👧")):
            shown, finish, _ = await both_modes(door, max_tokens=num_tokens)
            assert (shown, finish) == (expected, "length")


@pytest.mark.parametrize("merge", [1, 3, 50])
@pytest.mark.parametrize(
    ("stop", "shown", "num_tokens"),
    [
        ("DEFGHIJ", "ABC", 10),
        (["DE"], "ABC", 5),
        (["F", "DEF"], "ABC", 6),
        (["DEF", "DE"], "ABC", 5),
        ("A", "", 1),
        (["P"], "ABCDEFGHIJKLMNO", 16),
    ],
)
async def test_the_answer_ends_before_the_first_stop_string(text, stop, shown, num_tokens, merge):
    service = says(text, ALPHABET, merge=merge)
    async with open_door(service, text) as door:
        result = await both_modes(door, stop=stop, max_tokens=50)
    assert result[:2] == (shown, "stop")
    assert result[2]["completion_tokens"] == num_tokens
    assert all(stream.cancelled.is_set() for stream in service.streams)


async def test_the_stop_string_is_part_of_the_answer_on_request(text):
    async with open_door(says(text, ALPHABET), text) as door:
        shown, finish, _ = await both_modes(door, stop="DEF", max_tokens=50, include_stop_str_in_output=True)
    assert (shown, finish) == ("ABCDEF", "stop")


async def test_a_stop_string_of_split_characters_is_found(text):
    async with open_door(says(text, CHARACTERS), text) as door:
        shown, finish, _ = await both_modes(door, stop="👩‍👧", max_tokens=100)
    assert (shown, finish) == (CHARACTERS[: CHARACTERS.index("👩‍👧")], "stop")


async def test_a_stop_string_that_max_tokens_cuts_is_shown(text):
    async with open_door(says(text, ALPHABET), text) as door:
        shown, finish, usage = await both_modes(door, stop="DEFGHIJ", max_tokens=6)
    assert (shown, finish, usage["completion_tokens"]) == ("ABCDEF", "length", 6)


async def test_no_event_holds_a_part_of_the_stop_string_that_follows(text):
    async with open_door(says(text, ALPHABET), text) as door:
        events = (await door.complete(stream=True, stop="DEFGHIJ", max_tokens=50)).events
    pieces = [event["choices"][0]["text"] for event in events[:-1]]
    assert [piece for piece in pieces if piece] == ["A", "B", "C"]


async def test_stop_strings_are_not_looked_for_before_min_tokens(text):
    async with open_door(says(text, "ABABAB"), text) as door:
        shown, finish, usage = await both_modes(door, stop="AB", min_tokens=3, max_tokens=50)
    assert (shown, finish, usage["completion_tokens"]) == ("ABAB", "stop", 6)


async def test_a_clients_stop_token_is_shown_only_on_request(text):
    [stop_id] = text.encode("C")
    async with open_door(says(text, ALPHABET), text) as door:
        for fields, expected in (({}, "AB"), ({"include_stop_str_in_output": True}, "ABC")):
            shown, finish, usage = await both_modes(door, stop_token_ids=[stop_id], **fields)
            assert (shown, finish, usage["completion_tokens"]) == (expected, "stop", 3)


async def test_eos_is_passed_over_when_it_is_ignored(text):
    token_ids = [*text.encode("AB"), EOS_ID, *text.encode("CD")]
    async with open_door(ScriptedService(Script(token_ids)), text) as door:
        shown, finish, _ = await both_modes(door, ignore_eos=True, max_tokens=5)
    assert (shown, finish) == ("ABCD", "length")


async def test_every_token_is_an_event_unless_the_client_is_slower(text):
    for merge, num_events in ((1, 16), (4, 4)):
        async with open_door(says(text, ALPHABET, merge=merge), text) as door:
            events = (await door.complete(stream=True, max_tokens=16)).events
        assert len(events) == num_events + 1


async def test_tokens_are_sent_where_they_arrive_but_for_the_first_and_the_last(text):
    service = says(text, ALPHABET)
    async with open_door(service, text) as door:
        events = (await door.complete(stream=True, max_tokens=16)).events
    assert shown_text(events) == ALPHABET
    assert service.streams[0].num_taken == 14


async def test_stop_strings_are_looked_for_by_the_handler(text):
    service = says(text, ALPHABET)
    async with open_door(service, text) as door:
        events = (await door.complete(stream=True, max_tokens=16, stop=["EF"])).events
    assert shown_text(events) == "ABCD"
    assert service.streams[0].num_taken == 0


async def test_a_client_of_http_1_0_is_sent_no_chunks(text):
    service = says(text, ALPHABET)
    body = json.dumps({"model": MODEL, "prompt": "hello", "stream": True, "max_tokens": 16}).encode()
    async with open_door(service, text) as door:
        reader, writer = await asyncio.open_connection(*door.address)
        head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: "
        writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    headers, _, events = answer.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in headers
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
    assert service.streams[0].num_taken == 0


async def test_a_client_that_is_slower_than_its_socket_gets_the_rest_from_the_handler(text, monkeypatch):
    """All arrives once and in order, whoever sends it."""
    service = says(text, ALPHABET)
    is_behind = iter([0, 0, 1, 0, 1, 1, *[0] * 10])

    class Behind:
        def __init__(self, transport):
            self._transport = transport

        def get_write_buffer_size(self):
            return next(is_behind)

        def __getattr__(self, name):
            return getattr(self._transport, name)

    transport = web.Request.transport
    monkeypatch.setattr(web.Request, "transport", property(lambda request: Behind(transport.fget(request))))
    async with open_door(service, text) as door:
        events = (await door.complete(stream=True, max_tokens=16)).events
    assert shown_text(events) == ALPHABET
    assert service.streams[0].num_taken == 14 - 3


@pytest.mark.parametrize("path", ["complete", "chat"])
@pytest.mark.parametrize(
    ("error", "code"),
    [(GenerationError(502, "decode_failed", "lost"), "decode_failed"), (KeyError("x"), "internal_error")],
)
async def test_a_failure_after_the_first_token_is_one_error_event_and_nothing_follows(text, path, error, code):
    service = says(text, ALPHABET, error=error, error_at=2)
    async with open_door(service, text) as door:
        response = await getattr(door, path)(stream=True, stream_options={"include_usage": True})
        assert (await door.get("/health")).status == 200
    *chunks, last = response.events
    assert shown_text(chunks) == "AB"
    assert all("error" not in chunk for chunk in chunks)
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["code"] == code
    assert service.streams[0].cancelled.is_set()


async def test_a_stream_that_ends_without_a_finish_ends_in_an_error_event(text):
    async with open_door(ScriptedService(Script(text.encode("AB"))), text) as door:
        *chunks, last = (await door.complete(stream=True, max_tokens=9)).events
    assert shown_text(chunks) == "AB"
    assert last["error"]["code"] == "internal_error"


async def test_concurrent_streams_do_not_mix(text):
    async with open_door(says(text, CHARACTERS), text, defaults=GenerationDefaults(eos_ids=(EOS_ID,))) as door:
        responses = await asyncio.gather(*(door.complete(stream=True, max_tokens=20 + n) for n in range(16)))
    full = CHARACTERS.encode()
    for n, response in enumerate(responses):
        cut = full[: 20 + n].decode(errors="replace")
        assert shown_text(response.events) == cut


async def test_every_event_of_a_stream_is_counted_as_written_and_a_whole_answer_is_not(text):
    service = says(text, "abc")
    async with open_door(service, text) as door:
        await door.complete(max_tokens=3, ignore_eos=True)
        await door.complete(max_tokens=3, ignore_eos=True, stream=True)
    assert [stream.num_written for stream in service.streams] == [0, 3]


async def test_no_event_counts_as_written_before_it_is_and_the_last_one_tells_of_all_before(text, monkeypatch):
    service = says(text, "abc")
    num_written_before: list[int] = []
    write = web.StreamResponse.write

    async def count(response, data):
        num_written_before.append(service.streams[0].num_written)
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", count)
    async with open_door(service, text) as door:
        await door.complete(max_tokens=3, ignore_eos=True, stream=True)
    # The second goes out where it arrives.
    assert num_written_before == [0, 2, 3]


async def test_what_a_request_waited_for_a_core_is_read_when_its_handler_begins(text):
    service = says(text, "a")
    async with open_door(service, text) as door:
        await door.complete(max_tokens=1)
    (request,) = service.requests
    assert request.waited_s == service.read_wait_s()
    assert request.read_s > 0.0
