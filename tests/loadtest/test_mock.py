"""The mock as any client sees it: its times are kept, and what it cannot read is answered in words."""

import asyncio
import contextlib
import json

import aiohttp
import pytest

from pdserve.loadtest.measures.sse import Chunk, split_events
from pdserve.loadtest.mock.behaviour import Behaviour
from pdserve.loadtest.mock.server import MockServer

REQUEST = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True}


async def ask(server, body, path="/v1/completions"):
    async with aiohttp.ClientSession() as session, session.post(server.url + path, data=json.dumps(body)) as response:
        return response.status, await response.read()


async def open_stream(server, body):
    """A connection on which the request was sent, with hardly any buffer of its own."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, port, limit=1024)
    content = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
    return reader, writer


async def test_tokens_are_due_from_the_arrival_and_do_not_drift():
    async with MockServer([Behaviour(first_token_s=0.02, gap_s=0.01)]) as server:
        await ask(server, REQUEST)
    (received,) = server.received
    for number, written_at in enumerate(received.written_at):
        assert written_at >= received.arrived_at + 0.02 + number * 0.01


async def test_a_stream_that_is_due_earlier_does_not_wait_for_one_that_came_before():
    async with MockServer([Behaviour(first_token_s=3600.0), Behaviour(first_token_s=0.01)]) as server:
        _, writer = await open_stream(server, REQUEST)
        while not server.received:  # noqa: ASYNC110 - the order of two connections is the server's to tell
            await asyncio.sleep(0.001)
        async with asyncio.timeout(60.0):
            status, _ = await ask(server, REQUEST)
        writer.close()
        await writer.wait_closed()
    assert status == 200


async def test_jitter_only_ever_delays_a_token():
    async with MockServer([Behaviour(gap_s=0.005, jitter_s=0.01)]) as server:
        await asyncio.gather(*(ask(server, REQUEST) for _ in range(4)))
    late = [
        written_at - received.arrived_at - number * 0.005
        for received in server.received
        for number, written_at in enumerate(received.written_at)
    ]
    assert min(late) >= 0
    assert len({round(late_s, 4) for late_s in late}) > 4


async def test_the_final_event_tells_when_each_token_was_written():
    async with MockServer() as server:
        status, body = await ask(server, REQUEST)
    assert status == 200
    *_, final, done = split_events([Chunk(0.0, body)])
    assert done.data == "[DONE]"
    (received,) = server.received
    assert json.loads(final.data)["usage"]["metrics"] == {
        "ttft_s": received.written_at[0] - received.arrived_at,
        "arrived_at": received.arrived_at,
        "written_at": received.written_at,
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", [1], 400, "must be an object"),
        ("/v1/completions", {"prompt": 7}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens 0"),
        ("/v1/chat/completions", {"prompt": "a"}, 400, "messages"),
        ("/elsewhere", {}, 404, "no such path"),
    ],
)
async def test_a_request_that_it_cannot_answer_is_refused_in_words(path, body, status, words):
    async with MockServer() as server:
        answered, content = await ask(server, body, path)
    assert answered == status
    assert words in json.loads(content)["error"]["message"]


async def test_what_is_no_http_is_refused():
    async with MockServer() as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"\x00\x01 nonsense\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_reads_slowly_gets_every_token():
    async with MockServer() as server:
        reader, writer = await open_stream(server, REQUEST | {"max_tokens": 20_000})
        content = bytearray()
        while data := await reader.read(512):
            content += data
        writer.close()
        await writer.wait_closed()
    assert content.count(b'"text":" word"') == 20_000
    assert content.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_server_that_is_closed_cuts_its_streams():
    async with MockServer([Behaviour(first_token_s=3600.0)]) as server:
        reader, writer = await open_stream(server, REQUEST)
        await reader.readuntil(b"\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
