"""A whole cluster in one process on an injected clock: the real machines, a scripted network, any engine.

Router, prefill and decode schedulers exchange the real messages through MemoryHub; steps and copies
take as long as they are said to. After every event the invariants of the machine that took it are
checked. Nothing waits: `run` jumps from event to event.
"""

import dataclasses
import hashlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.cluster.attempts import DEFAULT_LEASE_S
from pdserve.cluster.events import Joined, Leave, LinkLost, LinkUp, Received, Tick
from pdserve.cluster.memory import MemoryHub
from pdserve.cluster.messages import Capacity, Link, Role, Send
from pdserve.core.block_hash import BlockHasher
from pdserve.core.ids import Epoch, NodeId, RequestId, new_request_id
from pdserve.core.kv_spec import KVSpec
from pdserve.core.sampling import SamplingParams
from pdserve.decode_node.chunk_budget import ChunkBudget
from pdserve.decode_node.scheduler import DecodeScheduler
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.engine.planner import Policy
from pdserve.engine.step import RunStep, StepDone, StepPlan, StepResult
from pdserve.engine.step_cost import StepCost
from pdserve.kvtransfer.checksum import block_checksum
from pdserve.kvtransfer.copying import CheckBlocks, check_own, copy_and_verify, take_and_verify
from pdserve.kvtransfer.offer import SendBlocks
from pdserve.kvtransfer.pull import CopyBlocks, CopyDone, Verdict
from pdserve.prefill_node.scheduler import PrefillScheduler
from pdserve.router.dispatcher import ClientGone, Deliver, Dispatcher, GiveUp, NodeJoined, NodeLost, Submit
from pdserve.router.record import Record, Times

ROUTER = NodeId("router")
TINY_SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4)
VOCAB = 5000


class Engine(Protocol):
    def step(self, plan: StepPlan) -> StepResult: ...


def next_token(tokens: list[int]) -> int:
    """The fake model: any change of any earlier token changes the next one."""
    digest = hashlib.blake2b(str(tokens).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """What the fake model says after `prompt`: the oracle of every test that uses it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeEngine:
    """Keeps tokens as KV, and draws from nothing but what it reads back through the block table."""

    def __init__(self, pool: KVPool):
        self.pool = pool

    def step(self, plan: StepPlan) -> StepResult:
        size = self.pool.spec.block_size
        tokens: dict[int, int] = {}
        for row in plan.rows:
            for offset, token in enumerate(row.token_ids):
                position = row.start + offset
                if position >= row.write_from:
                    slot = self.pool.data[row.block_ids[position // size], 0, 0, :, position % size]
                    slot[0], slot[1] = float(token), float(position)
            if row.sample is not None:
                tokens[row.key] = next_token(self._read(row.block_ids, row.start + len(row.token_ids)))
        checksums = {}
        for seal in plan.seals:
            self.pool.data[seal.block_id, :, :, :, seal.num_tokens :] = 0
            checksums[seal.block_id] = block_checksum(self.pool.view.block(seal.block_id), seal.block_hash)
        return StepResult(plan.step, tokens, checksums)

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


@dataclass
class SimNode:
    name: NodeId
    machine: PrefillScheduler | DecodeScheduler
    pool: KVPool
    engine: Engine
    alive: bool = True


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    finish: str | None = None
    given_up: str | None = None
    ledger: dict | None = None

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.given_up is not None


class InProcessCluster:
    """num_prefill = 0 makes colocated nodes: decode nodes with the role `both`.

    Without `cooperative` every prompt is handed off, which is what most tests are about. With `is_remote`
    decode nodes cannot map the pools of prefill nodes.
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
        policy: Policy = Policy.FCFS,
        make_engine: Callable[[KVPool], Engine] = FakeEngine,
        hub: MemoryHub | None = None,
        timing: Timing | None = None,
        max_attempts: int = 3,
        cooperative: bool = False,
        is_remote: bool = False,
        bytes_per_s: float = 0.0,
        tpot_slo_s: float | None = None,
        handoff_deadline_s: float = 2.0,
    ):
        self.now = 0.0
        self.hub = hub or MemoryHub(latency_s=0.0001)
        self.timing = timing or Timing()
        self.hasher = BlockHasher(b"f" * 32, spec.block_size)
        self.spec = spec
        self.dispatcher = Dispatcher(max_attempts, cooperative=cooperative, handoff_deadline_s=handoff_deadline_s)
        self.nodes: dict[NodeId, SimNode] = {}
        self.outcomes: dict[RequestId, Outcome] = {}
        self.trace: list[tuple[float, str, object]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._router_is_alive = True
        self._tpot_slo_s = tpot_slo_s
        self._way = (is_remote, bytes_per_s)
        role = Role.DECODE if num_prefill else Role.BOTH
        options = (num_blocks, max_step_tokens, max_running, policy, make_engine)
        self._start_prefill = lambda name: self._start(name, Role.PREFILL, *options)
        for i in range(num_prefill):
            self._start_prefill(NodeId(f"P{i}"))
        for i in range(num_decode):
            self._start(NodeId(f"D{i}"), role, *options)
        for name, node in self.nodes.items():
            for peer in self.nodes:
                if isinstance(node.machine, DecodeScheduler) and peer.startswith("P"):
                    self._feed(name, LinkUp(Link(peer, *self._way)))
        self._beat()

    # ---- what a test does ------------------------------------------------------------------------

    def submit(self, prompt: list[int], max_tokens: int = 8, priority: int = 0, **params: object) -> RequestId:
        request = new_request_id()
        self.outcomes[request] = Outcome()
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        record = Record(request, request.hex()[:6], prompt, sampling, Times(self.now), priority)
        self._route(self.dispatcher.handle(Submit(record), self.now))
        return request

    def cancel(self, request: RequestId) -> None:
        self._route(self.dispatcher.handle(ClientGone(request), self.now))

    def kill(self, name: NodeId) -> None:
        """The process is gone: its messages and its work with it; everybody sees the broken connection."""
        self.nodes[name].alive = False
        self.hub.kill(name)
        self._route(self.dispatcher.handle(NodeLost(name, "killed"), self.now))
        for other, node in self.nodes.items():
            if node.alive and isinstance(node.machine, DecodeScheduler):
                self._feed(other, LinkLost(name))

    def leave(self, name: NodeId) -> None:
        """The node is told to end once it has finished what it has."""
        self._feed(name, Leave())

    def restart_prefill(self, name: NodeId) -> None:
        """Kill a prefill node; its next incarnation is linked before anybody else could do anything."""
        self.kill(name)
        self.hub.join(name)
        self._start_prefill(name)
        for other, node in self.nodes.items():
            if isinstance(node.machine, DecodeScheduler):
                self._feed(other, LinkUp(Link(name, *self._way)))

    def silence_router(self) -> None:
        """The router is gone: no beat of it is heard any more, and nobody is told."""
        self._router_is_alive = False

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

    # ---- the world -------------------------------------------------------------------------------

    def _start(
        self,
        name: NodeId,
        role: Role,
        num_blocks: int,
        max_step_tokens: int,
        max_running: int,
        policy: Policy,
        make_engine: Callable[[KVPool], Engine],
    ) -> None:
        kv_pool = KVPool(self.spec, num_blocks, bytearray(buffer_bytes(self.spec, num_blocks)))
        blocks = BlockPool(num_blocks, kv_pool.view.generations)
        machine: PrefillScheduler | DecodeScheduler
        if role is Role.PREFILL:
            machine = PrefillScheduler(
                ROUTER,
                blocks,
                self.spec.block_size,
                max_step_tokens,
                StepCost(),
                self.spec.payload_bytes,
                policy,
            )
        else:
            machine = DecodeScheduler(
                ROUTER,
                blocks,
                self.hasher,
                ChunkBudget(max_step_tokens, StepCost()),
                max_running,
                self.spec.payload_bytes,
                policy,
            )
        self.nodes[name] = SimNode(name, machine, kv_pool, make_engine(kv_pool))
        capacity = Capacity(num_blocks, self.spec.block_size, 100_000, max_running)
        joined = NodeJoined(name, role, Epoch(1, 1), capacity, f"mem://{name}", self.hasher)
        self._route(self.dispatcher.handle(joined, self.now))
        self._feed(name, Joined(DEFAULT_LEASE_S, self._tpot_slo_s))

    def _beat(self) -> None:
        for name, node in self.nodes.items():
            if node.alive:
                self._feed(name, Tick())
        if self._router_is_alive:
            self._route(self.dispatcher.handle(Tick(), self.now))
        self.at(0.5, self._beat)

    def _next_event(self) -> None:
        hub_time = self.hub.next_time()
        if hub_time is not None and hub_time <= self._events[0][0]:
            self.now = max(self.now, hub_time)
            for receiver, sender, message in self.hub.deliver(self.now):
                self.trace.append((self.now, f"{sender}>{receiver}", message))
                self._receive(receiver, Received(sender, message))
            return
        self.now, _, what = heapq.heappop(self._events)
        what()

    def _receive(self, receiver: NodeId, event: Received) -> None:
        if receiver == ROUTER and not self._router_is_alive:
            return
        if receiver == ROUTER:
            self._route(self.dispatcher.handle(event, self.now))
        elif self.nodes[receiver].alive and event.message.__class__.__name__ != "Peers":
            self._feed(receiver, event)

    def _route(self, actions: list) -> None:
        self.dispatcher.check()
        for action in actions:
            if isinstance(action, Send):
                self.hub.send(ROUTER, action.peer, action.message, self.now)
                continue
            outcome = self.outcomes[action.request]
            if isinstance(action, Deliver):
                assert not outcome.is_over, "a token after the end"
                outcome.tokens += action.token_ids
                outcome.arrivals += [self.now] * len(action.token_ids)
                outcome.finish = action.finish
            elif isinstance(action, GiveUp):
                outcome.given_up = action.reason

    def _feed(self, name: NodeId, event: object) -> None:
        node = self.nodes[name]
        actions = node.machine.handle(event, self.now)  # type: ignore[arg-type]
        node.machine.check()
        for action in actions:
            if isinstance(action, Send):
                self.hub.send(name, action.peer, action.message, self.now)
            elif isinstance(action, SendBlocks):
                # A copy, as the bytes have left the pool when the message is on its way.
                views = [node.pool.view.block(entry.block_id) for entry in action.blocks.entries]
                payloads = tuple(memoryview(bytes(view)) for view in views)
                self.hub.send(name, action.peer, dataclasses.replace(action.blocks, payloads=payloads), self.now)
            elif isinstance(action, CheckBlocks):
                checked = check_own(node.pool.view, action.entries)
                self.at(0.0, lambda node=node, checked=checked: self._feed(node.name, checked))
            elif isinstance(action, RunStep):
                self.trace.append((self.now, f"{name} step", action.plan))
                delay = self.timing.step + self.timing.token * action.plan.num_tokens
                self.at(delay, lambda plan=action.plan, delay=delay: self._end_step(node, plan, delay))
            elif isinstance(action, CopyBlocks):
                self.trace.append((self.now, f"{name} copy", action))
                delay = self.timing.block * len(action.copies)
                self.at(delay, lambda copy=action: self._end_copy(node, copy))

    def _end_step(self, node: SimNode, plan: StepPlan, forward_s: float) -> None:
        if node.alive:
            result = dataclasses.replace(node.engine.step(plan), forward_s=forward_s)
            self.trace.append((self.now, f"{node.name} stepped", plan))
            self._feed(node.name, StepDone(result))

    def _end_copy(self, node: SimNode, action: CopyBlocks) -> None:
        if not node.alive:
            return
        source = self.nodes[action.peer].pool.view
        if any(copy.payload is not None for copy in action.copies):
            verdicts, busy_s = take_and_verify(node.pool, action.copies)
        else:
            verdicts, busy_s = copy_and_verify(source, node.pool, action.copies)
        verified = [c.hash for c, verdict in zip(action.copies, verdicts, strict=True) if verdict is Verdict.OK]
        self.trace.append((self.now, f"{node.name} verified", verified))
        self._feed(node.name, CopyDone(action.key, action.copies, tuple(verdicts), busy_s))
