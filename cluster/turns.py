"""How soon a thread gets a core that another one is using.

The threads of a node share its cores with the engine's, which computes for milliseconds on end. Linux lets a thread
that wakes run at once if it has asked for shorter turns than the one that runs (sched_setattr's sched_runtime for
normal threads, Linux 6.12), and else after a turn of about 3 ms. Shares of the core stay as they are. Elsewhere nothing
changes. Called by event_loop.py.
"""

import ctypes
import logging
import os
import platform

log = logging.getLogger(__name__)

# The least that Linux takes, in ns.
SHORT_TURN_NS = 100_000
SCHED_OTHER = 0
# asm/unistd.h: ctypes reaches no wrapper of this call in older C libraries.
CALL_NUMBERS = {"x86_64": 314, "aarch64": 274}


class _Attributes(ctypes.Structure):
    """struct sched_attr of linux/sched/types.h, its first version."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


def take_short_turns() -> None:
    """Of this thread and those that it starts from now on."""
    number = CALL_NUMBERS.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _Attributes(ctypes.sizeof(_Attributes), SCHED_OTHER, 0, nice, 0, SHORT_TURN_NS, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, ctypes.byref(attributes), 0):
        log.info("this thread may wait for its turn: %s", os.strerror(ctypes.get_errno()))
