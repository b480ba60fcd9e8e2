"""Blocks for the requests of a decode node: who waits, who gets them, and who yields to a late hand-off.

    lacks blocks ── line ──► admit: all or nothing, hits held, fillings joined, one block to grow into
    was swapped  ── line ──► the same, and its blocks come back from the host pool
    is overdue   ── no block left ──► the newest, least important sequences are preempted, each at most once

Owns the line of waiting requests, the fillings, the pool's reservations and the slots of the host pool. `due` names
the jobs whose pulls something happened to; the scheduler looks at each of them next. Called by DecodeScheduler; what
running sequences grow by is Growth's.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from pdserve.cluster.messages import Send
from pdserve.core.admission import AdmissionLine
from pdserve.core.batching import Batching
from pdserve.core.block_hash import NO_PARENT
from pdserve.core.ids import BlockHash, BlockId
from pdserve.decode_node.job import Job, Jobs, Phase, yields_first
from pdserve.decode_node.swap import SwapIn, Swapped, SwapSpace
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer.filling import Fillings
from pdserve.kvtransfer.pull import BlockCopy, CopyDone, Verdict

Action = Send | SwapIn


class Reservations:
    """num_slots: blocks that the host pool holds. batching: when somebody may begin.

    num_yielded: how often sequences have yielded, by the way of it
    """

    def __init__(
        self,
        pool: BlockPool,
        jobs: Jobs,
        max_running: int,
        num_slots: int = 0,
        batching: Batching = Batching.CONTINUOUS,
    ):
        self.pool = pool
        self.space = SwapSpace(num_slots)
        self.due: set[int] = set()
        self.num_yielded: Counter[str] = Counter()
        self._jobs = jobs
        self._max_running = max_running
        self._batching = batching
        self._line = AdmissionLine()
        self._fillings = Fillings()

    # ---- the line --------------------------------------------------------------------------------

    def wait(self, job: Job, resumed: bool) -> None:
        """Stand in line for blocks; twice is nothing. Who has yielded goes on, wherever that was."""
        self._line.join(job.sequence.key, job.sequence.priority, resumed or job.num_yields > 0)

    def is_waiting(self, job: Job) -> bool:
        return job.sequence.key in self._line

    def lacking(self, sequence: Sequence) -> list[BlockHash]:
        """What must be asked for: every block that is not cached here, the partial one always."""
        lacking = [h for h in sequence.hashes if self.pool.find(h) is None]
        return lacking + ([sequence.tail_hash] if sequence.tail_hash is not None else [])

    def admit(self, now: float) -> list[Action]:
        """Give blocks to those in line that fit; returns the Wants and copies that became necessary."""
        actions: list[Action] = []
        if not len(self._line) or not self._is_open:
            return actions

        def reserve(key: int) -> bool:
            job = self._jobs.by_key[key]
            has_blocks = self._reserve_pull(job, now, actions) if job.is_pulling else self._reserve_local(job, actions)
            if has_blocks:
                self._jobs.note_blocks(job)
            return has_blocks

        self.due.update(self._line.admit(reserve))
        return actions

    @property
    def _is_open(self) -> bool:
        num_active = self._jobs.num_active
        return num_active < self._max_running and self._batching.is_open(num_active)

    def _fits(
        self, job: Job, num_blocks: int, hits: Collection[BlockId], yielding: Collection[int] = (), gain: int = 0
    ) -> bool:
        """Whether a request may start: every running sequence keeps one block to grow into.

        yielding, gain  keys of jobs that would be preempted, and the blocks that there would be then
        """
        # What mostly decides costs nothing: this is asked at every event, of several that wait.
        if not self.pool.can_reserve(num_blocks, hits, keep=-gain):
            return False
        owed = sum(other.is_owed_growth for other in self._jobs.running() if other.sequence.key not in yielding)
        is_open = self._jobs.num_active - len(yielding) + job.num_streams <= self._max_running
        return is_open and self.pool.can_reserve(num_blocks, hits, keep=owed - gain)

    def _reserve_local(self, job: Job, actions: list[Action]) -> bool:
        sequence = job.sequence
        hits = self.pool.match(sequence.hashes[: sequence.num_tokens // sequence.block_size])
        missing = sequence.num_blocks - len(hits) + job.growth
        if not self._fits(job, missing, hits):
            return False
        sequence.claim(self.pool, hits, missing)
        job.num_hit_tokens = sequence.num_computed
        job.phase = Phase.RUNNING
        if job.swapped is not None:
            self._bring_back(job, job.swapped, len(hits), actions)
        return True

    def _bring_back(self, job: Job, swapped: Swapped, num_found: int, actions: list[Action]) -> None:
        """Its blocks come back from the host pool, but for those that were found here."""
        sequence = job.sequence
        if num_found >= len(swapped.slots):
            self.forget_swapped(job)
            return
        sequence.take_blocks(self.pool, swapped.num_computed)
        came = zip(swapped.slots, swapped.checksums, sequence.block_ids[: len(swapped.slots)], strict=True)
        copies = [BlockCopy(NO_PARENT, BlockId(slot), 0, checksum, block_id) for slot, checksum, block_id in came]
        job.phase = Phase.SWAPPING_IN
        sequence.busy += 1
        actions.append(SwapIn(sequence.key, tuple(copies[num_found:])))

    def forget_swapped(self, job: Job) -> None:
        """It needs nothing of the host pool any more; no copy may be under way."""
        if job.swapped is not None:
            self.space.give_back(job.swapped)
            job.swapped = None

    def _reserve_pull(self, job: Job, now: float, actions: list[Action]) -> bool:
        """All or nothing: hold the hits, join what others are filling, reserve the rest and one to grow."""
        sequence, pull = job.sequence, job.pull
        assert pull is not None
        found, joined, missing = self._find(sequence)
        if sequence.busy or not self._fits(job, missing + job.growth, found.values()):
            return False
        for block_id in found.values():
            self.pool.hold(block_id)
        sequence.num_reserved = missing + job.growth
        self.pool.reserve(sequence.num_reserved)
        targets: dict[BlockHash, BlockId] = {}
        for block_hash in sequence.hashes:
            if block_hash in found:
                sequence.block_ids.append(found[block_hash])
            elif block_hash in joined:
                block_id = self._fillings.join(block_hash, sequence.key)
                self.pool.hold(block_id)
                sequence.block_ids.append(block_id)
            else:
                targets[block_hash] = self.take(sequence)
                self._fillings.own(block_hash, targets[block_hash], sequence.key)
        if sequence.tail_hash is not None:
            targets[sequence.tail_hash] = self.take(sequence)
        job.num_hit_tokens = min(len(found) * sequence.block_size, sequence.num_tokens - 1)
        job.reserved_at = now
        lacking = [*joined, *targets]
        if not set(lacking) <= set(pull.lacking):
            # A block that was cached when the Want was sent has been evicted since.
            actions += pull.want(lacking, now)
        pull.lacking = {h: pull.lacking.get(h, 0) for h in lacking}
        actions += pull.start(targets, now)
        return True

    def _find(self, sequence: Sequence) -> tuple[dict[BlockHash, BlockId], list[BlockHash], int]:
        """Blocks that are cached here, hashes of those that others are filling, and how many more it needs."""
        found = {h: b for h in sequence.hashes if (b := self.pool.find(h)) is not None}
        joined = [h for h in sequence.hashes if h not in found and self._fillings.find(h) is not None]
        return found, joined, sequence.num_blocks - len(found) - len(joined)

    def take(self, sequence: Sequence) -> BlockId:
        block_id = self.pool.take()
        sequence.num_reserved -= 1
        sequence.block_ids.append(block_id)
        return block_id

    # ---- overdue hand-offs -----------------------------------------------------------------------

    def make_room(self, now: float) -> list[Action]:
        """Overdue requests get their blocks out of turn, and running sequences yield where that is enough.

        Called between two steps: one in flight writes to the blocks of those that would yield. Nobody yields
        twice, nor who others have yielded for, and nobody in line is passed too often: so nobody is starved.
        """
        actions: list[Action] = []
        late = self._jobs.overdue()
        for job in late if late and self._batching.is_open(self._jobs.num_active) else ():
            key = job.sequence.key
            if not (self.is_waiting(job) and self._line.may_pass(key)):
                continue
            yielding = self._enough_for(job)
            if yielding is None:
                continue
            for other in yielding:
                other.is_fixed = True
                other.num_yields += 1
                # The blocks are wanted at once.
                self.num_yielded["recompute"] += 1
                self.requeue(other)
            has_blocks = self._reserve_pull(job, now, actions)
            assert has_blocks, "others have yielded in vain"
            job.is_overdue, job.is_fixed = False, True
            self._jobs.note_blocks(job)
            self._line.pass_all(key)
            self.due.add(key)
        return actions

    def _enough_for(self, job: Job) -> list[Job] | None:
        """The first to yield, as few as make room for `job`; None when there never would be enough."""
        if job.sequence.busy:
            return None
        found, _, missing = self._find(job.sequence)
        hits, needed = set(found.values()), missing + job.growth
        if self._fits(job, needed, hits):
            return []
        others = [other for other in self._jobs.running() if self._may_yield_for(job, other)]
        if not others:
            return None
        refs = Counter(b for other in self._jobs.holding() for b in other.sequence.block_ids)
        yielding: list[Job] = []
        keys: set[int] = set()
        gain = 0
        for other in sorted(others, key=yields_first):
            refs.subtract(other.sequence.block_ids)
            # A block that is a hit as well only changes hands.
            freed = [b for b in other.sequence.block_ids if refs[b] == 0 and b not in hits]
            gain += len(freed) + other.sequence.num_reserved
            yielding.append(other)
            keys.add(other.sequence.key)
            if self._fits(job, needed, hits, keys, gain):
                return yielding
        return None

    def _may_yield_for(self, job: Job, other: Job) -> bool:
        is_above = other.sequence.priority > job.sequence.priority
        return not (other.is_fixed or other.has_settled or other.sequence.busy or is_above)

    # ---- giving back -----------------------------------------------------------------------------

    @property
    def num_preemptions(self) -> int:
        return self.num_yielded.total()

    def requeue(self, job: Job) -> None:
        """Drop the blocks of a job that yields and let it stand in line again."""
        self.give_back(job)
        job.phase = Phase.QUEUED
        self.wait(job, resumed=True)

    def hand_on(self, head: Job, jobs: list[Job]) -> None:
        """What a shared prompt has reserved goes to the samples that hold its blocks, as much to each."""
        self._leave_fillings(head)
        for job in jobs:
            job.sequence.num_reserved = min(head.sample_growth, head.sequence.num_reserved)
            head.sequence.num_reserved -= job.sequence.num_reserved
        head.sequence.give_back(self.pool)

    def give_back(self, job: Job) -> None:
        """Drop the blocks of a job that lives on; it will claim blocks again."""
        self._leave_fillings(job)
        job.sequence.give_back(self.pool)

    def free(self, job: Job) -> None:
        """Drop all that a job still has which has ended."""
        self.forget_swapped(job)
        job.sequence.give_back(self.pool)

    def leave(self, job: Job) -> None:
        """The job ends: its place in line and its part in fillings go to others; its blocks by `free`."""
        self._line.leave(job.sequence.key)
        self._leave_fillings(job)

    def _leave_fillings(self, job: Job) -> None:
        for block_hash, block_id, heir in self._fillings.leave(job.sequence.key):
            self._inherit(block_hash, block_id, heir)

    def _inherit(self, block_hash: BlockHash, block_id: BlockId, heir: int) -> None:
        pull = self._jobs.by_key[heir].pull
        assert pull is not None
        pull.adopt(block_hash, block_id)
        self.due.add(heir)

    # ---- copies ----------------------------------------------------------------------------------

    def begin(self, copies: Iterable[BlockCopy]) -> None:
        """These blocks are being written: nobody else may, until `end`."""
        for copy in copies:
            self._fillings.begin(copy.hash, copy.target)

    def end(self, event: CopyDone) -> None:
        """Verified blocks become findable for everybody who waits; a failed one goes to its present owner."""
        for copy, verdict in zip(event.copies, event.verdicts, strict=True):
            filling = self._fillings.end(copy.hash, copy.target)
            if filling is None:
                continue
            if verdict is Verdict.OK:
                self.pool.commit(copy.target, copy.hash, copy.checksum)
                for key in self._fillings.finish(copy.hash):
                    waiter = self._jobs.by_key[key].pull
                    assert waiter is not None
                    waiter.lacking.pop(copy.hash, None)
                    self.due.add(key)
            elif filling.owner != event.key:
                self._inherit(copy.hash, copy.target, filling.owner)
