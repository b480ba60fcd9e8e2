"""The asyncio edge that every node shares: links, beats, and the loop around its machine.

Dials the router, lets in the peers that dial it, turns frames and clocks into events, and executes what the
machine returns: Send here, everything else by the node. Owns the endpoint, and PeerLinks the links to peers
that this node dials. The machine and the pool belong to PrefillNode or DecodeNode.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pdserve.cluster.codec import Envelope
from pdserve.cluster.config import Network
from pdserve.cluster.endpoint import Endpoint, LinkId
from pdserve.cluster.events import Joined, Leave, Received, Tick
from pdserve.cluster.keys import ClusterKeys
from pdserve.cluster.membership import LATE_S, Acquaintance, Dialled, Doorway, disagreement
from pdserve.cluster.messages import (
    MAX_PROBE_BYTES,
    Begun,
    FirstToken,
    Hello,
    Message,
    Peers,
    PoolOffer,
    Probe,
    Probed,
    Refused,
    Send,
    Welcome,
    WrongEpoch,
)
from pdserve.cluster.peer_links import PeerLinks, PeerPools
from pdserve.core.errors import RefusedError
from pdserve.core.ids import Epoch, NodeId

log = logging.getLogger(__name__)

ROUTER = NodeId("router")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a node is told to end. leave: take no new work, finish what there is, then end; stop: end now."""

    leave: asyncio.Event
    stop: asyncio.Event


class Machine(Protocol):
    def handle(self, event: Any, now: float) -> list[Any]: ...

    def check(self) -> None: ...

    @property
    def is_drained(self) -> bool: ...


class Backlog(Protocol):
    """What a prefill node has ready for peers whose links took no more."""

    def writable(self, peer: NodeId) -> None: ...

    def gone(self, peer: NodeId) -> None: ...


class NodeLife:
    """hello: what this node says of itself, its peer_address filled in here once it listens."""

    def __init__(
        self,
        hello: Hello,
        epoch: Epoch,
        machine: Machine,
        execute: Callable[[Any], None],
        pool_offer: PoolOffer | None = None,
        peer_pools: PeerPools | None = None,
        keys: ClusterKeys | None = None,
        backlog: Backlog | None = None,
        make_endpoint: Callable[..., Endpoint] = Endpoint,
    ):
        self.epoch = epoch
        self.machine = machine
        self._hello = hello
        self._execute = execute
        self._pool_offer = pool_offer
        self._peer_pools = peer_pools
        self._backlog = backlog
        self._endpoint = make_endpoint(epoch, self._on_frame, self._on_link_lost, self._on_writable, keys)
        self._doorway = Doorway(epoch, self._endpoint, self._judge, self._welcome)
        self._router: Dialled | None = None
        self._router_address = ""
        self._peers: PeerLinks | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._beat_s, self._silence_s = 0.5, 3.0
        self._joined = asyncio.Event()
        self._fatal: asyncio.Future[None] | None = None
        self._is_leaving = False
        self._drained = asyncio.Event()
        self._is_over = False

    # ---- life ------------------------------------------------------------------------------------

    async def run(self, network: Network, ending: Ending) -> None:
        """Serve until told to end. Raises RefusedError when the router refuses this node, or what `fail` was told."""
        self._fatal = asyncio.get_running_loop().create_future()
        try:
            bound = await self._endpoint.listen(network.listen)
            self._hello = replace(self._hello, peer_address=network.advertise or bound)
            if self._peer_pools is not None:
                self._peers = PeerLinks(self._endpoint, self.epoch, self._hello, self._peer_pools, self.feed)
            self._router_address = network.router
            self._router = Dialled(self._endpoint.connect(network.router), self._endpoint, self.epoch, self._hello)
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                beats = tasks.create_task(self._beats(), name="beats")
                stopped = tasks.create_task(_finished(ending.stop), name="stop")
                left = tasks.create_task(self._leave(ending.leave, network.drain_s), name="leave")
                ends: set[asyncio.Future[None]] = {stopped, left, self._fatal}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in (beats, stopped, left):
                    task.cancel()
            if self._fatal.done():
                self._fatal.result()
        finally:
            # A step or copy still in flight reports to a node that has ended.
            self._is_over = True
            if self._fatal.done():
                self._fatal.exception()
            else:
                self._fatal.cancel()
            if self._peers is not None:
                self._peers.close()
            await self._endpoint.close()

    async def _leave(self, leave: asyncio.Event, drain_s: float) -> None:
        """Wait until this node is to leave, then until nobody needs it, for drain_s at most."""
        await leave.wait()
        log.info("leaving: no new work, up to %g s for what is under way", drain_s)
        self._is_leaving = True
        self.feed(Leave())
        if self._router is None or self._router.state is not Acquaintance.KNOWN:
            # The router went first: nobody is left to finish anything for.
            return
        try:
            async with asyncio.timeout(drain_s):
                await self._drained.wait()
        except TimeoutError:
            log.warning("leaving after %g s (drain_s) with requests under way: they go on elsewhere", drain_s)

    def fail(self, error: BaseException) -> None:
        """Something happened that this process cannot go on after: `run` raises it."""
        if self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    async def joined(self) -> None:
        """Wait until the router has let this node in."""
        await self._joined.wait()

    async def _beats(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            late, due = now - due > LATE_S, now + self._beat_s
            assert self._router is not None
            if self._router.beat(now, self._silence_s):
                log.warning("the router has been silent for %.1f s: saying hello again", self._silence_s)
            if self._peers is not None:
                self._peers.beat(now)
            self.feed(Tick(late))
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def feed(self, event: Any) -> None:
        """Give the machine an event and do what it says, on the event loop; nothing once `run` is over."""
        if self._is_over:
            return
        # Whatever this turn of the loop has waited for, it is not what the next message has.
        self._endpoint.read_wait_s()
        now = time.monotonic()
        for action in self.machine.handle(event, now):
            if isinstance(action, Send):
                self.send(action.peer, stamped(action.message, now, time.monotonic))
            else:
                self._execute(action)
        if self._is_leaving and self.machine.is_drained:
            self._drained.set()

    # ---- frames ----------------------------------------------------------------------------------

    def _on_frame(self, link: LinkId, envelope: Envelope) -> None:
        assert self._router is not None
        if link == self._router.link:
            self._from_router(envelope)
        elif self._peers is not None and (peer := self._peers.node_of(link)) is not None:
            assert self._tasks is not None
            self._peers.receive(peer, envelope, self._tasks)
        elif isinstance(envelope.message, Hello):
            admitted, before = self._doorway.hello(link, envelope, envelope.message)
            if before is not None:
                self._gone(before.node)
            if admitted is not None:
                log.info("%s linked to this node", admitted.node)
        elif not isinstance(envelope.message, WrongEpoch):
            sender = self._doorway.sender(link, envelope)
            if sender is not None and isinstance(envelope.message, Probe):
                num_bytes = min(envelope.message.num_bytes, MAX_PROBE_BYTES)
                self.send(sender, Probed(envelope.message.seq, (bytes(num_bytes),)))
            elif sender is not None:
                self.feed(Received(sender, envelope.message, self._endpoint.waited_s))

    def _from_router(self, envelope: Envelope) -> None:
        assert self._router is not None
        message = self._router.accept(envelope, time.monotonic())
        if isinstance(message, Welcome):
            self._beat_s, self._silence_s = message.heartbeat_s, message.node_lost_s
            self.feed(Joined(message.lease_s, message.tpot_s))
            self._joined.set()
            log.info("joined the router")
        elif isinstance(message, Refused):
            self.fail(RefusedError(message.field, message.reason))
        elif isinstance(message, Peers):
            if self._peers is not None:
                self._peers.link(message.prefill)
        elif message is not None and not isinstance(message, WrongEpoch):
            self.feed(Received(ROUTER, message, self._endpoint.waited_s))

    def _on_link_lost(self, link: LinkId) -> None:
        assert self._router is not None
        if link == self._router.link:
            if self._router.lost():
                log.warning("lost the connection to the router: it is dialled again")
            if self._is_leaving:
                self._drained.set()
            self._router.redialled(self._endpoint.connect(self._router_address))
        elif self._peers is not None and self._peers.node_of(link) is not None:
            self._peers.lost(link)
        else:
            gone = self._doorway.lost(link)
            if gone is not None:
                log.info("%s is no longer linked to this node", gone)
                self._gone(gone)

    def _on_writable(self, link: LinkId) -> None:
        """A dialled link stands, or one that took no more takes messages again."""
        if self._router is not None and link == self._router.link:
            # Hello at once instead of at the next beat.
            self._router.greet()
        elif self._peers is not None and (peer := self._peers.node_of(link)) is not None:
            self._peers.greet(peer)
        elif self._backlog is not None and (member := self._doorway.node_of(link)) is not None:
            self._backlog.writable(member)

    def _gone(self, peer: NodeId) -> None:
        if self._backlog is not None:
            self._backlog.gone(peer)

    # ---- out -------------------------------------------------------------------------------------

    def send(self, peer: NodeId, message: Message) -> bool:
        """Hand a message to the link with `peer`; it may be lost. False: the link takes none now, or there is none."""
        if peer == ROUTER:
            assert self._router is not None
            sent = self._router.send(message)
        elif self._peers is not None and peer in self._peers:
            sent = self._peers.send(peer, message)
        else:
            sent = self._doorway.send(peer, message)
        if not sent:
            # Nothing is assumed delivered: the beats, Want and Resume repeat it from state.
            log.debug("could not send %s to %s", type(message).__name__, peer)
        return sent

    def _judge(self, hello: Hello) -> Refused | None:
        if hello.node == ROUTER:
            return Refused("node", f"the name {ROUTER} is the router's own")
        return disagreement(self._hello.facts, hello.facts)

    def _welcome(self) -> Welcome:
        return Welcome(self._hello.node, self._pool_offer)


def stamped(message: Message, since: float, clock: Callable[[], float]) -> Message:
    """The message as it goes out: where it tells of the step that was over then, with how long that is ago."""
    return replace(message, told_s=clock() - since) if isinstance(message, FirstToken | Begun) else message


async def _finished(event: asyncio.Event) -> None:
    await event.wait()
