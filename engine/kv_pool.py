"""The KV pool's bytes: one flat buffer, block-major, and the header that peers read.

    offset 0                     magic, layout version, num_blocks, block_bytes   (4 x u64)
    offset 64                    generation of each block                         (num_blocks x u64)
    offset data_offset (page)    block 0, block 1, ...                            (block_bytes each)

    one block: [kv_head, layer, kv(2), block_size, head_dim], then padding to a whole page

Who owns which block is BlockPool's business; this class only knows where the bytes are. Written by
the engine thread and the copy worker, read by peers through a read-only map of the same buffer.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pdserve.core.errors import LayoutError
from pdserve.core.ids import BlockId
from pdserve.core.kv_spec import HEADER_BYTES, KVSpec, data_offset

MAGIC = int.from_bytes(b"pdserveK", "little")
LAYOUT_VERSION = 1


def buffer_bytes(spec: KVSpec, num_blocks: int) -> int:
    """Size of the whole buffer of a pool."""
    return data_offset(num_blocks) + num_blocks * spec.block_bytes


@dataclass(slots=True)
class PoolView:
    """A pool's buffer seen as bytes: the owner's own, or a peer's mapped read-only.

    buffer  any object with the buffer protocol, at least buffer_bytes(spec, num_blocks) long
    Raises LayoutError when the header does not describe the pool that was announced.
    """

    spec: KVSpec
    num_blocks: int
    buffer: Any
    generations: np.ndarray = field(init=False)  # [num_blocks] uint64
    _bytes: memoryview = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._bytes = memoryview(self.buffer).cast("B")
        needed = buffer_bytes(self.spec, self.num_blocks)
        if len(self._bytes) < needed:
            raise LayoutError(f"pool buffer has {len(self._bytes)} bytes, {needed} needed")
        self.generations = np.frombuffer(self._bytes, np.uint64, self.num_blocks, HEADER_BYTES)

    def check_header(self) -> None:
        """Raise LayoutError unless the buffer's own header agrees with the announced layout."""
        header = np.frombuffer(self._bytes, np.uint64, 4, 0).tolist()
        expected = [MAGIC, LAYOUT_VERSION, self.num_blocks, self.spec.block_bytes]
        if header != expected:
            raise LayoutError(f"pool header is {header}, announced was {expected}")

    def block(self, block_id: BlockId) -> memoryview:
        """The payload bytes of one block, no copy."""
        start = data_offset(self.num_blocks) + block_id * self.spec.block_bytes
        return self._bytes[start : start + self.spec.payload_bytes]

    def release(self) -> None:
        """Drop every view of the buffer so that its owner can close it."""
        self.generations = np.empty(0, np.uint64)
        self._bytes.release()


class KVPool:
    """The pool of this node.

    buffer  writable buffer of buffer_bytes(spec, num_blocks); the caller owns and closes it
    data    [num_blocks, kv_head, layer, kv(2), block_size, head_dim], strided: never .contiguous() on it

    On CUDA `data` is device memory, and the buffer is its staging copy on the host: `publish` brings a
    sealed block into it, where peers read it, `adopt` brings blocks that were pulled into it to the device.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, buffer: Any, device: str = "cpu"):
        self.spec = spec
        self.num_blocks = num_blocks
        self.view = PoolView(spec, num_blocks, buffer)
        header = np.frombuffer(self.view.buffer, np.uint64, 4, 0)
        header[:] = [MAGIC, LAYOUT_VERSION, num_blocks, spec.block_bytes]
        # What was announced of the pool that this node had before its restart must name nothing here.
        self.view.generations[:] = secrets.randbits(32) << 32
        staged = torch.frombuffer(buffer, dtype=torch.uint8, offset=data_offset(num_blocks))
        self._staged = self._shaped(staged[: num_blocks * spec.block_bytes])
        if device == "cpu":
            self.data = self._staged
        else:
            self.data = self._shaped(torch.zeros(num_blocks * spec.block_bytes, dtype=torch.uint8, device=device))

    def publish(self, block_id: BlockId) -> None:
        """Make the buffer hold what the block holds; waits for the block's writes. Nothing to do on a CPU."""
        if self._staged is not self.data:
            self._staged[block_id].copy_(self.data[block_id])

    def adopt(self, block_ids: Sequence[BlockId]) -> None:
        """Make blocks hold what the buffer holds of them. Nothing to do on a CPU."""
        if self._staged is not self.data:
            for block_id in block_ids:
                self.data[block_id].copy_(self._staged[block_id])

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        blocks = flat.view(self.num_blocks, spec.block_bytes)[:, : spec.payload_bytes]
        shape = (spec.num_kv_heads, spec.num_layers, 2, spec.block_size, spec.head_dim)
        return blocks.view(getattr(torch, spec.dtype)).unflatten(1, shape)

    def set_generation(self, block_id: BlockId, generation: int) -> None:
        self.view.generations[block_id] = generation
