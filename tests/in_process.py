"""A whole cluster in one process on an injected clock: the real machines, a scripted network, any engine.

Router, prefill and decode schedulers exchange the real messages through MemoryHub; steps and copies
take as long as they are said to. After every event the invariants of the machine that took it are
checked. Nothing waits: `run` jumps from event to event. Links come and go here as cluster/node_life.py
and router/service.py let them: the router says which prefill nodes there are (Peers), decode nodes dial them,
and what is sent while a link is down is lost.
"""

import dataclasses
import hashlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.cluster.attempts import DEFAULT_LEASE_S
from pdserve.cluster.config import DecodeBaseline
from pdserve.cluster.events import Joined, Leave, LinkLost, LinkUp, Received, Tick
from pdserve.cluster.membership import LATE_S
from pdserve.cluster.memory import MemoryHub
from pdserve.cluster.messages import Capacity, Link, Message, Peers, Role, Send
from pdserve.core.batching import Batching
from pdserve.core.block_hash import BlockHasher, PrefixCache, root_of
from pdserve.core.cache_delta import BEGINNING
from pdserve.core.ids import Epoch, NodeId, RequestId, new_request_id
from pdserve.core.kv_spec import KVSpec
from pdserve.core.logprobs import NO_LOGPROBS, Logprobs, TokenLogprob
from pdserve.core.sampling import SamplingParams
from pdserve.core.turns import Policy
from pdserve.decode_node.chunk_budget import chunk_budget
from pdserve.decode_node.preemption import Mode
from pdserve.decode_node.scheduler import DecodeScheduler, Limits
from pdserve.decode_node.swap import SwapIn, SwapOut, SwappedIn, SwappedOut
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.checksum import block_checksum
from pdserve.engine.chunking import ChunkedPrefill, chunking
from pdserve.engine.kv_pool import KVPool, PoolView, buffer_bytes
from pdserve.engine.planner import Planner
from pdserve.engine.step import Draw, Row, RunStep, StepDone, StepPlan, StepResult
from pdserve.engine.step_cost import StepCost
from pdserve.kvtransfer.copying import CheckBlocks, check_own, copy_and_verify, copy_out, take_and_verify
from pdserve.kvtransfer.offer import SendBlocks
from pdserve.kvtransfer.pull import CopyBlocks, CopyDone, Verdict
from pdserve.prefill_node.scheduler import PrefillScheduler
from pdserve.router.dispatcher import Dispatcher
from pdserve.router.events import ClientGone, Deliver, GiveUp, NodeJoined, NodeLost, SampleStopped, Submit
from pdserve.router.ledger import Times
from pdserve.router.record import Record, SampleRecord
from pdserve.router.rules import Rules

ROUTER = NodeId("router")
TINY_SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4)
VOCAB = 5000
BEAT_S = 0.5
MODERN = DecodeBaseline()
# To dial and shake hands.
DIAL_S = 0.001


class Engine(Protocol):
    def step(self, plan: StepPlan) -> StepResult: ...


def next_token(tokens: list[int], sample: int = 0) -> int:
    """The fake model: any change of any earlier token changes the next one, and so does the sample."""
    digest = hashlib.blake2b(str(tokens).encode(), digest_size=4, salt=sample.to_bytes(2)).digest()
    return int.from_bytes(digest, "little") % VOCAB


def continuation(prompt: list[int], num_tokens: int, sample: int = 0) -> list[int]:
    """What the fake model says after `prompt`: the oracle of every test that uses it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, sample))
    return tokens[len(prompt) :]


def fake_logprobs(token: int, params: SamplingParams) -> Logprobs:
    """Of a drawn token, where they are asked for: any number that follows from it."""
    if params.logprobs is None:
        return NO_LOGPROBS
    others = [TokenLogprob(rank, -1.0 - rank) for rank in range(params.logprobs)]
    return Logprobs.pack(params.logprobs, [[TokenLogprob(token, -token / VOCAB), *others]])


class FakeEngine:
    """Keeps tokens as KV, and draws from nothing but what it reads back through the block table."""

    def __init__(self, pool: KVPool):
        self.pool = pool

    def step(self, plan: StepPlan) -> StepResult:
        size = self.pool.spec.block_size
        draws: dict[int, tuple[Draw, ...]] = {}
        scores: dict[int, Logprobs] = {}
        for move in plan.moves:
            self.pool.data[move.target] = self.pool.data[move.source]
        for row in plan.rows:
            for offset, token in enumerate(row.token_ids):
                position = row.start + offset
                if position >= row.write_from:
                    slot = self.pool.data[row.block_ids[position // size], 0, 0, :, position % size]
                    slot[0], slot[1] = float(token), float(position)
            if row.samples:
                read = self._read(row.block_ids, row.start + len(row.token_ids))
                tokens = [next_token(read, spec.sample) for spec in row.samples]
                params = row.samples[0].params
                draws[row.key] = tuple(Draw(token, fake_logprobs(token, params)) for token in tokens)
            if row.scored is not None:
                others = [TokenLogprob(rank, -1.0) for rank in range(row.scored.num_top)]
                rows = [[TokenLogprob(token, -token / VOCAB), *others] for token in row.scored.token_ids]
                scores[row.key] = Logprobs.pack(row.scored.num_top, rows)
        checksums = {}
        for seal in plan.seals:
            self.pool.data[seal.block_id, :, :, :, seal.num_tokens :] = 0
            checksums[seal.block_id] = block_checksum(self.pool.view.block(seal.block_id), seal.block_hash)
        return StepResult(plan.step, draws, checksums, scores=scores)

    def _read(self, block_ids: tuple[int, ...], num_tokens: int) -> list[int]:
        size, read = self.pool.spec.block_size, []
        for position in range(num_tokens):
            slot = self.pool.data[block_ids[position // size], 0, 0, :, position % size, 0]
            assert int(slot[1]) == position, f"slot of position {position} holds {slot.tolist()}"
            read.append(int(slot[0]))
        return read


@dataclass
class Timing:
    """Seconds: a step is `step` plus `token` for each of its tokens; a copy takes `block` per block."""

    step: float = 0.010
    token: float = 0.0001
    block: float = 0.0002


def written(row: Row, block_size: int) -> list[int]:
    """Blocks that a row of a step writes."""
    first, end = max(row.start, row.write_from) // block_size, row.start + len(row.token_ids)
    return list(row.block_ids[first : -(-end // block_size)])


@dataclass
class SimNode:
    """One incarnation of a node.

    is_known       the router has let it in
    told, linked   prefill nodes that a decode node was told of, and those among them that it is linked to
    maps           their pools, as long as a copy may begin
    held_up        what happened to it while its process is held up; None when it runs
    host           its host pool, where sequences that yield leave their blocks
    writing        blocks that steps and copies in flight write
    """

    name: NodeId
    role: Role
    epoch: Epoch
    machine: PrefillScheduler | DecodeScheduler
    pool: KVPool
    engine: Engine
    host: PoolView
    alive: bool = True
    is_known: bool = True
    told: dict[NodeId, Epoch] = field(default_factory=dict)
    linked: set[NodeId] = field(default_factory=set)
    maps: dict[NodeId, PoolView] = field(default_factory=dict)
    held_up: list[object] | None = None
    writing: set[int] = field(default_factory=set)

    def begin_writing(self, block_ids: list[int]) -> None:
        """Nobody may write what somebody else is writing, or two contents end in one block."""
        assert len(set(block_ids)) == len(block_ids), f"{self.name} writes {block_ids}"
        assert not self.writing & set(block_ids), f"{self.name} writes {self.writing} already, and {block_ids} now"
        self.writing.update(block_ids)


@dataclass
class Outcome:
    """Of a request; `samples` and `logprobs` by sample."""

    samples: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    finish: str | None = None
    given_up: str | None = None
    ledger: dict | None = None

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.given_up is not None

    @property
    def tokens(self) -> list[int]:
        """Of a request with one sample."""
        return self.samples.setdefault(0, [])


class InProcessCluster:
    """num_prefill = 0 makes colocated nodes: decode nodes with the role `both`.

    waited_s: what each message is said to have waited for a core before it was read.
    Without `cooperative` every prompt is handed off, which is what most tests are about. With `is_remote`
    decode nodes cannot map the pools of prefill nodes. baseline: on every node that has such a setting, and the router.
    """

    def __init__(
        self,
        num_prefill: int = 1,
        num_decode: int = 1,
        *,
        spec: KVSpec = TINY_SPEC,
        num_blocks: int = 64,
        max_step_tokens: int = 16,
        max_running: int = 16,
        mode: Mode = Mode.AUTO,
        num_swap_blocks: int = 0,
        policy: Policy = Policy.SHORTEST,
        make_engine: Callable[[KVPool], Engine] = FakeEngine,
        hub: MemoryHub | None = None,
        timing: Timing | None = None,
        max_attempts: int = 3,
        cooperative: bool = False,
        is_remote: bool = False,
        bytes_per_s: float = 0.0,
        ttft_slo_s: float | None = None,
        tpot_slo_s: float | None = None,
        handoff_deadline_s: float = 2.0,
        baseline: DecodeBaseline = MODERN,
        max_model_len: int = 100_000,
    ):
        self.now = 0.0
        self.waited_s = 0.0
        self.hub = hub or MemoryHub(latency_s=0.0001)
        self.timing = timing or Timing()
        self.hasher = BlockHasher(b"f" * 32, spec.block_size, root=root_of(PrefixCache(baseline.prefix_cache)))
        self.spec = spec
        rules = Rules(
            max_attempts=max_attempts,
            policy=policy,
            ttft_slo_s=ttft_slo_s,
            cooperative=cooperative,
            handoff_deadline_s=handoff_deadline_s,
        )
        batching = Batching(baseline.batching)
        self.dispatcher = Dispatcher(rules.under(batching))
        self.nodes: dict[NodeId, SimNode] = {}
        self.outcomes: dict[RequestId, Outcome] = {}
        self.records: dict[RequestId, Record] = {}
        self.trace: list[tuple[float, str, object]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._next_beat = 0.0
        self._router_is_alive = True
        self._tpot_slo_s = tpot_slo_s
        self._way = (is_remote, bytes_per_s)
        least_tokens = max_model_len if baseline.kv_allocation == "max-length" else 0
        self._capacity = Capacity(
            num_blocks, spec.block_size, max_model_len, max_running, spec.token_bytes, least_tokens
        )
        self._chunked_prefill = ChunkedPrefill(baseline.chunked_prefill)
        self._num_starts = itertools.count(1)
        role = Role.DECODE if num_prefill else Role.BOTH
        limits = Limits(max_running, num_swap_blocks, mode, batching, least_tokens)
        options = (num_blocks, max_step_tokens, limits, policy, make_engine)
        self._start = lambda name, role: self._start_node(name, role, *options)
        for i in range(num_prefill):
            self._start(NodeId(f"P{i}"), Role.PREFILL)
        for i in range(num_decode):
            self._start(NodeId(f"D{i}"), role)
        for decode in self._with_role(Role.DECODE):
            for prefill in self._with_role(Role.PREFILL):
                decode.told[prefill.name] = prefill.epoch
                self._dialled(decode, prefill.name)
        self._beat()

    # ---- what a test does ------------------------------------------------------------------------

    def submit(
        self, prompt: list[int], max_tokens: int = 8, priority: int = 0, n: int = 1, **params: object
    ) -> RequestId:
        request = new_request_id()
        self.outcomes[request] = Outcome()
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        samples = [SampleRecord(index) for index in range(n)]
        record = Record(request, request.hex()[:6], prompt, sampling, Times(self.now), priority, samples)
        self.records[request] = record
        self._route(self.dispatcher.handle(Submit(record), self.now))
        return request

    def stop_sample(self, request: RequestId, sample: int) -> None:
        self._route(self.dispatcher.handle(SampleStopped(request, sample), self.now))

    def cancel(self, request: RequestId) -> None:
        self._route(self.dispatcher.handle(ClientGone(request), self.now))

    def kill(self, name: NodeId) -> None:
        """The process is gone: its messages and its work with it; everybody sees the broken connection."""
        self.nodes[name].alive = False
        self.hub.kill(name)
        self._lose_node(name, "killed")
        for decode in self._with_role(Role.DECODE):
            self._lose_link(decode, name)

    def restart(self, name: NodeId) -> None:
        """Kill a node; its next incarnation joins at once."""
        role = self.nodes[name].role
        if self.nodes[name].alive:
            self.kill(name)
        self._start(name, role)

    def reset_link(self, node: NodeId, peer: NodeId, down_s: float = 0.01) -> None:
        """The connection of `node` to the router or a prefill node breaks, and can be made again after down_s."""
        dialling = self.nodes[node]
        if not dialling.alive or not self._is_up(node, peer):
            return
        if peer == ROUTER:
            self.hub.reset(node, peer)
            self._lose_node(node, "connection lost")
            self.at(down_s, lambda: self._joined(dialling))
        else:
            self._lose_link(dialling, peer)
            self.at(down_s, lambda: self._dialled(dialling, peer))

    def hold_up(self, name: NodeId, seconds: float) -> None:
        """The process of a node stands still; shorter than the router's patience, so nobody takes it for lost."""
        assert seconds < 3.0, "the router would lose it (node_lost_s)"
        node = self.nodes[name]
        if node.alive and node.held_up is None:
            node.held_up = []
            missed_beat = self._next_beat
            self.at(seconds, lambda: self._go_on(node, late=self.now - missed_beat > LATE_S))

    def leave(self, name: NodeId) -> None:
        """The node is told to end once it has finished what it has."""
        self._feed(name, Leave())

    def silence_router(self, seconds: float = float("inf")) -> None:
        """No beat of the router is heard for so long, nothing reaches it, and nobody is told."""
        self._router_is_alive = False
        if seconds < float("inf"):
            self.at(seconds, self._router_is_back)

    def at(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), what))

    def run(self, until: Callable[[], bool] | None = None, limit_s: float = 600.0) -> None:
        """Jump from event to event until `until` holds; by default until every request is over and all is idle."""
        done = until or self.is_quiet
        while not done():
            self._next_event()
            assert self.now < limit_s, f"not done after {limit_s} s: {self.outcomes}"

    def is_quiet(self) -> bool:
        """Every request is over and no living node holds anything for one: a leak makes `run` fail."""
        living = [node.machine for node in self.nodes.values() if node.alive]
        return (
            all(outcome.is_over for outcome in self.outcomes.values())
            and all(machine.is_idle for machine in living)
            and all(machine.gauges().num_leases == 0 for machine in living)
        )

    def results(self, *requests: RequestId) -> list[list[int]]:
        return [self.outcomes[request].tokens for request in requests]

    def assert_drained(self) -> None:
        """Nobody holds, leases or reserves anything."""
        for name, node in self.nodes.items():
            if node.alive:
                gauges = node.machine.gauges()
                used = (gauges.num_held, gauges.num_leased, gauges.num_reserved, gauges.num_leases)
                assert used == (0, 0, 0, 0), f"{name} still has held, leased, reserved, leases = {used}"
        assert self.dispatcher.num_records == 0

    def assert_views_agree(self) -> None:
        """The router believes of each node's prefix index what is in it."""
        for name, node in self.nodes.items():
            if node.alive and node.is_known:
                log, view = node.machine.pool.log, self.dispatcher.nodes[name].cache
                present = log.delta(BEGINNING, log.number + 1).added
                assert len(view) == len(present), f"{name} finds {len(present)} blocks, the router knows of {len(view)}"
                assert all(block_hash in view for block_hash in present), f"the router takes {name}'s blocks for others"

    # ---- the world -------------------------------------------------------------------------------

    def _start_node(
        self,
        name: NodeId,
        role: Role,
        num_blocks: int,
        max_step_tokens: int,
        limits: Limits,
        policy: Policy,
        make_engine: Callable[[KVPool], Engine],
    ) -> None:
        kv_pool = KVPool(self.spec, num_blocks, bytearray(buffer_bytes(self.spec, num_blocks)))
        blocks = BlockPool(num_blocks, kv_pool.view.generations)
        machine: PrefillScheduler | DecodeScheduler
        cost = StepCost()
        if role is Role.PREFILL:
            machine = PrefillScheduler(
                ROUTER,
                blocks,
                self.spec.block_size,
                Planner(policy, max_step_tokens, cost, chunking(self._chunked_prefill)),
                cost,
                self.spec.payload_bytes,
            )
        else:
            machine = DecodeScheduler(
                ROUTER,
                blocks,
                self.hasher,
                chunk_budget(self._chunked_prefill, max_step_tokens, cost),
                limits,
                self.spec.payload_bytes,
                policy,
            )
        epoch = Epoch(next(self._num_starts), 1)
        self.hub.join(name, epoch)
        host = PoolView(self.spec, limits.num_swap_blocks, bytearray(buffer_bytes(self.spec, limits.num_swap_blocks)))
        node = SimNode(name, role, epoch, machine, kv_pool, make_engine(kv_pool), host, is_known=False)
        self.nodes[name] = node
        self._joined(node)

    # ---- links -----------------------------------------------------------------------------------

    def _with_role(self, role: Role) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.alive and node.role is role]

    def _is_up(self, a: NodeId, b: NodeId) -> bool:
        if ROUTER in (a, b):
            return self.nodes[b if a == ROUTER else a].is_known
        return b in self.nodes[a].linked or a in self.nodes[b].linked

    def _joined(self, node: SimNode) -> None:
        """The handshake with the router is done."""
        if not node.alive or node.is_known:
            return
        node.is_known = True
        self._feed(node.name, Joined(DEFAULT_LEASE_S, self._tpot_slo_s))
        joined = NodeJoined(node.name, node.role, node.epoch, self._capacity, f"mem://{node.name}", self.hasher)
        self._route(self.dispatcher.handle(joined, self.now))
        self._route(self.dispatcher.handle(Tick(), self.now))

    def _lose_node(self, name: NodeId, reason: str) -> None:
        if self.nodes[name].is_known:
            self.nodes[name].is_known = False
            self._route(self.dispatcher.handle(NodeLost(name, reason), self.now))

    def _told(self, decode: SimNode, peers: Peers) -> None:
        """Leave the peers that are gone or have been replaced, dial those that are new."""
        told = {peer.node: peer.epoch for peer in peers.prefill}
        for name, epoch in list(decode.told.items()):
            if told.get(name) != epoch:
                del decode.told[name]
                self._lose_link(decode, name)
        for name, epoch in told.items():
            if name not in decode.told:
                decode.told[name] = epoch
                self.at(DIAL_S, lambda name=name: self._dialled(decode, name))

    def _dialled(self, decode: SimNode, peer: NodeId) -> None:
        """The handshake is done, if it is the incarnation that the router has told of."""
        source = self.nodes[peer]
        if not decode.alive or not source.alive or peer in decode.linked or decode.told.get(peer) != source.epoch:
            return
        decode.linked.add(peer)
        decode.maps[peer] = source.pool.view
        self._feed(decode.name, LinkUp(Link(peer, *self._way)))

    def _lose_link(self, decode: SimNode, peer: NodeId) -> None:
        if peer in decode.linked:
            decode.linked.discard(peer)
            self.hub.reset(decode.name, peer)
            self._feed(decode.name, LinkLost(peer))
            # Copies that begin with this event are the last.
            del decode.maps[peer]

    # ---- time ------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._next_beat = self.now + BEAT_S
        for node in list(self.nodes.values()):
            if node.alive and node.held_up is None:
                self._feed(node.name, Tick())
        if self._router_is_alive:
            self._route(self.dispatcher.handle(Tick(), self.now))
        self.at(BEAT_S, self._beat)

    def _go_on(self, node: SimNode, late: bool) -> None:
        """A process that was held up first does what its clock says, then reads what has come meanwhile."""
        events, node.held_up = node.held_up, None
        if node.alive:
            for event in (Tick(late), *(events or ())):
                self._feed(node.name, event)

    def _router_is_back(self) -> None:
        self._router_is_alive = True

    def _next_event(self) -> None:
        hub_time = self.hub.next_time()
        if hub_time is not None and hub_time <= self._events[0][0]:
            self.now = max(self.now, hub_time)
            for receiver, sender, message in self.hub.deliver(self.now):
                self.trace.append((self.now, f"{sender}>{receiver}", message))
                self._receive(receiver, Received(sender, message, self.waited_s))
            return
        self.now, _, what = heapq.heappop(self._events)
        what()

    def _receive(self, receiver: NodeId, event: Received) -> None:
        if receiver == ROUTER and not self._router_is_alive:
            return
        if receiver == ROUTER:
            self._route(self.dispatcher.handle(event, self.now))
        elif self.nodes[receiver].alive:
            self._feed(receiver, event)

    def _send(self, sender: NodeId, peer: NodeId, message: Message) -> None:
        if self._is_up(sender, peer):
            self.hub.send(sender, peer, message, self.now)

    def _route(self, actions: list) -> None:
        self.dispatcher.check()
        for action in actions:
            if isinstance(action, Send):
                self._send(ROUTER, action.peer, action.message)
                continue
            outcome = self.outcomes[action.request]
            if isinstance(action, Deliver):
                assert not outcome.is_over, "a token after the end"
                outcome.samples.setdefault(action.sample, []).extend(action.token_ids)
                outcome.logprobs.setdefault(action.sample, []).append(action.logprobs)
                outcome.arrivals += [self.now] * len(action.token_ids)
                assert action.sample not in outcome.finishes, "a token after the end of its sample"
                if action.finish is not None:
                    outcome.finishes[action.sample] = action.finish
                if action.is_last:
                    outcome.finish = self.records[action.request].finish
            elif isinstance(action, GiveUp):
                outcome.given_up = action.reason

    def _feed(self, name: NodeId, event: object) -> None:
        node = self.nodes[name]
        if node.held_up is not None:
            node.held_up.append(event)
            return
        if isinstance(event, Received) and isinstance(event.message, Peers):
            self._told(node, event.message)
            return
        actions = node.machine.handle(event, self.now)  # type: ignore[arg-type]
        node.machine.check()
        for action in actions:
            if isinstance(action, Send):
                self._send(name, action.peer, action.message)
            elif isinstance(action, SendBlocks):
                # A copy, as the bytes have left the pool when the message is on its way.
                views = [node.pool.view.block(entry.block_id) for entry in action.blocks.entries]
                payloads = tuple(memoryview(bytes(view)) for view in views)
                self._send(name, action.peer, dataclasses.replace(action.blocks, payloads=payloads))
            elif isinstance(action, CheckBlocks):
                checked = check_own(node.pool.view, action.entries)
                self.at(0.0, lambda checked=checked: self._report(node, checked))
            elif isinstance(action, RunStep):
                self.trace.append((self.now, f"{name} step", action.plan))
                node.begin_writing(self._written(action.plan))
                delay = self.timing.step + self.timing.token * action.plan.num_tokens
                self.at(delay, lambda plan=action.plan, delay=delay: self._end_step(node, plan, delay))
            elif isinstance(action, SwapOut):
                self.trace.append((self.now, f"{name} swap out", action))
                self.at(self.timing.block * len(action.slots), lambda out=action: self._end_swap_out(node, out))
            elif isinstance(action, SwapIn):
                self.trace.append((self.now, f"{name} swap in", action))
                node.begin_writing([copy.target for copy in action.copies])
                self.at(self.timing.block * len(action.copies), lambda come=action: self._end_swap_in(node, come))
            elif isinstance(action, CopyBlocks):
                self.trace.append((self.now, f"{name} copy", action))
                node.begin_writing([copy.target for copy in action.copies])
                delay = self.timing.block * len(action.copies)
                source = node.maps.get(action.peer)
                self.at(delay, lambda copy=action, source=source: self._end_copy(node, copy, source))

    def _report(self, node: SimNode, event: object) -> None:
        """What an incarnation that is gone was busy with is nobody's."""
        if node.alive:
            self._feed(node.name, event)

    def _written(self, plan: StepPlan) -> list[int]:
        return [block_id for row in plan.rows for block_id in written(row, self.spec.block_size)]

    def _end_step(self, node: SimNode, plan: StepPlan, forward_s: float) -> None:
        node.writing.difference_update(self._written(plan))
        result = dataclasses.replace(node.engine.step(plan), forward_s=forward_s)
        self.trace.append((self.now, f"{node.name} stepped", plan))
        self._report(node, StepDone(result))

    def _end_swap_out(self, node: SimNode, action: SwapOut) -> None:
        checksums, busy_s = copy_out(node.pool, node.host, action.block_ids, action.slots)
        self._report(node, SwappedOut(action.key, tuple(checksums), busy_s))

    def _end_swap_in(self, node: SimNode, action: SwapIn) -> None:
        node.writing.difference_update(copy.target for copy in action.copies)
        judged = copy_and_verify(node.host, node.pool, action.copies)
        self._report(node, SwappedIn(action.key, judged.verdicts, judged.busy_s))

    def _end_copy(self, node: SimNode, action: CopyBlocks, source: PoolView | None) -> None:
        """source: the pool that was mapped when the copy began; its owner may be gone by now."""
        node.writing.difference_update(copy.target for copy in action.copies)
        if any(copy.payload is not None for copy in action.copies):
            verdicts = take_and_verify(node.pool, action.copies).verdicts
        elif source is not None:
            verdicts = copy_and_verify(source, node.pool, action.copies).verdicts
        else:
            verdicts = (Verdict.MOVED,) * len(action.copies)
        verified = [c.hash for c, verdict in zip(action.copies, verdicts, strict=True) if verdict is Verdict.OK]
        self.trace.append((self.now, f"{node.name} verified", verified))
        took_s = self.timing.block * len(action.copies)
        self._report(node, CopyDone(action.key, action.copies, verdicts, 0.75 * took_s, 0.25 * took_s))
