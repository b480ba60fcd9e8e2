"""The lifeline from a child process to the supervisor that started it: when the parent dies, it dies.

The supervisor puts its process id into the child's environment; the first thing the child's command
line does is `hold`. Linux only (prctl(2)).
"""

import ctypes
import os
import signal
from collections.abc import MutableMapping

PARENT_VARIABLE = "PDSERVE_PARENT_PID"
PR_SET_PDEATHSIG = 1


def hold(environ: MutableMapping[str, str] = os.environ) -> None:
    """Ask the kernel to kill this process when the supervisor named in the environment dies.

    SIGKILL, because a process that hangs must go as well; nothing of ours needs a farewell to be
    cleaned up. The variable is taken out, so that it does not reach this process's own children.
    Exits at once when the supervisor died before the kernel was asked.
    """
    parent = environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if str(os.getppid()) != parent:
        raise SystemExit(f"pdserve: the supervisor (process {parent}) is gone, not starting")
