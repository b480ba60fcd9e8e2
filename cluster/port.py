"""One ZeroMQ socket and its monitor on the event loop.

Watches the raw descriptors instead of zmq.asyncio: nothing to await, nothing to cancel, so no message can
be lost in a cancelled receive. The descriptor of a ZeroMQ socket is edge-triggered and any call may eat
an edge; therefore every wake-up reads until the socket is empty, and every send is followed by one more
reading. Owned by Endpoint; the only file that imports zmq.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

from pdserve.cluster.codec import MAX_FRAME_BYTES
from pdserve.core.errors import ConfigError

# Frames per peer and direction before a send is refused; more lie in the kernel's buffers.
HIGH_WATER_MARK = 256
# Frames read before other callbacks of the loop get their turn: a large one takes 0.15 ms to decode.
RECEIVE_BUDGET = 32
OPTIONS = {
    zmq.LINGER: 0,
    zmq.SNDHWM: HIGH_WATER_MARK,
    zmq.RCVHWM: HIGH_WATER_MARK,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.HEARTBEAT_IVL: 1000,
    zmq.HEARTBEAT_TIMEOUT: 3000,
    zmq.HEARTBEAT_TTL: 3000,
    zmq.HANDSHAKE_IVL: 3000,
    zmq.CONNECT_TIMEOUT: 3000,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
}
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Sent(Enum):
    YES = "yes"
    FULL = "full"
    UNREACHABLE = "unreachable"


class Context:
    """The I/O thread that all ports of one endpoint share; close it after them."""

    def __init__(self) -> None:
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def close(self) -> None:
        self.zmq.term()


class Port:
    """A ROUTER that listens or a DEALER that dials.

    on_frames(parts, descriptor)  a message, in memory of its own that lives as long as the views on it;
                                  `descriptor` is the number of the connection it came by, or -1
    on_up()                       a handshake succeeded
    on_down(descriptor)           a connection broke; its last messages may still be unread
    on_empty(port)                everything that had arrived has been given to on_frames

    All are called on the loop, never from within send or close.
    """

    def __init__(
        self,
        context: Context,
        kind: int,
        on_frames: Callable[[list[memoryview], int], None],
        on_up: Callable[[], None],
        on_down: Callable[[int], None],
        on_empty: Callable[["Port"], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frames = on_frames
        self._on_up = on_up
        self._on_down = on_down
        self._on_empty = on_empty
        self._is_scheduled = False
        self.is_closed = False
        self._socket = context.zmq.socket(kind)
        for option, value in OPTIONS.items():
            self._socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        else:
            # A name per link: a reconnecting process is never taken for the one that was there before.
            self._socket.setsockopt(zmq.ROUTING_ID, b"L" + secrets.token_bytes(16))
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        self._loop.add_reader(self._socket.FD, self._pump)
        self._loop.add_reader(self._monitor.FD, self._pump)

    @classmethod
    def router(cls, context: Context, *callbacks: Callable[..., None]) -> "Port":
        return cls(context, zmq.ROUTER, *callbacks)

    @classmethod
    def dealer(cls, context: Context, *callbacks: Callable[..., None]) -> "Port":
        return cls(context, zmq.DEALER, *callbacks)

    def bind(self, address: str) -> str:
        """Listen; returns the address with the port that was given. Raises ConfigError."""
        try:
            self._socket.setsockopt(zmq.IPV6, "[" in address)
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
        bound: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        return bound

    def connect(self, address: str) -> None:
        """Dial, again and again until the first connection stands. Raises ConfigError for a bad address."""
        try:
            self._socket.setsockopt(zmq.IPV6, "[" in address)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot dial {address}: {error.strerror}") from error

    def send(self, parts: list[bytes | memoryview]) -> Sent:
        """Queue one message without waiting. Large parts are not copied: they go out as they are when they do."""
        try:
            return self._send(parts)
        finally:
            self.schedule()

    def _send(self, parts: list[bytes | memoryview]) -> Sent:
        for _ in range(2):
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
                return Sent.YES
            except zmq.Again:
                # The refusal may be stale: asking for events makes libzmq see what its peers have read.
                if not self._events() & zmq.POLLOUT:
                    break
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return Sent.UNREACHABLE
        return Sent.FULL

    def schedule(self) -> None:
        """Have the socket read at the loop's next turn."""
        if not self._is_scheduled and not self.is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_scheduled = False
        for _ in range(RECEIVE_BUDGET):
            if self.is_closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._on_frames([frame.buffer for frame in frames], _descriptor(frames[0]))
        else:
            self.schedule()
            return
        self.read_events()
        if not self.is_closed:
            self._read_rest()

    def _read_rest(self) -> None:
        """Say on_empty only if nothing came in while the events were read."""
        if self._events() & zmq.POLLIN:
            self.schedule()
        else:
            self._on_empty(self)

    def read_events(self) -> None:
        """Report connections made and broken. What a connection broken before now used is free after it."""
        while not self.is_closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._events()  # makes the new connection writable for us
                self._on_up()
            else:
                self._on_down(event["value"])

    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))

    def close(self) -> None:
        """Drop everything unsent and unread; twice is nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def _descriptor(frame: zmq.Frame) -> int:
    """Number of the descriptor the frame was read from; valid as a name while that connection stands."""
    with contextlib.suppress(zmq.ZMQError):
        return int(frame.get(zmq.SRCFD))
    return -1
