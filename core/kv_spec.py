"""What one KV block holds: the shapes and dtype that two nodes must share before a byte moves."""

import hashlib
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

PAGE_BYTES = 4096
HEADER_BYTES = 64


def data_offset(num_blocks: int) -> int:
    """Bytes of a pool before block 0: its header and the generation of each block, rounded up to whole pages."""
    return -(-(HEADER_BYTES + 8 * num_blocks) // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Layout of a block: [kv_head, layer, kv(2), block_size, head_dim], all layers contiguous.

    A slice of kv heads is one contiguous span, so a tensor-parallel rank pulls one span a block.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 32
    group: str = "full"
    format: str = "raw"

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token: layers * kv heads * 2 (K and V) * head_dim * bytes of the dtype."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def payload_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes from one block to the next: the payload rounded up to whole pages."""
        return -(-self.payload_bytes // PAGE_BYTES) * PAGE_BYTES

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_within(self, num_bytes: int) -> int:
        """Blocks of the largest pool that takes so many bytes, its header included."""
        most = num_bytes // self.block_bytes
        return max(0, (num_bytes - data_offset(most)) // self.block_bytes)

    def digest(self) -> str:
        text = "|".join(f"{name}={getattr(self, name)}" for name in self.__slots__)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
