"""Being woken at once, for the processes that measure: real-time scheduling, where the system permits it.

A server under test keeps its cores busy, and a process that wakes there waits for the others' time slices to end,
which would show as the server's latency. Measured on two cores at a load average of 5, timers late at p99: 2-6 ms
ordinarily, 4 ms with nice -10 or -20, 0.2-0.3 ms with SCHED_RR. The client takes no more of a core for it. The
kernel leaves at least 5 % of each core to everybody else.
"""

import contextlib
import os


def wake_at_once() -> None:
    """Ask for it; without the permission (CAP_SYS_NICE, which root has) everything stays as it is."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
