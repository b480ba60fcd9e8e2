"""The running batch of a decode node: what the next step runs, and what a step that is over has changed.

Every running sequence decodes one token first; chunks of prompts that are computed here fill what the budget leaves.
At most one step is under way. Owned by DecodeScheduler.
"""

import math
from collections.abc import Iterable

from pdserve.core.block_hash import BlockHasher
from pdserve.core.turns import Policy
from pdserve.decode_node.chunk_budget import ChunkBudget
from pdserve.decode_node.growth import Growth
from pdserve.decode_node.job import Job, Jobs
from pdserve.decode_node.pace import Pace
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.planner import Planner
from pdserve.engine.step import Draw, StepPlan, StepResult
from pdserve.engine.step_cost import StepWork


class Batch:
    def __init__(
        self,
        jobs: Jobs,
        pool: BlockPool,
        growth: Growth,
        hasher: BlockHasher,
        budget: ChunkBudget,
        policy: Policy,
    ):
        self._jobs = jobs
        self._pool = pool
        self._growth = growth
        self._hasher = hasher
        self._budget = budget
        self._planner = Planner(policy, budget.max_step_tokens, budget.cost, budget.chunking)
        self._step: StepPlan | None = None
        self._step_at = 0.0
        self._num_steps = 0

    @property
    def is_running(self) -> bool:
        return self._step is not None

    @property
    def token_s(self) -> float:
        """Seconds that each token of a prompt is expected to take beside the streams there are."""
        return self._budget.token_s(_work(self._jobs.streams()))

    def plan(self, now: float) -> StepPlan | None:
        """Begin the next step, or None when there is nothing to run. Where there is no block left, some yield."""
        assert self._step is None, "a step is under way"
        rows = []
        for job in self._jobs.streams():
            # An earlier job's growth may have preempted this one.
            if job.is_running and self._growth.grow(job, job.sequence.num_tokens, now):
                rows.append((job, 1))
        rows = [(job, n) for job, n in rows if job.is_running]
        streams = _work(job for job, _ in rows)
        left_s = self._left_s((job for job, _ in rows), now)
        self._planner.keep(job.sequence for job in self._jobs.running() if job.sequence.num_missing > 1)
        for sequence, num_tokens in self._planner.chunks(
            lambda first: self._num_chunk_tokens(streams, first.num_computed, left_s),
            self._budget.token_s(streams),
            now,
            beside=streams,
        ):
            job = self._jobs.by_key[sequence.key]
            # What it computes here was reserved whole: nobody yields for it.
            self._growth.grow(job, sequence.num_computed + num_tokens, now)
            rows.append((job, num_tokens))
        if not rows:
            return None
        for job, _ in rows:
            sequence = job.sequence
            sequence.busy += 1
            sequence.started_at = now if sequence.started_at is None else sequence.started_at
        self._num_steps += 1
        rows_ = tuple(job.sequence.row(n) for job, n in rows)
        self._step, self._step_at = StepPlan(self._num_steps, rows_, moves=self._growth.moves()), now
        return self._step

    def take(self, result: StepResult, now: float) -> list[tuple[Job, tuple[Draw, ...]]]:
        """The step is over: its jobs, and what was drawn for each. Cancelled ones are only let go of."""
        plan = self._step
        assert plan is not None, "a result although no step is running"
        assert plan.step == result.step, "a result of another step"
        self._step = None
        self._budget.cost.learn(StepWork.of(plan.rows), result.forward_s)
        self._growth.moved()
        taken = []
        for row in plan.rows:
            job = self._jobs.by_key[row.key]
            sequence = job.sequence
            sequence.busy -= 1
            if not job.cancelled:
                sequence.num_computed += len(row.token_ids)
                sequence.name_full_blocks(self._hasher, sequence.num_computed)
                sequence.commit_full(self._pool, {})
                if job.prefills_here:
                    sequence.ran_chunk(len(row.token_ids), self._step_at, now, result.forward_s)
                elif job.beginning is not None:
                    job.beginning.ran(self._step_at)
                if row.key in result.scores:
                    sequence.scores.append(result.scores[row.key])
            taken.append((job, result.draws.get(row.key, ())))
        return taken

    def _left_s(self, streams: Iterable[Job], now: float) -> float:
        """Seconds until the first of these streams is late by what it was promised; infinite without a promise."""
        tpot_s, left_s = self._budget.tpot_s, math.inf
        if tpot_s is None:
            return left_s
        for job in streams:
            if job.pace is None:
                # Its first token was there before it could run.
                since = now if job.beginning is None else job.beginning.told_at
                job.pace = Pace(since, job.sequence.num_outputs)
            left_s = min(left_s, job.pace.left_s(job.sequence.num_outputs, tpot_s, now))
        return left_s

    def _num_chunk_tokens(self, streams: StepWork, start: int, left_s: float) -> int:
        """Prompt tokens for a step beside `streams`; one whose blocks are on their way may join any time."""
        is_shared = streams.num_tokens > 0 or self._jobs.has_pulls
        limit_s = self._budget.limit_s(streams) if is_shared else None
        return self._budget.num_tokens(streams, None if limit_s is None else min(limit_s, left_s), start)


def _work(streams: Iterable[Job]) -> StepWork:
    """What a step of these streams alone has to do."""
    contexts = [job.sequence.num_tokens for job in streams]
    return StepWork(len(contexts), sum(contexts))
