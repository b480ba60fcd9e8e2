"""What a node's prefix index holds, told in numbered pieces: how far a reader is, and what has changed since.

Every change of a node's index has a number, counted from 1 in each incarnation. These two travel in the beats.
"""

from dataclasses import dataclass

from pdserve.core.ids import BlockHash


@dataclass(frozen=True, slots=True)
class CachePosition:
    """How far a reader has followed a node's index.

    whole  number at which it threw away all it knew and began anew; 0: it began with an empty index
    until  the last change it has taken in since then
    """

    whole: int = 0
    until: int = 0


BEGINNING = CachePosition()


@dataclass(frozen=True, slots=True)
class CacheDelta:
    """The changes numbered since + 1 to until, each hash once as it stands now; what changed again later is left out.

    It goes on from CachePosition(whole, since); with a `whole` that the reader does not know yet, since is 0 and all
    that the reader knew is void.
    """

    whole: int
    since: int
    until: int
    added: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
