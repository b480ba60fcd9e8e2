"""One request on the wire, recorded raw: bytes and the monotonic time at which each read returned.

Nothing is parsed here, so that the client's own work does not delay the time stamps of other streams; the raw bytes
(about 0.3 KB a token) are read after the run by measures/http.py. All the wire looks at is whether the response is
over, since not every server closes the connection that it was asked to close. Called by driver.py, and by the runner
for requests that are not measured.
"""

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast

from pdserve.loadtest.client.endpoint import Endpoint, connect
from pdserve.loadtest.client.exchange import ABANDONED, Exchange, Failure
from pdserve.loadtest.measures.sse import Chunk

# Far above any real answer; it only stops a server that never stops.
MAX_RESPONSE_BYTES = 64 * 1024 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024

_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"

# Every read lands here and is copied before the next one: a fresh buffer for each would cost more than the read.
_read_buffer = memoryview(bytearray(_READ_BYTES))


async def exchange(
    endpoint: Endpoint,
    tls: ssl.SSLContext | None,
    index: int,
    payload: bytes,
    timeout_s: float,
    woke_at: float,
    on_abandoned: Callable[[Exchange], None] | None = None,
) -> Exchange:
    """Send one request over a connection of its own and record its response to the end, the timeout or the failure.

    on_abandoned  told what has come so far when it is cancelled
    """
    receiver = _Receiver(payload)
    sent_at = time.monotonic()

    def result() -> Exchange:
        chunks = tuple(map(Chunk, receiver.times, receiver.reads))
        return Exchange(index, woke_at, sent_at, receiver.ended_at, chunks, receiver.failure)

    try:
        async with asyncio.timeout(timeout_s) as deadline:
            await _open(endpoint, tls, receiver)
            await receiver.ended
    except OSError as error:  # a timeout is one, too
        if deadline.expired():
            receiver.end(Failure("timeout", f"no end of the stream within {timeout_s:g} s (--timeout-s)"))
        else:
            receiver.end(Failure("connection", f"{type(error).__name__}: {error}"))
    except asyncio.CancelledError:
        receiver.end(Failure(ABANDONED, "the run was ended before its answer was"))
        if on_abandoned is not None:
            on_abandoned(result())
        raise
    finally:
        receiver.abort()
    return result()


async def _open(endpoint: Endpoint, tls: ssl.SSLContext | None, receiver: "_Receiver") -> None:
    connection = await connect(endpoint)
    try:
        if tls is None:
            receiver.send_ahead(connection)
        await asyncio.get_running_loop().create_connection(
            lambda: receiver, sock=connection, ssl=tls, server_hostname=endpoint.tls_name
        )
    except BaseException:
        connection.close()
        raise


class _Receiver(asyncio.BufferedProtocol):
    """Writes the request when its connection stands, then keeps what is read until the response is over."""

    def __init__(self, payload: bytes):
        self.times: list[float] = []
        self.reads: list[bytes] = []
        self.failure: Failure | None = None
        self.ended_at = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._payload = payload
        self._transport: asyncio.Transport | None = None
        self._num_bytes = 0
        self._head_is_read = False
        self._is_chunked = False
        self._length: int | None = None  # of head and body together, where the head tells it

    def send_ahead(self, connection: socket.socket) -> None:
        """Send what the fresh connection takes, some turns of the loop before it has become a transport."""
        with contextlib.suppress(BlockingIOError):
            self._payload = self._payload[connection.send(self._payload) :]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        if self._payload:
            self._transport.write(self._payload)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.times.append(time.monotonic())
        self.reads.append(bytes(_read_buffer[:nbytes]))
        self._num_bytes += nbytes
        if self._num_bytes > MAX_RESPONSE_BYTES:
            self.end(Failure("too_large", f"the response went beyond {MAX_RESPONSE_BYTES} bytes"))
        elif self._is_over():
            self.end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(None if exc is None else Failure("connection", f"{type(exc).__name__}: {exc}"))

    def end(self, failure: Failure | None) -> None:
        """The first end counts."""
        if not self.ended_at:
            self.ended_at = time.monotonic()
            self.failure = failure
            if not self.ended.done():
                self.ended.set_result(None)

    def abort(self) -> None:
        """Close the connection at once, if it stands."""
        self.end(None)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _is_over(self) -> bool:
        """Whether the response can be seen to be over: its length is reached, or its last chunk was read."""
        if not self._head_is_read:
            self._read_head()
        if self._length is not None:
            return self._num_bytes >= self._length
        last = self.reads[-1]
        if not self._is_chunked or not (last.endswith(b"\r\n\r\n") or len(last) < 4):
            return False
        return b"".join(self.reads[-len(_LAST_CHUNK) :]).endswith(_LAST_CHUNK)

    def _read_head(self) -> None:
        """How the body's end will be known; unknown where the head is longer than any real one."""
        head = b"".join(self.reads)
        end = head.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)
        if end < 0:
            self._head_is_read = self._num_bytes >= _MAX_HEAD_BYTES
            return
        self._head_is_read = True
        self._is_chunked = _CHUNKED.search(head, 0, end + 2) is not None
        length = _CONTENT_LENGTH.search(head, 0, end + 2)
        if length is not None and not self._is_chunked:
            self._length = end + 4 + int(length[1])
