"""Memory in huge pages, where the kernel gives them: for weights that every step reads from end to end.

With pages of 4 KiB the CPU looks up an address for each 4 KiB it reads, in a virtual machine twice over. Owned by the
kernels of one model; the memory lives as long as any tensor in it.
"""

import math
import mmap

import torch
from torch import Tensor

# Mapped at once; what does not fit into the rest of it begins a further one.
CHUNK_BYTES = 32 << 20
HUGE_PAGE_BYTES = 2 << 20
_ALIGNED_BYTES = 64


class HugePages:
    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A dense tensor of zeros."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._chunk is None or self._used + num_bytes > len(self._chunk):
            self._chunk = _map(num_bytes)
            self._used = 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=math.prod(shape), offset=self._used)
        self._used += -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return tensor.view(shape)


def _map(num_bytes: int) -> mmap.mmap:
    size = max(CHUNK_BYTES, -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Only Linux has this, and it is no more than a wish.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
