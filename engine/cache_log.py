"""What has changed in a pool's prefix index, numbered, so that a reader can follow it from any position.

    number    1   2   3   4   5      a was added, removed (3) and added again (5); b added; c added
    hash      a   b   a   c   a      since 0: added b, c, a up to 5; since 2: added c, a; since 5: nothing

Only the latest change of a hash counts, so a reader may lose, repeat or delay what it is told: it names its
position again. Of removals the newest max_removed are remembered; who is behind those begins anew. Memory is
bounded by that and by the hashes that are present. Owned by BlockPool, which reports every change.
"""

from bisect import bisect_right
from collections import OrderedDict

from pdserve.core.cache_delta import CacheDelta, CachePosition
from pdserve.core.ids import BlockHash

# Hashes in one delta, 18 bytes each on the wire: 74 KB and about a millisecond to decode in a beat.
MAX_DELTA_HASHES = 4096
# Changes that are outdated are swept when they are as many as those that count, and at least so many.
MIN_SWEEP = 64


class CacheLog:
    """max_removed: how many removals are remembered. number: of the latest change."""

    def __init__(self, max_removed: int):
        self.number = 0
        self._max_removed = max_removed
        self._latest: dict[BlockHash, int] = {}
        self._removed: OrderedDict[BlockHash, None] = OrderedDict()
        # Removals up to this number may have been forgotten.
        self._forgotten = 0
        self._numbers: list[int] = []
        self._hashes: list[BlockHash] = []

    def __len__(self) -> int:
        """Changes that are kept, outdated ones included."""
        return len(self._numbers)

    @property
    def num_present(self) -> int:
        """Hashes that are found now."""
        return len(self._latest) - len(self._removed)

    def add(self, block_hash: BlockHash) -> None:
        """The hash is found from now on."""
        self._removed.pop(block_hash, None)
        self._note(block_hash)

    def remove(self, block_hash: BlockHash) -> None:
        """The hash is found no longer."""
        self._note(block_hash)
        self._removed[block_hash] = None
        if len(self._removed) > self._max_removed:
            oldest, _ = self._removed.popitem(last=False)
            self._forgotten = self._latest.pop(oldest)

    def delta(self, position: CachePosition, max_hashes: int = MAX_DELTA_HASHES) -> CacheDelta:
        """The next changes for a reader at `position`, oldest first, as many as name max_hashes hashes."""
        if max(position.whole, position.until) < self._forgotten:
            position = CachePosition(self.number, 0)
        added: list[BlockHash] = []
        removed: list[BlockHash] = []
        until = position.until
        for at in range(bisect_right(self._numbers, until), len(self._numbers)):
            if len(added) + len(removed) == max_hashes:
                return CacheDelta(position.whole, position.until, until, tuple(added), tuple(removed))
            until, block_hash = self._numbers[at], self._hashes[at]
            if self._latest.get(block_hash) != until:
                continue
            if block_hash not in self._removed:
                added.append(block_hash)
            elif until > position.whole:
                # What was removed before the reader began anew, it has never heard of.
                removed.append(block_hash)
        return CacheDelta(position.whole, position.until, self.number, tuple(added), tuple(removed))

    def _note(self, block_hash: BlockHash) -> None:
        self.number += 1
        self._latest[block_hash] = self.number
        self._numbers.append(self.number)
        self._hashes.append(block_hash)
        if len(self._numbers) > 2 * len(self._latest) + MIN_SWEEP:
            kept = [(n, h) for n, h in zip(self._numbers, self._hashes, strict=True) if self._latest.get(h) == n]
            self._numbers, self._hashes = [n for n, _ in kept], [h for _, h in kept]
