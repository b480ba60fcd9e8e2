"""A client that goes away, or does not read, costs the service nothing from then on."""

import asyncio
import dataclasses
import json
import socket
import struct

import pytest

from tests.router.door import CARD, MODEL, Script, ScriptedService, open_door, says

NOTICED_WITHIN_S = 0.5
# More events than any socket buffer takes.
MANY = 500_000


def request_bytes(**fields):
    body = json.dumps({"model": MODEL, "prompt": "hi", **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def reset(writer):
    """Close with RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("hang_up", [lambda writer: writer.close(), reset], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits_at", [0, 3], ids=["before the first token", "between tokens"])
async def test_a_client_that_hangs_up_cancels_its_generation(text, raw_connection, waits_at, stream, hang_up):
    service = says(text, "hello", waits_at=waits_at)
    async with open_door(service, text) as door:
        reader, writer = await raw_connection(door)
        writer.write(request_bytes(stream=stream))
        if stream and waits_at:
            await reader.readuntil(b'"text":"l"')
        await service.submitted.wait()
        assert not service.streams[0].cancelled.is_set()
        hang_up(writer)
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await service.streams[0].cancelled.wait()
        service.script = Script(text.encode("next"))
        assert (await door.complete(max_tokens=4)).json["choices"][0]["text"] == "next"


async def test_a_client_that_hangs_up_does_not_disturb_another(text, raw_connection):
    service = says(text, "hello", waits_at=3)
    async with open_door(service, text) as door:
        _, writer = await raw_connection(door)
        other, other_writer = await raw_connection(door)
        writer.write(request_bytes(stream=True))
        await service.submitted.wait()
        service.submitted.clear()
        other_writer.write(request_bytes(stream=True))
        await service.submitted.wait()
        writer.close()
        await service.streams[0].cancelled.wait()
        await other.readuntil(b'"text":"l"')
        assert not service.streams[1].cancelled.is_set()


async def test_a_client_that_does_not_read_stops_its_stream_and_not_the_others(text):
    service = ScriptedService(Script(text.encode("a") * MANY))
    card = dataclasses.replace(CARD, max_model_len=2 * MANY)
    async with open_door(service, text, card=card) as door:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, door.address)
            await asyncio.get_running_loop().sock_sendall(client, request_bytes(stream=True, max_tokens=MANY))
            await service.submitted.wait()
            stream, num_given = service.streams[0], -1
            while stream.num_given != num_given:
                num_given = stream.num_given
                for _ in range(5):
                    assert (await door.get("/health")).status == 200
            assert 0 < num_given < MANY
            assert not stream.cancelled.is_set()
        async with asyncio.timeout(NOTICED_WITHIN_S):
            await stream.cancelled.wait()


async def test_shutdown_ends_a_stream_that_waits(text, raw_connection):
    service = says(text, "hello", waits_at=2)
    async with open_door(service, text) as door:
        reader, writer = await raw_connection(door)
        writer.write(request_bytes(stream=True))
        await reader.readuntil(b'"text":"e"')
    assert service.streams[0].cancelled.is_set()
