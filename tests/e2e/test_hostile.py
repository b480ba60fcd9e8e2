"""Nothing a client sends stops a process, writes a traceback, or keeps the next client from its answer."""

import asyncio
import json
import re
from collections.abc import Iterator

import pytest

from tests.e2e.client import Client
from tests.e2e.conftest import Connect
from tests.e2e.servers import Server

ANSWER_WITHIN_S = 20.0
AT_ONCE = 16
# A log line that warns, complains, or belongs to a traceback.
NOT_CALM = re.compile(r"\d [WEC] |Traceback|Error\b")
NUM_TOKENS = 24
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

NASTY_VALUES = (
    None,
    True,
    -1,
    0,
    1.5,
    2**31,
    2**64,
    -(2**63) - 1,
    10**400,
    1e308,
    "",
    "\x00",
    "\u2028" * 3,
    "a" * 100_000,
    [],
    [None],
    [[1]],
    [2**70],
    [-1],
    [True],
    ["a", "b"],
    {},
    {"a": {"b": [1]}},
    [{}] * 500,
)
FIELDS = ("prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stop_token_ids")
NASTY_BODIES = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"3",
    b'"prompt"',
    b'{"prompt": "a",}',
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    b"\xef\xbb\xbf" + b'{"prompt": "a"}',
    b"\x00" * 1000,
    b'{"prompt": "a"}' * 2,
)
# Whole connections that are answered with an error and closed.
NASTY_BYTES = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /ready HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
    b"GET /ready HTTP/1.1\r\nHost: x\r\nX-A: \x00\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /ready HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n",
    b"GET /ready HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(2000)) + b"\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n{}",
    HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
)
# HTTP that is well-formed and asks for what is not there.
STRANGE_HEADS = (
    b"GET /%ff%fe%00 HTTP/1.1\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\n",
    b"GET //v1//models HTTP/1.1\r\n",
    b"OPTIONS * HTTP/1.1\r\n",
    b"TRACE /ready HTTP/1.1\r\n",
    b"DELETE /v1/models HTTP/1.1\r\n",
    b"BREW /v1/completions HTTP/1.1\r\n",
    HEAD,
    HEAD + b"Content-Encoding: gzip\r\n",
    HEAD.replace(b"application/json", b"text/plain"),
    HEAD.replace(b"application/json", b"application/json; charset=rot13"),
    HEAD + b"Expect: the-worst\r\n",
    HEAD + b"X-Request-Id: \xff\x1b[31m\r\n",
)
# Connections that the client leaves in the middle of what it says.
UNFINISHED = (
    b"",
    b"\r\n\r\n\r\n",
    b"GET /re",
    HEAD,
    HEAD + b"Content-Length: 1000\r\n\r\n{",
    HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
    b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    HEAD + b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}",
)


@pytest.fixture
async def client(small_up: Server, connect: Connect) -> Client:
    return connect(small_up)


def post(path: bytes, body: bytes) -> bytes:
    head = HEAD.replace(b"/v1/completions", path) + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


def nasty_requests() -> Iterator[bytes]:
    yield from NASTY_BYTES
    for head in STRANGE_HEADS:
        yield head + b"Connection: close\r\n\r\n"
    for body in NASTY_BODIES:
        yield post(b"/v1/completions", body)
        yield post(b"/v1/chat/completions", body)
    for field in FIELDS:
        for value in NASTY_VALUES:
            yield post(b"/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1} | {field: value}).encode())
    for value in NASTY_VALUES:
        for body in ({"messages": value}, {"messages": [{"role": "user", "content": value}]}, {"messages": [value]}):
            yield post(b"/v1/chat/completions", json.dumps(body | {"max_tokens": 1}).encode())


async def say(server: Server, data: bytes, hang_up: bool = False) -> bytes:
    """Send bytes on a connection of their own; what is answered until the server closes it."""
    assert server.url is not None
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        if hang_up:
            await writer.drain()
            return b""
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await reader.read()
    except ConnectionError:
        # It was closed before everything had been read; that may take the answer with it.
        return b""
    finally:
        writer.close()


async def test_some_hundred_nasty_requests_stop_nothing(small_up: Server, client: Client):
    expected = (await client.complete("Once upon a time", NUM_TOKENS, ignore_eos=True)).text
    processes, num_lines = small_up.tree(), len(small_up.lines)
    requests = list(nasty_requests())
    assert len(requests) > 300
    async with client.stream("Once upon a time", 1000, ignore_eos=True) as undisturbed:
        await undisturbed.read(num_events=1)
        for start in range(0, len(requests), AT_ONCE):
            batch = requests[start : start + AT_ONCE]
            answers = await asyncio.gather(*(say(small_up, data) for data in batch))
            served = [(data[:300], answer) for data, answer in zip(batch, answers, strict=True) if b" 500 " in answer]
            assert served == []
        await asyncio.gather(*(say(small_up, data, hang_up=True) for data in UNFINISHED * 3))
        await undisturbed.read()
    assert undisturbed.closing["usage"]["completion_tokens"] == 1000
    assert (await client.complete("Once upon a time", NUM_TOKENS, ignore_eos=True)).text == expected
    assert small_up.tree() == processes
    assert [line for line in small_up.lines[num_lines:] if NOT_CALM.search(line)] == []


@pytest.mark.parametrize("data", NASTY_BYTES, ids=range(len(NASTY_BYTES)))
async def test_what_is_no_http_gets_a_short_400(small_up: Server, data: bytes):
    head, _, body = (await say(small_up, data)).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"400", head
    assert 0 < len(body) < 300
