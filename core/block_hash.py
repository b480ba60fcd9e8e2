"""Block hashes: names of KV content, equal on every node that computed the same thing.

    hash_i = blake2b(hash_{i-1} or root | u32 count | u32 ids, digest 16, key = K)
    root   = zeros, or the request's id where requests are not to find each other's blocks
    K      = blake2b-256(kv fingerprint | group | format | tenant salt)

A full block has count == block_size; a partial block's hash names it in messages only.
"""

import hashlib
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.core.ids import BlockHash, RequestId

NO_PARENT = BlockHash(bytes(16))


def common_root(request: RequestId) -> BlockHash:
    """Equal content has equal names, whoever computed it: requests find each other's blocks."""
    return NO_PARENT


def own_root(request: RequestId) -> BlockHash:
    """Names begin with the request itself: it finds its own blocks in every attempt, and nobody else's."""
    return BlockHash(request)


class PrefixCache(StrEnum):
    """The setting prefix_cache: whether requests share names."""

    ON = "on"
    OFF = "off"


def root_of(setting: PrefixCache) -> Callable[[RequestId], BlockHash]:
    return common_root if setting is PrefixCache.ON else own_root


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, the form in which they are hashed and sent."""
    return array("I", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    """The inverse of pack_token_ids; raises ValueError when the length is not a multiple of 4."""
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


@dataclass(frozen=True, slots=True)
class BlockHasher:
    """Hashes token ids block by block under one key.

    fingerprint  what KV means: checkpoint digest, RoPE, KVSpec (core.checkpoint.kv_fingerprint)
    salt         tenant salt, empty when prefixes may be shared by everyone
    root         of a request's first block: who shares names with whom
    """

    fingerprint: bytes
    block_size: int
    group: str = "full"
    format: str = "raw"
    salt: bytes = b""
    root: Callable[[RequestId], BlockHash] = common_root
    _key: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = (self.fingerprint, self.group.encode(), self.format.encode(), self.salt)
        material = b"".join(struct.pack("<I", len(part)) + part for part in parts)
        object.__setattr__(self, "_key", hashlib.blake2b(material, digest_size=32).digest())

    def extend(self, parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        """Hash of the block that follows `parent` and holds `token_ids` (1 to block_size of them)."""
        data = parent + struct.pack("<I", len(token_ids)) + pack_token_ids(token_ids)
        return BlockHash(hashlib.blake2b(data, digest_size=16, key=self._key).digest())

    def hashes(self, token_ids: Sequence[int], parent: BlockHash = NO_PARENT) -> list[BlockHash]:
        """One hash per block of `token_ids`; the last one is a partial block's when they do not fill it."""
        result = []
        for start in range(0, len(token_ids), self.block_size):
            parent = self.extend(parent, token_ids[start : start + self.block_size])
            result.append(parent)
        return result
