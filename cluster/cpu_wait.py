"""How long the thread of an event loop stood ready without a core, as Linux counts it.

    a turn's work is done: settle ── the loop sleeps ── something comes, it waits for a core ── it runs: read

A message for a process whose cores are busy is read late. That wait is nobody else's to know, and without it the ledger
of a request would not add up on a busy machine. Counted is what the thread waited since it had last done its work, so
waits in the midst of work are no message's; libzmq's I/O thread may wait, too, but for what it sends as much as for
what it brings, so that it counts for nothing. Where the kernel counts nothing it is 0. Owned by an endpoint, called on
its loop.
"""

import contextlib
import os
from pathlib import Path

# The second number: nanoseconds on a run queue (Documentation/scheduler/sched-stats.rst).
COUNTER = Path("/proc/thread-self/schedstat")


class CpuWait:
    """Counts for the thread that calls `read` first, from then on. Reading the counter takes 4 us (November 2026)."""

    def __init__(self, counter: Path = COUNTER) -> None:
        self._counter: Path | None = counter
        self._file: int | None = None
        self._counted_ns = 0
        self._settled_ns: int | None = None
        self._waited_s: float | None = None

    @property
    def is_read(self) -> bool:
        """Whether it was read in this turn, which is to be settled then."""
        return self._waited_s is not None

    def read(self) -> float:
        """Seconds from the end of the last turn that was settled; all that one turn reads has waited the same."""
        if self._waited_s is None:
            counted_ns = self._count_ns()
            since_ns = counted_ns if self._settled_ns is None else self._settled_ns
            self._waited_s = max(0, counted_ns - since_ns) / 1e9
        return self._waited_s

    def settle(self) -> None:
        """A turn's work is done."""
        self._settled_ns, self._waited_s = self._count_ns(), None

    def _count_ns(self) -> int:
        """What it was last where nothing is counted, or not as we know it, and once this is closed."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            if self._file is None and self._counter is not None:
                self._file = os.open(self._counter, os.O_RDONLY | os.O_CLOEXEC)
            if self._file is not None:
                self._counted_ns = int(os.pread(self._file, 96, 0).split()[1])
        return self._counted_ns

    def close(self) -> None:
        """Twice is nothing."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._counter = None
