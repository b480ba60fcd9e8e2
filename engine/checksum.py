"""The checksum of a block: computed once by its owner (Engine), compared by everyone who copies it (kvtransfer).

xxh3_64 of the bytes, seeded by the first 8 bytes of the block's hash, little-endian: a block copied from the
wrong place fails even where its bytes are intact. xxhash lets go of the GIL for more than 64 KiB, whether it is
given a block at once or in pieces (measured with 4.1: while it reads 512 MiB, another thread runs on).
"""

import numpy as np
import xxhash

from pdserve.core.ids import BlockHash
from pdserve.kernels.summed_copy import can_sum, load_summed_copy


def block_checksum(data: memoryview, block_hash: BlockHash) -> int:
    """Nothing is copied."""
    return xxhash.xxh3_64_intdigest(data, _seed(block_hash))


def running_checksum(block_hash: BlockHash) -> xxhash.xxh3_64:
    """Updated with a block's bytes in order, piece by piece, its intdigest() is their block_checksum."""
    return xxhash.xxh3_64(seed=_seed(block_hash))


def load_copy() -> None:
    """Compile what copy_and_sum runs if this machine has not yet, so that no first copy waits for it."""
    load_summed_copy()


def copy_and_sum(block: memoryview, copied: memoryview, block_hash: BlockHash) -> int | None:
    """Copy a block and return the checksum of what was written, from one pass over it and without the GIL.

    None, and nothing is copied, where it takes two: on a machine that has no such function, and for a block of another
    length than it is made for. The two are equally long and do not overlap.
    """
    native = load_summed_copy()
    if native is None or not can_sum(len(block)):
        return None
    return native(np.frombuffer(block, np.uint8), np.frombuffer(copied, np.uint8), _seed(block_hash))


def _seed(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[:8], "little")
