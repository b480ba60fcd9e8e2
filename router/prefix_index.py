"""Which blocks a node can find by hash, as the router has been told: it steers, and never decides.

Follows the numbered deltas of the node's beats. A delta that does not go on from here is passed over: the next
Live names the position again. So a lost, repeated or late beat costs a beat. Owned by placement.Node, and
forgotten with the node's incarnation.
"""

from collections.abc import Sequence

from pdserve.core.cache_delta import BEGINNING, CacheDelta, CachePosition
from pdserve.core.ids import BlockHash


class PrefixIndex:
    """position: how far the node's index has been followed."""

    def __init__(self) -> None:
        self.position = BEGINNING
        self._hashes: set[BlockHash] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._hashes

    def apply(self, delta: CacheDelta) -> None:
        """Take in what has changed, if it goes on from this position or begins anew."""
        if delta.whole > self.position.whole and delta.since == 0:
            self._hashes.clear()
        elif (delta.whole, delta.since) != (self.position.whole, self.position.until):
            return
        self._hashes.difference_update(delta.removed)
        self._hashes.update(delta.added)
        self.position = CachePosition(delta.whole, delta.until)

    def num_leading(self, hashes: Sequence[BlockHash]) -> int:
        """Blocks at the start of a request that need not be computed there."""
        return next((i for i, block_hash in enumerate(hashes) if block_hash not in self._hashes), len(hashes))

    def num_found(self, hashes: Sequence[BlockHash]) -> int:
        """Blocks of a request that need not be moved there, wherever they stand in it."""
        return sum(block_hash in self._hashes for block_hash in hashes)
