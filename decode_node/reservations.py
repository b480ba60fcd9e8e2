"""Blocks for the requests of a decode node: who gets them, who grows, and who must yield.

    lacks blocks ── line ──► admit: all or nothing, hits held, fillings joined, one block to grow into
    grows        ── no block left ──► the newest incomplete pull gives its own back, else a sequence is preempted
    is overdue   ── no block left ──► the newest, least important sequences are preempted, each at most once

Owns the line of waiting requests, the fillings and the pool's reservations. `due` names the jobs whose
pulls something happened to; the scheduler looks at each of them next.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from pdserve.cluster.messages import Send
from pdserve.core.admission import AdmissionLine
from pdserve.core.ids import BlockHash, BlockId
from pdserve.decode_node.job import Job, Jobs, Phase
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import BlockMove
from pdserve.kvtransfer.filling import Fillings
from pdserve.kvtransfer.pull import BlockCopy, CopyDone, PullState, Verdict

MAX_REVOKES = 3


def _yields_first(job: Job) -> tuple[int, float, int]:
    """Sorts the newest, least important sequence to the front; of one request's samples the last one."""
    return job.sequence.priority, -job.sequence.accepted_at, -job.sequence.key


class Reservations:
    def __init__(self, pool: BlockPool, jobs: Jobs, max_running: int):
        self.pool = pool
        self.due: set[int] = set()
        self.num_preemptions = 0
        self._jobs = jobs
        self._max_running = max_running
        self._line = AdmissionLine()
        self._fillings = Fillings()
        self._moves: list[BlockMove] = []

    # ---- the line --------------------------------------------------------------------------------

    def wait(self, job: Job, resumed: bool) -> None:
        """Stand in line for blocks; twice is nothing."""
        self._line.join(job.sequence.key, job.sequence.priority, resumed)

    def is_waiting(self, job: Job) -> bool:
        return job.sequence.key in self._line

    def lacking(self, sequence: Sequence) -> list[BlockHash]:
        """What must be asked for: every block that is not cached here, the partial one always."""
        lacking = [h for h in sequence.hashes if self.pool.find(h) is None]
        return lacking + ([sequence.tail_hash] if sequence.tail_hash is not None else [])

    def admit(self, now: float) -> list[Send]:
        """Give blocks to those in line that fit; returns the Wants that became necessary."""
        actions: list[Send] = []
        if not len(self._line) or self._jobs.num_active >= self._max_running:
            return actions

        def reserve(key: int) -> bool:
            job = self._jobs.by_key[key]
            has_blocks = self._reserve_pull(job, now, actions) if job.is_pulling else self._reserve_local(job)
            if has_blocks:
                self._jobs.note_blocks(job)
            return has_blocks

        self.due.update(self._line.admit(reserve))
        return actions

    def _fits(
        self, job: Job, num_blocks: int, hits: Iterable[BlockId], yielding: Collection[int] = (), gain: int = 0
    ) -> bool:
        """Whether a request may start: every running sequence keeps one block to grow into.

        yielding, gain  keys of jobs that would be preempted, and the blocks that there would be then
        """
        owed = sum(other.is_owed_growth for other in self._jobs.running() if other.sequence.key not in yielding)
        is_open = self._jobs.num_active - len(yielding) + job.num_streams <= self._max_running
        return is_open and self.pool.can_reserve(num_blocks, hits, keep=owed - gain)

    def _reserve_local(self, job: Job) -> bool:
        sequence = job.sequence
        hits = self.pool.match(sequence.hashes[: sequence.num_tokens // sequence.block_size])
        missing = sequence.num_blocks - len(hits) + job.growth
        if not self._fits(job, missing, hits):
            return False
        sequence.claim(self.pool, hits, missing)
        job.num_hit_tokens = sequence.num_computed
        job.phase = Phase.RUNNING
        return True

    def _reserve_pull(self, job: Job, now: float, actions: list[Send]) -> bool:
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
                targets[block_hash] = self._take(sequence)
                self._fillings.own(block_hash, targets[block_hash], sequence.key)
        if sequence.tail_hash is not None:
            targets[sequence.tail_hash] = self._take(sequence)
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

    def _take(self, sequence: Sequence) -> BlockId:
        block_id = self.pool.take()
        sequence.num_reserved -= 1
        sequence.block_ids.append(block_id)
        return block_id

    # ---- growing and yielding --------------------------------------------------------------------

    def grow(self, job: Job, num_tokens: int) -> bool:
        """Blocks of its own to write up to `num_tokens` tokens to; others yield where there are none.

        An incomplete reservation is revoked, or a sequence preempted. False when the job itself had to yield.
        """
        sequence = job.sequence
        index = sequence.next_written
        if index is not None and self._is_shared(sequence.block_ids[index]):
            if not self._reserve_one(job):
                return False
            # Those who held it with this one may have yielded.
            if self._is_shared(sequence.block_ids[index]):
                self._moves.append(sequence.replace_block(index, self.pool))
        while len(sequence.block_ids) * sequence.block_size < num_tokens:
            if not self._reserve_one(job):
                return False
            self._take(sequence)
        return True

    def _is_shared(self, block_id: BlockId) -> bool:
        """Whether others will go on reading it; those that leave it in this step will not."""
        leaving = sum(move.source == block_id for move in self._moves)
        return self.pool.num_refs(block_id) - leaving > 1

    def _reserve_one(self, job: Job) -> bool:
        """Have a block reserved. False when the job itself had to yield."""
        if job.sequence.num_reserved > 0:
            return True
        while self.pool.room < 1:
            if self._revoke_newest():
                continue
            victim = self._victim()
            self._preempt(victim)
            if victim is job:
                return False
        self.pool.reserve(1)
        job.sequence.num_reserved = 1
        return True

    def moves(self) -> tuple[BlockMove, ...]:
        """Copies that the next step begins with. Their sources stay held until `moved`, whoever lets go of them."""
        return tuple(self._moves)

    def moved(self) -> None:
        """The step is over."""
        self.pool.drop(self.leaving)
        self._moves = []

    @property
    def leaving(self) -> list[BlockId]:
        """Blocks that are held for copies under way alone, one entry for each copy."""
        return [move.source for move in self._moves]

    def _revoke_newest(self) -> bool:
        """Take back the newest incomplete reservation: its blocks stay at their source."""
        for job in sorted(self._jobs.holding(), key=lambda job: -job.sequence.key):
            pull = job.pull
            if not job.is_pulling or pull is None or pull.state is not PullState.COPYING:
                continue
            if job.revokes >= MAX_REVOKES or job.sequence.busy or job.is_fixed:
                continue
            job.revokes += 1
            pull.revoke()
            self.due.add(job.sequence.key)
            self.give_back(job)
            self.wait(job, resumed=False)
            return True
        return False

    def _victim(self) -> Job:
        return min(self._jobs.running(), key=_yields_first)

    def _preempt(self, job: Job) -> None:
        """Drop the newest, least important sequence's blocks; it catches up by recompute, no token lost."""
        self.num_preemptions += 1
        for move in [move for move in self._moves if move.target in job.sequence.block_ids]:
            # It was in the step that is being planned: nothing is copied for it any more.
            self._moves.remove(move)
            self.pool.drop([move.source])
        self.give_back(job)
        job.phase = Phase.QUEUED
        self.wait(job, resumed=True)

    # ---- overdue hand-offs -----------------------------------------------------------------------

    def make_room(self, now: float) -> list[Send]:
        """Overdue requests get their blocks out of turn, and running sequences yield where that is enough.

        Called between two steps: one in flight writes to the blocks of those that would yield. Nobody yields
        twice, nor who others have yielded for, and nobody in line is passed too often: so nobody is starved.
        """
        actions: list[Send] = []
        for job in self._jobs.overdue():
            key = job.sequence.key
            if not (self.is_waiting(job) and self._line.may_pass(key)):
                continue
            yielding = self._enough_for(job)
            if yielding is None:
                continue
            for other in yielding:
                other.is_fixed = True
                self._preempt(other)
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
        hits = set(found.values())
        refs = Counter(b for other in self._jobs.holding() for b in other.sequence.block_ids)
        yielding: list[Job] = []
        keys: set[int] = set()
        gain = 0
        for other in [None, *sorted(self._jobs.running(), key=_yields_first)]:
            if other is not None:
                if other.is_fixed or other.sequence.busy or other.sequence.priority > job.sequence.priority:
                    continue
                refs.subtract(other.sequence.block_ids)
                # A block that is a hit as well only changes hands.
                freed = [b for b in other.sequence.block_ids if refs[b] == 0 and b not in hits]
                gain += len(freed) + other.sequence.num_reserved
                yielding.append(other)
                keys.add(other.sequence.key)
            if self._fits(job, missing + job.growth, hits, keys, gain):
                return yielding
        return None

    # ---- giving back -----------------------------------------------------------------------------

    def hand_on(self, head: Job, jobs: list[Job]) -> None:
        """What a shared prompt has reserved goes to the samples that hold its blocks, a block each."""
        self._leave_fillings(head)
        for job in jobs[: head.sequence.num_reserved]:
            job.sequence.num_reserved = 1
            head.sequence.num_reserved -= 1
        head.sequence.give_back(self.pool)

    def give_back(self, job: Job) -> None:
        """Drop the blocks of a job that lives on; it will claim blocks again."""
        self._leave_fillings(job)
        job.sequence.give_back(self.pool)

    def leave(self, job: Job) -> None:
        """The job ends: its place in line and its part in fillings go to others; its blocks by give_back."""
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
