"""How long the threads that bring messages in stood ready without a core, as Linux counts it.

A message for a process whose cores are busy is read late: by libzmq's I/O thread, then by the event loop. That wait is
nobody else's to know, and without it the ledger of a request would not add up on a busy machine. Where the kernel
counts nothing it is 0. Owned by an endpoint, called on its loop.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

TASKS = Path("/proc/self/task")
IO_THREAD = "ZMQbg/IO"
# Messages that are read within that time of each other came in together, and waited together.
BURST_S = 0.001


class CpuWait:
    """Counts from the first call of `read`, which finds the threads. A reading takes 4 us a thread (November 2026)."""

    def __init__(self) -> None:
        self._files: list[int] | None = None
        self._counted_ns = 0
        self._read_at = float("-inf")
        self._waited_s = 0.0

    def read(self, now: float) -> float:
        """Seconds that the threads have waited before what is read now; an upper bound of what a message has."""
        if now - self._read_at > BURST_S:
            if self._files is None:
                self._files = list(_open_counters())
                self._counted_ns = self._count_ns()
            counted_ns = self._count_ns()
            self._waited_s, self._counted_ns = max(0, counted_ns - self._counted_ns) / 1e9, counted_ns
        self._read_at = now
        return self._waited_s

    def _count_ns(self) -> int:
        """The second number of each file: nanoseconds on a run queue."""
        total = 0
        for file in self._files or ():
            # A thread that has ended is counted no more.
            with contextlib.suppress(OSError):
                total += int(os.pread(file, 96, 0).split()[1])
        return total

    def close(self) -> None:
        """Twice is nothing."""
        for file in self._files or ():
            os.close(file)
        self._files = []


def _open_counters() -> Iterator[int]:
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for task in TASKS.iterdir():
            if task.name == own or (task / "comm").read_text().startswith(IO_THREAD):
                yield os.open(task / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
