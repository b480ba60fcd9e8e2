"""Who gets blocks next on a decode node: the line of requests that wait for a reservation.

Preempted sequences come before new ones, the oldest first; otherwise first come, first served within a
priority. A head that does not fit is passed at most MAX_PASSES times, so that a large prompt is never
starved by small ones; no more than that are tried in vain, because this runs at every event. A hand-off
past its deadline may pass all, each of them as often. Owns the order only; Reservations tries them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

MAX_PASSES = 8


@dataclass(slots=True)
class Waiting:
    key: int
    rank: tuple[int, int, int]
    passes: int = 0


class AdmissionLine:
    def __init__(self) -> None:
        self._line: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, key: int) -> bool:
        return any(waiting.key == key for waiting in self._line)

    def join(self, key: int, priority: int, resumed: bool) -> None:
        """Stand in line; resumed sequences before all that never ran. Joining twice is nothing."""
        if key in self:
            return
        # Keys count up: among the resumed the oldest comes first, as it is the last to be preempted again.
        self._line.append(Waiting(key, (0, -priority, key) if resumed else (1, -priority, 0)))
        self._line.sort(key=lambda waiting: waiting.rank)

    def leave(self, key: int) -> None:
        self._line = [waiting for waiting in self._line if waiting.key != key]

    def may_pass(self, key: int) -> bool:
        """Whether nobody before it has been passed too often."""
        return all(waiting.passes < MAX_PASSES for waiting in self._before(key))

    def pass_all(self, key: int) -> None:
        """It has its blocks out of turn."""
        for waiting in self._before(key):
            waiting.passes += 1
        self.leave(key)

    def _before(self, key: int) -> list[Waiting]:
        return list(itertools.takewhile(lambda waiting: waiting.key != key, self._line))

    def admit(self, reserve: Callable[[int], bool]) -> list[int]:
        """Try `reserve(key)` in order; returns the keys that got their blocks."""
        admitted: list[int] = []
        blocked: list[Waiting] = []
        for waiting in list(self._line):
            if len(blocked) == MAX_PASSES:
                break
            # A resumed sequence that does not fit lets no new one pass: it has waited once already.
            if blocked and (blocked[0].rank[0] == 0 or any(w.passes >= MAX_PASSES for w in blocked)):
                break
            if reserve(waiting.key):
                admitted.append(waiting.key)
                for earlier in blocked:
                    earlier.passes += 1
            else:
                blocked.append(waiting)
        self._line = [waiting for waiting in self._line if waiting.key not in admitted]
        return admitted
