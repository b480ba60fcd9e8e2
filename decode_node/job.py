"""One request on a decode node, or one of its samples, and the table of all of them.

    PULLING ── all verified, End ──► RUNNING ◄── blocks reserved ── QUEUED ◄── local plan, preempted
                                        │  └── SWAPPING_OUT ──► QUEUED ── SWAPPING_IN ──► RUNNING   (swap.py)
                                        └─ several samples: one job each from here on (samples.py)

A job that was cancelled leaves by_request at once and by_key when no step and no copy names its blocks
any more. Mutable, owned by the decode scheduler; Reservations changes what concerns blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from pdserve.cluster.messages import Drawn, Sample
from pdserve.core.ids import RequestId
from pdserve.decode_node.beginning import Beginning
from pdserve.decode_node.pace import Pace
from pdserve.decode_node.swap import Swapped
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Draw
from pdserve.kvtransfer.pull import Pull


class Phase(Enum):
    PULLING = "pulling"
    QUEUED = "queued"
    RUNNING = "running"
    SWAPPING_OUT = "swapping out"
    SWAPPING_IN = "swapping in"


# How often a sequence yields before it comes back to stay.
MAX_YIELDS = 3


@dataclass(slots=True)
class Job:
    """One sequence here. final_blocks: its largest block table, or what it is given at once.

    is_whole: it begins with all of final_blocks and keeps them to its end.

    num_given: outputs that came with the request; draws: those drawn since; num_sent: outputs the router has been sent.
    prefills_here: nobody has told the router of the prompt's first tokens yet, so this node will.
    samples: those that go on apart once what they share is computed; none for a job that is one sample.
    drawn: what was drawn for them elsewhere.
    is_overdue: its hand-off is past its deadline and has no blocks here.
    is_fixed: no overdue request takes its blocks (again): it has yielded to one, or others have yielded to it.
    num_yields: how often it has yielded, on other nodes, too; swapped: what it has in the host pool.
    beginning: of one whose prompt is computed and whose next token is not drawn; samples share one until the first
    of them draws. pace: of a stream that has run.
    """

    sequence: Sequence
    phase: Phase
    expires_at: float
    num_given: int
    final_blocks: int
    prefills_here: bool
    is_whole: bool = False
    samples: tuple[Sample, ...] = ()
    drawn: tuple[Drawn, ...] = ()
    draws: list[Draw] = field(default_factory=list)
    num_sent: int = 0
    pull: Pull | None = None
    cancelled: bool = False
    revokes: int = 0
    is_overdue: bool = False
    is_fixed: bool = False
    num_yields: int = 0
    swapped: Swapped | None = None
    heard_at: float | None = None
    reserved_at: float = 0.0
    num_hit_tokens: int = 0
    beginning: Beginning | None = None
    pace: Pace | None = None

    def __post_init__(self) -> None:
        self.num_sent = self.num_given

    @property
    def growth(self) -> int:
        """Blocks to grow into beside its block table: one, or one for each sample that goes on from it.

        All that it may ever need, once it yields no more.
        """
        if self.samples:
            return sum(not sample.outputs for sample in self.samples) * self.sample_growth
        most = max(0, self.final_blocks - self.sequence.num_blocks)
        return most if self.has_settled else min(1, most)

    @property
    def sample_growth(self) -> int:
        """Blocks for each sample that goes on from it: one to write to, or all that are not full by then."""
        return self.final_blocks - self.sequence.num_tokens // self.sequence.block_size if self.is_whole else 1

    @property
    def is_running(self) -> bool:
        return self.phase is Phase.RUNNING and not self.cancelled

    @property
    def has_settled(self) -> bool:
        """Whether it yields no more: it has often enough, or never does."""
        return self.is_whole or self.num_yields >= MAX_YIELDS

    @property
    def num_streams(self) -> int:
        """Places in the batch that it takes, or will."""
        return max(1, len(self.samples))

    @property
    def holds_blocks(self) -> bool:
        """Blocks, or a promise of some."""
        return bool(self.sequence.block_ids) or self.sequence.num_reserved > 0

    @property
    def is_pulling(self) -> bool:
        return self.phase is Phase.PULLING and not self.cancelled

    @property
    def num_to_compute(self) -> int:
        """Tokens that this node must compute before it can draw the next one."""
        return 0 if self.phase is Phase.PULLING or self.swapped is not None else self.sequence.num_missing

    @property
    def is_owed_growth(self) -> bool:
        """Whether it runs without a block to grow into, which new requests must leave it."""
        sequence = self.sequence
        return (
            self.phase is Phase.RUNNING and sequence.num_reserved == 0 and self.final_blocks > len(sequence.block_ids)
        )

    @property
    def is_ready_to_part(self) -> bool:
        """Whether all that its samples share is computed."""
        return bool(self.samples) and self.phase is Phase.RUNNING and self.sequence.num_missing == 0

    def add(self, draw: Draw) -> None:
        self.sequence.tokens.append(draw.token)
        self.draws.append(draw)

    def note_drawn(self, drawn: tuple[Drawn, ...]) -> None:
        """The prompt was computed elsewhere, and this drawn after it: nothing of it is drawn here again."""
        if self.samples:
            self.drawn, self.sequence.drawing = drawn, ()
        else:
            for each in drawn:
                self.add(Draw(each.token, each.logprobs))


def yields_first(job: Job) -> tuple[int, float, int]:
    """Sorts the newest, least important sequence to the front; of one request's samples the last one."""
    return job.sequence.priority, -job.sequence.accepted_at, -job.sequence.key


@dataclass(slots=True)
class Jobs:
    """by_request: those that somebody waits for. A request has one attempt here, and one job until its samples part.

    Of the many that may wait, those that a step is about are found by what they were noted for; what has become
    untrue since is dropped when it is met.
    """

    by_request: dict[RequestId, list[Job]] = field(default_factory=dict)
    by_key: dict[int, Job] = field(default_factory=dict)
    _holding: dict[int, Job] = field(default_factory=dict)
    _pulling: dict[int, Job] = field(default_factory=dict)
    _overdue: dict[int, Job] = field(default_factory=dict)

    def add(self, job: Job) -> None:
        self.by_request.setdefault(job.sequence.request, []).append(job)
        self.by_key[job.sequence.key] = job
        self._holding[job.sequence.key] = job
        if job.phase is Phase.PULLING:
            self._pulling[job.sequence.key] = job

    def note_blocks(self, job: Job) -> None:
        """It has been given blocks."""
        self._holding[job.sequence.key] = job

    def note_overdue(self, job: Job) -> None:
        self._overdue[job.sequence.key] = job

    def remove(self, job: Job) -> None:
        """Nobody waits for it any more."""
        jobs = self.by_request[job.sequence.request]
        jobs.remove(job)
        # Nobody may ever ask for pulls: where prompts are computed elsewhere, no chunk depends on them.
        self._pulling.pop(job.sequence.key, None)
        if not jobs:
            del self.by_request[job.sequence.request]

    def of(self, request: RequestId) -> list[Job]:
        """Those of a request, as they are now."""
        return list(self.by_request.get(request, ()))

    def find(self, request: RequestId, attempt: int, sample: int) -> Job | None:
        """The job of one sample, once it has one of its own."""
        for job in self.of(request):
            if job.sequence.attempt == attempt and job.sequence.sample == sample and not job.samples:
                return job
        return None

    def attempt(self, request: RequestId) -> int:
        """The attempt that is here; 0: none."""
        jobs = self.by_request.get(request)
        return jobs[0].sequence.attempt if jobs else 0

    def __iter__(self) -> Iterator[Job]:
        for jobs in self.by_request.values():
            yield from jobs

    def holding(self) -> list[Job]:
        """Jobs that hold blocks or a promise of some, ended ones included."""
        held = [job for key, job in self._holding.items() if job.holds_blocks and self.by_key.get(key) is job]
        if len(held) < len(self._holding):
            self._holding = {job.sequence.key: job for job in held}
        return held

    def running(self) -> list[Job]:
        return [job for job in self.holding() if job.is_running]

    def streams(self) -> list[Job]:
        """Jobs that have one token to run, as every stream has between two steps."""
        return [job for job in self.running() if job.sequence.num_missing == 1]

    def overdue(self) -> list[Job]:
        """Jobs whose hand-off is late and has no blocks."""
        late = [job for job in self._overdue.values() if job.is_overdue and job.is_pulling]
        self._overdue = {job.sequence.key: job for job in late}
        return late

    @property
    def has_pulls(self) -> bool:
        """Whether a hand-off is under way, or will be."""
        while self._pulling:
            key, job = next(iter(self._pulling.items()))
            if job.is_pulling:
                return True
            del self._pulling[key]
        return False

    @property
    def num_active(self) -> int:
        """Streams that hold blocks or a promise of some, ended ones included."""
        return sum(job.num_streams for job in self.holding())
