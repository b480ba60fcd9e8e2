"""Every request that is not over, and where its present attempt stands.

    queue ── dispatch ──► PREFILL ── FirstToken ──► HANDOFF ── Ready, Tokens ──► DECODE ── finish ──► closed
      ▲                      │                         │                            │
      └── attempt + 1 ◄──────┴── node lost, Failed, missing in two beats ◄──────────┘
    HANDOFF ── deadline ──► attempt + 1 on another decode node with room, else its own is told to make room

Owns the records, the queue, and what each node was given. A node is given few prompts at a time (Limits); Prefill and
Decode go out at the same moment. Used by Dispatcher, which brings the tokens, and by Beats.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from pdserve.cluster.messages import Cancel, Decode, Prefill, Send, Stage
from pdserve.core.ids import NodeId, RequestId
from pdserve.router.events import Action, GiveUp
from pdserve.router.nodes import Nodes
from pdserve.router.placement import Place, pick, pick_other
from pdserve.router.queue import RequestQueue
from pdserve.router.record import Record
from pdserve.router.rules import Rules


class Attempts:
    """beat: the number of the last Live, which Beats counts; each attempt notes after which one it began."""

    def __init__(self, nodes: Nodes, rules: Rules):
        self.beat = 0
        self._nodes = nodes
        self._rules = rules
        self._records: dict[RequestId, Record] = {}
        self._queue = RequestQueue(rules.policy)
        self._placed: dict[RequestId, Record] = {}
        self._has_news = False

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_records(self) -> int:
        return len(self._records)

    def __getitem__(self, request: RequestId) -> Record:
        return self._records[request]

    def find(self, request: RequestId) -> Record | None:
        """None for one that is over, or that nobody has submitted."""
        return self._records.get(request)

    def placed(self) -> Iterable[Record]:
        """Those that nodes were given."""
        return self._placed.values()

    def stuck(self, before: float) -> list[Record]:
        """Those in the queue that no node has been able to serve since then or longer."""
        return self._queue.stuck(before)

    def coming(self) -> dict[NodeId, int]:
        """Tokens by decode node of the requests that are not known to have blocks there."""
        coming: dict[NodeId, int] = {}
        for record in self._placed.values():
            name = record.decode_node
            if name is not None and name in self._nodes and record.stage in (Stage.PREFILL, Stage.HANDOFF):
                coming[name] = coming.get(name, 0) + self._nodes[name].tokens_to_begin(record)
        return coming

    # ---- the queue -------------------------------------------------------------------------------

    def submit(self, record: Record) -> None:
        self._records[record.request] = record
        ttft_s = self._rules.ttft_slo_s
        self._queue.join(record, None if ttft_s is None else record.times.promised_from + ttft_s)
        self._has_news = True

    def look_again(self) -> None:
        """There may be a place where there was none."""
        self._has_news = True

    def reconsider(self) -> None:
        """The nodes, or the links between them, may not be what they were."""
        self._queue.reconsider()
        self._has_news = True

    def dispatch(self, now: float) -> list[Send]:
        """Give queued requests to nodes, when something has happened that may have made a place."""
        if not len(self._queue) or not self._has_news:
            return []
        actions: list[Send] = []

        def place(record: Record) -> bool:
            found = self._pick(record, self._rules.limits.max_prompts)
            if found is None:
                return False
            node = found.computing
            num_tokens = node.num_lacking(record.num_tokens, self._nodes.hashes(record))
            if not node.takes(num_tokens, self._rules.limits):
                # Sooner than anywhere else. Those behind it are in turn after it there, and may be elsewhere sooner.
                node.num_awaited += num_tokens
                return False
            actions.extend(self._start(record, found, now))
            return True

        token_s, num_ahead = self._nodes.prefill_work()
        self._has_news = self._queue.admit(place, self._has_place_in_time, token_s, now, num_ahead)
        for node in self._nodes:
            node.num_awaited = 0
        return actions

    def _has_place_in_time(self, record: Record) -> bool:
        return self._pick(record, math.inf) is not None

    def _pick(self, record: Record, max_prompts: float) -> Place | None:
        hashes, nodes = self._nodes.hashes(record), self._nodes.staying()
        return pick(record, hashes, nodes, max_prompts, self._rules.cooperative)

    # ---- an attempt ------------------------------------------------------------------------------

    def _start(self, record: Record, place: Place, now: float) -> list[Send]:
        """The next attempt, at this place."""
        self._placed[record.request] = record
        prefill, decode = place.prefill, place.decode
        record.attempt += 1
        record.stage, record.missed, record.placed_in_beat = Stage.PREFILL, {}, self.beat
        record.prefill_node = prefill.node if prefill else None
        record.decode_node = decode.node if decode else None
        record.plan, record.is_overdue, record.has_blocks = place.plan, False, False
        record.times.dispatch(now)
        prompt, samples = record.packed()
        hashes = self._nodes.hashes(record)
        place.computing.prompts[record.request] = place.computing.num_lacking(record.num_tokens, hashes)
        common = (record.request, record.attempt, prompt, samples, hashes, record.params)
        urgency = (record.priority, self._deadline_s(record, now))
        actions: list[Send] = []
        if prefill is not None:
            actions.append(Send(prefill.node, Prefill(*common, *urgency)))
        if decode is not None:
            decode.streams[record.request] = decode.most_tokens(record)
            source = prefill.peer if prefill else None
            actions.append(Send(decode.node, Decode(*common, source, *urgency, record.num_yields)))
        return actions

    def _deadline_s(self, record: Record, now: float) -> float | None:
        """What is left of the promised time to first token; None without a promise, or once it is out."""
        if self._rules.ttft_slo_s is None or record.num_outputs:
            return None
        return max(0.0, record.times.promised_from + self._rules.ttft_slo_s - now)

    def computed(self, record: Record, now: float) -> None:
        """Its prompt is computed: its blocks are to be handed off in time."""
        record.stage, record.handoff_due = Stage.HANDOFF, now + self._rules.handoff_deadline_s
        self._leave_line(record)

    def arrived(self, record: Record) -> None:
        """Its blocks are where it goes on."""
        self._leave_line(record)
        record.stage = Stage.DECODE

    def _leave_line(self, record: Record) -> None:
        """Its place in the short line of the node that computed it is free."""
        for name in record.nodes:
            if name in self._nodes and self._nodes[name].prompts.pop(record.request, None) is not None:
                self._has_news = True

    # ---- another attempt, or none ----------------------------------------------------------------

    def retry(self, record: Record, reason: str) -> Sequence[Action]:
        """This attempt is over: the next one starts from prompt + outputs, before everything queued."""
        record.failures.append(reason)
        # An attempt that was only moved to a node with room has not failed.
        if len(record.failures) >= self._rules.max_attempts:
            given_up = GiveUp(record.request, f"{record.stage} failed in {record.attempt} attempts: {reason}")
            return [*self.close(record), given_up]
        return self.requeue(record)

    def lose(self, name: NodeId, reason: str) -> list[Action]:
        """A node is gone: what cannot go on without it is tried again."""
        actions: list[Action] = []
        for record in list(self._placed.values()):
            # From HANDOFF on the decode node finishes from the dead peer's map, or says that it cannot.
            lost_prefill = record.prefill_node == name and record.stage is Stage.PREFILL
            if lost_prefill or record.decode_node == name:
                actions += self.retry(record, f"lost {name}: {reason}")
        return actions

    def requeue(self, record: Record) -> list[Send]:
        actions = self._withdraw(record)
        del self._placed[record.request]
        record.stage = None
        self._queue.join(record, None, is_resumed=True)
        return actions

    def elsewhere(self, record: Record, coming: Mapping[NodeId, int]) -> Place | None:
        """Where there are blocks for it now, beside those that `coming` requests will need."""
        return pick_other(record, self._nodes.hashes(record), self._nodes.staying(), coming)

    def move(self, record: Record, place: Place, now: float) -> list[Send]:
        """The next attempt elsewhere. At a prefill node that stays it finds this one's blocks, and ends it."""
        assert record.decode_node is not None
        record.left.add(record.decode_node)
        stays = place.prefill.node if place.prefill else None
        actions = [send for send in self._withdraw(record) if send.peer != stays]
        return actions + self._start(record, place, now)

    def close(self, record: Record) -> list[Send]:
        """Forget the request and free what nodes hold for it; they may have ended it by themselves."""
        del self._records[record.request]
        if record.stage is None:
            self._queue.leave(record.request)
            return []
        del self._placed[record.request]
        return self._withdraw(record)

    def _withdraw(self, record: Record) -> list[Send]:
        self._has_news = True
        sends: list[Send] = []
        for name in record.nodes:
            if name in self._nodes:
                node = self._nodes[name]
                node.prompts.pop(record.request, None)
                node.streams.pop(record.request, None)
                sends.append(Send(name, Cancel(record.request, record.attempt)))
        return sends

    # ---- invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless queue, records and nodes agree."""
        queued = {record.request for record in self._queue}
        assert self._placed.keys() == self._records.keys() - queued, "a request neither waits nor is placed"
        for request, record in self._records.items():
            assert (record.stage is None) == (request in queued), f"{record.label} is {record.stage} and queued"
        for node in self._nodes:
            for request in [*node.prompts, *node.streams]:
                assert node.node in self._records[request].nodes, f"{node.node} was not given {request.hex()}"
        assert len(queued) == len(self._queue)
