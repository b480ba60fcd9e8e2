"""The hand-offs to a decode node: every pull that is under way, and the links they come by.

    Want ──► announced ──► blocks reserved ──► copies ──► all verified and End: it runs
                                                  └── a block failed twice: the rest is computed here

Owns the links to prefill nodes and what is known of their traffic; a pull belongs to its job. Called by
DecodeScheduler, which returns the actions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

from pdserve.cluster.events import Received
from pdserve.cluster.messages import Blocks, End, Gone, Have, Link, Message, Ready, Send
from pdserve.core.ids import NodeId
from pdserve.decode_node.beginning import Beginning
from pdserve.decode_node.ends import Ends
from pdserve.decode_node.job import Job, Jobs, Phase
from pdserve.decode_node.reservations import Reservations
from pdserve.kvtransfer.pull import CopyBlocks, CopyDone, Pull, PullState, Traffic, Verdict

Action = Send | CopyBlocks


class HandOffs:
    """router: who is told when blocks are verified. block_bytes: of a block on its way

    num_corrupt: blocks whose bytes were not what they were named
    """

    def __init__(
        self, router: NodeId, jobs: Jobs, reservations: Reservations, ends: Ends, block_bytes: int, block_size: int
    ):
        self.links: dict[NodeId, Link] = {}
        self.num_corrupt = 0
        self._router = router
        self._jobs = jobs
        self._reservations = reservations
        self._ends = ends
        self._block_bytes = block_bytes
        self._token_bytes = block_bytes // block_size
        self._traffic: defaultdict[NodeId, Traffic] = defaultdict(Traffic)
        self.handlers: dict[type[Message], Callable[..., Iterable[Action]]] = {
            Have: self._on_have,
            Blocks: self._on_blocks,
            End: self._on_end,
            Gone: self._on_gone,
        }

    def begin(self, job: Job, source: NodeId, now: float) -> list[Send]:
        """Ask the source for the blocks that are not cached here."""
        link = self.links.get(source)
        if link is None:
            return self._ends.fail(job, f"no link to {source}", now)
        job.pull = Pull(
            job.sequence.request,
            job.sequence.attempt,
            source,
            is_remote=link.is_remote,
            bytes_per_s=link.bytes_per_s,
            token_bytes=self._token_bytes,
        )
        return job.pull.want(self._reservations.lacking(job.sequence), now)

    def link_lost(self, peer: NodeId) -> None:
        """Its pulls finish from its mapped pool where that is all they need, else they fail when they are next due."""
        self.links.pop(peer, None)
        self._traffic.pop(peer, None)
        for job in self._jobs:
            if job.pull is not None and job.pull.source == peer:
                job.pull.orphaned = True
                self._reservations.due.add(job.sequence.key)

    def tick(self, now: float) -> list[Send]:
        """Ask again for what should have come."""
        self._count_traffic()
        sends: list[Send] = []
        for job in self._jobs:
            if job.phase is Phase.PULLING and job.pull is not None:
                sends += job.pull.tick(now, self._traffic[job.pull.source])
        return sends

    def _count_traffic(self) -> None:
        for traffic in self._traffic.values():
            traffic.num_pulls = traffic.num_expected = 0
        for job in self._jobs:
            if job.pull is not None and job.pull.is_remote:
                traffic = self._traffic[job.pull.source]
                traffic.num_pulls += 1
                traffic.num_expected += job.pull.num_expected

    # ---- messages of the source ------------------------------------------------------------------

    def _on_have(self, event: Received[Have], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        job, pull = self._pulling(sender, message)
        if job is not None and pull is not None:
            pull.announce(message.entries, now)
            self._heard(job, pull, now)
        return []

    def _on_blocks(self, event: Received[Blocks], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        traffic = self._traffic[sender]
        traffic.num_blocks, traffic.moved_at = traffic.num_blocks + len(message.entries), now
        job, pull = self._pulling(sender, message)
        if job is not None and pull is not None:
            pull.take(message.entries, message.payloads, now)
            self._reservations.due.add(job.sequence.key)
        return []

    def _on_end(self, event: Received[End], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        job, pull = self._pulling(sender, message)
        if job is None or pull is None:
            return []
        if message.count != job.sequence.num_tokens:
            reason = f"{sender} computed {message.count} tokens of {job.sequence.num_tokens}"
            return self._ends.fail(job, reason, now)
        if {each.sample for each in message.drawn} != set(job.sequence.drawing):
            reason = f"{sender} drew for {len(message.drawn)} samples of {len(job.sequence.drawing)}"
            return self._ends.fail(job, reason, now)
        pull.end = message
        if job.beginning is None:
            job.beginning = Beginning(now, now, waited_s=event.waited_s)
        self._heard(job, pull, now)
        return []

    def _on_gone(self, event: Received[Gone], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        job, _ = self._pulling(sender, message)
        return [] if job is None else self._ends.fail(job, f"{sender} holds nothing for it", now)

    def _heard(self, job: Job, pull: Pull, now: float) -> None:
        if pull.state is PullState.WANTING and pull.heard:
            job.heard_at = now if job.heard_at is None else job.heard_at
            self._reservations.wait(job, resumed=False)
        self._reservations.due.add(job.sequence.key)

    def _pulling(self, sender: NodeId, message: Have | Blocks | End | Gone) -> tuple[Job, Pull] | tuple[None, None]:
        """The job that a message of this sender is about, and its pull."""
        # Until its blocks are here a request is one job.
        job = next(iter(self._jobs.of(message.request)), None)
        if job is None or job.sequence.attempt != message.attempt or job.phase is not Phase.PULLING:
            self._ends.ended.covers(message.request, message.attempt)
            return None, None
        return (job, job.pull) if job.pull is not None and job.pull.source == sender else (None, None)

    # ---- copies ----------------------------------------------------------------------------------

    def advance(self, job: Job, now: float) -> list[Action]:
        """Whatever a pull can do now: copy what is announced, be complete, or compute the rest here.

        A job whose blocks are all here is left RUNNING.
        """
        pull, sequence = job.pull, job.sequence
        assert pull is not None
        if pull.orphaned and not pull.can_finish_alone:
            return list(self._ends.fail(job, f"lost {pull.source}", now))
        actions: list[Action] = list(pull.grant())
        copies = pull.next_copies()
        if copies:
            sequence.busy += 1
            self._reservations.begin(copies)
            actions.append(CopyBlocks(sequence.key, pull.source, tuple(copies)))
        if pull.complete():
            actions += self._complete(job, pull, now)
        elif pull.state is PullState.FAILED and pull.end is not None and sequence.busy == 0:
            actions += self._compute_rest(job, pull, now)
        return actions

    def copied(self, event: CopyDone, now: float) -> list[Send]:
        """A copy is over: what it has verified may be used, by whoever waits for it."""
        job = self._jobs.by_key[event.key]
        pull = job.pull
        assert pull is not None
        job.sequence.busy -= 1
        self.num_corrupt += event.verdicts.count(Verdict.CORRUPT)
        sends = pull.copied(event, now)
        if job.beginning is not None:
            job.beginning.copied(event.copy_s, event.verify_s, job.reserved_at, now)
        self._reservations.end(event)
        if job.cancelled:
            self._ends.free_if_idle(job)
            return []
        self._reservations.due.add(event.key)
        return sends

    def _complete(self, job: Job, pull: Pull, now: float) -> list[Send]:
        """Every block is verified: release the source."""
        sequence = job.sequence
        assert pull.end is not None
        assert job.beginning is not None
        job.beginning.ready(job.reserved_at, now)
        ready = Ready(
            sequence.request,
            sequence.attempt,
            num_blocks=pull.num_verified,
            num_bytes=pull.num_verified * self._block_bytes,
            num_cached_tokens=job.num_hit_tokens,
            reserve_s=job.reserved_at - (job.heard_at or job.reserved_at),
            copy_s=pull.copy_s,
            verify_s=pull.verify_s,
        )
        sequence.num_computed = pull.end.count
        sequence.num_found = len(sequence.hashes) * sequence.block_size
        sequence.num_committed = len(sequence.hashes)
        job.phase = Phase.RUNNING
        job.note_drawn(pull.end.drawn)
        return [*pull.release(), Send(self._router, ready)]

    def _compute_rest(self, job: Job, pull: Pull, now: float) -> list[Send]:
        """Blocks that could not be verified are computed here; what was verified is found again by hash."""
        assert pull.end is not None
        assert job.beginning is not None
        job.beginning.ready(job.reserved_at, now)
        self._reservations.give_back(job)
        job.phase = Phase.QUEUED
        job.note_drawn(pull.end.drawn)
        self._reservations.wait(job, resumed=True)
        return pull.release()
