"""Who is given blocks, asked at every event: what that costs while nobody can be."""

from dataclasses import dataclass, field

import pytest

from pdserve.core.batching import Batching
from pdserve.core.ids import NodeId, RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.decode_node.job import MAX_YIELDS, Job, Jobs, Phase
from pdserve.decode_node.reservations import Reservations
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer.pull import Pull


@dataclass(slots=True)
class Asked(Jobs):
    """times: how often all of those that hold blocks were gone through."""

    times: list[int] = field(default_factory=lambda: [0])

    def holding(self) -> list[Job]:
        self.times[0] += 1
        return Jobs.holding(self)


def make_job(key: int, num_yields: int = 0) -> Job:
    """It needs two blocks and one to grow into, or, once it yields no more, three."""
    sequence = Sequence(key, RequestId(key.to_bytes(16, "little")), 1, [1] * 8, 8, SamplingParams(), [], 4)
    return Job(sequence, Phase.QUEUED, 0.0, 0, 3, prefills_here=True, num_yields=num_yields)


def test_while_there_are_too_few_blocks_for_anybody_in_line_those_that_run_are_not_gone_through_for_each():
    jobs, pool = Asked(), BlockPool(4)
    reservations = Reservations(pool, jobs, max_running=100)
    for key in range(20):
        job = make_job(key)
        jobs.add(job)
        reservations.wait(job, resumed=False)
    pool.reserve(2)
    assert reservations.admit(0.0) == []
    assert jobs.times[0] == 1
    pool.unreserve(2)
    reservations.admit(0.0)
    assert [job.sequence.key for job in jobs.running()] == [0]


@pytest.mark.parametrize("num_yields", [1, MAX_YIELDS])
def test_who_has_yielded_on_another_node_gets_blocks_before_those_that_came_earlier(num_yields: int):
    jobs, pool = Jobs(), BlockPool(4)
    reservations = Reservations(pool, jobs, max_running=100)
    for job in (make_job(1), make_job(2, num_yields), make_job(3)):
        jobs.add(job)
        reservations.wait(job, resumed=False)
    reservations.admit(0.0)
    assert [job.sequence.key for job in jobs.running()] == [2]


def test_a_late_hand_off_does_not_break_into_a_static_batch():
    jobs, pool = Jobs(), BlockPool(4)
    reservations = Reservations(pool, jobs, max_running=100, batching=Batching.STATIC)
    running, late = make_job(1), make_job(2)
    jobs.add(running)
    reservations.wait(running, resumed=False)
    reservations.admit(0.0)
    late.phase, late.pull, late.is_overdue = Phase.PULLING, Pull(late.sequence.request, 1, NodeId("P0")), True
    jobs.add(late)
    jobs.note_overdue(late)
    reservations.wait(late, resumed=False)
    assert reservations.make_room(1.0) == []
    assert jobs.running() == [running]
    assert reservations.is_waiting(late)
