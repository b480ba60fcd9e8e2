"""Ends a run early once it is clear that its rate fails; never because it passes. Pure.

A server that cannot keep up answers the first requests in time and the later ones ever later, so a good beginning says
little, and a bad one enough. Requests count in the order of the schedule, each once all before it have ended: those
that end first are the fast ones (see runs.py).
"""

from dataclasses import dataclass, field

from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.search.runs import broken_by
from pdserve.loadtest.search.sequential import Decision, decide
from pdserve.loadtest.workload.window import Window

# Requests that follow each other share their fate: a burst at the beginning may break a dozen.
_MIN_REQUESTS = 30


@dataclass(slots=True)
class Judge:
    """Called with each record as its request ends; True ends the run.

    num_kept, num_requests  what earlier runs at the same rate came to
    first_index             of the steady window's first request
    """

    share: float
    num_kept: int
    num_requests: int
    first_index: int
    promises: tuple[Promise, ...]
    _ahead: dict[int, bool] = field(default_factory=dict)
    _num_judged: int = 0

    def __call__(self, record: Record) -> bool:
        if record.window is not Window.STEADY:
            return False
        self._ahead[record.index] = not broken_by(record, self.promises)
        while (is_kept := self._ahead.pop(self.first_index + self._num_judged, None)) is not None:
            self._num_judged += 1
            self.num_requests += 1
            self.num_kept += is_kept
        is_clear = decide(self.num_kept, self.num_requests, self.share) is Decision.FAILS
        return is_clear and self._num_judged >= _MIN_REQUESTS
