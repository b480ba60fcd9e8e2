"""The router's machine: which node serves what, and what every request has received, without sockets or clocks.

Takes each event and message to where it belongs: Nodes knows the nodes, Attempts gives requests to them, Beats sees
what is lost, late or stuck. Puts tokens into the ledger of their record: a token is taken once per index, in order,
whoever sends it. Called by RouterService.
"""

from collections.abc import Callable, Iterable

from pdserve.cluster.events import Received, Tick
from pdserve.cluster.messages import (
    Begun,
    Cancel,
    Failed,
    FirstToken,
    Held,
    Message,
    Ready,
    Resume,
    Returned,
    Send,
    Stage,
    TokenRun,
    Tokens,
)
from pdserve.core.ids import RequestId
from pdserve.core.logprobs import NO_LOGPROBS
from pdserve.router.attempts import Attempts
from pdserve.router.beats import Beats
from pdserve.router.events import (
    Action,
    ClientGone,
    Deliver,
    Event,
    NodeJoined,
    NodeLost,
    SampleStopped,
    Submit,
)
from pdserve.router.nodes import Nodes
from pdserve.router.record import Record
from pdserve.router.rules import Rules


class Dispatcher:
    """num_stale: messages of nodes that are gone, or for attempts that are over."""

    def __init__(self, rules: Rules):
        self.nodes = Nodes(rules.is_fcfs)
        self.num_stale = 0
        self._attempts = Attempts(self.nodes, rules)
        self._beats = Beats(self.nodes, self._attempts, rules)
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
            Begun: self._on_begun,
            Failed: self._on_failed,
            Returned: self._on_returned,
            Held: self._beats.hear,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Feed one event; returns what is to be done, in order."""
        actions = list(self._on_event[type(event)](event, now))
        return [*actions, *self._attempts.dispatch(now)]

    @property
    def num_queued(self) -> int:
        return self._attempts.num_queued

    @property
    def num_records(self) -> int:
        return self._attempts.num_records

    def find(self, request: RequestId) -> Record | None:
        return self._attempts.find(request)

    def check(self) -> None:
        """Raise AssertionError unless queue, records and nodes agree."""
        self._attempts.check()

    # ---- requests --------------------------------------------------------------------------------

    def _on_submit(self, event: Submit, now: float) -> Iterable[Action]:
        event.record.times.queued = now
        self._attempts.submit(event.record)
        return []

    def _on_client_gone(self, event: ClientGone, now: float) -> Iterable[Action]:
        record = self._attempts.find(event.request)
        return [] if record is None else self._attempts.close(record)

    def _on_sample_stopped(self, event: SampleStopped, now: float) -> Iterable[Action]:
        record = self._attempts.find(event.request)
        sample = record.sample(event.sample) if record is not None else None
        if record is None or sample is None or sample.finish is not None:
            return []
        sample.finish = "stop"
        if not record.live:
            record.finish = _finish_of(record)
            return self._attempts.close(record)
        node = record.decode_node
        if node is None or node not in self.nodes or record.stage is None:
            return []
        # Before its hand-off it has nothing of its own on a node; beats repeat what is lost or comes too early.
        return [Send(node, Cancel(record.request, record.attempt, event.sample))]

    # ---- nodes and time --------------------------------------------------------------------------

    def _on_joined(self, event: NodeJoined, now: float) -> Iterable[Action]:
        lost = self._on_lost(NodeLost(event.node, "another incarnation joined"), now)
        self.nodes.join(event)
        self._attempts.reconsider()
        return [*lost, *self.nodes.announce_peers()]

    def _on_lost(self, event: NodeLost, now: float) -> Iterable[Action]:
        if event.node not in self.nodes:
            return []
        self.nodes.lose(event.node)
        self._attempts.reconsider()
        return [*self._attempts.lose(event.node, event.reason), *self.nodes.announce_peers()]

    def _on_tick(self, event: Tick, now: float) -> Iterable[Action]:
        return self._beats.tick(now)

    # ---- messages --------------------------------------------------------------------------------

    def _on_received(self, event: Received[Message], now: float) -> Iterable[Action]:
        if event.sender not in self.nodes:
            self.num_stale += 1
            return []
        handler = self._on_message.get(type(event.message))
        return [] if handler is None else handler(event, now)

    def _current(self, request: RequestId, attempt: int) -> Record | None:
        record = self._attempts.find(request)
        if record is None or record.stage is None or record.attempt != attempt:
            self.num_stale += 1
            return None
        return record

    def _on_first_token(self, event: Received[FirstToken], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        record = self._current(message.request, message.attempt)
        if record is None:
            return []
        if record.stage is Stage.PREFILL:
            self._attempts.computed(record, now)
        # Another node's word of what it did with the blocks may have come first.
        record.times.compute(message, event.waited_s)
        if record.times.is_first_attempt:
            # A later attempt's computing is no part of the time to the first token.
            record.num_not_computed = record.of_prompt(message.num_cached_tokens)
            record.prefill_queue_s, record.prefill_s = message.queue_s, message.prefill_s
            record.chunks = message.chunks
        if record.lacks_prompt_logprobs:
            if not message.prompt_logprobs.covers(len(record.prompt) - 1):
                return self._attempts.retry(record, f"{sender}: its log-probabilities are not of this prompt")
            record.prompt_logprobs = message.prompt_logprobs
        actions: list[Action] = []
        for drawn in message.drawn:
            ids = (drawn.sample, drawn.index, (drawn.token,))
            run = TokenRun(record.request, record.attempt, *ids, drawn.finish, drawn.logprobs)
            actions += self._take(record, run, now)
        return actions

    def _on_tokens(self, event: Received[Tokens], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        actions: list[Action] = []
        for run in message.runs:
            record = self._current(run.request, run.attempt)
            sample = None if record is None else record.sample(run.sample)
            if record is None or sample is None:
                continue
            if record.lacks_prompt_logprobs:
                # They came with a FirstToken that was lost; nothing else has them.
                actions += self._attempts.retry(record, "the log-probabilities of its prompt were lost")
                continue
            num_outputs = len(sample.outputs)
            if run.first_index > num_outputs:
                actions.append(Send(sender, Resume(run.request, run.attempt, run.sample, num_outputs)))
                continue
            if record.stage is not Stage.DECODE:
                self._attempts.arrived(record)
            actions += self._take(record, run, now)
        return actions

    def _on_ready(self, event: Received[Ready], now: float) -> Iterable[Action]:
        message = event.message
        record = self._current(message.request, message.attempt)
        if record is None:
            return []
        self._attempts.arrived(record)
        if record.ready_attempt == record.attempt:
            return []
        record.ready_attempt = record.attempt
        record.bytes_moved += message.num_bytes
        if record.times.ready is None:
            record.times.ready = now
            record.num_not_moved = record.of_prompt(message.num_cached_tokens)
            record.reserve_s, record.copy_s = message.reserve_s, message.copy_s
            record.verify_s = message.verify_s
        return []

    def _on_begun(self, event: Received[Begun], now: float) -> Iterable[Action]:
        message = event.message
        record = self._current(message.request, message.attempt)
        if record is not None:
            record.times.begin(message, event.waited_s)
        return []

    def _on_failed(self, event: Received[Failed], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        record = self._current(message.request, message.attempt)
        if record is None:
            return []
        if sender == record.decode_node and record.prefill_node is not None:
            # Until its next beat confirms the link, or all attempts could fail at once for the same reason.
            self.nodes[sender].doubted.add(record.prefill_node)
        return self._attempts.retry(record, f"{sender}: {message.reason}")

    def _on_returned(self, event: Received[Returned], now: float) -> Iterable[Action]:
        """A decode node needs its blocks for others: it goes on elsewhere, or stands in line before all that is new."""
        sender, message = event.sender, event.message
        record = self._current(message.request, message.attempt)
        if record is None or sender != record.decode_node:
            return []
        record.num_yields = max(record.num_yields, message.num_yields)
        place = self._attempts.elsewhere(record, self._attempts.coming())
        if place is not None:
            return self._attempts.move(record, place, now)
        return self._attempts.requeue(record)

    # ---- the ledger ------------------------------------------------------------------------------

    def _take(self, record: Record, run: TokenRun, now: float) -> list[Action]:
        """Put tokens of a sample into the ledger, each index once, and pass on what is new."""
        sample = record.sample(run.sample)
        if sample is None or sample.finish is not None:
            return []
        num_known = len(sample.outputs) - run.first_index
        if num_known < 0:
            # Of Tokens a gap has been asked for; a FirstToken with one is a mistake.
            return []
        new = run.token_ids[num_known:]
        logprobs = run.logprobs.after(num_known) if run.logprobs.covers(len(run.token_ids)) else NO_LOGPROBS
        if new:
            num_before = len(sample.outputs)
            sample.outputs += new
            record.times.take(num_before, len(sample.outputs), now)
        sample.finish = run.finish
        if record.live:
            is_news = new or run.finish is not None
            return [Deliver(record.request, run.sample, new, run.finish, logprobs)] if is_news else []
        record.finish = _finish_of(record)
        last = Deliver(record.request, run.sample, new, run.finish, logprobs, is_last=True)
        return [last, *self._attempts.close(record)]


def _finish_of(record: Record) -> str:
    """How its samples ended, each way named once."""
    return "+".join(sorted({sample.finish for sample in record.samples if sample.finish is not None}))
