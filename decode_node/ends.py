"""However a request ends on a decode node: finished, cancelled, failed, sent back, or its lease over.

It leaves the table of requests at once; what a step or a copy in flight names is freed when that is over. Owns the
memory of ended attempts, by which late messages are told. Used by DecodeScheduler and HandOffs.
"""

from pdserve.cluster.attempts import EndedAttempts
from pdserve.cluster.messages import Failed, Returned, Send, Stage
from pdserve.core.ids import NodeId, RequestId
from pdserve.decode_node.job import Job, Jobs, Phase
from pdserve.decode_node.reservations import Reservations


class Ends:
    """router: who is told of what failed or goes back"""

    def __init__(self, router: NodeId, jobs: Jobs, reservations: Reservations):
        self.ended = EndedAttempts()
        self._router = router
        self._jobs = jobs
        self._reservations = reservations

    def fail(self, job: Job, reason: str, now: float) -> list[Send]:
        sequence = job.sequence
        failed = Failed(sequence.request, sequence.attempt, Stage.HANDOFF, reason)
        return [Send(self._router, failed), *self.end(sequence.request, now)]

    def send_back(self, job: Job, now: float) -> list[Send]:
        """Others need its blocks: it may go on elsewhere."""
        sequence = job.sequence
        returned = Returned(sequence.request, sequence.attempt, job.num_yields)
        return [Send(self._router, returned), *self.end(sequence.request, now)]

    def end(self, request: RequestId, now: float) -> list[Send]:
        """All of a request. Returns the word to the source of a pull that it may let go, too."""
        return [send for job in self._jobs.of(request) for send in self.end_job(job, now)]

    def end_job(self, job: Job, now: float) -> list[Send]:
        """One sample of a request; with the last one the request has ended."""
        sequence = job.sequence
        self._jobs.remove(job)
        if not self._jobs.of(sequence.request):
            self.ended.add(sequence.request, sequence.attempt, now)
        job.cancelled = True
        self._reservations.leave(job)
        sends = job.pull.release() if job.phase is Phase.PULLING and job.pull is not None else []
        self.free_if_idle(job)
        return sends

    def free_if_idle(self, job: Job) -> None:
        """Free what a job that has ended still holds, once no step and no copy names it."""
        if job.sequence.busy == 0:
            self._reservations.free(job)
            del self._jobs.by_key[job.sequence.key]
