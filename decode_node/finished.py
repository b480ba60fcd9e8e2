"""Samples that finished here lately, kept so that tokens lost on the way can be sent again.

Owned by the decode scheduler. Forgotten when the router says so, or after KEEP_S.
"""

from dataclasses import dataclass, replace

from pdserve.cluster.messages import HeldEntry, Resume, Stage, TokenRun
from pdserve.core.ids import RequestId

KEEP_S = 30.0
MAX_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Finished:
    """run: all that was drawn here, with its finish."""

    run: TokenRun
    ended_at: float

    @property
    def num_outputs(self) -> int:
        return self.run.first_index + len(self.run.token_ids)


class FinishedSamples:
    """By request, the one that has finished a sample last at the end."""

    def __init__(self) -> None:
        self._finished: dict[RequestId, dict[int, Finished]] = {}

    def add(self, run: TokenRun, now: float) -> None:
        samples = self._finished.pop(run.request, {})
        self._finished[run.request] = samples | {run.sample: Finished(run, now)}
        if len(self._finished) > MAX_KEPT:
            del self._finished[next(iter(self._finished))]

    def forget(self, request: RequestId, attempt: int, sample: int | None) -> None:
        """The router has everything of this attempt, or of one sample of it; a later attempt's tokens stay."""
        samples = self._finished.get(request, {})
        for index, finished in list(samples.items()):
            if sample in (None, index) and finished.run.attempt <= attempt:
                del samples[index]
        if not samples:
            self._finished.pop(request, None)

    def resume(self, message: Resume) -> TokenRun | None:
        """The tokens from first_index on, or None when this attempt of the sample did not finish here."""
        finished = self._finished.get(message.request, {}).get(message.sample)
        if finished is None or finished.run.attempt != message.attempt:
            return None
        run = finished.run
        # What came with the request nobody can lack.
        skipped = max(0, message.first_index - run.first_index)
        return replace(
            run,
            first_index=run.first_index + skipped,
            token_ids=run.token_ids[skipped:],
            logprobs=run.logprobs.after(skipped),
        )

    def sweep(self, now: float) -> None:
        while self._finished:
            request, samples = next(iter(self._finished.items()))
            if any(now - finished.ended_at < KEEP_S for finished in samples.values()):
                return
            del self._finished[request]

    def held(self) -> list[HeldEntry]:
        return [
            HeldEntry(f.run.request, f.run.attempt, Stage.DONE, f.num_outputs, sample=f.run.sample)
            for samples in self._finished.values()
            for f in samples.values()
        ]
