"""How much of the memory for KV is empty while requests wait for it: python benchmarks/kv_waste.py.

Requests with the lengths of Azure's conversation trace go through one decode node's memory, as many at once as
fit; one step is one token of each. The memory is a block pool, or contiguous as it was before paging; all see the
same requests in the same line. Needs no model and prints a Markdown table; the figures are the same on every machine.

A slot holds the KV of one token. The kinds of waste are those of the PagedAttention paper (Kwon et al., SOSP 2023,
section 3.1), counted in each step:

    used         holds a token
    reservation  allocated, will hold a token of its request later
    internal     allocated, will never hold one
    growth       promised to a running request, not allocated yet (one block each; paged memory only)
    external     none of these, and no request in the line fits
"""

import argparse
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Protocol

from traces import Lengths, azure_conversation

from pdserve.core.admission import MAX_PASSES, AdmissionLine
from pdserve.core.ids import RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence

NUM_SLOTS = 1 << 18
BLOCK_SIZES = (16, 32, 64, 128)
# Steps that are not counted: the longest answer, so that nothing of the first fill, all young, is left.
WARM_UP = 1_000


@dataclass(frozen=True, slots=True)
class Split:
    """Slots of each kind; together they are the memory."""

    used: int
    reservation: int
    internal: int
    growth: int
    external: int

    @property
    def total(self) -> int:
        return sum(astuple(self))

    @property
    def waste(self) -> float:
        """Share of the allocated slots that hold nothing."""
        return 1 - self.used / (self.used + self.reservation + self.internal)


class Memory(Protocol):
    """Memory for the KV of running requests, which are named by their place in the trace."""

    @property
    def num_running(self) -> int: ...

    def start(self, key: int, lengths: Lengths) -> bool:
        """Admit a request, if it fits, with its prompt in memory; one that yielded goes on where it was."""
        ...

    def step(self) -> tuple[list[int], list[int]]:
        """One token more for each; who had to yield for it, and who is running its last step."""
        ...

    def end(self, key: int) -> None: ...

    def split(self) -> Split: ...


# ---- paged ---------------------------------------------------------------------------------------


class Paged:
    """A decode node's block pool: every running request is promised one block to grow into."""

    def __init__(self, num_slots: int, block_size: int):
        self.pool = BlockPool(num_slots // block_size)
        self.block_size = block_size
        self.running: dict[int, Sequence] = {}
        self._num_slots = num_slots
        self._lengths: dict[int, Lengths] = {}
        self._yielded: dict[int, Sequence] = {}

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_owed(self) -> int:
        """Blocks to grow into that nobody has reserved; new requests must leave them."""
        return sum(1 for sequence in self.running.values() if sequence.num_reserved == 0)

    def start(self, key: int, lengths: Lengths) -> bool:
        sequence = self._yielded.get(key) or make_sequence(key, lengths, self.block_size)
        # The last token's KV is computed by the step that follows.
        num_computed = sequence.num_tokens - 1
        num_blocks = -(-num_computed // self.block_size) + 1
        if not self.pool.can_reserve(num_blocks, keep=self.num_owed):
            return False
        self._yielded.pop(key, None)
        sequence.claim(self.pool, [], num_blocks)
        sequence.take_blocks(self.pool, num_computed)
        sequence.num_computed = num_computed
        self.running[key], self._lengths[key] = sequence, lengths
        return True

    def step(self) -> tuple[list[int], list[int]]:
        yielded: list[int] = []
        for key, sequence in list(self.running.items()):
            while key in self.running and not self._can_grow(sequence):
                # The newest one gives way, as on a decode node where all are equally important.
                newest = max(self.running)
                self._yielded[newest] = self.running.pop(newest)
                self._yielded[newest].give_back(self.pool)
                yielded.append(newest)
            if key in self.running:
                sequence.take_blocks(self.pool, sequence.num_computed + 1)
                sequence.num_computed += 1
        last = [key for key, s in self.running.items() if s.num_outputs == self._lengths[key].num_output - 1]
        for sequence in self.running.values():
            sequence.tokens.append(0)
        return yielded, last

    def _can_grow(self, sequence: Sequence) -> bool:
        """Whether the next token has a slot; reserves a block for it where one is needed and free."""
        if sequence.num_computed < len(sequence.block_ids) * self.block_size or sequence.num_reserved:
            return True
        if self.pool.room < 1:
            return False
        self.pool.reserve(1)
        sequence.num_reserved = 1
        return True

    def end(self, key: int) -> None:
        self.running.pop(key).give_back(self.pool)
        del self._lengths[key]

    def split(self) -> Split:
        used = reservation = internal = 0
        for key, sequence in self.running.items():
            allocated, final = len(sequence.block_ids) * self.block_size, num_final(self._lengths[key])
            used += sequence.num_computed
            reservation += min(allocated, final) - sequence.num_computed
            internal += max(0, allocated - final)
        growth = (self.pool.num_reserved + min(self.num_owed, self.pool.room)) * self.block_size
        return Split(
            used, reservation, internal, growth, self._num_slots - self.pool.num_held * self.block_size - growth
        )


def make_sequence(key: int, lengths: Lengths, block_size: int) -> Sequence:
    """A request as a decode node gets it, with its first token; what its tokens are does not matter."""
    tokens = [0] * (lengths.num_prompt + 1)
    return Sequence(
        key, RequestId(key.to_bytes(16, "little")), 1, tokens, lengths.num_prompt, SamplingParams(), [], block_size
    )


def num_final(lengths: Lengths) -> int:
    """Slots that a request uses in the end: nothing is computed from an answer's last token."""
    return lengths.num_prompt + lengths.num_output - 1


# ---- contiguous ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    start: int
    size: int
    num_final: int


class Contiguous:
    """One region a request, of a size that is fixed when it starts; the first hole that is large enough is taken."""

    def __init__(self, num_slots: int, size_of: Callable[[Lengths], int]):
        self._num_slots = num_slots
        self._size_of = size_of
        self.regions: dict[int, Region] = {}
        self._last_steps: list[tuple[int, int]] = []
        self._num_steps = 0
        self._num_used = 0

    @property
    def num_running(self) -> int:
        return len(self.regions)

    def start(self, key: int, lengths: Lengths) -> bool:
        size = self._size_of(lengths)
        start = self._find(size)
        if start is None:
            return False
        self.regions[key] = Region(start, size, num_final(lengths))
        self._num_used += lengths.num_prompt
        heapq.heappush(self._last_steps, (self._num_steps + lengths.num_output - 1, key))
        return True

    def _find(self, size: int) -> int | None:
        free_from = 0
        for region in sorted(self.regions.values(), key=lambda region: region.start):
            if region.start - free_from >= size:
                break
            free_from = region.start + region.size
        return free_from if free_from + size <= self._num_slots else None

    def step(self) -> tuple[list[int], list[int]]:
        self._num_steps += 1
        self._num_used += len(self.regions)
        last = []
        while self._last_steps and self._last_steps[0][0] == self._num_steps:
            last.append(heapq.heappop(self._last_steps)[1])
        return [], last

    def end(self, key: int) -> None:
        self._num_used -= self.regions.pop(key).num_final

    def split(self) -> Split:
        allocated = sum(region.size for region in self.regions.values())
        final = sum(region.num_final for region in self.regions.values())
        return Split(self._num_used, final - self._num_used, allocated - final, 0, self._num_slots - allocated)


# ---- the run -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Sums over the counted steps; in each of them requests waited."""

    num_steps: int
    num_running: int
    num_yielded: int
    split: Split


def fill(memory: Memory, requests: list[Lengths]) -> Run:
    """Keep the memory full until nobody waits any more.

    Raises ValueError for a request that fits into no empty memory, and for too few to fill it for long.
    """
    line = Line(memory, requests)
    num_steps = num_running = num_yielded = 0
    sums: tuple[int, ...] = (0, 0, 0, 0, 0)
    line.admit()
    for step in itertools.count():
        if not line.num_waiting:
            break
        if not memory.num_running:
            raise ValueError("a request does not fit into the empty memory")
        yielded, last = memory.step()
        if step >= WARM_UP:
            num_steps += 1
            num_running += memory.num_running
            num_yielded += len(yielded)
            sums = tuple(map(sum, zip(sums, astuple(memory.split()), strict=True)))
        for key in last:
            memory.end(key)
        if yielded or last:
            line.admit(yielded)
    if not num_steps:
        raise ValueError(f"nobody waited any more after {WARM_UP} steps: more requests are needed, or fewer slots")
    return Run(num_steps, num_running, num_yielded, Split(*sums))


class Line:
    """The decode node's: first come, first served, the head passed a bounded number of times."""

    def __init__(self, memory: Memory, requests: list[Lengths]):
        self._line = AdmissionLine()
        self._memory = memory
        self._requests = requests
        self._arrivals: Iterator[int] = iter(range(len(requests)))

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def admit(self, yielded: Iterable[int] = ()) -> None:
        """Start who fits; there are always as many in the line as are looked at."""
        for key in yielded:
            self._line.join(key, 0, resumed=True)
        admitted = [0]
        while admitted:
            for key in itertools.islice(self._arrivals, max(0, MAX_PASSES - len(self._line))):
                self._line.join(key, 0, resumed=False)
            admitted = self._line.admit(lambda key: self._memory.start(key, self._requests[key]))


# ---- the table -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=NUM_SLOTS, help="tokens that the memory holds")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=BLOCK_SIZES)
    parser.add_argument("--num-requests", type=int, help="only so many from the start of the trace")
    options = parser.parse_args()
    requests = azure_conversation()[: options.num_requests]
    lines = [
        f"{len(requests):,} requests, {options.slots:,} slots",
        "",
        "| memory | requests at once | used | reservation | internal | growth | external | waste | yielded |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    try:
        for name, memory in memories(options.slots, options.block_sizes, requests):
            lines.append(row(name, fill(memory, requests)))
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(lines))


def memories(num_slots: int, block_sizes: Iterable[int], requests: list[Lengths]) -> Iterator[tuple[str, Memory]]:
    """Our own, then what was usual before paging, the last two with knowledge that no server has."""
    for block_size in block_sizes:
        yield f"paged, blocks of {block_size}", Paged(num_slots, block_size)
    longest = max(map(num_final, requests))
    yield f"contiguous, {longest:,} slots each", Contiguous(num_slots, lambda _: longest)
    yield "contiguous, answer up to a power of two", Contiguous(num_slots, up_to_power_of_two)
    yield "contiguous, final length known", Contiguous(num_slots, num_final)


def up_to_power_of_two(lengths: Lengths) -> int:
    """The prompt and at most twice the answer, as section 6.1 of the paper assumes for Orca."""
    return lengths.num_prompt + (1 << (lengths.num_output - 1).bit_length())


def row(name: str, run: Run) -> str:
    """Means over the counted steps: shares of the memory, the waste as one of what is allocated. Who yielded: a sum."""
    cells = [name, f"{run.num_running / run.num_steps:.1f}"]
    cells += [f"{slots / run.split.total:.1%}" for slots in astuple(run.split)]
    return "| " + " | ".join([*cells, f"{run.split.waste:.1%}", str(run.num_yielded)]) + " |"


if __name__ == "__main__":
    main()
