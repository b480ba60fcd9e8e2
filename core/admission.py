"""Who gets room next where not all fit: a line of keys that is tried from its head, and who may pass whom.

A head that does not fit is passed at most MAX_PASSES times, so that a large request is never starved by small
ones; no more than that are tried in vain, because this runs at every event. Owns order and passes only; whose
line it is tries them: the prefill node for its prompts, the decode node for its reservations.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

MAX_PASSES = 8

Rank = tuple[int, bool, int, int]


class Passes:
    """How often each key has been passed by one behind it. spent: those that nobody may pass any more."""

    def __init__(self) -> None:
        self.spent: set[int] = set()
        self._passes: dict[int, int] = {}

    def admit(
        self, in_turn: Iterable[int], take: Callable[[int], bool], lets_nobody_pass: Callable[[int], bool]
    ) -> list[int]:
        """Try `take(key)` in order; returns the keys that it said yes to.

        lets_nobody_pass: asked of who is refused
        """
        admitted: list[int] = []
        blocked: list[int] = []
        for key in in_turn:
            if take(key):
                admitted.append(key)
                self.forget(key)
                self.count(blocked)
            elif lets_nobody_pass(key):
                break
            else:
                blocked.append(key)
            if len(blocked) == MAX_PASSES or not self.spent.isdisjoint(blocked):
                break
        return admitted

    def count(self, passed: Iterable[int]) -> None:
        for key in passed:
            self._passes[key] = self._passes.get(key, 0) + 1
            if self._passes[key] >= MAX_PASSES:
                self.spent.add(key)

    def forget(self, key: int) -> None:
        self._passes.pop(key, None)
        self.spent.discard(key)


class AdmissionLine:
    """Higher priority first; within one the resumed before all that never ran, then first come, first served."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._by_key: dict[int, Rank] = {}
        self._passes = Passes()
        self._num_joined = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: int) -> bool:
        return key in self._by_key

    def join(self, key: int, priority: int, resumed: bool) -> None:
        """Stand in line; joining twice is nothing. Of the resumed the smallest key, which is the oldest, is first."""
        if key in self._by_key:
            return
        self._num_joined += 1
        rank = self._by_key[key] = (-priority, not resumed, key if resumed else self._num_joined, key)
        insort(self._ranks, rank)

    def leave(self, key: int) -> None:
        """Who is not in line leaves nothing."""
        rank = self._by_key.pop(key, None)
        if rank is not None:
            del self._ranks[bisect_left(self._ranks, rank)]
            self._passes.forget(key)

    def may_pass(self, key: int) -> bool:
        """Whether nobody before it has been passed too often."""
        return not any(self._by_key[spent] < self._by_key[key] for spent in self._passes.spent)

    def pass_all(self, key: int) -> None:
        """It has got in out of turn."""
        self._passes.count(rank[-1] for rank in self._ranks[: bisect_left(self._ranks, self._by_key[key])])
        self.leave(key)

    def admit(self, take: Callable[[int], bool]) -> list[int]:
        """Try `take(key)` in order; returns the keys that got in, which have left the line.

        A resumed one that does not fit lets nobody behind it pass: it has waited once already.
        """
        admitted = self._passes.admit((rank[-1] for rank in self._ranks), take, self._is_resumed)
        for key in admitted:
            self.leave(key)
        return admitted

    def _is_resumed(self, key: int) -> bool:
        return not self._by_key[key][1]
