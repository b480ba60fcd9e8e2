"""Runs many scripts, each of which says when it wants to go on, from one heap and one timer.

A timer of the event loop for each token would cost more than the token's write. Owned by server.py.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Iterator

# Yields the monotonic time at which it is to be resumed.
Script = Iterator[float]


class Pacer:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[float, int, Script]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def run(self, script: Script) -> None:
        """Begin a script now and go on with it whenever it is due, until it ends or `close`."""
        self._resume(script)
        self._arm()

    def close(self) -> None:
        """Nothing is resumed any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()

    def _resume(self, script: Script) -> None:
        due = next(script, None)
        if due is not None:
            heapq.heappush(self._waiting, (due, next(self._numbers), script))

    def _fire(self) -> None:
        self._timer = None
        waiting = self._waiting
        while waiting and waiting[0][0] <= time.monotonic():
            self._resume(heapq.heappop(waiting)[2])
        self._arm()

    def _arm(self) -> None:
        """Have the timer fire when the next script is due."""
        if self._timer is not None:
            if self._waiting and self._timer.when() <= self._waiting[0][0]:
                return
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._timer = self._loop.call_at(self._waiting[0][0], self._fire)
