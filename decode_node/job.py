"""One request on a decode node, and the table of all of them.

    PULLING ── all verified, End ──► RUNNING ◄── blocks reserved ── QUEUED ◄── local plan, preempted

A job that was cancelled leaves by_request at once and by_key when no step and no copy names its blocks
any more. Mutable, owned by the decode scheduler; Reservations changes what concerns blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from pdserve.core.ids import RequestId
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer.pull import Pull


class Phase(Enum):
    PULLING = "pulling"
    QUEUED = "queued"
    RUNNING = "running"


@dataclass(slots=True)
class Job:
    """One request here. num_sent: outputs the router has been sent; final_blocks: its largest block table.

    prefills_here: nobody has told the router of the prompt's first token yet, so this node will.
    is_overdue: its hand-off is past its deadline and has no blocks here.
    is_fixed: no overdue request takes its blocks (again): it has yielded to one, or others have yielded to it.
    """

    sequence: Sequence
    phase: Phase
    expires_at: float
    num_sent: int
    final_blocks: int
    prefills_here: bool
    pull: Pull | None = None
    cancelled: bool = False
    resumed: bool = False
    revokes: int = 0
    is_overdue: bool = False
    is_fixed: bool = False
    heard_at: float | None = None
    reserved_at: float = 0.0
    num_hit_tokens: int = 0

    @property
    def growth(self) -> int:
        """One block to grow into, unless the block table already has its final size."""
        return 1 if self.final_blocks > self.sequence.num_blocks else 0

    @property
    def is_owed_growth(self) -> bool:
        """Whether it runs without a block to grow into, which new requests must leave it."""
        sequence = self.sequence
        return (
            self.phase is Phase.RUNNING and sequence.num_reserved == 0 and self.final_blocks > len(sequence.block_ids)
        )


@dataclass(slots=True)
class Jobs:
    by_request: dict[RequestId, Job] = field(default_factory=dict)
    by_key: dict[int, Job] = field(default_factory=dict)

    def add(self, job: Job) -> None:
        self.by_request[job.sequence.request] = job
        self.by_key[job.sequence.key] = job

    def __iter__(self) -> Iterator[Job]:
        return iter(self.by_request.values())

    def running(self) -> list[Job]:
        return [job for job in self if job.phase is Phase.RUNNING]

    def streams(self) -> list[Job]:
        """Jobs that have one token to run, as every stream has between two steps."""
        return [job for job in self if job.phase is Phase.RUNNING and job.sequence.num_missing == 1]

    @property
    def num_active(self) -> int:
        """Jobs that hold blocks or a promise of some, ended ones included."""
        return sum(1 for job in self.by_key.values() if job.sequence.block_ids or job.sequence.num_reserved)
