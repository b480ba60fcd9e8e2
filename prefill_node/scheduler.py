"""Life of a prompt on a prefill node, as a pure machine.

    QUEUED ── reserve ──► RUNNING ── last chunk ──► PARKED ── Release, finish, expiry ──► gone
       └── Cancel, expiry ──┴── Cancel, expiry (freed when its step ends) ──────────────► gone

Owns the block pool, the sequences and the offers of this node. A prompt reserves all of its blocks
(hits held) before its first chunk, in the order of an AdmissionLine; the Planner says who computes then.
Nothing is started while more than half of the pool is parked, but for the next attempt of what was parked
here: it finds its blocks again. Called by PrefillNode on the event loop.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

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
    Prefill,
    Release,
    Send,
    Stage,
    Want,
)
from pdserve.core.admission import AdmissionLine
from pdserve.core.cache_delta import CacheDelta
from pdserve.core.errors import ProtocolError
from pdserve.core.ids import BlockHash, BlockId, NodeId, RequestId
from pdserve.core.logprobs import Logprobs
from pdserve.core.turns import Policy
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.planner import Planner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Draw, RunStep, StepDone, StepPlan
from pdserve.engine.step_cost import StepCost, StepWork
from pdserve.kvtransfer.copying import BlocksChecked, CheckBlocks
from pdserve.kvtransfer.drawn import drawn_after
from pdserve.kvtransfer.offer import Answer, OfferBook, SendBlocks
from pdserve.prefill_node.tail_chunk import cut_tail

BEAT_S = 0.5

Action = Send | SendBlocks | CheckBlocks | RunStep
Event = Joined | Leave | Received | LinkUp | LinkLost | StepDone | BlocksChecked | Tick


class Phase(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    PARKED = "parked"


@dataclass(slots=True)
class Prompt:
    """One accepted request. `leased` are the blocks its lease pins once it is PARKED.

    was_parked: it goes on from an earlier attempt that was computed here, whose blocks it finds again
    """

    sequence: Sequence
    phase: Phase
    cancelled: bool = False
    was_parked: bool = False
    first_token: FirstToken | None = None
    leased: list[BlockId] = field(default_factory=list)


class PrefillScheduler:
    """router: where FirstToken and Failed go. max_step_tokens: the chunk budget of one step.

    cost: what steps take here, goes on learning; block_bytes: of a block on its way to another host
    """

    def __init__(
        self,
        router: NodeId,
        pool: BlockPool,
        block_size: int,
        max_step_tokens: int,
        cost: StepCost,
        block_bytes: int,
        policy: Policy = Policy.SHORTEST,
    ):
        self.pool = pool
        self.offers = OfferBook(block_bytes)
        self.ended = EndedAttempts()
        self.num_unexpected = 0
        self.num_corrupt = 0
        self._router = router
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._cost = cost
        self._prompts: dict[RequestId, Prompt] = {}
        self._by_key: dict[int, Prompt] = {}
        self._line = AdmissionLine()
        self._planner = Planner(policy, max_step_tokens, cost)
        self._next_key = 0
        self._step: StepPlan | None = None
        self._num_steps = 0
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
        actions += self._admit(now)
        actions += self._start_step(now)
        return actions

    # ---- messages --------------------------------------------------------------------------------

    def _on_received(self, event: Received, now: float) -> Iterable[Action]:
        handlers = self._from_router if event.sender == self._router else self._from_peers
        handler = handlers.get(type(event.message))
        if handler is None:
            self.num_unexpected += 1
            return []
        return handler(event.sender, event.message, now)

    def _on_prefill(self, sender: NodeId, message: Prefill, now: float) -> Iterable[Action]:
        known = self._prompts.get(message.request)
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
        was_parked = known is not None and (known.was_parked or known.phase is Phase.PARKED)
        prompt = Prompt(sequence, Phase.QUEUED, was_parked=was_parked)
        self._prompts[message.request] = prompt
        self._by_key[sequence.key] = prompt
        # A stream that stands still has waited before.
        self._line.join(sequence.key, sequence.priority, resumed=was_parked)
        self.offers.open(message.request, message.attempt, now)
        return actions

    def _on_cancel(self, sender: NodeId, message: Cancel, now: float) -> Iterable[Action]:
        if message.sample is not None:
            # The others need the prompt all the same.
            return []
        prompt = self._prompts.get(message.request)
        if prompt is None or prompt.sequence.attempt > message.attempt:
            self.ended.add(message.request, message.attempt, now)
            return []
        return self._end(prompt, now)

    def _on_release(self, sender: NodeId, message: Release, now: float) -> Iterable[Action]:
        prompt = self._prompts.get(message.request)
        if prompt is None or prompt.sequence.attempt != message.attempt or prompt.phase is not Phase.PARKED:
            return []
        return self._end(prompt, now)

    def _on_live(self, sender: NodeId, message: Live, now: float) -> Iterable[Action]:
        actions: list[Action] = []
        for entry in message.entries:
            if entry.stage in (Stage.PREFILL, Stage.HANDOFF):
                self.offers.renew(entry.request, entry.attempt, now)
            prompt = self._prompts.get(entry.request)
            if entry.stage is Stage.PREFILL and prompt is not None and prompt.first_token is not None:
                actions.append(Send(self._router, prompt.first_token))
        return [*actions, Send(sender, self.held(message.beat, self.pool.log.delta(message.cache)))]

    def _on_want(self, sender: NodeId, message: Want, now: float) -> Iterable[Action]:
        if self.ended.covers(message.request, message.attempt):
            return self.offers.gone(sender, message)
        return self.offers.want(sender, message, now)

    def _on_fetch(self, sender: NodeId, message: Fetch, now: float) -> Iterable[Action]:
        if self.ended.covers(message.request, message.attempt):
            return []
        return self.offers.fetch(sender, message)

    def _on_bad(self, sender: NodeId, message: Bad, now: float) -> Iterable[Action]:
        """A peer read bytes that are not what they are named: whether they are wrong here, too, is looked at."""
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

    def _admit(self, now: float) -> list[Action]:
        """Reserve for queued prompts in order, as far as there is room."""
        actions: list[Action] = []
        for key in self._line.admit(self._reserve):
            actions += self._announce_hits(self._by_key[key])
        return actions

    def _reserve(self, key: int) -> bool:
        prompt = self._by_key[key]
        if self._starts_no_prompt and not prompt.was_parked:
            return False
        sequence = prompt.sequence
        hits = self.pool.match(sequence.hashes)
        missing = sequence.num_blocks - len(hits)
        if not self.pool.can_reserve(missing, hits):
            return False
        sequence.claim(self.pool, hits, missing)
        self._planner.add(sequence)
        prompt.phase = Phase.RUNNING
        return True

    def _start_step(self, now: float) -> list[Action]:
        if self._step is not None:
            return []
        rows, seals = [], []
        chunks = self._planner.chunks(lambda _: self._max_step_tokens, self._token_s, now, cut=self._cut_tail)
        for sequence, num_tokens in chunks:
            sequence.take_blocks(self.pool, sequence.num_computed + num_tokens)
            rows.append(sequence.row(num_tokens))
            seals += sequence.seals(num_tokens)
            sequence.busy += 1
            sequence.started_at = now if sequence.started_at is None else sequence.started_at
        if not rows:
            return []
        self._num_steps += 1
        self._step = StepPlan(self._num_steps, tuple(rows), tuple(seals))
        return [RunStep(self._step)]

    def _cut_tail(self, sequence: Sequence, num_tokens: int) -> int:
        offer = self.offers.find(sequence.request, sequence.attempt)
        return num_tokens if offer is None else cut_tail(sequence, num_tokens, offer.link_token_s, self._cost)

    def _announce_hits(self, prompt: Prompt) -> list[Answer]:
        """Blocks found in the prefix cache are announced as soon as their prompt has its reservation."""
        sequence = prompt.sequence
        num_found = sequence.num_found // self._block_size
        entries = [self._entry(sequence.block_ids[i], sequence.hashes[i]) for i in range(num_found)]
        return self.offers.seal(sequence.request, sequence.attempt, entries)

    def _on_step_done(self, event: StepDone, now: float) -> Iterable[Action]:
        plan, result = self._step, event.result
        assert plan is not None, "a result although no step is running"
        assert plan.step == result.step, "a result of another step"
        self._step = None
        self._cost.learn(StepWork.of(plan.rows), result.forward_s)
        sealed = {seal.block_id: seal.block_hash for seal in plan.seals}
        actions: list[Action] = []
        for row in plan.rows:
            prompt = self._by_key[row.key]
            sequence = prompt.sequence
            sequence.busy -= 1
            if prompt.cancelled:
                self._free(prompt)
                continue
            sequence.num_computed += len(row.token_ids)
            self._planner.progressed(sequence)
            sequence.commit_full(self.pool, result.checksums)
            own = [b for b in sequence.block_ids if b in sealed]
            for block_id in own:
                self.pool.note_checksum(block_id, result.checksums[block_id])
            entries = [self._entry(block_id, sealed[block_id]) for block_id in own]
            actions += self.offers.seal(sequence.request, sequence.attempt, entries)
            if row.key in result.scores:
                sequence.scores.append(result.scores[row.key])
            if sequence.num_missing == 0:
                actions += self._finish(prompt, result.draws.get(row.key, ()), now)
        return actions

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
        )
        prompt.first_token = first
        self._planner.remove(sequence)
        prompt.phase = Phase.PARKED
        self.pool.pin(sequence.block_ids)
        prompt.leased = list(sequence.block_ids)
        sequence.give_back(self.pool)
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
        del self._prompts[sequence.request]
        prompt.cancelled = True
        self._line.leave(sequence.key)
        self._planner.remove(sequence)
        if sequence.busy == 0:
            self._free(prompt)
        return list(actions)

    def _free(self, prompt: Prompt) -> None:
        sequence = prompt.sequence
        if prompt.phase is Phase.RUNNING:
            sequence.give_back(self.pool)
        elif prompt.phase is Phase.PARKED:
            self.pool.unpin(prompt.leased)
        del self._by_key[sequence.key]

    # ---- state for others ------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self._step is None and not len(self._line) and not len(self._planner)

    @property
    def is_drained(self) -> bool:
        """Whether nobody needs this node any more: every prompt is released, cancelled or expired."""
        return self.is_idle and not self._prompts

    def held(self, beat: int, cache: CacheDelta | None = None) -> Held:
        """The answer to Live, with what has changed in the prefix index."""
        stages = {Phase.QUEUED: Stage.PREFILL, Phase.RUNNING: Stage.PREFILL, Phase.PARKED: Stage.HANDOFF}
        entries = tuple(
            HeldEntry(p.sequence.request, p.sequence.attempt, stages[p.phase], p.sequence.num_outputs)
            for p in self._prompts.values()
        )
        return Held(beat, entries, self.gauges(), (), self._is_leaving, cache)

    def gauges(self) -> Gauges:
        queued = [p.sequence for p in self._prompts.values() if p.phase is not Phase.PARKED]
        return Gauges(
            num_free=self.pool.num_free,
            num_cached=self.pool.num_cached,
            num_held=self.pool.num_held,
            num_leased=self.pool.num_leased,
            num_reserved=self.pool.num_reserved,
            num_running=len(self._planner),
            num_waiting=len(self._line),
            num_leases=len(self.offers),
            num_parked=self.pool.num_leased,
            num_queued_tokens=sum(sequence.num_missing for sequence in queued),
            token_s=self._token_s,
            starts_no_prompt=self._starts_no_prompt,
            num_corrupt=self.num_corrupt,
        )

    def check(self) -> None:
        """Invariants over pool, sequences and leases; raises AssertionError."""
        self.pool.check(p.sequence.block_ids for p in self._by_key.values())
        reserved = sum(p.sequence.num_reserved for p in self._by_key.values())
        assert reserved == self.pool.num_reserved, f"{self.pool.num_reserved} reserved, sequences have {reserved}"
        phases = [p.phase for p in self._prompts.values()]
        assert len(self._line) == phases.count(Phase.QUEUED), "a queued prompt stands in no line"
        assert len(self._planner) == phases.count(Phase.RUNNING), "a running prompt is never planned"
        assert len(self.offers) == len(self._prompts), "a request without a lease, or a lease without a request"

    # ---- helpers ---------------------------------------------------------------------------------

    @property
    def _starts_no_prompt(self) -> bool:
        """Decode nodes take over more slowly than prompts are computed: more would only wait in their place."""
        return self.pool.num_leased > self.pool.num_blocks // 2

    @property
    def _token_s(self) -> float:
        """Seconds that each token of a prompt is expected to take."""
        return self._cost.predict_s(StepWork().plus_chunk(0, self._max_step_tokens)) / self._max_step_tokens

    def _entry(self, block_id: BlockId, block_hash: BlockHash) -> HaveEntry:
        checksum = self.pool.checksum(block_id)
        assert checksum is not None, f"block {block_id} is announced without a checksum"
        return HaveEntry(block_hash, block_id, self.pool.generation(block_id), checksum)
