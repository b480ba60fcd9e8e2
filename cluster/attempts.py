"""What a node remembers of requests that ended: the highest attempt, for as long as frames may be late.

A lower attempt than the remembered one, or the same one again, is stale: dropped and counted.
Owned by the node's machine.
"""

from collections import OrderedDict

from pdserve.core.ids import RequestId

REMEMBER_S = 30.0
# How long a node keeps a request without a beat, until the router has told it otherwise.
DEFAULT_LEASE_S = 5.0
MAX_REMEMBERED = 100_000


class EndedAttempts:
    def __init__(self) -> None:
        self._ended: OrderedDict[RequestId, tuple[int, float]] = OrderedDict()
        self.num_stale = 0

    def add(self, request: RequestId, attempt: int, now: float) -> None:
        known = self._ended.pop(request, None)
        highest = attempt if known is None else max(known[0], attempt)
        self._ended[request] = (highest, now)
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def covers(self, request: RequestId, attempt: int) -> bool:
        """Whether this attempt is known to have ended; counts it when it is."""
        known = self._ended.get(request)
        if known is None or known[0] < attempt:
            return False
        self.num_stale += 1
        return True

    def sweep(self, now: float) -> None:
        while self._ended:
            _, ended_at = next(iter(self._ended.values()))
            if now - ended_at < REMEMBER_S:
                return
            self._ended.popitem(last=False)
