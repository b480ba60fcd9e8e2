"""Where the samples of a request part: one computed prompt becomes a job for each sample.

    shared prompt, computed ──┬─ a sample with its next token drawn ──► RUNNING on the same blocks
                              ├─ one whose token was its last ─────────► finished
                              └─ one that had outputs of its own ──────► QUEUED: it finds the prompt again by hash

No block is copied here: the first write to one that others hold, too, does that (Reservations.grow). Called by
DecodeScheduler and HandOffs.
"""

from collections.abc import Iterable

from pdserve.cluster.messages import Drawn, Sample, TokenRun
from pdserve.core.block_hash import BlockHasher, unpack_token_ids
from pdserve.decode_node.job import Job, Jobs, Phase
from pdserve.decode_node.reservations import Reservations
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Draw


class Keys:
    """Handles of sequences, counting up: the younger of two has the greater one."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


class Samples:
    def __init__(self, jobs: Jobs, reservations: Reservations, keys: Keys, hasher: BlockHasher):
        self._jobs = jobs
        self._reservations = reservations
        self._keys = keys
        self._hasher = hasher

    def part(self, head: Job, drawn: Iterable[Drawn], is_told: bool) -> list[TokenRun]:
        """Put a job for each sample in the place of `head`, whose blocks hold all that they share.

        Returns the runs of samples that had their last token drawn and need no job.

        is_told  whether the router has been told of what was drawn here
        """
        tokens = {each.sample: each for each in drawn}
        jobs, runs = [], []
        for sample in head.samples:
            first = tokens.get(sample.index)
            if first is not None and first.finish is not None:
                runs.append(_run_of(head, first))
            elif first is not None:
                jobs.append(self._sharing(head, sample, first, is_told))
            else:
                jobs.append(self._catching_up(head, sample))
        for job in jobs:
            job.beginning = head.beginning
        self._reservations.hand_on(head, [job for job in jobs if job.phase is Phase.RUNNING])
        for job in jobs:
            self._jobs.add(job)
            if job.phase is Phase.QUEUED:
                self._reservations.wait(job, resumed=True)
        self._jobs.remove(head)
        del self._jobs.by_key[head.sequence.key]
        return runs

    def _sharing(self, head: Job, sample: Sample, first: Drawn, is_told: bool) -> Job:
        sequence = head.sequence.fork(self._keys.next(), sample.index, ())
        sequence.share(head.sequence, self._reservations.pool)
        job = self._job(head, sequence, Phase.RUNNING)
        job.add(Draw(first.token, first.logprobs))
        job.num_sent = len(job.draws) if is_told else 0
        return job

    def _catching_up(self, head: Job, sample: Sample) -> Job:
        sequence = head.sequence.fork(self._keys.next(), sample.index, unpack_token_ids(sample.outputs))
        sequence.name_full_blocks(self._hasher, sequence.num_tokens)
        return self._job(head, sequence, Phase.QUEUED)

    def _job(self, head: Job, sequence: Sequence, phase: Phase) -> Job:
        given = (head.expires_at, sequence.num_outputs, head.final_blocks)
        return Job(sequence, phase, *given, prefills_here=False, is_whole=head.is_whole)


def _run_of(head: Job, first: Drawn) -> TokenRun:
    sequence = head.sequence
    return TokenRun(
        sequence.request, sequence.attempt, first.sample, first.index, (first.token,), first.finish, first.logprobs
    )
