"""Life of a prompt on a prefill node, as a pure machine.

    QUEUED ── reserve ──► RUNNING ── last chunk ──► PARKED ── Release, finish, expiry ──► gone
       └── Cancel, expiry ──┴── Cancel, expiry (freed when its step ends) ──────────────► gone

Owns the block pool, the prompts and the offers of this node, and takes each event to where it belongs: Reservations
gives blocks to prompts, Batch runs steps, OfferBook tells peers what there is. Called by PrefillNode on the event loop.
"""

from collections.abc import Callable, Iterable

from pdserve.cluster.attempts import EndedAttempts
from pdserve.cluster.events import Joined, Leave, LinkLost, LinkUp, Received, Tick
from pdserve.cluster.messages import (
    NO_BEAT,
    Bad,
    Cancel,
    End,
    Failed,
    Fetch,
    FirstToken,
    Gauges,
    HaveEntry,
    Held,
    HeldEntry,
    Live,
    Message,
    Prefill,
    Release,
    Send,
    Stage,
    Want,
)
from pdserve.core.cache_delta import CacheDelta
from pdserve.core.errors import ProtocolError
from pdserve.core.ids import BlockHash, BlockId, NodeId
from pdserve.core.logprobs import Logprobs
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.planner import Planner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Draw, RunStep, StepDone
from pdserve.engine.step_cost import StepCost
from pdserve.kvtransfer.copying import BlocksChecked, CheckBlocks
from pdserve.kvtransfer.drawn import drawn_after
from pdserve.kvtransfer.offer import OfferBook, SendBlocks
from pdserve.prefill_node.batch import Batch
from pdserve.prefill_node.prompt import Phase, Prompt, Prompts
from pdserve.prefill_node.reservations import Reservations

BEAT_S = 0.5

Action = Send | SendBlocks | CheckBlocks | RunStep
Event = Joined | Leave | Received[Message] | LinkUp | LinkLost | StepDone | BlocksChecked | Tick


class PrefillScheduler:
    """router: where FirstToken and Failed go. planner: who computes next, and how much of it one step does.

    cost: what steps take here, which goes on learning; block_bytes: of a block on its way to another host
    """

    def __init__(
        self, router: NodeId, pool: BlockPool, block_size: int, planner: Planner, cost: StepCost, block_bytes: int
    ):
        self.pool = pool
        self.offers = OfferBook(block_bytes)
        self.ended = EndedAttempts()
        self.num_unexpected = 0
        self.num_corrupt = 0
        self._router = router
        self._block_size = block_size
        self._prompts = Prompts()
        self._reservations = Reservations(pool, self._prompts)
        self._batch = Batch(self._prompts, pool, self.offers, planner, cost)
        self._next_key = 0
        self._is_leaving = False
        self._from_router: dict[type, Callable[..., Iterable[Action]]] = {
            Prefill: self._on_prefill,
            Cancel: self._on_cancel,
            Live: self._on_live,
        }
        self._from_peers: dict[type, Callable[..., Iterable[Action]]] = {
            Release: self._on_release,
            Want: self._on_want,
            Fetch: self._on_fetch,
            Bad: self._on_bad,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Feed one event; returns what is to be done, in order."""
        actions: list[Action] = []
        if isinstance(event, Received):
            actions += self._on_received(event, now)
        elif isinstance(event, Joined):
            self.offers.lease_s = event.lease_s
        elif isinstance(event, StepDone):
            actions += self._on_step_done(event, now)
        elif isinstance(event, Tick):
            actions += self._on_tick(event, now)
        elif isinstance(event, BlocksChecked):
            self._on_checked(event)
        elif isinstance(event, Leave):
            self._is_leaving = True
            actions.append(Send(self._router, self.held(NO_BEAT)))
        actions += self._admit()
        actions += self._start_step(now)
        return actions

    # ---- messages --------------------------------------------------------------------------------

    def _on_received(self, event: Received[Message], now: float) -> Iterable[Action]:
        handlers = self._from_router if event.sender == self._router else self._from_peers
        handler = handlers.get(type(event.message))
        if handler is None:
            self.num_unexpected += 1
            return []
        return handler(event, now)

    def _on_prefill(self, event: Received[Prefill], now: float) -> Iterable[Action]:
        message = event.message
        known = self._prompts.find(message.request)
        if known is not None:
            if known.sequence.attempt == message.attempt and known.first_token is not None:
                return [Send(self._router, known.first_token)]
            if known.sequence.attempt >= message.attempt:
                return []
        if self.ended.covers(message.request, message.attempt):
            return []
        actions = self._end(known, now) if known is not None else []
        self._next_key += 1
        try:
            sequence = Sequence.of(self._next_key, message, self._block_size, now)
            if sequence.num_blocks > self.pool.num_blocks:
                raise ProtocolError(f"the prompt needs {sequence.num_blocks} KV blocks of {self.pool.num_blocks}")
        except ProtocolError as error:
            failed = Failed(message.request, message.attempt, Stage.PREFILL, str(error))
            return [*actions, Send(self._router, failed)]
        sequence.waited_s = event.waited_s
        was_parked = known is not None and (known.was_parked or known.phase is Phase.PARKED)
        prompt = Prompt(sequence, Phase.QUEUED, was_parked=was_parked)
        self._prompts.add(prompt)
        self._reservations.wait(prompt)
        self.offers.open(message.request, message.attempt, now)
        return actions

    def _on_cancel(self, event: Received[Cancel], now: float) -> Iterable[Action]:
        message = event.message
        if message.sample is not None:
            # The others need the prompt all the same.
            return []
        prompt = self._prompts.find(message.request)
        if prompt is None or prompt.sequence.attempt > message.attempt:
            self.ended.add(message.request, message.attempt, now)
            return []
        return self._end(prompt, now)

    def _on_release(self, event: Received[Release], now: float) -> Iterable[Action]:
        message = event.message
        prompt = self._prompts.find(message.request)
        if prompt is None or prompt.sequence.attempt != message.attempt or prompt.phase is not Phase.PARKED:
            return []
        return self._end(prompt, now)

    def _on_live(self, event: Received[Live], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        actions: list[Action] = []
        for entry in message.entries:
            if entry.stage in (Stage.PREFILL, Stage.HANDOFF):
                self.offers.renew(entry.request, entry.attempt, now)
            prompt = self._prompts.find(entry.request)
            if entry.stage is Stage.PREFILL and prompt is not None and prompt.first_token is not None:
                actions.append(Send(self._router, prompt.first_token))
        return [*actions, Send(sender, self.held(message.beat, self.pool.log.delta(message.cache)))]

    def _on_want(self, event: Received[Want], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        if self.ended.covers(message.request, message.attempt):
            return self.offers.gone(sender, message)
        return self.offers.want(sender, message, now)

    def _on_fetch(self, event: Received[Fetch], now: float) -> Iterable[Action]:
        sender, message = event.sender, event.message
        if self.ended.covers(message.request, message.attempt):
            return []
        return self.offers.fetch(sender, message)

    def _on_bad(self, event: Received[Bad], now: float) -> Iterable[Action]:
        """A peer read bytes that are not what they are named: whether they are wrong here, too, is looked at."""
        message = event.message
        found = {h: self.pool.find(h) for h in message.hashes}
        entries = tuple(self._entry(block_id, h) for h, block_id in found.items() if block_id is not None)
        return [CheckBlocks(entries)] if entries else []

    def _on_checked(self, event: BlocksChecked) -> None:
        """Wrong bytes are offered to nobody under this name again; a good block stays what it is."""
        self.num_corrupt += len(event.bad)
        for entry in event.bad:
            if self.pool.find(entry.hash) == entry.block_id:
                self.pool.forget(entry.hash)

    # ---- the step --------------------------------------------------------------------------------

    def _admit(self) -> list[Action]:
        """Blocks found in the prefix cache are announced as soon as their prompt has its reservation."""
        actions: list[Action] = []
        for prompt in self._reservations.admit():
            self._batch.join(prompt)
            sequence = prompt.sequence
            num_found = sequence.num_found // self._block_size
            hits = zip(sequence.block_ids[:num_found], sequence.hashes, strict=False)
            actions += self._announce(sequence, hits)
        return actions

    def _start_step(self, now: float) -> list[Action]:
        if self._batch.is_running:
            return []
        plan = self._batch.plan(now)
        return [] if plan is None else [RunStep(plan)]

    def _on_step_done(self, event: StepDone, now: float) -> Iterable[Action]:
        actions: list[Action] = []
        for computed in self._batch.take(event.result, now):
            prompt = computed.prompt
            if prompt.cancelled:
                self._reservations.free_if_idle(prompt)
                continue
            actions += self._announce(prompt.sequence, computed.sealed)
            if prompt.sequence.num_missing == 0:
                actions += self._finish(prompt, computed.draws, now)
        return actions

    def _announce(self, sequence: Sequence, blocks: Iterable[tuple[BlockId, BlockHash]]) -> Iterable[Action]:
        entries = [self._entry(block_id, block_hash) for block_id, block_hash in blocks]
        return self.offers.seal(sequence.request, sequence.attempt, entries)

    def _entry(self, block_id: BlockId, block_hash: BlockHash) -> HaveEntry:
        checksum = self.pool.checksum(block_id)
        assert checksum is not None, f"block {block_id} is announced without a checksum"
        return HaveEntry(block_hash, block_id, self.pool.generation(block_id), checksum)

    def _finish(self, prompt: Prompt, draws: Iterable[Draw], now: float) -> list[Action]:
        """The prompt is computed and the next token of each sample drawn: tell the router at once, park the blocks."""
        sequence = prompt.sequence
        drawn = drawn_after(sequence, draws)
        first = FirstToken(
            sequence.request,
            sequence.attempt,
            drawn=drawn,
            num_cached_tokens=min(sequence.num_found, sequence.num_tokens - 1),
            queue_s=sequence.queue_s,
            prefill_s=now - sequence.accepted_at - sequence.queue_s,
            prompt_logprobs=Logprobs.join(sequence.scores),
            chunks=tuple(sequence.chunks.chunks),
            step_end_s=sequence.chunks.step_end_s,
            waited_s=sequence.waited_s,
        )
        prompt.first_token = first
        self._batch.leave(prompt)
        self._reservations.park(prompt)
        actions: list[Action] = [Send(self._router, first)]
        if sum(each.finish is not None for each in drawn) == sequence.num_samples:
            return actions + self._end(prompt, now)
        end = End(sequence.request, sequence.attempt, sequence.num_tokens, drawn)
        return actions + list(self.offers.finish(sequence.request, sequence.attempt, end))

    # ---- time ------------------------------------------------------------------------------------

    def _on_tick(self, event: Tick, now: float) -> Iterable[Action]:
        if event.late:
            self.offers.grant_beat(now, 2 * BEAT_S)
        self.ended.sweep(now)
        actions: list[Action] = list(self.offers.lapse(now))
        for request, _ in self.offers.expired(now):
            actions += self._end(self._prompts[request], now)
        return actions

    # ---- ends ------------------------------------------------------------------------------------

    def _end(self, prompt: Prompt, now: float) -> list[Action]:
        """However a request ends here. Blocks named in a step in flight are freed when it ends."""
        sequence = prompt.sequence
        actions = self.offers.close(sequence.request, sequence.attempt)
        self.ended.add(sequence.request, sequence.attempt, now)
        self._prompts.remove(prompt)
        self._reservations.leave(prompt)
        self._batch.leave(prompt)
        self._reservations.free_if_idle(prompt)
        return list(actions)

    # ---- state for others ------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._batch.is_running and not self._reservations.num_waiting and not len(self._batch)

    @property
    def is_drained(self) -> bool:
        """Whether nobody needs this node any more: every prompt is released, cancelled or expired."""
        return self.is_idle and not len(self._prompts)

    def held(self, beat: int, cache: CacheDelta | None = None) -> Held:
        """The answer to Live, with what has changed in the prefix index."""
        stages = {Phase.QUEUED: Stage.PREFILL, Phase.RUNNING: Stage.PREFILL, Phase.PARKED: Stage.HANDOFF}
        entries = tuple(
            HeldEntry(p.sequence.request, p.sequence.attempt, stages[p.phase], p.sequence.num_outputs)
            for p in self._prompts
        )
        return Held(beat, entries, self.gauges(), (), self._is_leaving, cache)

    def gauges(self) -> Gauges:
        queued = [p.sequence for p in self._prompts if p.phase is not Phase.PARKED]
        return Gauges(
            num_free=self.pool.num_free,
            num_cached=self.pool.num_cached,
            num_held=self.pool.num_held,
            num_leased=self.pool.num_leased,
            num_reserved=self.pool.num_reserved,
            num_running=len(self._batch),
            num_waiting=self._reservations.num_waiting,
            num_leases=len(self.offers),
            num_parked=self.pool.num_leased,
            num_queued_tokens=sum(sequence.num_missing for sequence in queued),
            token_s=self._batch.token_s,
            starts_no_prompt=self._reservations.starts_no_prompt,
            num_corrupt=self.num_corrupt,
        )

    def check(self) -> None:
        """Invariants over pool, sequences and leases; raises AssertionError."""
        self._reservations.check()
        running = [p for p in self._prompts if p.phase is Phase.RUNNING]
        assert len(self._batch) == len(running), "a running prompt is never planned"
        assert len(self.offers) == len(self._prompts), "a request without a lease, or a lease without a request"
