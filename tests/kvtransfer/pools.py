"""Pools with known content, for the tests of shared memory. Run as a program it owns and serves one."""

import asyncio
import json
import sys
from dataclasses import asdict

from pdserve.core.ids import BlockHash, BlockId, Epoch
from pdserve.core.kv_spec import KVSpec
from pdserve.engine.checksum import block_checksum
from pdserve.engine.kv_pool import KVPool, buffer_bytes
from pdserve.kvtransfer.pull import BlockCopy
from pdserve.kvtransfer.shm import PoolMemory, PoolServer

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4)
# 2.25 MiB a block: more than one slice of a copy.
LARGE_SPEC = KVSpec(num_layers=9, num_kv_heads=8, head_dim=128, dtype="float32", block_size=32)
NUM_BLOCKS = 8
GENERATION = 7 << 32


def block_hash(block_id):
    return BlockHash(bytes([block_id]) * 16)


def content(spec, block_id):
    """The bytes of a block: each block's own, none repeating within 4 KB."""
    return (bytes((i * 31 + block_id) % 251 for i in range(251)) * (spec.payload_bytes // 251 + 1))[
        : spec.payload_bytes
    ]


def make_pool(spec=SPEC, num_blocks=NUM_BLOCKS, buffer=None):
    """A pool full of `content`, every block in generation GENERATION + its id."""
    pool = KVPool(spec, num_blocks, bytearray(buffer_bytes(spec, num_blocks)) if buffer is None else buffer)
    for block_id in range(num_blocks):
        pool.view.block(BlockId(block_id))[:] = content(spec, block_id)
        pool.set_generation(BlockId(block_id), GENERATION + block_id)
    return pool


def empty_pool(spec=SPEC, num_blocks=NUM_BLOCKS):
    return KVPool(spec, num_blocks, bytearray(buffer_bytes(spec, num_blocks)))


def make_copy(block_id, target, spec=SPEC, **changes):
    """The copy of one block of make_pool into block `target`, as its owner would announce it."""
    announced = {
        "hash": block_hash(block_id),
        "source": BlockId(block_id),
        "generation": GENERATION + block_id,
        "checksum": block_checksum(memoryview(content(spec, block_id)), block_hash(block_id)),
        "target": BlockId(target),
    }
    return BlockCopy(**(announced | changes))


async def own_pool():
    """Serve a pool until stdin ends; prints the epoch and the offer as a line of JSON."""
    memory = PoolMemory.create("pdserve-test", buffer_bytes(SPEC, NUM_BLOCKS))
    make_pool(buffer=memory.buffer)
    epoch = Epoch.new()
    async with PoolServer(memory, epoch, NUM_BLOCKS, SPEC.block_bytes) as server:
        print(json.dumps({"epoch": asdict(epoch), "offer": asdict(server.offer)}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    memory.close()


if __name__ == "__main__":
    asyncio.run(own_pool())
