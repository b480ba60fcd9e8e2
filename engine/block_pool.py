"""Who owns which KV block: reservations, references, pins, the prefix index and the free queue.

    a block's state, by precedence           leaves it when
    held     refs > 0 (filling ones too)     the last reference is dropped
    leased   pins > 0                        the last pin is taken off
    cached   findable by hash, in the LRU    it is held again, or taken (evicted) for other content
    free     otherwise                       it is taken

Owned by the event loop; knows neither bytes nor torch. A reservation is a count: it promises that so
many `take` calls will succeed. Full blocks are immutable once committed; a partial block has no hash
here. `log` tells others what the index holds. `check` states the invariants and is run after every event in tests.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.core.errors import OutOfBlocksError
from pdserve.core.ids import BlockHash, BlockId
from pdserve.engine.cache_log import CacheLog


@dataclass(slots=True)
class Block:
    refs: int = 0
    pins: int = 0
    hash: BlockHash | None = None
    checksum: int | None = None


class Generations(Protocol):
    """A list of int, or the uint64 array in the header of a pool's buffer."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class BlockPool:
    """num_blocks blocks; `generations` is where each block's 64-bit generation is kept.

    The node passes the array inside the pool's own buffer, so that a bump is seen by every peer
    before the block's id reaches the engine thread.
    """

    def __init__(self, num_blocks: int, generations: Generations | None = None):
        self.num_blocks = num_blocks
        self.num_reserved = 0
        self.num_held = 0
        self.log = CacheLog(num_blocks)
        self._generations: Generations = generations if generations is not None else [0] * num_blocks
        self._blocks = [Block() for _ in range(num_blocks)]
        self._index: dict[BlockHash, BlockId] = {}
        self._free: deque[BlockId] = deque(BlockId(i) for i in range(num_blocks))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_leased(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached) - self.num_held

    @property
    def room(self) -> int:
        """Blocks that a new reservation could still be promised."""
        return len(self._free) + len(self._cached) - self.num_reserved

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the longest findable prefix of `hashes`; changes nothing."""
        found = []
        for block_hash in hashes:
            block_id = self._index.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def find(self, block_hash: BlockHash) -> BlockId | None:
        return self._index.get(block_hash)

    def can_reserve(self, num_blocks: int, hits: Iterable[BlockId] = (), keep: int = 0) -> bool:
        """Whether `num_blocks` can be promised after every block of `hits` is held and `keep` are left."""
        return num_blocks + keep + sum(1 for block_id in hits if block_id in self._cached) <= self.room

    def generation(self, block_id: BlockId) -> int:
        return int(self._generations[block_id])

    def num_refs(self, block_id: BlockId) -> int:
        return self._blocks[block_id].refs

    def checksum(self, block_id: BlockId) -> int | None:
        return self._blocks[block_id].checksum

    # ---- commands --------------------------------------------------------------------------------

    def reserve(self, num_blocks: int) -> None:
        if num_blocks > self.room:
            raise OutOfBlocksError(f"{num_blocks} blocks reserved with room for {self.room}")
        self.num_reserved += num_blocks

    def unreserve(self, num_blocks: int) -> None:
        if num_blocks > self.num_reserved:
            raise OutOfBlocksError(f"{num_blocks} blocks given back of {self.num_reserved} reserved")
        self.num_reserved -= num_blocks

    def take(self) -> BlockId:
        """One block of the caller's reservation, held once, for new content; evicts if it must."""
        if self.num_reserved == 0:
            raise OutOfBlocksError("a block was taken that nobody reserved")
        self.num_reserved -= 1
        if self._free:
            block_id = self._free.popleft()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._unindex(block_id)
        block = self._blocks[block_id]
        block.refs, block.checksum = 1, None
        self.num_held += 1
        # uint64 arrays refuse a wrapped Python int, and wrapping is harmless for an equality test.
        self._generations[block_id] = (int(self._generations[block_id]) + 1) % 2**64
        return block_id

    def hold(self, block_id: BlockId) -> None:
        """One more reference to a block that was found, is held or is leased."""
        block = self._blocks[block_id]
        self.num_held += block.refs == 0
        block.refs += 1
        self._cached.pop(block_id, None)

    def drop(self, block_ids: Sequence[BlockId]) -> None:
        """One reference less to each block of a prefix; its tail becomes evictable first."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.refs == 0:
                raise OutOfBlocksError(f"block {block_id} dropped once too often")
            block.refs -= 1
            self.num_held -= block.refs == 0
            self._settle(block_id)

    def pin(self, block_ids: Sequence[BlockId]) -> None:
        """A lease names these blocks; they must be held at this moment."""
        for block_id in block_ids:
            if self._blocks[block_id].refs == 0:
                raise OutOfBlocksError(f"block {block_id} leased while nobody holds it")
            self._blocks[block_id].pins += 1

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.pins == 0:
                raise OutOfBlocksError(f"block {block_id} unpinned once too often")
            block.pins -= 1
            self._settle(block_id)

    def commit(self, block_id: BlockId, block_hash: BlockHash, checksum: int | None) -> bool:
        """Make a full, held block findable. False when the hash is already indexed: the first one stays."""
        block = self._blocks[block_id]
        block.checksum = checksum
        if block_hash in self._index:
            return self._index[block_hash] == block_id
        block.hash = block_hash
        self._index[block_hash] = block_id
        self.log.add(block_hash)
        return True

    def note_checksum(self, block_id: BlockId, checksum: int) -> None:
        """Keep the checksum of a partial block, which no hash finds."""
        self._blocks[block_id].checksum = checksum

    def forget(self, block_hash: BlockHash) -> None:
        """Take a hash out of the index: its bytes are not what the name says."""
        block_id = self._index.get(block_hash)
        if block_id is not None:
            self._unindex(block_id)
            if block_id in self._cached:
                del self._cached[block_id]
                self._free.append(block_id)

    # ---- invariants ------------------------------------------------------------------------------

    def check(self, block_tables: Iterable[Sequence[BlockId]]) -> None:
        """Raise AssertionError unless the four states partition the pool and the counters agree.

        block_tables: those of every sequence of the node; a block's refs is how often they name it.
        """
        refs = Counter(block_id for table in block_tables for block_id in table)
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free queue"
        assert not free & cached, f"free and cached at once: {free & cached}"
        for index, block in enumerate(self._blocks):
            block_id = BlockId(index)
            assert block.refs == refs[block_id], (
                f"block {block_id}: {block}, block tables name it {refs[block_id]} times"
            )
            idle = block.refs == 0 and block.pins == 0
            assert (block_id in free) == (idle and block.hash is None), f"block {block_id}: {block}"
            assert (block_id in cached) == (idle and block.hash is not None), f"block {block_id}: {block}"
            if block.hash is not None:
                assert self._index.get(block.hash) == block_id, f"block {block_id} is not where its hash points"
        assert self.num_held == sum(block.refs > 0 for block in self._blocks)
        assert len(self._index) == sum(block.hash is not None for block in self._blocks)
        assert len(self._index) == self.log.num_present, "the log has missed a change of the index"
        assert 0 <= self.num_reserved <= len(free) + len(cached), f"{self.num_reserved} promised"

    def _settle(self, block_id: BlockId) -> None:
        block = self._blocks[block_id]
        if block.refs or block.pins:
            return
        if block.hash is not None:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def _unindex(self, block_id: BlockId) -> None:
        block = self._blocks[block_id]
        if block.hash is not None:
            del self._index[block.hash]
            self.log.remove(block.hash)
        block.hash = None
