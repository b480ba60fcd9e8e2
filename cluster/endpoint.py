"""The links of one process: typed messages over ZeroMQ, to peers that dialled us and peers we dialled.

    accepted:  (none) ── first good frame ──► up ── connection broke ──► lost
    dialled:   dialling ── handshake ──► up ── connection broke ──► lost

A link is one connection. Once that breaks, the link is lost for good and its LinkId never comes back; whoever
wants the peer again dials again and greets again. So a broken connection is never continued in secret, and a
restarted peer is never mistaken for the one before. Accepted links share one ROUTER, each dialled one has a
DEALER under a fresh name. Everything runs on the event loop that calls listen or connect. The node that owns
the endpoint checks epochs and gives messages to its machines; nothing sent is assumed delivered.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NewType, TypeVarTuple

from pdserve.cluster.address import check_address, claim_path
from pdserve.cluster.codec import Envelope, decode, encode, payloads_of
from pdserve.cluster.cpu_wait import CpuWait
from pdserve.cluster.keys import ClusterKeys
from pdserve.cluster.messages import Message
from pdserve.cluster.port import Context, Port, Sent
from pdserve.core.errors import CodecError, ConfigError
from pdserve.core.ids import Epoch

LinkId = NewType("LinkId", int)
Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

# How soon a refused sender hears that it may try again. A ROUTER does not tell which of its pipes drained.
RETRY_S = 0.01
# Lost peers whose last frames may still arrive and must not look like new links.
MAX_GONE = 4096


@dataclass(slots=True)
class EndpointCounters:
    """num_refused: sends that found no room or no peer; num_late: frames of links already given up."""

    num_sent: int = 0
    num_received: int = 0
    num_refused: int = 0
    num_bad: int = 0
    num_late: int = 0
    num_callback_errors: int = 0


@dataclass(slots=True, eq=False)
class _Link:
    """routing_id: the peer's name on our ROUTER, empty for a link that we dialled."""

    id: LinkId
    port: Port
    routing_id: bytes = b""
    descriptor: int = -1
    is_up: bool = False
    is_leaving: bool = False


class Endpoint:
    """on_message(link, envelope)  a decoded frame, in the order of sending
    on_lost(link)                  the connection broke; what it had delivered was given to on_message before
    on_writable(link)              a dialled link is up now, or a send that was refused may succeed now

    keys: encrypt all TCP links, and let in only who holds a key that is allowed
    waited_s: how long the message that on_message is called for may have waited for a core here, at most
    Callbacks run on the loop; what they raise is logged and counted, and the link goes on.
    """

    def __init__(
        self,
        epoch: Epoch,
        on_message: Callable[[LinkId, Envelope], None],
        on_lost: Callable[[LinkId], None],
        on_writable: Callable[[LinkId], None] | None = None,
        keys: ClusterKeys | None = None,
    ) -> None:
        self.epoch = epoch
        self.counters = EndpointCounters()
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_writable = on_writable
        self._context = Context(keys)
        self._router: Port | None = None
        self._ipc_paths: list[Path] = []
        self._links: dict[LinkId, _Link] = {}
        self._accepted: dict[bytes, _Link] = {}
        self._by_descriptor: dict[int, _Link] = {}
        self._gone: dict[bytes, None] = {}
        self._leaving: list[_Link] = []
        self._refused: set[LinkId] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._num_links = 0
        self._is_closed = False
        self._cpu_wait = CpuWait()
        self.waited_s = 0.0

    async def listen(self, address: str) -> str:
        """Accept links at tcp://host:port (port 0: any free one) or ipc:///path; returns the real address.

        The directory of an ipc path is made with mode 0700 and must be ours alone. Raises ConfigError.
        """
        path = check_address(address)
        if path is not None:
            claim_path(path)
        router = self._router or Port.router(
            self._context, self._read_accepted, _nothing, self._mark_broken, self._report_lost
        )
        try:
            bound: str = router.bind(address)
        except ConfigError:
            if self._router is None:
                router.close()
            raise
        self._router = router
        if path is not None:
            self._ipc_paths.append(path)
        return bound

    def connect(self, address: str) -> LinkId:
        """Dial a peer until it answers; sends are refused until on_writable. Raises ConfigError."""
        check_address(address)
        link_id = self._next_id()

        def read(frames: list[memoryview], descriptor: int) -> None:
            link.descriptor = descriptor
            self._receive(link, frames)

        def up() -> None:
            link.is_up = True
            self._call(link_id, self._on_writable, link_id)

        def down(_descriptor: int) -> None:
            if link.is_up:  # else a handshake failed, which libzmq tries again
                self._leave(link)

        port = Port.dealer(self._context, read, up, down, self._report_lost)
        link = self._links[link_id] = _Link(link_id, port)
        try:
            port.connect(address)
        except ConfigError:
            self._forget(link)
            raise
        return link_id

    def send(self, link_id: LinkId, message: Message, addressee: Epoch) -> bool:
        """Hand a message to the link without waiting; False: not taken, the pipe is full or nobody is there.

        After False on_writable tells when to try again, or on_lost that it is over. True is no promise of
        delivery. Raises CodecError when the message itself cannot be sent.
        """
        link = self._links.get(link_id)
        if link is None or not link.is_up or link.is_leaving:
            self.counters.num_refused += 1
            return False
        frames = [encode(message, self.epoch, addressee), *payloads_of(message)]
        sent = link.port.send([link.routing_id, *frames] if link.routing_id else frames)
        if sent is Sent.YES:
            self.counters.num_sent += 1
            return True
        self.counters.num_refused += 1
        if sent is Sent.UNREACHABLE:
            self._leave(link)
            return False
        self._refused.add(link_id)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._tell_refused)
        return False

    def read_wait_s(self) -> float:
        """How long what the loop begins with now may have waited for a core, at most.

        To be called in every turn of the loop that something of ours begins: the wait for that turn is no later one's.
        """
        if not self._cpu_wait.is_read and not self._is_closed:
            asyncio.get_running_loop().call_soon(self._settle)
        return self._cpu_wait.read()

    def _settle(self) -> None:
        if not self._is_closed:
            self._cpu_wait.settle()

    def descriptor(self, link_id: LinkId) -> int | None:
        """The number of a link's connection, which belongs to libzmq; None before anything has come by it."""
        link = self._links.get(link_id)
        return link.descriptor if link is not None and link.descriptor >= 0 else None

    def close_link(self, link_id: LinkId) -> None:
        """Give a link up; on_lost is not called. An accepted peer notices nothing, its frames are dropped."""
        link = self._links.get(link_id)
        if link is not None:
            self._forget(link)

    async def close(self) -> None:
        """Close every link and free every address; twice is nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        for link in list(self._links.values()):
            self._forget(link)
        if self._router is not None:
            self._router.close()
        self._cpu_wait.close()
        # Nothing lingers, so this waits only for the I/O thread to see the sockets closed: under 1 ms.
        self._context.close()
        for path in self._ipc_paths:
            path.unlink(missing_ok=True)

    # ---- from the ports --------------------------------------------------------------------------

    def _read_accepted(self, frames: list[memoryview], descriptor: int) -> None:
        routing_id = bytes(frames[0])
        if routing_id in self._gone:
            self.counters.num_late += 1
            return
        link = self._accepted.get(routing_id)
        self._receive(link, frames[1:], routing_id, descriptor)

    def _receive(
        self, link: _Link | None, frames: list[memoryview], routing_id: bytes = b"", descriptor: int = -1
    ) -> None:
        """Decode one message and give it on; a good first one makes the link of a peer that dialled us."""
        try:
            if not frames:
                raise CodecError("message without a frame")
            envelope = decode(bytes(frames[0]), tuple(frames[1:]))
        except CodecError as error:
            self._count_bad(link, error)
            return
        if link is None:
            link = self._accept(routing_id, descriptor)
        self.counters.num_received += 1
        self.waited_s = self.read_wait_s()
        self._call(link.id, self._on_message, link.id, envelope)

    def _accept(self, routing_id: bytes, descriptor: int) -> _Link:
        assert self._router is not None
        # A descriptor's number may be reused: first hear of the connections that broke before this one.
        self._router.read_events()
        link = _Link(self._next_id(), self._router, routing_id, descriptor, is_up=True)
        self._links[link.id] = link
        self._accepted[routing_id] = link
        if descriptor >= 0:
            if descriptor in self._by_descriptor:
                # That connection broke before its first frame was read, so nobody has told of it.
                self._leave(self._by_descriptor[descriptor])
            self._by_descriptor[descriptor] = link
        return link

    def _mark_broken(self, descriptor: int) -> None:
        link = self._by_descriptor.pop(descriptor, None)
        if link is not None:
            self._leave(link)

    def _leave(self, link: _Link) -> None:
        """The connection is gone, its last messages may be unread: on_lost waits for them."""
        if not link.is_leaving:
            link.is_leaving = True
            self._leaving.append(link)
            link.port.schedule()

    def _report_lost(self, port: Port) -> None:
        for link in [link for link in self._leaving if link.port is port]:
            if link.id in self._links:  # else a callback has closed it meanwhile
                self._forget(link)
                self._call(link.id, self._on_lost, link.id)

    def _tell_refused(self) -> None:
        self._retry = None
        refused, self._refused = self._refused, set()
        for link_id in refused:
            if link_id in self._links:
                self._call(link_id, self._on_writable, link_id)

    def _forget(self, link: _Link) -> None:
        del self._links[link.id]
        self._refused.discard(link.id)
        if link in self._leaving:
            self._leaving.remove(link)
        if not link.routing_id:
            link.port.close()
            return
        del self._accepted[link.routing_id]
        if self._by_descriptor.get(link.descriptor) is link:
            del self._by_descriptor[link.descriptor]
        self._gone[link.routing_id] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def _next_id(self) -> LinkId:
        self._num_links += 1
        return LinkId(self._num_links)

    def _count_bad(self, link: _Link | None, error: CodecError) -> None:
        self.counters.num_bad += 1
        count = self.counters.num_bad
        if count & (count - 1) == 0:  # 1, 2, 4, 8, ...: a babbling peer does not fill the log
            log.warning("frame dropped on link %s (%d so far): %s", link.id if link else "of a stranger", count, error)

    def _call(self, link_id: LinkId, callback: Callable[[*Ts], None] | None, *args: *Ts) -> None:
        if callback is None:
            return
        try:
            callback(*args)
        except Exception:
            # The reader must go on: the other links share it, and an edge it misses never comes again.
            self.counters.num_callback_errors += 1
            log.exception("callback for link %s failed", link_id)


def _nothing() -> None:
    """A ROUTER's new connections show themselves by their first frame."""
