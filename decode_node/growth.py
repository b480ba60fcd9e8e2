"""Blocks for running sequences to write to: each its own, more of them as it grows.

    next block shared with others  ── copied before the step, to one of its own
    block table full               ── one more
    no block left                  ── the newest incomplete pull gives its own back, else a sequence yields

Owns the copies that the next step begins with. Called by Batch while it plans a step; between two steps nothing is
under way but copies of the copy worker.
"""

from pdserve.core.ids import BlockId
from pdserve.decode_node.job import Job, Jobs
from pdserve.decode_node.preemption import Preemption
from pdserve.decode_node.reservations import Reservations
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.step import BlockMove
from pdserve.kvtransfer.pull import PullState

MAX_REVOKES = 3


class Growth:
    def __init__(self, jobs: Jobs, reservations: Reservations, preemption: Preemption):
        self._jobs = jobs
        self._reservations = reservations
        self._preemption = preemption
        self._moves: list[BlockMove] = []

    @property
    def _pool(self) -> BlockPool:
        return self._reservations.pool

    def grow(self, job: Job, num_tokens: int, now: float) -> bool:
        """Blocks of its own to write up to `num_tokens` tokens to. False when it cannot run in this step."""
        sequence = job.sequence
        index = sequence.next_written
        if index is not None and self._is_shared(sequence.block_ids[index]):
            if not self._reserve_one(job, now):
                return False
            # Those who held it with this one may have yielded.
            if self._is_shared(sequence.block_ids[index]):
                self._moves.append(sequence.replace_block(index, self._pool))
        while len(sequence.block_ids) * sequence.block_size < num_tokens:
            if not self._reserve_one(job, now):
                return False
            self._reservations.take(sequence)
        return True

    def moves(self) -> tuple[BlockMove, ...]:
        """Copies that the next step begins with. Their sources stay held until `moved`, whoever lets go of them."""
        return tuple(self._moves)

    def moved(self) -> None:
        """The step is over."""
        self._pool.drop(self.leaving)
        self._moves = []

    @property
    def leaving(self) -> list[BlockId]:
        """Blocks that are held for copies under way alone, one entry for each copy."""
        return [move.source for move in self._moves]

    def _is_shared(self, block_id: BlockId) -> bool:
        """Whether others will go on reading it; those that leave it in this step will not."""
        leaving = sum(move.source == block_id for move in self._moves)
        return self._pool.num_refs(block_id) - leaving > 1

    def _reserve_one(self, job: Job, now: float) -> bool:
        """Have a block reserved. False when there will be one later, or the job itself had to yield."""
        while job.sequence.num_reserved == 0:
            if self._pool.room > 0:
                self._pool.reserve(1)
                job.sequence.num_reserved = 1
            elif self._preemption.num_leaving:
                # A sequence is on its way out: its blocks come when their copies are done.
                return False
            elif not self._revoke_newest():
                victim = self._preemption.victim()
                self._undo_moves(victim)
                self._preemption.preempt(victim, now)
                if victim is job:
                    return False
        return True

    def _undo_moves(self, job: Job) -> None:
        """It was in the step that is being planned: it has its shared blocks again, and nothing is copied for it."""
        block_ids = job.sequence.block_ids
        for move in [move for move in self._moves if move.target in block_ids]:
            self._moves.remove(move)
            block_ids[block_ids.index(move.target)] = move.source
            self._pool.drop([move.target])

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
            self._reservations.due.add(job.sequence.key)
            self._reservations.give_back(job)
            self._reservations.wait(job, resumed=False)
            return True
        return False
