"""The links that a decode node dials: one to each prefill node that the router has told it of.

    told of a peer ── dial, hello ──► welcomed ── pool mapped, or speed of the link measured ──► linked
          ▲                                                                                         │
          └──────────────────────── connection broke, another incarnation ◄─────────────────────────┘

Owns the names of these links; the machine hears of them by LinkUp and LinkLost. Called by NodeLife.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from pdserve.cluster.codec import Envelope
from pdserve.cluster.endpoint import Endpoint, LinkId
from pdserve.cluster.events import LinkLost, LinkUp, Received
from pdserve.cluster.link_probe import LinkProbe
from pdserve.cluster.membership import Acquaintance, Dialled
from pdserve.cluster.messages import Hello, Link, Message, Peer, PoolOffer, Probed, Refused, Welcome, WrongEpoch
from pdserve.core.errors import LayoutError
from pdserve.core.ids import Epoch, NodeId

log = logging.getLogger(__name__)

GIGA = 1e9


class PeerPool(Protocol):
    """bytes_per_s: how fast blocks are copied out of it, as measured"""

    @property
    def bytes_per_s(self) -> float: ...


class PeerPools(Protocol):
    """What a decode node does with the pool of a prefill node it is linked to."""

    def can_map(self, offer: PoolOffer | None) -> bool:
        """Whether it is to be mapped; else its blocks come in frames. Raises LayoutError when neither is allowed."""

    def fetch(self, offer: PoolOffer, epoch: Epoch) -> PeerPool:
        """Map it; called in a worker thread. Raises LayoutError when it cannot be mapped here."""

    def opened(self, node: NodeId, pool: Any) -> None:
        """Use what `fetch` returned for this peer from now on."""

    def closed(self, node: NodeId) -> None: ...

    def discard(self, pool: Any) -> None:
        """The peer was lost while its pool was being mapped."""


class PeerLinks:
    """feed: gives the machine an event"""

    def __init__(
        self, endpoint: Endpoint, epoch: Epoch, hello: Hello, pools: PeerPools, feed: Callable[[Any], None]
    ) -> None:
        self._endpoint = endpoint
        self._epoch = epoch
        self._hello = hello
        self._pools = pools
        self._feed = feed
        self._peers: dict[NodeId, Dialled] = {}
        self._addresses: dict[NodeId, str] = {}
        self._by_link: dict[LinkId, NodeId] = {}
        self._probes: dict[NodeId, LinkProbe] = {}
        self._linked: set[NodeId] = set()

    def __contains__(self, node: NodeId) -> bool:
        return node in self._peers

    def node_of(self, link: LinkId) -> NodeId | None:
        return self._by_link.get(link)

    def link(self, peers: Iterable[Peer]) -> None:
        """Dial the peers that are new, leave those that are gone or have been replaced."""
        told = {peer.node: peer for peer in peers}
        for node, dialled in list(self._peers.items()):
            if node not in told or dialled.expected != told[node].epoch:
                self._unlink(node)
        for node, peer in told.items():
            if node not in self._peers:
                link = self._endpoint.connect(peer.address)
                self._by_link[link] = node
                self._addresses[node] = peer.address
                self._peers[node] = Dialled(link, self._endpoint, self._epoch, self._hello, expected=peer.epoch)

    def close(self) -> None:
        for node in list(self._peers):
            self._unlink(node)

    def beat(self, now: float) -> None:
        for dialled in self._peers.values():
            # A prefill node has nothing to say while nothing is wanted of it: silence is no sign.
            dialled.beat(now, float("inf"))
        for node, probe in self._probes.items():
            self._send_all(node, probe.tick(now))

    def send(self, node: NodeId, message: Message) -> bool:
        return self._peers[node].send(message)

    # ---- from the links --------------------------------------------------------------------------

    def greet(self, node: NodeId) -> None:
        """The link stands: say hello at once instead of at the next beat."""
        self._peers[node].greet()

    def receive(self, node: NodeId, envelope: Envelope, tasks: asyncio.TaskGroup) -> None:
        """A frame of this peer. Mapping its pool becomes one of `tasks`."""
        dialled = self._peers[node]
        known = dialled.state is Acquaintance.KNOWN
        message = dialled.accept(envelope, time.monotonic())
        if known and dialled.state is not Acquaintance.KNOWN:
            self._lose(node)
        if isinstance(message, Welcome):
            self._welcomed(node, message.pool, dialled, tasks)
        elif isinstance(message, Probed):
            self._probed(node, message)
        elif isinstance(message, Refused):
            log.error("%s refuses this node: %s: %s", node, message.field, message.reason)
        elif message is not None and not isinstance(message, WrongEpoch):
            self._feed(Received(node, message, self._endpoint.waited_s))

    def lost(self, link: LinkId) -> None:
        """The connection broke. The peer may be back, or the router is about to say that it is gone: dial again."""
        node = self._by_link.pop(link)
        self._probes.pop(node, None)
        if self._peers[node].lost():
            self._lose(node)
        again = self._endpoint.connect(self._addresses[node])
        self._by_link[again] = node
        self._peers[node].redialled(again)

    def _unlink(self, node: NodeId) -> None:
        dialled = self._peers.pop(node)
        self._probes.pop(node, None)
        del self._by_link[dialled.link]
        self._endpoint.close_link(dialled.link)
        if dialled.lost():
            self._lose(node)

    # ---- the way for blocks ----------------------------------------------------------------------

    def _welcomed(self, node: NodeId, offer: PoolOffer | None, dialled: Dialled, tasks: asyncio.TaskGroup) -> None:
        try:
            can_map = self._pools.can_map(offer)
        except LayoutError as error:
            log.error("cannot take blocks from %s: %s", node, error)
            return
        if can_map and offer is not None:
            tasks.create_task(self._open_pool(node, offer, dialled), name=f"map {node}")
        elif node not in self._linked:
            self._probes[node] = LinkProbe()
            self._send_all(node, self._probes[node].tick(time.monotonic()))

    async def _open_pool(self, node: NodeId, offer: PoolOffer, dialled: Dialled) -> None:
        """Map the peer's pool; the link is up when that is done."""
        epoch = dialled.peer
        try:
            pool = await asyncio.to_thread(self._pools.fetch, offer, epoch)
        except LayoutError as error:
            log.error("cannot map the pool of %s: %s", node, error)
            # Unknown again: the next beat says hello, and the answer brings a fresh offer.
            dialled.lost()
            return
        is_current = self._peers.get(node) is dialled and dialled.peer == epoch
        # The link may have been lost and come back meanwhile: then two of these are under way.
        if not is_current or dialled.state is not Acquaintance.KNOWN or node in self._linked:
            self._pools.discard(pool)
            return
        self._pools.opened(node, pool)
        self._linked_to(Link(node, bytes_per_s=pool.bytes_per_s))

    def _probed(self, node: NodeId, message: Probed) -> None:
        probe = self._probes.get(node)
        if probe is None:
            return
        self._send_all(node, probe.answered(message.seq, len(message.payloads[0]), time.monotonic()))
        if probe.is_done:
            del self._probes[node]
            self._linked_to(Link(node, is_remote=True, bytes_per_s=probe.bytes_per_s))

    def _send_all(self, node: NodeId, messages: Iterable[Message]) -> None:
        for message in messages:
            self._peers[node].send(message)

    def _linked_to(self, link: Link) -> None:
        self._linked.add(link.node)
        transport = "ZeroMQ" if link.is_remote else "shared memory"
        log.info("linked to %s, transport %s, %.2f GB/s", link.node, transport, link.bytes_per_s / GIGA)
        self._feed(LinkUp(link))

    def _lose(self, node: NodeId) -> None:
        self._probes.pop(node, None)
        if node not in self._linked:
            return
        self._linked.discard(node)
        log.warning("lost %s", node)
        self._feed(LinkLost(node))
        self._pools.closed(node)
