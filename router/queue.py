"""The router's queue: which requests wait for a place, in what order, and who may pass whom.

    join ──► line ── in turn, a place found ──► gone          leave: the client is gone
              │ ▲
              ▼ └── the nodes have changed ── set aside: no node there is could ever serve it

The order is core/turns.py's; what goes on after a failed attempt comes before all new ones of its priority. Whoever
has no place now keeps its turn; those behind may pass it, as often and with as many tries as core/admission.py says.
Who waits for an absent node is in nobody's way. Owned by Attempts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdserve.core.admission import Passes
from pdserve.core.ids import RequestId
from pdserve.core.turns import Policy, Turns
from pdserve.router.record import Record


@dataclass(slots=True)
class Waiting:
    """key: its place among equals. deadline: when its first token is promised, None without a promise.

    stuck_since: when no node there was could ever serve it; checked_in: round of changes in which that was last asked
    """

    key: int
    record: Record
    deadline: float | None
    is_resumed: bool
    stuck_since: float | None = None
    checked_in: int = 0


class RequestQueue:
    def __init__(self, policy: Policy):
        self._turns = Turns(policy)
        self._passes = Passes()
        self._by_key: dict[int, Waiting] = {}
        self._by_request: dict[RequestId, Waiting] = {}
        self._aside: dict[int, Waiting] = {}
        self._next_key = 0
        self._round = 1

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._by_request

    def __iter__(self) -> Iterator[Record]:
        """In no particular order."""
        return (waiting.record for waiting in self._by_key.values())

    def join(self, record: Record, deadline: float | None, *, is_resumed: bool = False) -> None:
        self._next_key += 1
        waiting = Waiting(self._next_key, record, deadline, is_resumed)
        self._by_key[waiting.key] = self._by_request[record.request] = waiting
        self._line_up(waiting)

    def leave(self, request: RequestId) -> None:
        """Who is not here leaves nothing."""
        waiting = self._by_request.pop(request, None)
        if waiting is not None:
            del self._by_key[waiting.key]
            self._aside.pop(waiting.key, None)
            self._turns.leave(waiting.key)
            self._passes.forget(waiting.key)

    def admit(
        self,
        place: Callable[[Record], bool],
        has_place_in_time: Callable[[Record], bool],
        token_s: float,
        now: float,
        num_ahead: int,
    ) -> bool:
        """Try `place` in turn; those that it found a place for have left. True when others should be tried soon.

        has_place_in_time  whether a node could ever serve it, asked of whom `place` has refused
        token_s            seconds that the nodes together take for a token of a prompt
        num_ahead          tokens that they have to compute before any of these
        """
        refused: list[Waiting] = []

        def take(key: int) -> bool:
            waiting = self._by_key[key]
            if not place(waiting.record):
                refused.append(waiting)
                return False
            self._turns.serve(key)
            return True

        for key in self._passes.admit(self._turns.order(token_s, now, num_ahead=num_ahead), take, lambda _: False):
            self.leave(self._by_key[key].record.request)
        unchecked = [waiting for waiting in refused if waiting.checked_in < self._round]
        for waiting in unchecked:
            waiting.checked_in = self._round
            if has_place_in_time(waiting.record):
                waiting.stuck_since = None
            else:
                self._set_aside(waiting, now)
        return any(waiting.key in self._aside for waiting in unchecked)

    def _set_aside(self, waiting: Waiting, now: float) -> None:
        waiting.stuck_since = now if waiting.stuck_since is None else waiting.stuck_since
        self._aside[waiting.key] = waiting
        self._turns.leave(waiting.key)
        self._passes.forget(waiting.key)

    def reconsider(self) -> None:
        """The nodes, or the links between them, may not be what they were."""
        self._round += 1
        for waiting in self._aside.values():
            self._line_up(waiting)
        self._aside.clear()

    def stuck(self, before: float) -> list[Record]:
        """Those that no node has been able to serve since then or longer."""
        return [w.record for w in self._aside.values() if w.stuck_since is not None and w.stuck_since <= before]

    def _line_up(self, waiting: Waiting) -> None:
        record = waiting.record
        self._turns.join(
            waiting.key,
            record.priority,
            record.times.promised_from,
            waiting.deadline,
            record.num_tokens,
            is_resumed=waiting.is_resumed,
        )
