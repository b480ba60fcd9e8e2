"""One ZeroMQ socket and its monitor on the event loop.

Watches the raw descriptors instead of zmq.asyncio: nothing to await, nothing to cancel, so no message can
be lost in a cancelled receive. The descriptor of a ZeroMQ socket is edge-triggered and any call may eat
an edge; therefore every wake-up reads until the socket is empty, and every send is followed by one more
reading. Owned by Endpoint; the only file that imports zmq.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from pdserve.cluster.codec import MAX_FRAME_BYTES
from pdserve.cluster.keys import ClusterKeys
from pdserve.core.errors import ConfigError

log = logging.getLogger(__name__)

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
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | REFUSALS


Frame = zmq.Frame


def make_frame(data: memoryview) -> Frame:
    """Our own copy of `data` in memory that libzmq sends without another; may be called in any thread.

    A block sent as it lies would have to outlive its pool, and pyzmq starts a thread to learn when it has been sent.
    """
    return Frame(data, copy=True)


class Sent(Enum):
    YES = "yes"
    FULL = "full"
    UNREACHABLE = "unreachable"


class Context:
    """The I/O thread that all ports of one endpoint share; close it after them.

    keys: every TCP connection is encrypted, and only holders of a key that is allowed are let in
    """

    def __init__(self, keys: ClusterKeys | None = None) -> None:
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.keys = keys
        self._keeper: ThreadAuthenticator | None = None

    def admit_known_keys(self) -> None:
        """Have whoever dials a port of this context asked for its key; without that libzmq lets any key in."""
        if self.keys is None or self._keeper is not None:
            return
        self._keeper = ThreadAuthenticator(self.zmq)
        self._keeper.start()
        self._keeper.configure_curve_callback(credentials_provider=AllowList(self.keys.allowed))

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.stop()
        self.zmq.term()


@dataclass(frozen=True, slots=True)
class AllowList:
    """allowed: public keys in Z85."""

    allowed: frozenset[bytes]

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self.allowed


def make_key_pair() -> tuple[bytes, bytes]:
    """A new public and secret key in Z85."""
    return zmq.curve_keypair()


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
        self._num_failed = 0
        self._context = context
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
            keys = self._context.keys
            if keys is not None and address.startswith("tcp:"):
                self._context.admit_known_keys()
                self._socket.setsockopt(zmq.CURVE_SERVER, 1)
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
        bound: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        return bound

    def connect(self, address: str) -> None:
        """Dial, again and again until the first connection stands. Raises ConfigError for a bad address."""
        try:
            self._socket.setsockopt(zmq.IPV6, "[" in address)
            keys = self._context.keys
            if keys is not None and address.startswith("tcp:"):
                self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
                self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot dial {address}: {error.strerror}") from error

    def send(self, parts: list[bytes | Frame]) -> Sent:
        """Queue one message without waiting. Bytes are copied, a Frame goes as it is."""
        try:
            return self._send(parts)
        finally:
            self.schedule()

    def _send(self, parts: list[bytes | Frame]) -> Sent:
        for _ in range(2):
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
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
            elif event["event"] & REFUSALS:
                self._count_refusal(event["endpoint"].decode(errors="replace"))
            else:
                self._on_down(event["value"])

    def _count_refusal(self, address: str) -> None:
        """libzmq goes on trying, and strangers may try as often as they like: 1, 2, 4, 8, ... come into the log."""
        self._num_failed += 1
        if self._num_failed & (self._num_failed - 1) == 0:
            log.warning(
                "no connection on %s (%d so far): the other side has no key that is allowed here, or speaks no ZeroMQ",
                address,
                self._num_failed,
            )

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
