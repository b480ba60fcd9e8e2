"""One client's connection to the mock: its request read with h11, its end noticed. Made by server.py.

Each connection serves one request and says so (`Connection: close`).
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import h11

_MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    """arrived_at: monotonic, when its last byte was read."""

    method: bytes
    path: bytes
    request_id: str | None
    body: bytes
    arrived_at: float


Respond = Callable[[Request, asyncio.Transport], None]


class Connection(asyncio.Protocol):
    """respond is called once, with the whole request, and closes the transport when it has answered."""

    def __init__(self, open_connections: "set[Connection]", respond: Respond):
        self._open_connections = open_connections
        self._respond = respond
        self._parser = h11.Connection(our_role=h11.SERVER)
        self._head: h11.Request | None = None
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._open_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_connections.discard(self)

    def abort(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        arrived_at = time.monotonic()
        if self._transport.is_closing():  # it is answered already
            return
        try:
            self._parser.receive_data(data)
            while self._read_event(self._parser.next_event(), arrived_at):
                pass
        except h11.RemoteProtocolError as error:
            write_error(self._transport, error.error_status_hint, str(error))

    def _read_event(self, event: object, arrived_at: float) -> bool:
        """Returns whether more may follow from what was read."""
        match event:
            case h11.Request():
                self._head = event
            case h11.Data() if len(self._body) + len(event.data) > _MAX_BODY_BYTES:
                write_error(self._transport, 413, f"the body is larger than {_MAX_BODY_BYTES} bytes")
                return False
            case h11.Data():
                self._body += event.data
            case h11.EndOfMessage():
                self._respond(self._request(arrived_at), self._transport)
                return False
            case _:
                return False
        return True

    def _request(self, arrived_at: float) -> Request:
        assert self._head is not None
        request_id = dict(self._head.headers).get(b"x-request-id")
        return Request(
            self._head.method,
            self._head.target.partition(b"?")[0],
            None if request_id is None else request_id.decode("latin-1"),
            bytes(self._body),
            arrived_at,
        )


def write_json(transport: asyncio.Transport, status: int, payload: dict[str, Any]) -> None:
    """A whole response, after which the connection is closed."""
    body = json.dumps(payload).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    transport.close()


def write_error(transport: asyncio.Transport, status: int, message: str) -> None:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    write_json(transport, status, {"error": {"message": message, "type": kind}})
