"""The tile registers of AMX, which Linux gives a process that asks for them (5.16 on). Called by library.py."""

import ctypes
import logging
import os
import platform
from functools import cache

log = logging.getLogger(__name__)

# asm/prctl.h and asm/fpu/types.h: ctypes reaches no wrapper of this call.
ARCH_PRCTL = 158
REQUEST_PERMISSION, TILE_DATA = 0x1023, 18


@cache
def take_tiles() -> bool:
    """Whether this process may use tile registers; of threads, those that are there and those to come."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA):
        log.debug("no tile registers: %s", os.strerror(ctypes.get_errno()))
        return False
    return True
