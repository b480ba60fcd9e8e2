"""The asyncio edge that every node shares: links, beats, and the loop around its machine.

Dials the router and the peers it is told of, lets in the peers that dial it, turns frames and clocks
into events, and executes what the machine returns: Send here, everything else by the node. Owns the
endpoint and the names of links. The machine and the pool belong to PrefillNode or DecodeNode.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pdserve.cluster.codec import Envelope
from pdserve.cluster.config import Network
from pdserve.cluster.endpoint import Endpoint, LinkId
from pdserve.cluster.events import Joined, Leave, LinkLost, LinkUp, Received, Tick
from pdserve.cluster.keys import ClusterKeys
from pdserve.cluster.membership import LATE_S, Acquaintance, Dialled, Doorway, disagreement
from pdserve.cluster.messages import Hello, Message, Peer, Peers, PoolOffer, Refused, Send, Welcome, WrongEpoch
from pdserve.core.errors import LayoutError, RefusedError
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


class PeerPools(Protocol):
    """What a decode node does with the pool of a prefill node it is linked to."""

    def can_map(self, offer: PoolOffer | None) -> bool:
        """Whether it is to be mapped; else its blocks come in frames. Raises LayoutError when neither is allowed."""

    def fetch(self, offer: PoolOffer, epoch: Epoch) -> Any:
        """Map it; called in a worker thread. Raises LayoutError when it cannot be mapped here."""

    def opened(self, node: NodeId, pool: Any) -> None:
        """Use what `fetch` returned for this peer from now on."""

    def closed(self, node: NodeId) -> None: ...

    def discard(self, pool: Any) -> None:
        """The peer was lost while its pool was being mapped."""


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
    ):
        self.epoch = epoch
        self.machine = machine
        self._hello = hello
        self._execute = execute
        self._pool_offer = pool_offer
        self._peer_pools = peer_pools
        self._endpoint = Endpoint(epoch, self._on_frame, self._on_link_lost, self._on_writable, keys)
        self._doorway = Doorway(epoch, self._endpoint, self._judge, self._welcome)
        self._router: Dialled | None = None
        self._router_address = ""
        self._peers: dict[NodeId, Dialled] = {}
        self._linked: set[NodeId] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._addresses: dict[NodeId, str] = {}
        self._links: dict[LinkId, NodeId] = {}
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
            for node in list(self._peers):
                self._unlink(node)
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
            for dialled in self._peers.values():
                # A prefill node has nothing to say while nothing is wanted of it: silence is no sign.
                dialled.beat(now, float("inf"))
            self.feed(Tick(late))
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def feed(self, event: Any) -> None:
        """Give the machine an event and do what it says, on the event loop; nothing once `run` is over."""
        if self._is_over:
            return
        for action in self.machine.handle(event, time.monotonic()):
            if isinstance(action, Send):
                self.send(action.peer, action.message)
            else:
                self._execute(action)
        if self._is_leaving and self.machine.is_drained:
            self._drained.set()

    # ---- frames ----------------------------------------------------------------------------------

    def _on_frame(self, link: LinkId, envelope: Envelope) -> None:
        assert self._router is not None
        if link == self._router.link:
            self._from_router(envelope)
        elif link in self._links:
            self._from_peer(self._links[link], envelope)
        elif isinstance(envelope.message, Hello):
            admitted, _ = self._doorway.hello(link, envelope, envelope.message)
            if admitted is not None:
                log.info("%s linked to this node", admitted.node)
        elif not isinstance(envelope.message, WrongEpoch):
            sender = self._doorway.sender(link, envelope)
            if sender is not None:
                self.feed(Received(sender, envelope.message))

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
            self._link(message.prefill)
        elif message is not None and not isinstance(message, WrongEpoch):
            self.feed(Received(ROUTER, message))

    def _from_peer(self, node: NodeId, envelope: Envelope) -> None:
        dialled = self._peers[node]
        known = dialled.state is Acquaintance.KNOWN
        message = dialled.accept(envelope, time.monotonic())
        if known and dialled.state is not Acquaintance.KNOWN:
            self._lose(node)
        if isinstance(message, Welcome):
            self._welcomed(node, message.pool, dialled)
        elif isinstance(message, Refused):
            log.error("%s refuses this node: %s: %s", node, message.field, message.reason)
        elif message is not None and not isinstance(message, WrongEpoch):
            self.feed(Received(node, message))

    def _on_link_lost(self, link: LinkId) -> None:
        assert self._router is not None
        if link == self._router.link:
            if self._router.lost():
                log.warning("lost the connection to the router: it is dialled again")
            if self._is_leaving:
                self._drained.set()
            self._router.redialled(self._endpoint.connect(self._router_address))
        elif link in self._links:
            node = self._links.pop(link)
            if self._peers[node].lost():
                self._lose(node)
            # It may be back, or the router is about to say that it is gone.
            again = self._endpoint.connect(self._addresses[node])
            self._links[again] = node
            self._peers[node].redialled(again)
        else:
            gone = self._doorway.lost(link)
            if gone is not None:
                log.info("%s is no longer linked to this node", gone)

    def _on_writable(self, link: LinkId) -> None:
        """A dialled link stands: say hello at once instead of at the next beat."""
        if self._router is not None and link == self._router.link:
            self._router.greet()
        elif link in self._links:
            self._peers[self._links[link]].greet()

    # ---- peers that this node dials --------------------------------------------------------------

    def _link(self, peers: Iterable[Peer]) -> None:
        """Dial the peers that are new, leave those that are gone or have been replaced."""
        told = {peer.node: peer for peer in peers}
        for node, dialled in list(self._peers.items()):
            if node not in told or dialled.expected != told[node].epoch:
                self._unlink(node)
        for node, peer in told.items():
            if node not in self._peers:
                link = self._endpoint.connect(peer.address)
                self._links[link] = node
                self._addresses[node] = peer.address
                self._peers[node] = Dialled(link, self._endpoint, self.epoch, self._hello, expected=peer.epoch)

    def _unlink(self, node: NodeId) -> None:
        dialled = self._peers.pop(node)
        del self._links[dialled.link]
        self._endpoint.close_link(dialled.link)
        if dialled.lost():
            self._lose(node)

    def _welcomed(self, node: NodeId, offer: PoolOffer | None, dialled: Dialled) -> None:
        assert self._tasks is not None
        assert self._peer_pools is not None
        try:
            can_map = self._peer_pools.can_map(offer)
        except LayoutError as error:
            log.error("cannot take blocks from %s: %s", node, error)
            return
        if can_map and offer is not None:
            self._tasks.create_task(self._open_pool(node, offer, dialled), name=f"map {node}")
        elif node not in self._linked:
            self._linked.add(node)
            log.info("linked to %s, transport ZeroMQ", node)
            self.feed(LinkUp(node, is_remote=True))

    async def _open_pool(self, node: NodeId, offer: PoolOffer, dialled: Dialled) -> None:
        """Map the peer's pool; the link is up when that is done."""
        assert self._peer_pools is not None
        epoch = dialled.peer
        try:
            pool = await asyncio.to_thread(self._peer_pools.fetch, offer, epoch)
        except LayoutError as error:
            log.error("cannot map the pool of %s: %s", node, error)
            # Unknown again: the next beat says hello, and the answer brings a fresh offer.
            dialled.lost()
            return
        is_current = self._peers.get(node) is dialled and dialled.peer == epoch
        # The link may have been lost and come back meanwhile: then two of these are under way.
        if not is_current or dialled.state is not Acquaintance.KNOWN or node in self._linked:
            self._peer_pools.discard(pool)
            return
        self._peer_pools.opened(node, pool)
        self._linked.add(node)
        log.info("linked to %s, transport shared memory", node)
        self.feed(LinkUp(node))

    def _lose(self, node: NodeId) -> None:
        if node not in self._linked:
            return
        self._linked.discard(node)
        log.warning("lost %s", node)
        self.feed(LinkLost(node))
        assert self._peer_pools is not None
        self._peer_pools.closed(node)

    # ---- out -------------------------------------------------------------------------------------

    def send(self, peer: NodeId, message: Message) -> None:
        """Hand a message to the link with `peer`; it may be lost."""
        if peer == ROUTER:
            assert self._router is not None
            sent = self._router.send(message)
        elif peer in self._peers:
            sent = self._peers[peer].send(message)
        else:
            sent = self._doorway.send(peer, message)
        if not sent:
            # Nothing is assumed delivered: the beats, Want and Resume repeat it from state.
            log.debug("could not send %s to %s", type(message).__name__, peer)

    def _judge(self, hello: Hello) -> Refused | None:
        if hello.node == ROUTER:
            return Refused("node", f"the name {ROUTER} is the router's own")
        return disagreement(self._hello.facts, hello.facts)

    def _welcome(self) -> Welcome:
        return Welcome(self._hello.node, self._pool_offer)


async def _finished(event: asyncio.Event) -> None:
    await event.wait()
