"""The table of nodes: who has joined, what each last said of itself, and what they can do together.

    NodeJoined ──► in the table ── Held.is_leaving ──► gets no new work ── NodeLost ──► gone

Owns every Node, and the hasher that their checkpoint needs; the prompts and streams that a node was given are put
there by Attempts. Used by Dispatcher, Attempts and Beats; RouterService asks what a request may need.
"""

from collections.abc import Iterator

from pdserve.cluster.messages import Capacity, Held, Peer, Peers, Role, Send
from pdserve.core.block_hash import BlockHasher
from pdserve.core.ids import BlockHash, NodeId
from pdserve.router.events import NodeJoined
from pdserve.router.placement import Node
from pdserve.router.record import Record


class Nodes:
    """is_fcfs: they compute prompts in the order in which they come."""

    def __init__(self, is_fcfs: bool):
        self._is_fcfs = is_fcfs
        self._by_name: dict[NodeId, Node] = {}
        self._hasher: BlockHasher | None = None

    def __iter__(self) -> Iterator[Node]:
        """In the order in which they joined."""
        return iter(self._by_name.values())

    def __contains__(self, name: NodeId | None) -> bool:
        return name in self._by_name

    def __getitem__(self, name: NodeId) -> Node:
        return self._by_name[name]

    # ---- who is there ----------------------------------------------------------------------------

    def join(self, event: NodeJoined) -> None:
        peer = Peer(event.node, event.epoch, event.address)
        self._by_name[event.node] = Node(event.node, event.role, peer, event.capacity, is_fcfs=self._is_fcfs)
        self._hasher = event.hasher

    def lose(self, name: NodeId) -> None:
        del self._by_name[name]
        for node in self:
            node.links = {other: link for other, link in node.links.items() if other != name}

    def hear(self, name: NodeId, held: Held) -> bool:
        """Note what a node says of itself. Whether it may serve others than before."""
        node = self._by_name[name]
        before = (node.links.keys(), node.doubted, node.is_leaving)
        node.gauges, node.doubted = held.gauges, set()
        node.links = {link.node: link for link in held.links}
        node.is_leaving = held.is_leaving
        if held.cache is not None:
            node.cache.apply(held.cache)
        return before != (node.links.keys(), set(), node.is_leaving)

    def peers(self) -> Peers:
        """The prefill nodes, to which decode nodes link themselves."""
        return Peers(tuple(node.peer for node in self if node.role is Role.PREFILL))

    def announce_peers(self) -> list[Send]:
        peers = self.peers()
        return [Send(node.node, peers) for node in self if node.role is Role.DECODE]

    # ---- what they can do ------------------------------------------------------------------------

    def staying(self) -> list[Node]:
        """Those that take new work."""
        return [node for node in self if not node.is_leaving]

    def readiness(self) -> tuple[bool, str]:
        """Whether a new request would be served now, and why not in one line."""
        if not self.staying():
            return False, "no node has joined"
        decoders = [node for node in self.staying() if node.role in (Role.DECODE, Role.BOTH)]
        if any(node.role is Role.BOTH for node in decoders):
            return True, "ready"
        prefills = [node for node in self.staying() if node.role is Role.PREFILL]
        if not prefills:
            return False, "no prefill node has joined"
        if not decoders:
            return False, "no decode node has joined"
        if not any(p.node in d.links for p in prefills for d in decoders):
            return False, "no decode node is linked to a prefill node yet"
        return True, "ready"

    def largest(self) -> tuple[int, int]:
        """Most tokens that a prefill node's and a decode node's whole pool can hold."""

        def most(roles: tuple[Role, ...]) -> int:
            sizes = [n.capacity.num_tokens for n in self.staying() if n.role in roles]
            return max(sizes, default=0)

        return most((Role.PREFILL, Role.BOTH)), most((Role.DECODE, Role.BOTH))

    def widest(self, num_prompt: int, num_samples: int) -> Capacity | None:
        """Of a decode node that can begin these samples side by side, or else of the one with the most blocks."""

        def suits(capacity: Capacity) -> tuple[bool, int, int]:
            return capacity.can_begin(num_prompt, num_samples), capacity.num_blocks, capacity.max_running

        decoders = [n.capacity for n in self.staying() if n.role in (Role.DECODE, Role.BOTH)]
        return max(decoders, key=suits, default=None)

    def prefill_work(self) -> tuple[float, int]:
        """Seconds that the nodes for prompts together take for a token, and the tokens that they were given."""
        nodes = [n for n in self.staying() if n.role is not Role.DECODE and n.gauges and n.gauges.token_s > 0]
        rate = sum(1 / node.gauges.token_s for node in nodes if node.gauges)
        return (1 / rate if rate else 0.0), sum(node.num_prompt_tokens for node in nodes)

    def hashes(self, record: Record) -> tuple[BlockHash, ...]:
        """Names of the request's blocks; none before any node has joined."""
        return () if self._hasher is None else record.hashes(self._hasher)
