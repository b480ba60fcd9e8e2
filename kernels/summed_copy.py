"""Copying memory and computing its xxh3_64 in one pass, in C++ (cpp/summed_copy.cpp), without the GIL.

The blocks of a prompt of 512 tokens of SmolLM2-135M out of one pool into another, one core of a Xeon of the Sapphire
Rapids generation (December 2026): numpy copies them in 1.65 ms, this copies and sums them in 0.97 ms, because its
stores go past the caches and fetch nothing first; with ordinary stores it takes as long as the copy alone. Called by
engine/checksum.py.
"""

import ctypes
from functools import cache

import numpy as np

from pdserve.kernels.library import LibraryError, bind, load_library

_P, _I = ctypes.c_void_p, ctypes.c_int64
STRIPE_BYTES = 64
# XXH3 has other formulas for up to 240 bytes.
LEAST_BYTES = 256


def can_sum(num_bytes: int) -> bool:
    """Whether SummedCopy takes as many."""
    return num_bytes >= LEAST_BYTES and num_bytes % STRIPE_BYTES == 0


class SummedCopy:
    def __init__(self, library: ctypes.CDLL):
        self._run = bind(library, "copy_summed", [_P, _P, _I, ctypes.c_uint64, _P])

    def __call__(self, read: np.ndarray, written: np.ndarray, seed: int) -> int:
        """The xxh3_64 of what was written.

        read, written  dense bytes, equally many, as many as can_sum takes; they do not overlap
        """
        assert len(read) == len(written)
        assert can_sum(len(read))
        checksum = ctypes.c_uint64()
        self._run(read.ctypes.data, written.ctypes.data, len(read), seed, ctypes.addressof(checksum))
        return checksum.value


@cache
def load_summed_copy() -> SummedCopy | None:
    """The compiled function, or None on a machine that cannot compile it, or has no AVX-512."""
    try:
        library = load_library()
        return SummedCopy(library) if library.copies_summed() else None
    except LibraryError:
        # Said already by whoever loaded the kernels of the model.
        return None
