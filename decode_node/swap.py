"""The host pool: where a sequence that yields leaves its blocks, and what it is told by.

    RUNNING ── SwapOut ──► SWAPPING_OUT ── SwappedOut ──► QUEUED ── blocks reserved, SwapIn ──► SWAPPING_IN
       ▲                                                                                           │
       └── SwappedIn, every block verified ◄───────────────────────────────────────────────────────┘

Slots are of a block each. Copies run in the copy worker, beside steps; a block that comes back is verified like one
from another node. Pure: SwapSpace belongs to Reservations, Preemption sends sequences out, DecodeNode has the bytes.
"""

from dataclasses import dataclass

from pdserve.core.ids import BlockId
from pdserve.kvtransfer.pull import BlockCopy, Verdict


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Action: copy these blocks into these slots, then report SwappedOut."""

    key: int
    block_ids: tuple[BlockId, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwappedOut:
    """Event: the checksum of each block, in order."""

    key: int
    checksums: tuple[int, ...]
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Action: copy slots, the sources, into blocks and verify them, then report SwappedIn."""

    key: int
    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """Event: the verdict on each block, in order."""

    key: int
    verdicts: tuple[Verdict, ...]
    busy_s: float = 0.0


@dataclass(slots=True)
class Swapped:
    """What one sequence has in the host pool: a slot a block, up to num_computed tokens."""

    slots: tuple[int, ...]
    num_computed: int
    checksums: tuple[int, ...] = ()


class SwapSpace:
    """num_slots blocks; who takes a slot gives it back."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_slots: int) -> tuple[int, ...]:
        assert num_slots <= len(self._free), f"{num_slots} slots taken of {len(self._free)}"
        taken, self._free = self._free[:num_slots], self._free[num_slots:]
        return tuple(taken)

    def give_back(self, swapped: Swapped) -> None:
        self._free += swapped.slots
