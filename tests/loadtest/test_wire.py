"""One request on a real socket, against servers that answer in every way that a connection can go."""

import asyncio
import contextlib
import ssl
import subprocess
import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.loadtest.client import wire
from pdserve.loadtest.client.endpoint import find_endpoint, open_tls
from pdserve.loadtest.client.request import encode_request, name_request
from pdserve.loadtest.client.target import Api, Target
from pdserve.loadtest.client.wire import exchange
from pdserve.loadtest.errors import OptionError, TargetError
from pdserve.loadtest.measures.record import read_exchange
from pdserve.loadtest.mock.server import MockServer
from tests.loadtest.samples import make_planned

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PAYLOAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


@contextlib.asynccontextmanager
async def listening(respond, host="127.0.0.1"):
    """The target that is answered by respond(reader, writer); every connection is over when the context is."""
    handlers = []

    async def handle(reader, writer):
        handlers.append(asyncio.current_task())
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await respond(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async with await asyncio.start_server(handle, host, 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        yield Target(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


@contextlib.asynccontextmanager
async def answering(*parts, closes=False, host="127.0.0.1"):
    """Each request is answered with these parts, one write each; then its connection is closed, or left open."""
    heard = []
    left = asyncio.Event()

    async def respond(reader, writer):
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.002)
            if not closes:
                await reader.read()
        finally:
            left.set()

    async with listening(respond, host) as target:
        yield target, heard, left


async def ask(target, timeout_s=5.0, payload=PAYLOAD):
    endpoint = await find_endpoint(target)
    return await exchange(endpoint, open_tls(endpoint), 0, payload, timeout_s, time.monotonic())


def raw(exchanged):
    return b"".join(chunk.data for chunk in exchanged.chunks)


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD, b"1\r\na\r\n", b"0\r\n\r\n"],
        [HEAD + b"1\r\na\r\n0\r\n\r\n"],
        [HEAD, b"1\r\na\r\n0", b"\r\n\r", b"\n"],
        [HEAD[:20], HEAD[20:] + b"1\r\na\r\n", b"0\r", b"\n\r\n"],
        [b"HTTP/1.1 500 Broken\r\ncontent-length: 5\r\n\r\n", b"hel", b"lo"],
        [b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n"],
    ],
)
async def test_the_end_of_a_response_is_seen_on_a_connection_that_stays_open(parts):
    async with answering(*parts) as (target, _, left):
        exchanged = await ask(target, timeout_s=10.0)
        await left.wait()
    assert exchanged.failure is None
    assert raw(exchanged) == b"".join(parts)


async def test_a_chunk_that_looks_like_the_last_one_is_not():
    parts = [HEAD, b"7\r\ndata: 0\r\n", b"4\r\n\r\n\r\n\r\n", b"5\r\n0\r\n\r\n\r\n", b"0\r\n\r\n"]
    async with answering(*parts) as (target, _, _):
        assert raw(await ask(target)).endswith(b"5\r\n0\r\n\r\n\r\n0\r\n\r\n")


async def test_a_body_without_a_length_ends_with_its_connection():
    async with answering(b"HTTP/1.0 200 OK\r\n\r\n", b"hello 0\r\n\r\n", b"more", closes=True) as (target, _, _):
        exchanged = await ask(target)
    assert exchanged.failure is None
    assert raw(exchanged).endswith(b"more")


async def test_times_are_those_of_the_reads():
    before = time.monotonic()
    async with answering(HEAD, b"1\r\na\r\n", b"0\r\n\r\n") as (target, _, _):
        exchanged = await ask(target)
    times = [chunk.arrived_at for chunk in exchanged.chunks]
    assert before <= exchanged.woke_at <= exchanged.sent_at <= times[0]
    assert times == sorted(times)
    assert times[-1] <= exchanged.ended_at <= time.monotonic()


async def test_a_response_that_never_ends_is_cut(monkeypatch):
    monkeypatch.setattr(wire, "MAX_RESPONSE_BYTES", 1000)
    async with answering(HEAD, b"a" * 2000) as (target, _, _):
        exchanged = await ask(target)
    assert exchanged.failure.kind == "too_large"


async def test_a_server_that_falls_silent_is_given_up_with_what_it_said():
    async with answering(HEAD + b"1\r\na\r\n") as (target, _, left):
        exchanged = await ask(target, timeout_s=0.5)
        await left.wait()
    assert exchanged.failure.kind == "timeout"
    assert raw(exchanged) == HEAD + b"1\r\na\r\n"


async def test_a_refused_connection_is_a_failure():
    async with answering() as (target, _, _):
        endpoint = await find_endpoint(target)
    exchanged = await exchange(endpoint, None, 0, PAYLOAD, 5.0, time.monotonic())
    assert exchanged.failure.kind == "connection"
    assert exchanged.chunks == ()


async def test_a_request_larger_than_the_sockets_buffer_is_sent_whole():
    received = bytearray()

    async def swallow(reader, writer):
        received.extend(await reader.readexactly(8_000_000))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with listening(swallow) as target:
        exchanged = await ask(target, payload=bytes(range(250)) * 32_000)
    assert exchanged.failure is None
    assert received == bytes(range(250)) * 32_000


async def test_cancelling_leaves_no_connection():
    async with answering(HEAD) as (target, heard, left):
        asking = asyncio.create_task(ask(target, timeout_s=60.0))
        while not heard:  # noqa: ASYNC110 - it is the server that hears
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await left.wait()


async def test_ipv6_is_spoken():
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", host="::1") as (target, heard, _):
        request = encode_request(target, "m", make_planned(), "label")
        assert (await ask(target, payload=request)).failure is None
        assert f"Host: {target.url.removeprefix('http://')}\r\n".encode() in heard[0]


async def test_of_several_addresses_the_one_that_accepts_is_taken():
    async with MockServer(host="127.0.0.1") as server:
        port = server.url.rsplit(":", 1)[1]
        endpoint = await find_endpoint(Target(f"http://localhost:{port}"))
    assert endpoint.address[:2] == ("127.0.0.1", int(port))


async def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(TargetError, match=r"--url http://no host\.invalid: cannot be reached"):
        await find_endpoint(Target("http://no host.invalid"))


async def test_the_request_carries_its_label_and_the_key():
    request = encode_request(Target("http://h:1/base path", api_key="sesame"), "m", make_planned(), name_request(3, 7))
    head, _, body = request.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /base%20path/v1/completions HTTP/1.1"
    assert {
        "Host: h:1",
        "X-Request-Id: 00000003-0000-4000-8000-000000000007",
        "Authorization: Bearer sesame",
        "Connection: close",
    } < set(lines)
    assert f"Content-Length: {len(body)}" in lines


@pytest.mark.parametrize("key", ["a\r\nb", "a\x00", "ä"])
def test_a_key_that_no_header_can_carry_is_refused(key):
    with pytest.raises(OptionError, match="--api-key-file"):
        Target("http://h", api_key=key)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "2", "-subj", "/CN=mock", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", folder / "key.pem", "-out", folder / "cert.pem"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl program")
    return folder


@pytest.fixture
def tls_server(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return MockServer(tls=context)


async def test_https_is_spoken_where_the_certificate_is_trusted(tls_server, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    planned = make_planned(output_tokens=4)
    async with tls_server as server:
        target = Target(server.url, api=Api.COMPLETIONS)
        exchanged = await ask(target, payload=encode_request(target, "mock", planned, "label"))
    record = read_exchange(planned, exchanged, 0.0)
    assert record.error is None
    assert record.output_tokens == 4


async def test_a_certificate_that_nobody_trusts_is_a_failure(tls_server):
    async with tls_server as server:
        exchanged = await ask(Target(server.url))
    assert exchanged.failure.kind == "connection"
    assert "CERTIFICATE_VERIFY_FAILED" in exchanged.failure.detail


@given(st.integers(0, 2**63), st.integers(0, 10**9), st.booleans())
def test_a_request_is_named_by_a_uuid_that_ends_in_its_index(seed, index, is_preflight):
    name = name_request(seed, index, is_preflight)
    assert str(uuid.UUID(name)) == name
    assert uuid.UUID(name).version == 4
    assert int(name.rsplit("-")[-1]) == index
