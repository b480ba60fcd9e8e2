"""In what order waiting prompts get their turn, kept up to date: the first costs the same however many wait.

    higher priority first; within one
      1  what goes on after a failure, in order of arrival
      2  what has no promise to keep, or has kept it: by policy
      3  what can still keep its promise, by deadline, but for those that give way (Moore)
      4  what gives way, then what has lost its promise: by policy
    and whoever has waited for MAX_YIELD_S, the oldest first, is owed its turn in between

Pure: keys, lengths and times, no requests. The planner of a node has one for its sequences, the router's queue one for
its requests; both tell it what joins, leaves and is computed.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Policy(StrEnum):
    """`fcfs`: in order of arrival. `shortest`: who has the fewest tokens left to compute, then in order of arrival."""

    FCFS = "fcfs"
    SHORTEST = "shortest"


# How long a prompt lets others go first, because they are shorter or because its own deadline is lost.
MAX_YIELD_S = 10.0
# Half of all steps are slower than the mean.
COST_MARGIN = 1.05
# Who gives way is decided among so many at the front. Only those get chunks in the next step: one further behind
# that would push a longer one out is heard once it has moved up, which the yielding of the others brings about.
WINDOW = 32

RESUMED, FREE, PROMISED, LOST = range(4)
Rank = tuple[int, int, float, int]


@dataclass(slots=True)
class Turn:
    """One prompt in line. since: when it joined; num_tokens: how many are left to compute; rank: sorts it."""

    key: int
    priority: int
    since: float
    deadline: float | None
    num_tokens: int
    rank: Rank = (0, 0, 0.0, 0)

    @property
    def standing(self) -> int:
        return self.rank[1]

    @property
    def age(self) -> tuple[int, float, int]:
        """Sorts the oldest of the highest priority to the front."""
        return -self.priority, self.since, self.key


class Turns:
    """Keys are unique, and of two that are equal in all else the smaller one goes first."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self._turns: dict[int, Turn] = {}
        self._ranks: list[Rank] = []
        self._ages: list[tuple[int, float, int]] = []
        self._num_promised = 0
        self._num_yielded = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, key: int) -> bool:
        return key in self._turns

    def join(
        self,
        key: int,
        priority: int,
        since: float,
        deadline: float | None,
        num_tokens: int,
        *,
        is_resumed: bool = False,
    ) -> None:
        """Stand in line; deadline: by when the whole of it must be computed, None without a promise."""
        turn = self._turns[key] = Turn(key, priority, since, deadline, num_tokens)
        insort(self._ages, turn.age)
        self._stand(turn, RESUMED if is_resumed else FREE if deadline is None else PROMISED)

    def leave(self, key: int) -> None:
        """Who is not in line leaves nothing."""
        turn = self._turns.pop(key, None)
        if turn is not None:
            del self._ages[bisect_left(self._ages, turn.age)]
            self._step_out(turn)

    def advance(self, key: int, num_tokens: int) -> None:
        """So many of its tokens are left to compute now."""
        turn = self._turns[key]
        turn.num_tokens = num_tokens
        if self._rank(turn, turn.standing) != turn.rank:
            self._stand(turn, self._step_out(turn))

    def serve(self, key: int) -> None:
        """It was first in a step, or is given to a node: whoever is owed a turn has had it, or has let one pass."""
        self._num_yielded = 0 if self._ages and key == self._ages[0][2] else self._num_yielded + 1

    def order(self, token_s: float, now: float, step_tokens: int = 0, num_ahead: int = 0) -> Iterator[int]:
        """Keys in turn, to be used up before the line is changed.

        Whoever has waited for MAX_YIELD_S, the oldest first, is owed every second step; where the step between would
        end the prompt that is next (it has at most `step_tokens` left), every third. So

        * it is computed within 3 * (tokens of it and of older ones) / step_tokens steps from then on, whatever comes
          after it: owed steps go to the oldest alone, and nobody new is ever older;
        * under `shortest` a prompt of one step is delayed by at most one chunk of longer ones, however many there are
          and however long they have waited. Say it comes during a step. After an owed one it is next. After the first
          step since, it is next, too, because that step ends it. If it comes during the second, that one is given to
          a prompt that it ends, and only the owed one comes before its own.

        token_s    seconds that each token is expected to take
        num_ahead  tokens that are computed before the first of these
        """
        if not self._turns:
            return iter(())
        owed = self._owed(now, step_tokens)
        in_turn: Iterator[int] = (rank[-1] for rank in self._ranks)
        if self._num_promised:
            num_ahead += 0 if owed is None else self._turns[owed].num_tokens
            in_turn = self._by_promise(owed, token_s, now, num_ahead)
        return in_turn if owed is None else itertools.chain((owed,), (key for key in in_turn if key != owed))

    def _owed(self, now: float, step_tokens: int) -> int | None:
        oldest = self._turns[self._ages[0][2]]
        if now - oldest.since <= MAX_YIELD_S:
            self._num_yielded = 0
            return None
        ends = self._turns[self._ranks[0][-1]].num_tokens <= step_tokens
        return oldest.key if self._num_yielded >= (2 if ends else 1) else None

    def _by_promise(self, owed: int | None, token_s: float, now: float, num_ahead: int) -> Iterator[int]:
        """Those at the front by what they can keep, the rest as it stands."""
        ordered: list[int] = []
        for _, group in itertools.groupby(self._window(token_s, now), key=lambda turn: turn.priority):
            turns = [turn for turn in group if turn.key != owed]
            hopeful = [turn for turn in turns if turn.standing != LOST]
            giving_way = _giving_way(hopeful, token_s * COST_MARGIN, now, num_ahead)
            ordered += [turn.key for turn in hopeful if turn.key not in giving_way]
            ordered += [turn.key for turn in hopeful if turn.key in giving_way]
            ordered += [turn.key for turn in turns if turn.standing == LOST]
            num_ahead += sum(turn.num_tokens for turn in turns)
        seen = set(ordered)
        return itertools.chain(ordered, (rank[-1] for rank in self._ranks if rank[-1] not in seen))

    def _window(self, token_s: float, now: float) -> list[Turn]:
        """The front of the line. Who cannot be in time even as the next one never can again, and steps back."""
        while True:
            window = [self._turns[rank[-1]] for rank in self._ranks[:WINDOW]]
            lost = [t for t in window if t.standing == PROMISED and _is_late(t, t.num_tokens, token_s, now)]
            if not lost:
                return window
            for turn in lost:
                self._step_out(turn)
                self._stand(turn, LOST)

    def _rank(self, turn: Turn, standing: int) -> Rank:
        within = 0.0
        if standing == PROMISED and turn.deadline is not None:
            within = turn.deadline
        elif standing != RESUMED and self._policy is Policy.SHORTEST:
            within = turn.num_tokens
        return -turn.priority, standing, within, turn.key

    def _stand(self, turn: Turn, standing: int) -> None:
        turn.rank = self._rank(turn, standing)
        insort(self._ranks, turn.rank)
        self._num_promised += standing == PROMISED

    def _step_out(self, turn: Turn) -> int:
        """Returns its standing."""
        del self._ranks[bisect_left(self._ranks, turn.rank)]
        self._num_promised -= turn.standing == PROMISED
        return turn.standing


def _is_late(turn: Turn, num_tokens: int, token_s: float, now: float) -> bool:
    """Whether it misses its promise if so many tokens are computed until its last one."""
    return turn.deadline is not None and now + num_tokens * token_s > turn.deadline


def _giving_way(turns: Sequence[Turn], token_s: float, now: float, num_ahead: int) -> set[int]:
    """Keys of those that must be late so that as many as possible are in time.

    Whenever one would be late, the longest up to it gives way (Moore, Management Science 15, 1968, which is exact
    for promises in the order of their deadlines).
    """
    giving_way: set[int] = set()
    longest: list[tuple[int, int]] = []
    for turn in turns:
        num_ahead += turn.num_tokens
        if turn.standing != PROMISED:
            continue
        heapq.heappush(longest, (-turn.num_tokens, turn.key))
        if _is_late(turn, num_ahead, token_s, now):
            shortened, key = heapq.heappop(longest)
            num_ahead += shortened
            giving_way.add(key)
    return giving_way
