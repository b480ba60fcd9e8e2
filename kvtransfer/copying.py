"""Blocks into our own pool, each verified over our own bytes before anybody may use it.

Called in the copy worker of a decode node, mostly without the GIL; nobody else may write the targets. A prefill
node looks at its own blocks with `check_own` when a peer has read one wrong.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.cluster.messages import HaveEntry
from pdserve.core.block_hash import NO_PARENT
from pdserve.core.errors import LayoutError
from pdserve.core.ids import BlockHash, BlockId
from pdserve.engine.checksum import block_checksum, copy_and_sum, running_checksum
from pdserve.engine.kv_pool import KVPool, PoolView
from pdserve.kvtransfer.pull import BlockCopy, Verdict

# Where copying and summing take two passes: copied, then read once more for the checksum while it lies in the core's
# L2. The fastest of 32 KiB to 8 MiB on cores with 1 MiB of it (November 2026); smaller ones spend their time in Python.
# Between two calls the worker can lose the GIL and the core.
SLICE_BYTES = 512 << 10
# 1 to 3 ms of reading.
SPEED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict per block, in order, and the busy seconds of copying and of summing what was written.

    verify_s is 0 where one pass does both.
    """

    verdicts: tuple[Verdict, ...]
    copy_s: float
    verify_s: float

    @property
    def busy_s(self) -> float:
        return self.copy_s + self.verify_s


@dataclass(slots=True)
class Watch:
    """Seconds spent on nothing but checksums so far."""

    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckBlocks:
    """Action: look whether these blocks of our own still have their checksums, then report BlocksChecked."""

    entries: tuple[HaveEntry, ...]


@dataclass(frozen=True, slots=True)
class BlocksChecked:
    """Event: those of a CheckBlocks that have not."""

    bad: tuple[HaveEntry, ...]


def check_own(pool: PoolView, entries: Sequence[HaveEntry]) -> BlocksChecked:
    """Compare blocks with the checksums they were announced with; one that has been reassigned is not judged."""
    mine = [entry for entry in entries if int(pool.generations[entry.block_id]) == entry.generation]
    return BlocksChecked(
        tuple(entry for entry in mine if block_checksum(pool.block(entry.block_id), entry.hash) != entry.checksum)
    )


def copy_and_verify(source: PoolView, target: KVPool, copies: Sequence[BlockCopy]) -> Judged:
    """Copy blocks out of a peer's pool and check that they are what was announced.

    Only blocks with Verdict.OK may be used, the content of the other targets is undefined. Runs in a worker thread,
    mostly without the GIL; nobody else may write the targets. Raises LayoutError when the two pools do not fit or a
    target is not in our pool.
    """
    if source.spec != target.spec:
        raise LayoutError(f"cannot copy between pools of {source.spec} and {target.spec}")
    return _each(target, copies, lambda copy, watch: _copy_block(source, target, copy, watch))


def take_and_verify(target: KVPool, copies: Sequence[BlockCopy]) -> Judged:
    """The same for blocks whose bytes came in frames."""
    return _each(target, copies, lambda copy, watch: _take_block(target, copy, watch))


def copy_out(
    pool: KVPool, host: PoolView, block_ids: Sequence[BlockId], slots: Sequence[int]
) -> tuple[list[int], float]:
    """Copy blocks of our own into slots of the host pool; nobody writes either meanwhile.

    Returns the checksum of each, seeded as that of a block without a name, and the seconds it took.
    """
    started = time.perf_counter()
    checksums, watch = [], Watch()
    for block_id, slot in zip(block_ids, slots, strict=True):
        pool.publish(block_id)
        checksums.append(_copy_summed(pool.view.block(block_id), host.block(BlockId(slot)), NO_PARENT, watch))
    return checksums, time.perf_counter() - started


def read_speed(pool: PoolView) -> float:
    """Bytes a second that are copied out of a pool, over its first blocks; the first reading only maps their pages."""
    num_blocks = min(pool.num_blocks, max(1, SPEED_BYTES // pool.spec.payload_bytes))
    scratch = np.empty(pool.spec.payload_bytes, np.uint8)
    took_s = 0.0
    for _ in range(2):
        started = time.perf_counter()
        for block_id in range(num_blocks):
            np.copyto(scratch, np.frombuffer(pool.block(BlockId(block_id)), np.uint8))
        took_s = time.perf_counter() - started
    return num_blocks * len(scratch) / took_s


def _each(target: KVPool, copies: Sequence[BlockCopy], judge: Callable[[BlockCopy, Watch], Verdict]) -> Judged:
    started, watch = time.perf_counter(), Watch()
    for copy in copies:
        if not 0 <= copy.target < target.num_blocks:
            raise LayoutError(f"target block {copy.target} is not in a pool of {target.num_blocks}")
    verdicts = tuple(judge(copy, watch) for copy in copies)
    target.adopt([copy.target for copy, verdict in zip(copies, verdicts, strict=True) if verdict is Verdict.OK])
    return Judged(verdicts, time.perf_counter() - started - watch.verify_s, watch.verify_s)


def _copy_block(source: PoolView, target: KVPool, copy: BlockCopy, watch: Watch) -> Verdict:
    if not 0 <= copy.source < source.num_blocks:
        return Verdict.CORRUPT
    # A seqlock: the owner bumps the generation before it writes the block again.
    if int(source.generations[copy.source]) != copy.generation:
        return Verdict.MOVED
    checksum = _copy_bytes(source.block(copy.source), target, copy, watch)
    if int(source.generations[copy.source]) != copy.generation:
        return Verdict.MOVED
    return _judge(checksum, copy)


def _take_block(target: KVPool, copy: BlockCopy, watch: Watch) -> Verdict:
    if copy.payload is None or len(copy.payload) != len(target.view.block(copy.target)):
        return Verdict.CORRUPT
    return _judge(_copy_bytes(copy.payload, target, copy, watch), copy)


def _copy_bytes(block: memoryview, target: KVPool, copy: BlockCopy, watch: Watch) -> int:
    return _copy_summed(block, target.view.block(copy.target), copy.hash, watch)


def _copy_summed(block: memoryview, copied: memoryview, block_hash: BlockHash, watch: Watch) -> int:
    """Returns the checksum of what was written: what was checked is what will be used."""
    summed = copy_and_sum(block, copied, block_hash)
    if summed is not None:
        return summed
    read, written = np.frombuffer(block, np.uint8), np.frombuffer(copied, np.uint8)
    checksum = running_checksum(block_hash)
    for start in range(0, len(read), SLICE_BYTES):
        end = start + SLICE_BYTES
        np.copyto(written[start:end], read[start:end])
        copied_at = time.perf_counter()
        checksum.update(copied[start:end])
        watch.verify_s += time.perf_counter() - copied_at
    return checksum.intdigest()


def _judge(checksum: int, copy: BlockCopy) -> Verdict:
    return Verdict.OK if checksum == copy.checksum else Verdict.CORRUPT
