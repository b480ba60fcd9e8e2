"""Ends a run early once it is clear on which side of the share its rate is. Pure.

To fail, it is enough that the requests so far say so. To pass it is not: a server that cannot keep up answers the first
requests in time and the later ones ever later. One that is offered a share s more than it can serve falls behind by s
seconds a second, so it takes limit / s seconds until a promise of `limit` breaks: with s the search's own step, what is
found after that time is off by no more than the step. And of the later half as many must have kept as of all.
Requests count in the order of the schedule, each once it and all before it have ended or cannot keep their promises any
more: those that end first are the fast ones (see runs.py).
"""

from dataclasses import dataclass, field

from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.search.answer import num_needed
from pdserve.loadtest.search.runs import broken_by
from pdserve.loadtest.search.sequential import Decision, decide
from pdserve.loadtest.workload.window import Window

# Requests that follow each other share their fate: a burst at the beginning may break a dozen.
_MIN_REQUESTS = 30
# The promises that a growing queue breaks; where none of them is made, it is given as long as for one of 2 s.
_QUEUED = {Measure.TTFT, Measure.SECOND, Measure.E2E}
_DEFAULT_LIMIT_S = 2.0


@dataclass(slots=True)
class Judge:
    """Called with each record as its request ends; True ends the run.

    num_kept, num_requests  what earlier runs at the same rate came to
    first_index             of the steady window's first request
    step                    ratio of neighbouring rates of the search
    """

    share: float
    num_kept: int
    num_requests: int
    first_index: int
    promises: tuple[Promise, ...]
    step: float
    _ahead: dict[int, tuple[bool, float]] = field(default_factory=dict)
    _kept: list[bool] = field(default_factory=list)
    _began_s: float = 0.0

    def __call__(self, record: Record) -> bool:
        if record.window is not Window.STEADY:
            return False
        self._ahead[record.index] = (not broken_by(record, self.promises), record.intended_s)
        span_s = 0.0
        while (seen := self._ahead.pop(self.first_index + len(self._kept), None)) is not None:
            is_kept, intended_s = seen
            self._began_s = self._began_s if self._kept else intended_s
            span_s = intended_s - self._began_s
            self._kept.append(is_kept)
            self.num_requests += 1
            self.num_kept += is_kept
        decision = decide(self.num_kept, self.num_requests, self.share)
        if decision is Decision.PASSES:
            return self._has_shown(span_s)
        return decision is Decision.FAILS and len(self._kept) >= _MIN_REQUESTS

    @property
    def settling_s(self) -> float:
        """How long a queue takes to break a promise when the rate is one step too high."""
        limits = [promise.limit_s for promise in self.promises if promise.measure in _QUEUED]
        return max(limits, default=_DEFAULT_LIMIT_S) / (self.step - 1)

    def _has_shown(self, span_s: float) -> bool:
        later = self._kept[len(self._kept) // 2 :]
        is_enough = self.num_requests >= num_needed(self.share) and span_s >= self.settling_s
        return is_enough and sum(later) >= self.share * len(later)
