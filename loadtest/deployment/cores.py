"""Which cores a server under test is given: those this process may use, as far as a container's quota lets it.

A child process inherits where its parent may run when it is started, so `confined` narrows that for a moment.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Of the unified hierarchy, as a container sees its own group: "max 100000", or "200000 100000" for two cores.
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = QUOTA) -> tuple[int, ...]:
    """The cores that can be kept busy, in order."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    try:
        limit, period = quota.read_text(encoding="ascii").split()
        num_cores = len(cores) if limit == "max" else max(1, int(limit) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return cores
    return cores[:num_cores]


@contextlib.contextmanager
def confined(cores: tuple[int, ...]) -> Iterator[None]:
    """What is started meanwhile runs on these cores; on all of this process's for none."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
