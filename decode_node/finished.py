"""Requests that finished here lately, kept so that tokens lost on the way can be sent again.

Owned by the decode scheduler. Forgotten when the router says so, or after KEEP_S.
"""

from dataclasses import dataclass

from pdserve.cluster.messages import Finish, HeldEntry, Resume, Stage, TokenRun
from pdserve.core.ids import RequestId
from pdserve.engine.sequence import Sequence

KEEP_S = 30.0
MAX_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Finished:
    attempt: int
    outputs: tuple[int, ...]
    finish: Finish
    ended_at: float


class FinishedRequests:
    def __init__(self) -> None:
        self._finished: dict[RequestId, Finished] = {}

    def add(self, sequence: Sequence, finish: Finish, now: float) -> None:
        outputs = tuple(sequence.tokens[sequence.num_prompt :])
        self._finished[sequence.request] = Finished(sequence.attempt, outputs, finish, now)
        if len(self._finished) > MAX_KEPT:
            del self._finished[next(iter(self._finished))]

    def forget(self, request: RequestId, attempt: int) -> None:
        """The router has everything of this attempt; a later one's tokens stay."""
        finished = self._finished.get(request)
        if finished is not None and finished.attempt <= attempt:
            del self._finished[request]

    def resume(self, message: Resume) -> TokenRun | None:
        """The tokens from first_index on, or None when this attempt did not finish here."""
        finished = self._finished.get(message.request)
        if finished is None or finished.attempt != message.attempt:
            return None
        outputs = finished.outputs[message.first_index :]
        return TokenRun(message.request, message.attempt, 0, message.first_index, outputs, finished.finish)

    def sweep(self, now: float) -> None:
        while self._finished:
            request, oldest = next(iter(self._finished.items()))
            if now - oldest.ended_at < KEEP_S:
                return
            del self._finished[request]

    def held(self) -> list[HeldEntry]:
        return [
            HeldEntry(request, finished.attempt, Stage.DONE, len(finished.outputs))
            for request, finished in self._finished.items()
        ]
