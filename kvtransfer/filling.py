"""Blocks on their way into this node's pool: one entry per hash, whoever wants it.

The first request that lacks a block owns its copy; later ones join and wait. When the owner ends
before the block is verified, the oldest joiner becomes the owner and copies into the same block.
Owned by the decode scheduler; holds no references of its own (owner and joiners each hold one).
"""

from dataclasses import dataclass, field

from pdserve.core.ids import BlockHash, BlockId


@dataclass(slots=True)
class Filling:
    block_id: BlockId
    owner: int
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

    def join(self, block_hash: BlockHash, key: int) -> BlockId:
        filling = self._entries[block_hash]
        filling.joiners.append(key)
        return filling.block_id

    def finish(self, block_hash: BlockHash) -> list[int]:
        """The block is verified: everybody who lacked it; the entry is gone."""
        filling = self._entries.pop(block_hash)
        return [filling.owner, *filling.joiners]

    def leave(self, key: int) -> list[tuple[BlockHash, BlockId, int]]:
        """Sequence `key` ends: returns (hash, block, new owner) for each entry that changes hands."""
        handed = []
        for block_hash, filling in list(self._entries.items()):
            if key in filling.joiners:
                filling.joiners.remove(key)
            if filling.owner != key:
                continue
            if filling.joiners:
                filling.owner = filling.joiners.pop(0)
                handed.append((block_hash, filling.block_id, filling.owner))
            else:
                del self._entries[block_hash]
        return handed
