"""Shared memory as a process sees it: in huge pages where the kernel gives them, and without page faults later.

With pages of 4 KiB every block is found through hundreds of look-ups of an address, in a virtual machine twice over:
decode attention over a pool reads 10 to 35 % less a second, and the first copy from a peer's pool faults on each page.
Distributions leave huge pages for shared memory switched off; MADV_COLLAPSE (Linux 6.1) makes them when asked, if the
map begins where a huge page may, which mmap alone does not care for. Used by shm.py.
"""

import ctypes
import errno
import logging
import mmap
import os
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

# asm-generic/mman-common.h; the mmap module does not name them.
MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_COLLAPSE = 22, 23, 25
MAP_FIXED = 0x10
HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")

_P, _S, _I, _L = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long


def map_writable(fd: int, num_bytes: int) -> memoryview:
    """Map a file for reading and writing, all of it in memory on return.

    It is unmapped when the last view of the buffer is gone. Raises OSError.
    """
    buffer, address = _map(fd, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    _collapse(address, num_bytes)
    try:
        _advise(address, num_bytes, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 5.14; the memory is all zeros anyway.
        ctypes.memset(address, 0, num_bytes)
    return buffer


def map_readable(fd: int, num_bytes: int) -> memoryview:
    """Map a file for reading; raises OSError. What later copies would fault on is looked up now."""
    buffer, address = _map(fd, num_bytes, mmap.PROT_READ)
    with suppress(OSError):
        _advise(address, num_bytes, MADV_POPULATE_READ)
    return buffer.toreadonly()


def _map(fd: int, num_bytes: int, protection: int) -> tuple[memoryview, int]:
    """Beginning where a huge page may."""
    libc, step = _libc(), huge_page_bytes()
    reserved = _checked(libc.mmap(None, num_bytes + step, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
    address = -(-reserved // step) * step
    try:
        _checked(libc.mmap(address, num_bytes, protection, mmap.MAP_SHARED | MAP_FIXED, fd, 0))
    except OSError:
        libc.munmap(reserved, num_bytes + step)
        raise
    end = address + -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for first, last in ((reserved, address), (end, reserved + num_bytes + step)):
        if first < last:
            libc.munmap(first, last - first)
    array = (ctypes.c_char * num_bytes).from_address(address)
    # At exit a thread may still be reading.
    weakref.finalize(array, libc.munmap, address, num_bytes).atexit = False
    return memoryview(array).cast("B"), address


def _collapse(address: int, num_bytes: int) -> None:
    """A wish: what it gets changes no result."""
    step = huge_page_bytes()
    whole = num_bytes // step * step
    if not whole:
        return
    # Where nothing of a huge page is there yet, there is nothing to collapse.
    for offset in range(0, whole, step):
        ctypes.memset(address + offset, 0, 1)
    try:
        _advise(address, whole, MADV_COLLAPSE)
    except OSError as error:
        log.info("the KV pool is in small pages, decode steps take longer: %s", error.strerror)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    if _libc().madvise(address, num_bytes, advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _checked(address: int) -> int:
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


@cache
def huge_page_bytes() -> int:
    try:
        return int(HUGE_PAGE_SIZE.read_text())
    except (OSError, ValueError):
        return 2 << 20


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes, libc.mmap.restype = [_P, _S, _I, _I, _I, _L], _P
    libc.munmap.argtypes = [_P, _S]
    libc.madvise.argtypes = [_P, _S, _I]
    return libc
