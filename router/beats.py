"""The beat: every node is told what it should hold, and what it says it holds is compared with that.

    Tick ──► late and stuck requests ──► Live to every node ──► Held ──┬── as it should be
                                                                       ├── more than anybody needs: Cancel
                                                                       ├── a message was lost: Resume, DECODE
                                                                       └── missing, in two beats: the next attempt

So a lost message costs two beats at most. Counts the beats and owns nothing else. Used by Dispatcher.
"""

from collections.abc import Iterable

from pdserve.cluster.events import Received
from pdserve.cluster.messages import Cancel, Held, HeldEntry, Live, LiveEntry, Resume, Role, Send, Stage
from pdserve.core.ids import NodeId, RequestId
from pdserve.router.attempts import Attempts
from pdserve.router.events import Action, GiveUp
from pdserve.router.nodes import Nodes
from pdserve.router.record import Plan, Record
from pdserve.router.rules import Rules

MISSED_BEATS = 2


class Beats:
    def __init__(self, nodes: Nodes, attempts: Attempts, rules: Rules):
        self._nodes = nodes
        self._attempts = attempts
        self._rules = rules

    # ---- Live ------------------------------------------------------------------------------------

    def tick(self, now: float) -> Iterable[Action]:
        """Give up what is stuck, move what is late, and tell every node what it should hold."""
        self._attempts.beat += 1
        actions: list[Action] = [*self._give_up_stuck(now), *self._press_handoffs(now)]
        entries: dict[NodeId, list[LiveEntry]] = {node.node: [] for node in self._nodes}
        for record in self._attempts.placed():
            assert record.stage is not None
            is_overdue = record.is_overdue and record.stage is Stage.HANDOFF
            entry = LiveEntry(record.request, record.attempt, record.stage, is_overdue)
            for name in record.nodes:
                if name in entries and (name == record.decode_node or record.stage is not Stage.DECODE):
                    entries[name].append(entry)
        for node in self._nodes:
            live = Live(self._attempts.beat, tuple(entries[node.node]), node.cache.position)
            actions.append(Send(node.node, live))
        return actions

    def _give_up_stuck(self, now: float) -> Iterable[Action]:
        """A request waits for busy nodes as long as it takes, for absent ones only so long."""
        grace_s = self._rules.recovery_grace_s
        actions: list[Action] = []
        for record in self._attempts.stuck(now - grace_s):
            _, reason = self._nodes.readiness()
            if reason == "ready":
                reason = f"no node holds {record.final_tokens} tokens of KV any more"
            waited = f"after waiting {grace_s:g} s (recovery_grace_s)"
            actions += [*self._attempts.close(record), GiveUp(record.request, f"{reason}, {waited}")]
        # What a decode node has room for changes without a word of its own.
        self._attempts.reconsider()
        return actions

    def _press_handoffs(self, now: float) -> Iterable[Action]:
        """A request that has no blocks in time goes on elsewhere; where there is no room, its node makes some."""
        handoffs = [r for r in self._attempts.placed() if r.stage is Stage.HANDOFF and r.plan is Plan.SPLIT]
        # A transfer that is under way would only begin anew elsewhere, however slow its link.
        late = [record for record in handoffs if record.handoff_due <= now and not record.has_blocks]
        coming = self._attempts.coming() if late else {}
        actions: list[Action] = []
        for record in late:
            place = self._attempts.elsewhere(record, coming)
            if place is None:
                record.is_overdue, record.handoff_due = True, now + self._rules.handoff_deadline_s
                continue
            actions += self._attempts.move(record, place, now)
            if place.decode is not None:
                needed = place.decode.tokens_to_begin(record)
                coming[place.decode.node] = coming.get(place.decode.node, 0) + needed
        return actions

    # ---- Held ------------------------------------------------------------------------------------

    def hear(self, event: Received[Held], now: float) -> Iterable[Action]:
        """The answer to a Live, or news of the node without one."""
        sender, message = event.sender, event.message
        if self._nodes.hear(sender, message):
            self._attempts.reconsider()
        self._attempts.look_again()
        node = self._nodes[sender]
        actions: list[Action] = self._unwanted(sender, message)
        peers = self._nodes.peers()
        if node.role is Role.DECODE and node.links.keys() != {peer.node for peer in peers.prefill}:
            # Peers may have been lost; the node does nothing about those it knows.
            actions.append(Send(sender, peers))
        held: dict[tuple[RequestId, int], list[HeldEntry]] = {}
        for entry in message.entries:
            held.setdefault((entry.request, entry.attempt), []).append(entry)
        for request in dict.fromkeys([*node.prompts, *node.streams]):
            record = self._attempts[request]
            entries = held.get((request, record.attempt))
            if entries is not None:
                record.missed.pop(sender, None)
                for entry in entries:
                    actions += self._compare(sender, record, entry)
            elif message.beat > record.placed_in_beat:
                # The answer to a Live that is older than the request says nothing of it.
                actions += self._miss(sender, record)
        return actions

    def _miss(self, sender: NodeId, record: Record) -> Iterable[Action]:
        """A node does not name a request that it should hold."""
        record.missed[sender] = record.missed.get(sender, 0) + 1
        if record.missed[sender] < MISSED_BEATS:
            return []
        return self._attempts.retry(record, f"{sender} does not know the request")

    def _compare(self, sender: NodeId, record: Record, entry: HeldEntry) -> Iterable[Action]:
        """What a node says of a sample that it should hold."""
        if sender == record.decode_node:
            record.has_blocks = entry.has_blocks
        if entry.stage is Stage.DECODE and record.stage is Stage.HANDOFF:
            # Its Ready was lost.
            self._attempts.arrived(record)
        sample = record.sample(entry.sample)
        if sample is not None and entry.stage is Stage.DONE and entry.next_index > len(sample.outputs):
            yield Send(sender, Resume(record.request, record.attempt, entry.sample, len(sample.outputs)))

    def _unwanted(self, sender: NodeId, message: Held) -> list[Action]:
        """What a node holds for nobody, because a Cancel or a Release was lost: it need not wait for its lease."""
        actions: list[Action] = []
        for entry in message.entries:
            record = self._attempts.find(entry.request)
            is_current = record is not None and record.stage is not None and record.attempt == entry.attempt
            is_needed = record is not None and (sender == record.decode_node or record.stage is not Stage.DECODE)
            if not (is_current and is_needed):
                actions.append(Send(sender, Cancel(entry.request, entry.attempt)))
            elif record is not None and entry.stage in (Stage.DECODE, Stage.DONE):
                sample = record.sample(entry.sample)
                if sample is None or sample.finish is not None:
                    actions.append(Send(sender, Cancel(entry.request, entry.attempt, entry.sample)))
        return actions
