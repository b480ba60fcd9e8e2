"""The table of a decode node's requests: a step finds those that it is about without asking all that wait."""

import weakref
from dataclasses import dataclass
from typing import ClassVar

from pdserve.core.ids import BlockId, RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.decode_node.job import Job, Jobs, Phase
from pdserve.engine.sequence import Sequence


@dataclass(slots=True, weakref_slot=True)
class Counted(Job):
    """asked: how often any of them was asked whether it holds blocks."""

    asked: ClassVar[list[int]] = [0]

    @property
    def holds_blocks(self) -> bool:
        self.asked[0] += 1
        return bool(self.sequence.block_ids)


def make_job(key: int, phase: Phase = Phase.QUEUED, num_blocks: int = 0) -> Counted:
    request = RequestId(key.to_bytes(16, "little"))
    sequence = Sequence(key, request, 1, [1, 2], 2, SamplingParams(), [], 4)
    sequence.block_ids = [BlockId(key)] * num_blocks
    sequence.num_computed = 1 if num_blocks else 0
    return Counted(sequence, phase, 0.0, 0, 1, prefills_here=False)


def test_those_that_wait_are_asked_once_and_those_that_hold_blocks_each_time():
    jobs = Jobs()
    for key in range(1000):
        jobs.add(make_job(key))
    runs = make_job(1000, Phase.RUNNING, num_blocks=1)
    jobs.add(runs)
    assert jobs.streams() == [runs]
    Counted.asked[0] = 0
    assert jobs.streams() == [runs]
    assert jobs.num_active == 1
    assert Counted.asked[0] == 2


def test_who_is_given_blocks_later_is_found_when_that_is_noted_and_no_more_once_they_are_gone():
    jobs, job = Jobs(), make_job(1)
    jobs.add(job)
    assert jobs.running() == []
    job.phase, job.sequence.block_ids = Phase.RUNNING, [BlockId(1)]
    jobs.note_blocks(job)
    assert jobs.running() == [job]
    job.cancelled = True
    assert jobs.running() == []
    assert jobs.num_active == 1
    job.sequence.block_ids = []
    assert jobs.num_active == 0


def test_pulls_are_under_way_until_the_last_of_them_runs_or_is_gone():
    jobs = Jobs()
    pulls = [make_job(key, Phase.PULLING) for key in range(3)]
    for job in pulls:
        jobs.add(job)
    pulls[0].phase = Phase.RUNNING
    pulls[1].cancelled = True
    assert jobs.has_pulls
    pulls[2].phase = Phase.QUEUED
    assert not jobs.has_pulls


def test_overdue_are_those_that_were_noted_and_still_pull():
    jobs = Jobs()
    pulls = [make_job(key, Phase.PULLING) for key in range(3)]
    for job in pulls:
        jobs.add(job)
    for job in pulls[:2]:
        job.is_overdue = True
        jobs.note_overdue(job)
    pulls[0].phase = Phase.RUNNING
    assert jobs.overdue() == [pulls[1]]


def test_who_has_pulled_and_is_gone_is_kept_nowhere_although_nobody_asks_for_pulls():
    jobs, job = Jobs(), make_job(1, Phase.PULLING)
    gone = weakref.ref(job)
    jobs.add(job)
    jobs.note_overdue(job)
    jobs.remove(job)
    del jobs.by_key[job.sequence.key], job
    assert jobs.running() == jobs.overdue() == []
    assert gone() is None
