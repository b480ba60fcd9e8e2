"""Which nodes serve a request: what the router knows of each node, and the pick among them.

    prompt  to the node that has its first token soonest: its line, then the tokens that its cache lacks
    stream  to the decode node whose cache saves the most transfer, else to the one with the fewest streams

What a cache saves counts in seconds, less what more streams than elsewhere take (Savings): so a prompt that no
node has seen is placed by lines and streams alone. Pure: reads the nodes, changes none. Called by Attempts.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.cluster.messages import Capacity, Gauges, Link, Peer, Role
from pdserve.core.ids import BlockHash, NodeId, RequestId
from pdserve.router.prefix_index import PrefixIndex
from pdserve.router.record import Plan, Record

# Steps that a new stream is taken to share with those that are there already: a short answer's. What a request may
# grow to (max_tokens) says little about what it will.
SHARED_STEPS = 32
# A decode node computes a prompt beside idle prefill nodes when each of those would have this many times the work.
SPARED = 2
# Of a link that nobody has measured: TCP over loopback (docs/performance.md).
UNMEASURED_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a node is given at a time. What waits in the queue can still be ordered, moved and taken back.

    max_prompts  prompts that it has not answered yet
    max_work_s   predicted seconds of those among them that it would compute before the next one. A second is many
                 times what the next one takes to arrive, and little of what a client waits
    """

    max_prompts: float = 8
    max_work_s: float = 1.0


LIMITS = Limits()


@dataclass(slots=True)
class Node:
    """What is known of one node; `prompts` and `streams` are the requests it was given, with their tokens.

    The tokens of a stream are those it may grow to.
    is_leaving: it takes no new work.
    cache: blocks that it says it finds by hash.
    num_awaited: tokens of requests that are in the queue until it takes them.
    is_fcfs: it computes prompts in the order in which they come; else a long one lets shorter ones go first.
    links: prefill nodes that a decode node says it is linked to. doubted: those it has failed with since then.
    """

    node: NodeId
    role: Role
    peer: Peer
    capacity: Capacity
    links: Mapping[NodeId, Link] = field(default_factory=dict)
    doubted: set[NodeId] = field(default_factory=set)
    gauges: Gauges | None = None
    cache: PrefixIndex = field(default_factory=PrefixIndex)
    is_leaving: bool = False
    prompts: dict[RequestId, int] = field(default_factory=dict)
    streams: dict[RequestId, int] = field(default_factory=dict)
    num_awaited: int = 0
    is_fcfs: bool = True

    def fits(self, num_tokens: int) -> bool:
        return num_tokens <= self.capacity.num_tokens

    def can_begin(self, record: Record) -> bool:
        """Whether all samples of the request, of which each needs a block to write to, can begin here side by side."""
        num_samples = len(record.live)
        is_alone = num_samples == 1
        return self.fits(record.final_tokens) and (is_alone or self.capacity.can_begin(len(record.prompt), num_samples))

    def least_tokens(self, record: Record) -> int:
        """Tokens that it gives the request blocks for at once, whatever that needs."""
        return len(record.live) * self.capacity.least_tokens

    def tokens_to_begin(self, record: Record) -> int:
        """Tokens that the request needs blocks for here before it can go on, beside one block to write to."""
        return max(record.num_tokens, self.least_tokens(record))

    def most_tokens(self, record: Record) -> int:
        """Tokens that the request will have had blocks for at its end."""
        return max(record.total_tokens, self.least_tokens(record))

    @property
    def starts_no_prompt(self) -> bool:
        """Whether it said that a prompt given to it now would wait for others to be released."""
        return self.gauges is not None and self.gauges.starts_no_prompt

    @property
    def is_idle(self) -> bool:
        """Whether a prompt given to it now would be started at once."""
        return not self.prompts and not self.starts_no_prompt

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts it was given and has not answered."""
        return sum(self.prompts.values())

    def takes(self, num_tokens: int, limits: Limits) -> bool:
        """Whether it is given a prompt with so many tokens to compute now. An idle one is, however long it takes."""
        if not self.prompts:
            return True
        before = sum(given for given in self.prompts.values() if self.is_fcfs or given <= num_tokens)
        work_s = before * self.gauges.token_s if self.gauges else 0.0
        return len(self.prompts) < limits.max_prompts and work_s < limits.max_work_s

    @property
    def room(self) -> int:
        """Tokens that its pool could still take if every stream grows to the end; 0 before its first beat."""
        if self.gauges is None or len(self.streams) >= self.capacity.max_running:
            return 0
        size = self.capacity.block_size
        return (self.capacity.num_blocks - sum(-(-tokens // size) for tokens in self.streams.values())) * size

    @property
    def num_spare_tokens(self) -> int:
        """Tokens that its pool could take as it was at its last beat, whatever its streams grow to."""
        if self.gauges is None or len(self.streams) >= self.capacity.max_running:
            return 0
        gauges = self.gauges
        return (gauges.num_free + gauges.num_cached - gauges.num_reserved) * self.capacity.block_size

    def num_lacking(self, num_tokens: int, hashes: Sequence[BlockHash]) -> int:
        """Tokens of a request that it would have to compute; the last one is always run."""
        return max(1, num_tokens - self.cache.num_leading(hashes) * self.capacity.block_size)

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds until it would have computed so many tokens that are given to it now; 0 until its first beat."""
        before = self.num_prompt_tokens + self.num_awaited
        return (before + num_tokens) * self.gauges.token_s if self.gauges else 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """One way to serve a request. Without `prefill` the decode node computes the prompt, too."""

    prefill: Node | None
    decode: Node | None

    @property
    def computing(self) -> Node:
        """The node that computes the prompt."""
        node = self.prefill or self.decode
        assert node is not None
        return node

    @property
    def plan(self) -> Plan:
        if self.prefill is None:
            return Plan.LOCAL
        return Plan.SPLIT if self.decode else Plan.PREFILL_ONLY


class Savings:
    """What the prefix caches of `nodes` save one request, in seconds, at most to nothing.

    A decode node with more streams than another saves less: each of them, and the new one, has its next
    SHARED_STEPS tokens later by about what a token takes there. So a hot prefix draws requests to the nodes that
    hold it until those are busier than it is worth, and a short one hardly any. Where the pool has no room, a
    request would wait for blocks, whatever is cached there: nothing is saved.
    """

    def __init__(self, record: Record, hashes: Sequence[BlockHash], nodes: Collection[Node]):
        self._record = record
        self._hashes = hashes
        self._fewest = min((len(node.streams) for node in nodes if node.role is not Role.PREFILL), default=0)
        self._lacking: dict[NodeId, int] = {}
        self._found: dict[NodeId, int] = {}

    def num_lacking(self, node: Node) -> int:
        """Tokens that it would have to compute."""
        if node.node not in self._lacking:
            self._lacking[node.node] = node.num_lacking(self._record.num_tokens, self._hashes)
        return self._lacking[node.node]

    def first_token_s(self, node: Node) -> float:
        """Seconds until it would have the first token, its own cache and its streams counted."""
        num_tokens = self._record.num_tokens
        all_s = node.prefill_s(num_tokens)
        return all_s - self._net(node, all_s - node.prefill_s(self.num_lacking(node)))

    def transfer_s(self, place: Place) -> float:
        """Seconds on the link that blocks which the decode node has already need not take."""
        if place.prefill is None or place.decode is None:
            return 0.0
        node = place.decode
        if node.node not in self._found:
            self._found[node.node] = node.cache.num_found(self._hashes)
        num_bytes = self._found[node.node] * node.capacity.block_size * node.capacity.token_bytes
        return self._net(node, num_bytes / (node.links[place.prefill.node].bytes_per_s or UNMEASURED_BYTES_PER_S))

    def _net(self, node: Node, saved_s: float) -> float:
        if node.role is Role.PREFILL:
            return saved_s
        if node.gauges is None or node.num_spare_tokens < node.tokens_to_begin(self._record):
            return 0.0
        crowding_s = (len(node.streams) - self._fewest) * SHARED_STEPS * node.gauges.token_s
        return max(0.0, saved_s - crowding_s)


def pick(
    record: Record, hashes: Sequence[BlockHash], nodes: Collection[Node], max_prompts: float, cooperative: bool
) -> Place | None:
    """Where the request has its first token soonest, or None when no node has a place for it.

    The node may have so much to do that it is given nothing now (Node.takes): it is to be waited for then.

    hashes       names of the request's blocks
    max_prompts  a node that has this many prompts is given no more
    cooperative  whether decode nodes compute prompts when that is sooner than to wait in a prefill node's line
    """
    savings = Savings(record, hashes, nodes)

    def cost(place: Place) -> tuple[bool, float, bool, int, float, int, NodeId]:
        node = place.computing
        num_streams = len(place.decode.streams) if place.decode else 0
        # Equally soon, a decode node is left to its streams.
        lends = place.prefill is None and node.role is Role.DECODE
        soonest = (node.starts_no_prompt, savings.first_token_s(node))
        return *soonest, lends, node.num_prompt_tokens, -savings.transfer_s(place), num_streams, node.node

    return min(_places(record, nodes, max_prompts, cooperative, savings), key=cost, default=None)


def pick_other(
    record: Record, hashes: Sequence[BlockHash], nodes: Collection[Node], coming: Mapping[NodeId, int]
) -> Place | None:
    """Where a request goes on whose decode node has no blocks for it in time, or None.

    The prefill node that has its blocks stays its source while it can. A decode node must have blocks for it
    now, and it goes to none twice.

    coming  tokens by decode node of the requests that it may still have to find blocks for
    """
    prefills = [node for node in nodes if node.role is Role.PREFILL]
    source = [node for node in prefills if node.node == record.prefill_node]

    def has_room(node: Node) -> bool:
        needed = max(record.num_tokens + node.capacity.block_size, node.least_tokens(record))
        needed += coming.get(node.node, 0)
        return node.node not in (record.decode_node, *record.left) and node.num_spare_tokens >= needed

    decoders = [node for node in nodes if node.role is not Role.PREFILL and has_room(node)]
    return pick(record, hashes, [*(source or prefills), *decoders], math.inf, cooperative=False)


def _places(
    record: Record, nodes: Collection[Node], max_prompts: float, cooperative: bool, savings: Savings
) -> Iterator[Place]:
    """Every place. Where no prefill node could ever hold the prompt, as it may be once outputs have made it
    longer, decode nodes compute it."""
    fitting = [node for node in nodes if node.fits(record.num_tokens)]
    open_ = [node for node in fitting if len(node.prompts) < max_prompts]
    prefills = [node for node in open_ if node.role is Role.PREFILL]
    if record.ends_with_prefill and prefills:
        yield from (Place(prefill, None) for prefill in prefills)
        return
    decoders = [node for node in fitting if node.role is not Role.PREFILL and node.can_begin(record)]
    splits = [Place(p, d) for d in decoders for p in prefills if p.node in d.links and p.node not in d.doubted]
    yield from splits
    no_prefill_node = all(node.role is not Role.PREFILL for node in fitting)
    # However soon a decode node expects to be done: what an idle prefill node computes costs no stream anything. But
    # where a cache spares most of the work, there is little left to cost anything.
    least = min((savings.num_lacking(place.computing) for place in splits if place.computing.is_idle), default=None)
    for decode in decoders:
        lends = no_prefill_node
        if cooperative and decode.room >= decode.most_tokens(record):
            lends = lends or least is None or SPARED * savings.num_lacking(decode) <= least
        if len(decode.prompts) < max_prompts and (decode.role is Role.BOTH or lends):
            yield Place(None, decode)
