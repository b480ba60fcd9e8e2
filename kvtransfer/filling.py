"""Blocks on their way into this node's pool: one entry per hash, whoever wants it.

The first request that lacks a block owns its copy; later ones join and wait. When the owner ends
before the block is verified, the oldest joiner becomes the owner and copies into the same block, but
never while a copy into it is in flight: that one's verdict decides.
Owned by the decode scheduler; holds no references of its own (owner and joiners each hold one).
"""

from dataclasses import dataclass, field

from pdserve.core.ids import BlockHash, BlockId


@dataclass(slots=True)
class Filling:
    """is_copying: a copy into the block is in flight, the owner's or that of one that owned it before."""

    block_id: BlockId
    owner: int
    is_copying: bool = False
    joiners: list[int] = field(default_factory=list)


class Fillings:
    def __init__(self) -> None:
        self._entries: dict[BlockHash, Filling] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, block_hash: BlockHash) -> Filling | None:
        return self._entries.get(block_hash)

    def own(self, block_hash: BlockHash, block_id: BlockId, key: int) -> None:
        self._entries[block_hash] = Filling(block_id, key)

    def begin(self, block_hash: BlockHash, block_id: BlockId) -> None:
        """A copy into this block starts; nothing for a block that nobody shares."""
        filling = self._entries.get(block_hash)
        if filling is not None and filling.block_id == block_id:
            filling.is_copying = True

    def end(self, block_hash: BlockHash, block_id: BlockId) -> Filling | None:
        """A copy into this block is over; its entry, or None when nobody waits for this block any more."""
        filling = self._entries.get(block_hash)
        if filling is None or filling.block_id != block_id:
            return None
        filling.is_copying = False
        return filling

    def join(self, block_hash: BlockHash, key: int) -> BlockId:
        filling = self._entries[block_hash]
        filling.joiners.append(key)
        return filling.block_id

    def finish(self, block_hash: BlockHash) -> list[int]:
        """The block is verified: everybody who lacked it; the entry is gone."""
        filling = self._entries.pop(block_hash)
        return [filling.owner, *filling.joiners]

    def leave(self, key: int) -> list[tuple[BlockHash, BlockId, int]]:
        """Sequence `key` ends: returns (hash, block, new owner) for each block that its heir may write now."""
        handed = []
        for block_hash, filling in list(self._entries.items()):
            if key in filling.joiners:
                filling.joiners.remove(key)
            if filling.owner != key:
                continue
            if filling.joiners:
                filling.owner = filling.joiners.pop(0)
                if not filling.is_copying:
                    handed.append((block_hash, filling.block_id, filling.owner))
            else:
                del self._entries[block_hash]
        return handed
