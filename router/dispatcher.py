"""Which node serves what, and what every request has received: a pure machine without sockets or clocks.

    queue ── dispatch ──► PREFILL ── FirstToken ──► HANDOFF ── Ready, Tokens ──► DECODE ── finish ──► done
      ▲                      │                         │                            │
      └── attempt + 1 ◄──────┴── node lost, Failed, missing in two beats ◄──────────┘
    HANDOFF ── deadline ──► attempt + 1 on another decode node with room, else its own is told to make room

Owns the queue, the records and what is known of every node. A node is given few prompts at a time (Limits);
Prefill and Decode go out at the same moment. A token is taken once per index, in order, whoever sends it.
Called by RouterService.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve.cluster.events import Received, Tick
from pdserve.cluster.messages import (
    Cancel,
    Capacity,
    Decode,
    Failed,
    FirstToken,
    Held,
    HeldEntry,
    Live,
    LiveEntry,
    Peer,
    Peers,
    Prefill,
    Ready,
    Resume,
    Returned,
    Role,
    Send,
    Stage,
    TokenRun,
    Tokens,
)
from pdserve.core.block_hash import BlockHasher
from pdserve.core.ids import BlockHash, Epoch, NodeId, RequestId
from pdserve.core.logprobs import NO_LOGPROBS, Logprobs
from pdserve.core.turns import Policy
from pdserve.router.placement import LIMITS, Limits, Node, Place, pick, pick_other
from pdserve.router.queue import RequestQueue
from pdserve.router.record import Plan, Record

MISSED_BEATS = 2


@dataclass(frozen=True, slots=True)
class Submit:
    record: Record


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads this request any more, or its text is complete."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class SampleStopped:
    """The text of one sample is complete; the others go on."""

    request: RequestId
    sample: int


@dataclass(frozen=True, slots=True)
class NodeJoined:
    node: NodeId
    role: Role
    epoch: Epoch
    capacity: Capacity
    address: str
    hasher: BlockHasher


@dataclass(frozen=True, slots=True)
class NodeLost:
    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """Action: new tokens of a sample for the client; with `finish` they are its last.

    is_last: with them the request has ended
    """

    request: RequestId
    sample: int
    token_ids: tuple[int, ...]
    finish: str | None
    logprobs: Logprobs = NO_LOGPROBS
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Action: the request cannot be served; `reason` names the stage that failed."""

    request: RequestId
    reason: str


Event = Submit | ClientGone | SampleStopped | NodeJoined | NodeLost | Received | Tick
Action = Send | Deliver | GiveUp


class Dispatcher:
    """max_attempts: tries of a request before it is given up; limits: how much a node is given at a time.

    policy: in what order nodes compute their prompts, and in what order they are given them.
    recovery_grace_s: how long queued requests wait for a node that can serve them to come back.
    ttft_slo_s: the promised time to first token, by which nodes order their prompts.
    cooperative: whether decode nodes compute prompts when their first token comes sooner that way.
    handoff_deadline_s: from the first token until the request must have its blocks on the decode node.
    """

    def __init__(
        self,
        max_attempts: int = 3,
        limits: Limits = LIMITS,
        policy: Policy = Policy.SHORTEST,
        recovery_grace_s: float = 60.0,
        ttft_slo_s: float | None = None,
        cooperative: bool = True,
        handoff_deadline_s: float = 2.0,
    ):
        self.nodes: dict[NodeId, Node] = {}
        self.num_stale = 0
        self._max_attempts = max_attempts
        self._limits = limits
        # Where there is a promise, what has lost it lets others go first.
        self._is_fcfs = policy is Policy.FCFS and ttft_slo_s is None
        self._recovery_grace_s = recovery_grace_s
        self._ttft_slo_s = ttft_slo_s
        self._cooperative = cooperative
        self._handoff_deadline_s = handoff_deadline_s
        self._beat = 0
        self._hasher: BlockHasher | None = None
        self._records: dict[RequestId, Record] = {}
        self._queue = RequestQueue(policy)
        self._placed: dict[RequestId, Record] = {}
        self._has_news = False
        self._on_event: dict[type, Callable[..., Iterable[Action]]] = {
            Submit: self._on_submit,
            ClientGone: self._on_client_gone,
            SampleStopped: self._on_sample_stopped,
            NodeJoined: self._on_joined,
            NodeLost: self._on_lost,
            Received: self._on_received,
            Tick: self._on_tick,
        }
        self._on_message: dict[type, Callable[..., Iterable[Action]]] = {
            FirstToken: self._on_first_token,
            Tokens: self._on_tokens,
            Ready: self._on_ready,
            Failed: self._on_failed,
            Returned: self._on_returned,
            Held: self._on_held,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Feed one event; returns what is to be done, in order."""
        actions = list(self._on_event[type(event)](event, now))
        return actions + self._dispatch(now)

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_records(self) -> int:
        return len(self._records)

    def find(self, request: RequestId) -> Record | None:
        return self._records.get(request)

    def readiness(self) -> tuple[bool, str]:
        """Whether a new request would be served now, and why not in one line."""
        if not self._staying():
            return False, "no node has joined"
        decoders = [node for node in self._staying() if node.role in (Role.DECODE, Role.BOTH)]
        if any(node.role is Role.BOTH for node in decoders):
            return True, "ready"
        prefills = [node for node in self._staying() if node.role is Role.PREFILL]
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
            sizes = [n.capacity.num_tokens for n in self._staying() if n.role in roles]
            return max(sizes, default=0)

        return most((Role.PREFILL, Role.BOTH)), most((Role.DECODE, Role.BOTH))

    def widest(self) -> tuple[int, int, int]:
        """Of the decode node that can begin most samples at once: its blocks, its largest batch, its block size."""
        decoders = [n.capacity for n in self._staying() if n.role in (Role.DECODE, Role.BOTH)]
        return max(((c.num_blocks, c.max_running, c.block_size) for c in decoders), default=(0, 0, 1))

    # ---- requests --------------------------------------------------------------------------------

    def _on_submit(self, event: Submit, now: float) -> Iterable[Action]:
        record = event.record
        self._records[record.request] = record
        promised = None if self._ttft_slo_s is None else record.times.arrived + self._ttft_slo_s
        self._queue.join(record, promised)
        self._has_news = True
        return []

    def _on_client_gone(self, event: ClientGone, now: float) -> Iterable[Action]:
        record = self._records.get(event.request)
        if record is None:
            return []
        return self._close(record)

    def _on_sample_stopped(self, event: SampleStopped, now: float) -> Iterable[Action]:
        record = self._records.get(event.request)
        sample = record.sample(event.sample) if record is not None else None
        if record is None or sample is None or sample.finish is not None:
            return []
        sample.finish = "stop"
        if not record.live:
            record.finish = _finish_of(record)
            return self._close(record)
        # Before its hand-off it has nothing of its own on a node; beats repeat what is lost or comes too early.
        decode = [record.decode_node] if record.decode_node in self.nodes and record.stage is not None else []
        return [Send(node, Cancel(record.request, record.attempt, event.sample)) for node in decode if node is not None]

    def _dispatch(self, now: float) -> list[Action]:
        """Give queued requests to nodes, when something has happened that may have made a place."""
        if not len(self._queue) or not self._has_news:
            return []
        actions: list[Action] = []

        def place(record: Record) -> bool:
            found = self._pick(record, self._limits.max_prompts)
            if found is None:
                return False
            node = found.computing
            num_tokens = node.num_lacking(record.num_tokens, self._hashes(record))
            if not node.takes(num_tokens, self._limits):
                # Sooner than anywhere else. Those behind it are in turn after it there, and may be elsewhere sooner.
                node.num_awaited += num_tokens
                return False
            actions.extend(self._start(record, found, now))
            return True

        token_s, num_ahead = self._prefill_work()
        self._has_news = self._queue.admit(place, self._has_place_in_time, token_s, now, num_ahead)
        for node in self.nodes.values():
            node.num_awaited = 0
        return actions

    def _prefill_work(self) -> tuple[float, int]:
        """Seconds that the nodes for prompts together take for a token, and the tokens that they were given."""
        nodes = [n for n in self._staying() if n.role is not Role.DECODE and n.gauges and n.gauges.token_s > 0]
        rate = sum(1 / node.gauges.token_s for node in nodes if node.gauges)
        return (1 / rate if rate else 0.0), sum(node.num_prompt_tokens for node in nodes)

    def _start(self, record: Record, place: Place, now: float) -> list[Action]:
        """The next attempt, at this place."""
        assert self._hasher is not None, "a place before any node has joined"
        self._placed[record.request] = record
        prefill, decode = place.prefill, place.decode
        record.attempt += 1
        record.stage, record.missed, record.placed_in_beat = Stage.PREFILL, {}, self._beat
        record.prefill_node = prefill.node if prefill else None
        record.decode_node = decode.node if decode else None
        record.plan, record.is_overdue, record.has_blocks = place.plan, False, False
        if record.times.dispatched is None:
            record.times.dispatched = now
        prompt, samples = record.packed()
        hashes = record.hashes(self._hasher)
        place.computing.prompts[record.request] = place.computing.num_lacking(record.num_tokens, hashes)
        common = (record.request, record.attempt, prompt, samples, hashes, record.params)
        urgency = (record.priority, self._deadline_s(record, now))
        actions: list[Action] = []
        if prefill is not None:
            actions.append(Send(prefill.node, Prefill(*common, *urgency)))
        if decode is not None:
            decode.streams[record.request] = record.total_tokens
            source = prefill.peer if prefill else None
            actions.append(Send(decode.node, Decode(*common, source, *urgency, record.num_yields)))
        return actions

    def _deadline_s(self, record: Record, now: float) -> float | None:
        """What is left of the promised time to first token; None without a promise, or once it is out."""
        if self._ttft_slo_s is None or record.num_outputs:
            return None
        return max(0.0, record.times.arrived + self._ttft_slo_s - now)

    def _pick(self, record: Record, max_prompts: float) -> Place | None:
        return pick(record, self._hashes(record), self._staying(), max_prompts, self._cooperative)

    def _hashes(self, record: Record) -> Sequence[BlockHash]:
        """Names of the request's blocks; none before any node has joined."""
        return () if self._hasher is None else record.hashes(self._hasher)

    def _staying(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.is_leaving]

    def _close(self, record: Record) -> list[Action]:
        """Forget the request and free what nodes hold for it; they may have ended it by themselves."""
        del self._records[record.request]
        if record.stage is None:
            self._queue.leave(record.request)
            return []
        del self._placed[record.request]
        return self._withdraw(record)

    def _withdraw(self, record: Record) -> list[Action]:
        self._has_news = True
        actions: list[Action] = []
        for name in record.nodes:
            node = self.nodes.get(name)
            if node is None:
                continue
            node.prompts.pop(record.request, None)
            node.streams.pop(record.request, None)
            actions.append(Send(name, Cancel(record.request, record.attempt)))
        return actions

    def _retry(self, record: Record, reason: str) -> list[Action]:
        """This attempt is over: the next one starts from prompt + outputs, before everything queued."""
        record.failures.append(reason)
        # An attempt that was only moved to a node with room has not failed.
        if len(record.failures) >= self._max_attempts:
            given_up = GiveUp(record.request, f"{record.stage} failed in {record.attempt} attempts: {reason}")
            return [*self._close(record), given_up]
        return self._requeue(record)

    def _requeue(self, record: Record) -> list[Action]:
        actions = self._withdraw(record)
        del self._placed[record.request]
        record.stage = None
        self._queue.join(record, None, is_resumed=True)
        return actions

    # ---- nodes -----------------------------------------------------------------------------------

    def _on_joined(self, event: NodeJoined, now: float) -> Iterable[Action]:
        actions: list[Action] = []
        if event.node in self.nodes:
            actions += self._on_lost(NodeLost(event.node, "another incarnation joined"), now)
        peer = Peer(event.node, event.epoch, event.address)
        self.nodes[event.node] = Node(event.node, event.role, peer, event.capacity, is_fcfs=self._is_fcfs)
        self._hasher = event.hasher
        self._nodes_changed()
        return actions + self._announce_peers()

    def _on_lost(self, event: NodeLost, now: float) -> Iterable[Action]:
        if self.nodes.pop(event.node, None) is None:
            return []
        for node in self.nodes.values():
            node.links = {name: link for name, link in node.links.items() if name != event.node}
        self._nodes_changed()
        actions: list[Action] = []
        for record in list(self._placed.values()):
            # From HANDOFF on the decode node finishes from the dead peer's map, or says that it cannot.
            lost_prefill = record.prefill_node == event.node and record.stage is Stage.PREFILL
            if lost_prefill or record.decode_node == event.node:
                actions += self._retry(record, f"lost {event.node}: {event.reason}")
        return actions + self._announce_peers()

    def _nodes_changed(self) -> None:
        self._queue.reconsider()
        self._has_news = True

    def _announce_peers(self) -> list[Action]:
        peers = self._peers()
        return [Send(n.node, peers) for n in self.nodes.values() if n.role is Role.DECODE]

    def _peers(self) -> Peers:
        return Peers(tuple(n.peer for n in self.nodes.values() if n.role is Role.PREFILL))

    # ---- messages --------------------------------------------------------------------------------

    def _on_received(self, event: Received, now: float) -> Iterable[Action]:
        if event.sender not in self.nodes:
            self.num_stale += 1
            return []
        handler = self._on_message.get(type(event.message))
        return [] if handler is None else handler(event.sender, event.message, now)

    def _current(self, request: RequestId, attempt: int) -> Record | None:
        record = self._records.get(request)
        if record is None or record.stage is None or record.attempt != attempt:
            self.num_stale += 1
            return None
        return record

    def _on_first_token(self, sender: NodeId, message: FirstToken, now: float) -> Iterable[Action]:
        record = self._current(message.request, message.attempt)
        if record is None:
            return []
        if record.stage is Stage.PREFILL:
            record.stage, record.handoff_due = Stage.HANDOFF, now + self._handoff_deadline_s
            self._prefilled(record)
            if not record.num_outputs:
                # A later attempt's computing is no part of the time to the first token.
                record.num_not_computed = record.of_prompt(message.num_cached_tokens)
                record.prefill_queue_s, record.prefill_s = message.queue_s, message.prefill_s
        if record.lacks_prompt_logprobs:
            record.prompt_logprobs = message.prompt_logprobs
        actions: list[Action] = []
        for drawn in message.drawn:
            ids = (drawn.sample, drawn.index, (drawn.token,))
            run = TokenRun(record.request, record.attempt, *ids, drawn.finish, drawn.logprobs)
            actions += self._take(record, run, now)
        return actions

    def _on_tokens(self, sender: NodeId, message: Tokens, now: float) -> Iterable[Action]:
        actions: list[Action] = []
        for run in message.runs:
            record = self._current(run.request, run.attempt)
            sample = None if record is None else record.sample(run.sample)
            if record is None or sample is None:
                continue
            if record.lacks_prompt_logprobs:
                # They came with a FirstToken that was lost; nothing else has them.
                actions += self._retry(record, "the log-probabilities of its prompt were lost")
                continue
            num_outputs = len(sample.outputs)
            if run.first_index > num_outputs:
                actions.append(Send(sender, Resume(run.request, run.attempt, run.sample, num_outputs)))
                continue
            self._prefilled(record)
            record.stage = Stage.DECODE
            actions += self._take(record, run, now)
        return actions

    def _on_ready(self, sender: NodeId, message: Ready, now: float) -> Iterable[Action]:
        record = self._current(message.request, message.attempt)
        if record is None:
            return []
        self._prefilled(record)
        record.stage = Stage.DECODE
        if record.ready_attempt == record.attempt:
            return []
        record.ready_attempt = record.attempt
        record.bytes_moved += message.num_bytes
        if record.times.ready is None:
            record.times.ready = now
            record.num_not_moved = record.of_prompt(message.num_cached_tokens)
            record.reserve_s, record.copy_s = message.reserve_s, message.copy_s
        return []

    def _on_failed(self, sender: NodeId, message: Failed, now: float) -> Iterable[Action]:
        record = self._current(message.request, message.attempt)
        if record is None:
            return []
        if sender == record.decode_node and record.prefill_node is not None:
            # Until its next beat confirms the link, or all attempts could fail at once for the same reason.
            self.nodes[sender].doubted.add(record.prefill_node)
        return self._retry(record, f"{sender}: {message.reason}")

    def _on_returned(self, sender: NodeId, message: Returned, now: float) -> Iterable[Action]:
        """A decode node needs its blocks for others: it goes on elsewhere, or stands in line before all that is new."""
        record = self._current(message.request, message.attempt)
        if record is None:
            return []
        record.num_yields = message.num_yields
        assert self._hasher is not None, "a request before any node has joined"
        place = pick_other(record, record.hashes(self._hasher), self._staying(), self._coming())
        if place is not None:
            return self._move(record, place, now)
        return self._requeue(record)

    def _on_held(self, sender: NodeId, message: Held, now: float) -> Iterable[Action]:
        node = self.nodes[sender]
        before = (node.links.keys(), node.doubted, node.is_leaving)
        node.gauges, node.doubted = message.gauges, set()
        node.links = {link.node: link for link in message.links}
        node.is_leaving = message.is_leaving
        if message.cache is not None:
            node.cache.apply(message.cache)
        self._has_news = True
        if before != (node.links.keys(), set(), node.is_leaving):
            self._nodes_changed()
        held: dict[tuple[RequestId, int], list[HeldEntry]] = {}
        for entry in message.entries:
            held.setdefault((entry.request, entry.attempt), []).append(entry)
        actions = self._unwanted(sender, message)
        peers = self._peers()
        if node.role is Role.DECODE and node.links.keys() != {peer.node for peer in peers.prefill}:
            # Peers may have been lost; the node does nothing about those it knows.
            actions.append(Send(sender, peers))
        for request in dict.fromkeys([*node.prompts, *node.streams]):
            record = self._records[request]
            entries = held.get((request, record.attempt))
            if entries is not None:
                record.missed.pop(sender, None)
                for entry in entries:
                    actions += self._compare(sender, record, entry)
                continue
            if message.beat <= record.placed_in_beat:
                # The answer to a Live that is older than the request says nothing of it.
                continue
            record.missed[sender] = record.missed.get(sender, 0) + 1
            if record.missed[sender] >= MISSED_BEATS:
                actions += self._retry(record, f"{sender} does not know the request")
        return actions

    def _compare(self, sender: NodeId, record: Record, entry: HeldEntry) -> Iterable[Action]:
        """What a node says of a sample that it should hold."""
        if sender == record.decode_node:
            record.has_blocks = entry.has_blocks
        if entry.stage is Stage.DECODE and record.stage is Stage.HANDOFF:
            # Its Ready was lost.
            record.stage = Stage.DECODE
        sample = record.sample(entry.sample)
        if sample is not None and entry.stage is Stage.DONE and entry.next_index > len(sample.outputs):
            yield Send(sender, Resume(record.request, record.attempt, entry.sample, len(sample.outputs)))

    def _unwanted(self, sender: NodeId, message: Held) -> list[Action]:
        """What a node holds for nobody, because a Cancel or a Release was lost: it need not wait for its lease."""
        actions: list[Action] = []
        for entry in message.entries:
            record = self._records.get(entry.request)
            is_current = record is not None and record.stage is not None and record.attempt == entry.attempt
            is_needed = record is not None and (sender == record.decode_node or record.stage is not Stage.DECODE)
            if not (is_current and is_needed):
                actions.append(Send(sender, Cancel(entry.request, entry.attempt)))
            elif record is not None and entry.stage in (Stage.DECODE, Stage.DONE):
                sample = record.sample(entry.sample)
                if sample is None or sample.finish is not None:
                    actions.append(Send(sender, Cancel(entry.request, entry.attempt, entry.sample)))
        return actions

    def _on_tick(self, event: Tick, now: float) -> Iterable[Action]:
        """The beat: tell every node what it should hold; its answer is compared."""
        self._beat += 1
        actions: list[Action] = [*self._give_up_stuck(now), *self._press_handoffs(now)]
        entries: dict[NodeId, list[LiveEntry]] = {name: [] for name in self.nodes}
        for record in self._placed.values():
            assert record.stage is not None
            is_overdue = record.is_overdue and record.stage is Stage.HANDOFF
            entry = LiveEntry(record.request, record.attempt, record.stage, is_overdue)
            for name in record.nodes:
                if name in entries and (name == record.decode_node or record.stage is not Stage.DECODE):
                    entries[name].append(entry)
        for node in self.nodes.values():
            actions.append(Send(node.node, Live(self._beat, tuple(entries[node.node]), node.cache.position)))
        return actions

    def _press_handoffs(self, now: float) -> Iterable[Action]:
        """A request that has no blocks in time goes on elsewhere; where there is no room, its node makes some."""
        handoffs = [r for r in self._placed.values() if r.stage is Stage.HANDOFF and r.plan is Plan.SPLIT]
        # A transfer that is under way would only begin anew elsewhere, however slow its link.
        late = [record for record in handoffs if record.handoff_due <= now and not record.has_blocks]
        coming = self._coming() if late else {}
        actions: list[Action] = []
        for record in late:
            place = pick_other(record, self._hashes(record), self._staying(), coming)
            if place is None:
                record.is_overdue, record.handoff_due = True, now + self._handoff_deadline_s
                continue
            actions += self._move(record, place, now)
            if place.decode is not None:
                coming[place.decode.node] = coming.get(place.decode.node, 0) + record.num_tokens
        return actions

    def _coming(self) -> dict[NodeId, int]:
        """Tokens by decode node of the requests that are not known to have blocks there."""
        coming: dict[NodeId, int] = {}
        for record in self._placed.values():
            if record.decode_node is not None and record.stage in (Stage.PREFILL, Stage.HANDOFF):
                coming[record.decode_node] = coming.get(record.decode_node, 0) + record.num_tokens
        return coming

    def _move(self, record: Record, place: Place, now: float) -> list[Action]:
        """The next attempt elsewhere. At a prefill node that stays it finds this one's blocks, and ends it."""
        assert record.decode_node is not None
        record.left.add(record.decode_node)
        stays = place.prefill.node if place.prefill else None
        actions = [send for send in self._withdraw(record) if not (isinstance(send, Send) and send.peer == stays)]
        return actions + self._start(record, place, now)

    def _give_up_stuck(self, now: float) -> Iterable[Action]:
        """A request waits for busy nodes as long as it takes, for absent ones only so long."""
        actions: list[Action] = []
        for record in self._queue.stuck(now - self._recovery_grace_s):
            _, reason = self.readiness()
            if reason == "ready":
                reason = f"no node holds {record.final_tokens} tokens of KV any more"
            waited = f"after waiting {self._recovery_grace_s:g} s (recovery_grace_s)"
            actions += [*self._close(record), GiveUp(record.request, f"{reason}, {waited}")]
        # What a decode node has room for changes without a word of its own.
        self._nodes_changed()
        return actions

    def _has_place_in_time(self, record: Record) -> bool:
        return self._pick(record, math.inf) is not None

    def _prefilled(self, record: Record) -> None:
        """The prompt is computed: its place in the node's short line is free."""
        for name in record.nodes:
            if name in self.nodes and self.nodes[name].prompts.pop(record.request, None) is not None:
                self._has_news = True

    def _take(self, record: Record, run: TokenRun, now: float) -> list[Action]:
        """Put tokens of a sample into the ledger, each index once, and pass on what is new."""
        sample = record.sample(run.sample)
        if sample is None or sample.finish is not None:
            return []
        num_known = len(sample.outputs) - run.first_index
        new = run.token_ids[num_known:]
        logprobs = run.logprobs.after(num_known) if run.logprobs.covers(len(run.token_ids)) else NO_LOGPROBS
        times = record.times
        if new:
            before = len(sample.outputs)
            sample.outputs += new
            times.first_token = now if times.first_token is None else times.first_token
            if before < 2 <= len(sample.outputs) and times.second_token is None:
                times.second_token = now
            times.last_token = now
        sample.finish = run.finish
        if record.live:
            is_news = new or run.finish is not None
            return [Deliver(record.request, run.sample, new, run.finish, logprobs)] if is_news else []
        record.finish = _finish_of(record)
        return [Deliver(record.request, run.sample, new, run.finish, logprobs, is_last=True), *self._close(record)]

    # ---- invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless queue, records and nodes agree."""
        queued = {record.request for record in self._queue}
        assert self._placed.keys() == self._records.keys() - queued, "a request neither waits nor is placed"
        for request, record in self._records.items():
            assert (record.stage is None) == (request in queued), f"{record.label} is {record.stage} and queued"
        for node in self.nodes.values():
            for request in [*node.prompts, *node.streams]:
                assert node.node in self._records[request].nodes, f"{node.node} was not given {request.hex()}"
        assert len(queued) == len(self._queue)


def _finish_of(record: Record) -> str:
    """How its samples ended, each way named once."""
    return "+".join(sorted({sample.finish for sample in record.samples if sample.finish is not None}))
