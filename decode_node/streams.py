"""What the router is told of each stream: its tokens as they are drawn, and again what it has missed.

    drawn ── step over ──► sent ── Resume ──► sent again, for 30 s after the finish, too

A token stays with its job, and with what has finished, until nobody can ask for it any more. Owns the memory of
finished samples. Used by DecodeScheduler.
"""

from collections.abc import Iterable

from pdserve.cluster.messages import Drawn, Finish, FirstToken, Resume, TokenRun
from pdserve.core.logprobs import Logprobs
from pdserve.decode_node.ends import Ends
from pdserve.decode_node.finished import FinishedSamples
from pdserve.decode_node.job import Job, Jobs
from pdserve.engine.step import Draw


class Streams:
    def __init__(self, jobs: Jobs, ends: Ends):
        self.finished = FinishedSamples()
        self._jobs = jobs
        self._ends = ends

    def add(self, job: Job, draws: Iterable[Draw], drawn: Iterable[Drawn], now: float) -> list[TokenRun]:
        """One more token of a sample; returns what the router has not been told of it."""
        runs = []
        for draw, each in zip(draws, drawn, strict=True):
            job.add(draw)
            if job.prefills_here:
                # FirstToken tells of it.
                job.prefills_here, job.sequence.scores_prompt = False, False
                job.num_sent = job.sequence.num_outputs
            else:
                runs.append(_unsent(job, each.finish))
            if each.finish is not None:
                self.finished.add(_run(job, job.num_given, each.finish), now)
                self._ends.end_job(job, now)
        return runs

    def resume(self, message: Resume) -> TokenRun | None:
        """What the router lacks of a sample, or None when it is not here or has nothing more."""
        run = self.finished.resume(message)
        if run is not None:
            return run
        job = self._jobs.find(message.request, message.attempt, message.sample)
        if job is None or message.first_index >= job.num_sent:
            return None
        job.num_sent = message.first_index
        return _unsent(job, None)


def first_token(job: Job, drawn: tuple[Drawn, ...], now: float) -> FirstToken:
    """What was drawn after a prompt that was computed here; lost, it is asked for again like any other."""
    sequence = job.sequence
    return FirstToken(
        sequence.request,
        sequence.attempt,
        drawn=drawn,
        num_cached_tokens=job.num_hit_tokens,
        queue_s=sequence.queue_s,
        prefill_s=now - sequence.accepted_at - sequence.queue_s,
        prompt_logprobs=Logprobs.join(sequence.scores),
        chunks=tuple(sequence.chunks.chunks),
        step_end_s=sequence.chunks.step_end_s,
        waited_s=sequence.waited_s,
    )


def _unsent(job: Job, finish: Finish | None) -> TokenRun:
    run = _run(job, job.num_sent, finish)
    job.num_sent = job.sequence.num_outputs
    return run


def _run(job: Job, first_index: int, finish: Finish | None) -> TokenRun:
    """Outputs of a sample from an index on, of those that were drawn here or that its hand-off brought along."""
    sequence, draws = job.sequence, job.draws[first_index - job.num_given :]
    tokens, logprobs = tuple(draw.token for draw in draws), Logprobs.join(draw.logprobs for draw in draws)
    return TokenRun(sequence.request, sequence.attempt, sequence.sample, first_index, tokens, finish, logprobs)
