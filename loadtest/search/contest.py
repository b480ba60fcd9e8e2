"""Several servers on the same machine, searched in turn: whose run is next. Pure.

    A B C, A B C, ...   whoever has the fewest runs, so that what drifts on the machine drifts for all of them alike

Left out are those whose search is over, whose next run no longer fits in the time left, and, while others are not
known as well, those that cannot be the best any more (budget.py).
"""

from collections.abc import Sequence

from pdserve.loadtest.search.budget import Budget, Choice, rank
from pdserve.loadtest.search.goodput import GoodputConfig, GoodputResult, GoodputSearch
from pdserve.loadtest.search.runs import Run

# Runs end early once they are clear, so one may begin when so much of it fits; what the end of the time cuts off
# counts as far as it went.
MUST_FIT = 1 / 3


class Contest:
    """Owns a search for each name, all over the same grid of rates."""

    def __init__(self, names: Sequence[str], config: GoodputConfig):
        self.searches = {name: GoodputSearch(config) for name in names}
        self._dropped: set[str] = set()

    def next(self, left_s: float, budget: Budget) -> Choice | None:
        """The run to make next; None when nothing is left to ask or no run fits. budget: what runs cost by now."""
        choices = rank(self._open, left_s / MUST_FIT, budget)
        hopeful = [choice for choice in choices if not choice.is_behind] or choices
        return min(hopeful, key=lambda choice: len(self.searches[choice.name].runs), default=None)

    def add(self, choice: Choice, run: Run) -> None:
        self.searches[choice.name].add(run)

    def drop(self, name: str) -> None:
        """It cannot be run any more; what was found of it stays."""
        self._dropped.add(name)

    @property
    def _open(self) -> dict[str, GoodputSearch]:
        return {name: search for name, search in self.searches.items() if name not in self._dropped}

    def results(self) -> dict[str, GoodputResult]:
        return {name: search.result() for name, search in self.searches.items()}
