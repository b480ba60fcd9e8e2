"""Life of a request on a decode node, as a pure machine.

    PULLING ── all verified, End ──► RUNNING ── finish ──► done (answers repeated for 30 s)
       │                               │  ▲
       └─ a block failed twice ► QUEUED ◄─┘ preempted       QUEUED ── blocks reserved ──► RUNNING
    local plans start QUEUED; any state ── Cancel, lease over ──► gone (freed when step and copies end)

Owns the block pool and the requests of this node, and takes each event to where it belongs: Reservations gives
blocks to requests, HandOffs pulls them in, Batch runs steps, Streams tells the router of tokens.
Called by DecodeNode on the event loop.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdserve.cluster.attempts import DEFAULT_LEASE_S
from pdserve.cluster.events import Joined, Leave, LinkLost, LinkUp, Received, Tick
from pdserve.cluster.messages import (
    NO_BEAT,
    Cancel,
    Decode,
    Drawn,
    Failed,
    Gauges,
    Held,
    HeldEntry,
    Live,
    Message,
    Resume,
    Send,
    Stage,
    TokenRun,
    Tokens,
)
from pdserve.core.batching import Batching
from pdserve.core.block_hash import BlockHasher
from pdserve.core.cache_delta import CacheDelta
from pdserve.core.errors import ProtocolError
from pdserve.core.ids import NodeId
from pdserve.core.turns import Policy
from pdserve.decode_node.batch import Batch
from pdserve.decode_node.beginning import Beginning
from pdserve.decode_node.chunk_budget import ChunkBudget
from pdserve.decode_node.ends import Ends
from pdserve.decode_node.growth import Growth
from pdserve.decode_node.hand_offs import HandOffs
from pdserve.decode_node.job import Job, Jobs, Phase
from pdserve.decode_node.preemption import Mode, Preemption
from pdserve.decode_node.reservations import Reservations
from pdserve.decode_node.samples import Keys, Samples
from pdserve.decode_node.streams import Streams, first_token
from pdserve.decode_node.swap import SwapIn, SwapOut, SwappedIn, SwappedOut
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import RunStep, StepDone
from pdserve.kvtransfer.drawn import drawn_after
from pdserve.kvtransfer.pull import CopyBlocks, CopyDone

BEAT_S = 0.5

Action = Send | RunStep | CopyBlocks | SwapOut | SwapIn
Event = Joined | Leave | Received[Message] | LinkUp | LinkLost | StepDone | CopyDone | SwappedOut | SwappedIn | Tick


@dataclass(frozen=True, slots=True)
class Limits:
    """max_running: largest batch. num_swap_blocks: of the host pool; mode: how sequences yield blocks.

    batching: when sequences may begin; least_tokens: for which each has blocks from its beginning to its end, 0: it
    is given them as it grows
    """

    max_running: int
    num_swap_blocks: int = 0
    mode: Mode = Mode.AUTO
    batching: Batching = Batching.CONTINUOUS
    least_tokens: int = 0


class DecodeScheduler:
    """router: where tokens go. budget: tokens of a step. block_bytes: of a block on its way"""

    def __init__(
        self,
        router: NodeId,
        pool: BlockPool,
        hasher: BlockHasher,
        budget: ChunkBudget,
        limits: Limits,
        block_bytes: int,
        policy: Policy = Policy.SHORTEST,
    ):
        self.pool = pool
        self.num_unexpected = 0
        self._router = router
        self._hasher = hasher
        self._budget = budget
        self._limits = limits
        self._lease_s = DEFAULT_LEASE_S
        self._jobs = Jobs()
        self.reservations = Reservations(pool, self._jobs, limits.max_running, limits.num_swap_blocks, limits.batching)
        self._ends = Ends(router, self._jobs, self.reservations)
        self._hand_offs = HandOffs(router, self._jobs, self.reservations, self._ends, block_bytes, hasher.block_size)
        self._preemption = Preemption(
            self._jobs, self.reservations, self._ends, self._hand_offs, budget.cost, block_bytes, limits.mode
        )
        self._growth = Growth(self._jobs, self.reservations, self._preemption)
        self._batch = Batch(self._jobs, pool, self._growth, hasher, budget, policy)
        self._streams = Streams(self._jobs, self._ends)
        self._keys = Keys()
        self._samples = Samples(self._jobs, self.reservations, self._keys, hasher)
        self._is_leaving = False
        self._from_router: dict[type, Callable[..., Iterable[Action]]] = {
            Decode: self._on_decode,
            Cancel: self._on_cancel,
            Live: self._on_live,
            Resume: self._on_resume,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Feed one event; returns what is to be done, in order."""
        actions: list[Action] = []
        if isinstance(event, Received):
            actions += self._on_received(event, now)
        elif isinstance(event, Joined):
            self._lease_s, self._budget.tpot_s = event.lease_s, event.tpot_s
        elif isinstance(event, StepDone):
            actions += self._on_step_done(event, now)
        elif isinstance(event, CopyDone):
            actions += self._hand_offs.copied(event, now)
        elif isinstance(event, SwappedOut):
            self._preemption.swapped_out(event)
        elif isinstance(event, SwappedIn):
            self._preemption.swapped_in(event)
        elif isinstance(event, Tick):
            actions += self._on_tick(event, now)
        elif isinstance(event, LinkUp):
            self._hand_offs.links[event.link.node] = event.link
            actions.append(self._news())
        elif isinstance(event, LinkLost):
            self._hand_offs.link_lost(event.peer)
            actions.append(self._news())
        elif isinstance(event, Leave):
            self._is_leaving = True
            actions.append(self._news())
        actions += self._settle(now)
        actions += self._start_step(now)
        actions += self._settle(now)
        return actions

    def _settle(self, now: float) -> list[Action]:
        """Reservations, and every pull that something happened to, until nothing more can move."""
        actions: list[Action] = []
        while True:
            actions += self.reservations.admit(now)
            if not self.reservations.due:
                return actions
            job = self._jobs.by_key.get(self.reservations.due.pop())
            if job is not None and not job.cancelled and job.phase is Phase.PULLING:
                actions += self._hand_offs.advance(job, now)
                if job.is_ready_to_part:
                    actions += self._part(job, job.drawn, now)

    def _on_received(self, event: Received[Message], now: float) -> Iterable[Action]:
        handlers = self._from_router if event.sender == self._router else self._hand_offs.handlers
        handler = handlers.get(type(event.message))
        if handler is None:
            self.num_unexpected += 1
            return []
        return handler(event, now)

    # ---- messages of the router ------------------------------------------------------------------

    def _on_decode(self, event: Received[Decode], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        if self._jobs.attempt(message.request) >= message.attempt:
            return []
        if self._ends.ended.covers(message.request, message.attempt):
            return []
        actions = self._ends.end(message.request, now)
        try:
            job = self._job(message, now)
        except ProtocolError as error:
            return [*actions, Send(sender, Failed(message.request, message.attempt, Stage.HANDOFF, str(error)))]
        job.sequence.waited_s = event.waited_s
        self._jobs.add(job)
        if message.source is None:
            self.reservations.wait(job, resumed=False)
            return actions
        return [*actions, *self._hand_offs.begin(job, message.source.node, now)]

    def _on_cancel(self, event: Received[Cancel], now: float) -> Iterable[Action]:
        message = event.message
        self._streams.finished.forget(message.request, message.attempt, message.sample)
        known = self._jobs.attempt(message.request)
        if message.sample is not None:
            job = self._jobs.find(message.request, message.attempt, message.sample)
            return [] if job is None else self._ends.end_job(job, now)
        if not known or known > message.attempt:
            self._ends.ended.add(message.request, message.attempt, now)
            return []
        return self._ends.end(message.request, now)

    def _on_live(self, event: Received[Live], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        for entry in message.entries:
            for job in self._jobs.of(entry.request):
                if job.sequence.attempt == entry.attempt:
                    job.expires_at = now + self._lease_s
                    job.is_overdue = entry.is_overdue and not job.is_fixed
                    if job.is_overdue:
                        self._jobs.note_overdue(job)
        return [Send(sender, self.held(message.beat, self.pool.log.delta(message.cache)))]

    def _on_resume(self, event: Received[Resume], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        run = self._streams.resume(message)
        return [] if run is None else [Send(sender, Tokens((run,)))]

    def _news(self) -> Send:
        """Goes before any Failed: else the router might pick a lost link again, until no attempt is left."""
        return Send(
            self._router, Held(NO_BEAT, (), self.gauges(), tuple(self._hand_offs.links.values()), self._is_leaving)
        )

    # ---- the step --------------------------------------------------------------------------------

    def _start_step(self, now: float) -> list[Action]:
        if self._batch.is_running:
            return []
        actions: list[Action] = list(self.reservations.make_room(now))
        plan = self._batch.plan(now)
        actions += self._preemption.actions()
        return actions if plan is None else [*actions, RunStep(plan)]

    def _on_step_done(self, event: StepDone, now: float) -> Iterable[Action]:
        actions: list[Action] = []
        runs: list[TokenRun] = []
        for job, draws in self._batch.take(event.result, now):
            if job.cancelled:
                self._ends.free_if_idle(job)
            elif job.sequence.num_missing == 0:
                drawn = drawn_after(job.sequence, draws)
                if job.prefills_here:
                    actions.append(Send(self._router, first_token(job, drawn, now)))
                    job.beginning = Beginning(now, now, ready_at=now)
                elif job.beginning is not None and not job.samples:
                    begun = job.beginning.begun(job.sequence.request, job.sequence.attempt, now)
                    actions.append(Send(self._router, begun))
                    for sample in self._jobs.of(job.sequence.request):
                        sample.beginning = None
                if job.samples:
                    actions += self._part(job, job.drawn or drawn, now)
                else:
                    runs += self._streams.add(job, draws, drawn, now)
        return [*actions, Send(self._router, Tokens(tuple(runs)))] if runs else actions

    def _part(self, head: Job, drawn: Iterable[Drawn], now: float) -> list[Send]:
        """What the samples of a request share is computed: each goes on by itself."""
        sequence = head.sequence
        runs = self._samples.part(head, drawn, is_told=head.prefills_here)
        for run in runs:
            self._streams.finished.add(run, now)
        if not self._jobs.of(sequence.request):
            self._ends.ended.add(sequence.request, sequence.attempt, now)
        return [Send(self._router, Tokens(tuple(runs)))] if runs and not head.prefills_here else []

    # ---- time ------------------------------------------------------------------------------------

    def _on_tick(self, event: Tick, now: float) -> Iterable[Action]:
        self._ends.ended.sweep(now)
        self._streams.finished.sweep(now)
        actions: list[Action] = []
        for job in list(self._jobs):
            if event.late:
                job.expires_at = max(job.expires_at, now + 2 * BEAT_S)
            if job.expires_at <= now and not job.cancelled:
                actions += self._ends.end(job.sequence.request, now)
        actions += self._hand_offs.tick(now)
        return actions

    # ---- state for others ------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._batch.is_running and not self._jobs.by_key

    @property
    def is_drained(self) -> bool:
        """Whether nobody needs this node any more: the router has taken the last token of every stream."""
        return self.is_idle and not self._streams.finished.held()

    def held(self, beat: int, cache: CacheDelta | None = None) -> Held:
        """The answer to Live: what is here, what ended lately, and what has changed in the prefix index."""
        entries = [
            HeldEntry(
                job.sequence.request,
                job.sequence.attempt,
                Stage.HANDOFF if job.phase is Phase.PULLING else Stage.DECODE,
                job.num_sent,
                has_blocks=job.phase is Phase.PULLING and bool(job.sequence.block_ids),
                sample=job.sequence.sample,
            )
            for job in self._jobs
        ]
        entries += self._streams.finished.held()
        links = tuple(self._hand_offs.links.values())
        return Held(beat, tuple(entries), self.gauges(), links, self._is_leaving, cache)

    def gauges(self) -> Gauges:
        jobs = list(self._jobs)
        num_running = len(self._jobs.running())
        yielded, space = self.reservations.num_yielded, self.reservations.space
        return Gauges(
            num_free=self.pool.num_free,
            num_cached=self.pool.num_cached,
            num_held=self.pool.num_held,
            num_leased=self.pool.num_leased,
            num_reserved=self.pool.num_reserved,
            num_running=num_running,
            num_waiting=len(jobs) - num_running,
            num_leases=len(jobs),
            num_parked=0,
            num_queued_tokens=sum(job.num_to_compute for job in jobs),
            token_s=self._batch.token_s,
            num_corrupt=self._hand_offs.num_corrupt + self._preemption.num_corrupt,
            num_yielded_swap=yielded[Mode.SWAP],
            num_yielded_recompute=yielded[Mode.RECOMPUTE],
            num_yielded_return=yielded[Mode.RETURN],
            num_swap_blocks=space.num_slots,
            num_swapped=space.num_slots - space.num_free,
        )

    def check(self) -> None:
        """Invariants over pool, sequences and pulls; raises AssertionError."""
        tables = [job.sequence.block_ids for job in self._jobs.by_key.values()]
        self.pool.check([*tables, self._growth.leaving])
        reserved = sum(job.sequence.num_reserved for job in self._jobs.by_key.values())
        assert reserved == self.pool.num_reserved, f"{self.pool.num_reserved} reserved, sequences have {reserved}"
        holding = {job.sequence.key for job in self._jobs.by_key.values() if job.holds_blocks}
        assert {job.sequence.key for job in self._jobs.holding()} == holding, "blocks were given and not noted"
        assert self._jobs.has_pulls == any(job.is_pulling for job in self._jobs)
        space = self.reservations.space
        slots = [slot for job in self._jobs.by_key.values() if job.swapped is not None for slot in job.swapped.slots]
        assert len(set(slots)) == len(slots) == space.num_slots - space.num_free, "slots are lost or taken twice"
        for job in self._jobs:
            assert self._jobs.by_key.get(job.sequence.key) is job
            assert not job.is_ready_to_part, "samples share what is computed for longer than they must"
            if job.phase is Phase.QUEUED:
                assert not job.sequence.block_ids, "a queued sequence holds blocks"
                assert self.reservations.is_waiting(job), "a queued sequence stands in no line"

    def _job(self, message: Decode, now: float) -> Job:
        """Raises ProtocolError for a request that makes no sense or can never fit."""
        size = self._hasher.block_size
        is_local = message.source is None
        sequence = Sequence.of(self._keys.next(), message, size, now, computes=is_local)
        # The last token drawn is never run, so it needs no slot.
        asked = sequence.num_prompt + message.sampling.max_tokens - 1
        final_blocks = -(-max(asked, self._limits.least_tokens) // size)
        job = Job(
            sequence,
            Phase.QUEUED if is_local else Phase.PULLING,
            now + self._lease_s,
            num_given=sequence.num_outputs,
            final_blocks=final_blocks,
            prefills_here=is_local,
            is_whole=self._limits.least_tokens > 0,
            num_yields=message.num_yields,
            samples=message.samples if len(message.samples) > 1 else (),
        )
        needed = max(final_blocks, sequence.num_blocks + job.growth)
        if needed > self.pool.num_blocks:
            raise ProtocolError(f"the request needs up to {needed} KV blocks of {self.pool.num_blocks}")
        most = self._limits.max_running
        if job.num_streams > most:
            raise ProtocolError(f"the request has {job.num_streams} samples, {most} run at once here")
        return job
