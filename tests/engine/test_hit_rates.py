"""Hits of the block pool on a published conversation trace, against the policy written down by itself."""

import numpy as np
import pytest
from hit_rates import Replay, blocks_found, named
from traces import (
    MOONCAKE_BLOCK_TOKENS,
    NO_BLOCK,
    azure_conversation,
    mooncake_conversation,
    pack_prefixes,
    unpack_prefixes,
)

from pdserve.core.ids import BlockHash
from pdserve.engine.block_pool import BlockPool

# One prompt after the other; and several computed at the same time, others' blocks leased meanwhile.
ONE_BY_ONE, OVERLAPPING = (0, 0), (2, 6)
NUM_DIFFERENT = 182_790


class Oracle:
    """The stated policy, block by block of the trace, with nothing of the pool in it.

    A memory of `num_blocks` places. A prompt uses the longest run of its first blocks that are named, and one new
    place for each other block. Once computed, a new place is named after its block, unless one is already; it
    stays nameless then, and is empty when its prompt is released. Named places that nobody uses are kept. When a
    prompt needs more places than are empty, those go whose last user was released the longest ago, and of one
    prompt's the last first.
    """

    def __init__(self, num_blocks: int, num_computing: int = 0, num_parked: int = 0):
        self.num_blocks = num_blocks
        self.num_computing = num_computing
        self.num_parked = num_parked
        self.computing: list[tuple[list[int], list[int]]] = []
        self.parked: list[tuple[list[int], int]] = []
        self.is_named = np.zeros(NUM_DIFFERENT, bool)
        self.num_users = np.zeros(NUM_DIFFERENT, np.int64)
        self.last_used = np.zeros(NUM_DIFFERENT, np.int64)
        self.num_nameless = 0
        self.now = 0

    def arrive(self, prompt: list[int]) -> int | None:
        """How many of the prompt's tokens are found; None when it fits into no empty memory."""
        if len(prompt) > self.num_blocks:
            return None
        while not self.fits(prompt):
            if self.parked:
                self.settle(len(self.computing), len(self.parked) - 1)
            else:
                self.settle(len(self.computing) - 1, 0)
        used, new = self.split(prompt)
        self.admit(used, new)
        self.computing.append((used, new))
        self.settle(self.num_computing, self.num_parked)
        # At most n - 1 of a prompt's n tokens are looked up: the last one is run.
        return min(len(used) * MOONCAKE_BLOCK_TOKENS, len(prompt) * MOONCAKE_BLOCK_TOKENS - 1)

    def settle(self, num_computing: int, num_parked: int) -> None:
        """Compute and release the oldest, until so many are left."""
        while len(self.computing) > num_computing:
            self.parked.append(self.compute(*self.computing.pop(0)))
        while len(self.parked) > num_parked:
            self.release(*self.parked.pop(0))

    def split(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """What a look-up finds of a prompt, and the rest."""
        missing = np.flatnonzero(~self.is_named[prompt])
        num_found = int(missing[0]) if len(missing) else len(prompt)
        return prompt[:num_found], prompt[num_found:]

    def fits(self, prompt: list[int]) -> bool:
        in_use = np.count_nonzero(self.is_named & (self.num_users > 0)) + self.num_nameless
        used, new = self.split(prompt)
        return in_use + np.count_nonzero(self.num_users[used] == 0) + len(new) <= self.num_blocks

    def admit(self, used: list[int], new: list[int]) -> None:
        self.num_users[used] += 1
        num_empty = self.num_blocks - np.count_nonzero(self.is_named) - self.num_nameless
        num_evicted = len(new) - num_empty
        if num_evicted > 0:
            idle = np.flatnonzero(self.is_named & (self.num_users == 0))
            oldest = np.argpartition(self.last_used[idle], num_evicted - 1)[:num_evicted]
            self.is_named[idle[oldest]] = False
        self.num_nameless += len(new)

    def compute(self, used: list[int], new: list[int]) -> tuple[list[int], int]:
        """Names the new places; returns the prompt's named ones, and how many stay nameless."""
        own = [block for block in new if not self.is_named[block]]
        self.is_named[own] = True
        self.num_users[own] = 1
        self.num_nameless -= len(own)
        # A block's place in the prompt decides among those of one release.
        return [*used, *own], len(new) - len(own)

    def release(self, places: list[int], num_nameless: int) -> None:
        self.now += 1
        self.num_users[places] -= 1
        self.last_used[places] = self.now * 1024 - np.arange(len(places))
        self.num_nameless -= num_nameless


def found_by_both(prompts: list[list[int]], num_blocks: int, flow: tuple[int, int]) -> int:
    """Pool and oracle find the same of each prompt; the tokens of all. The pool is left as it should be."""
    replay, oracle = Replay(BlockPool(num_blocks), *flow), Oracle(num_blocks, *flow)
    found = [replay.arrive(*arrival) for arrival in enumerate(named(prompts))]
    assert found == [oracle.arrive(prompt) for prompt in prompts]
    replay.end()
    replay.pool.check([])
    assert (replay.pool.num_held, replay.pool.num_leased, replay.pool.num_reserved) == (0, 0, 0)
    return sum(num_tokens or 0 for num_tokens in found)


@pytest.mark.parametrize("flow", [ONE_BY_ONE, OVERLAPPING], ids=["one by one", "overlapping"])
# At 2,000 and 3,000 prompts come back whose end has just been evicted, so the order within a prompt matters, too.
@pytest.mark.parametrize("num_blocks", [150, 2_000, 3_000, 30_000])
def test_of_the_first_prompts_the_pool_finds_what_the_policy_says(num_blocks: int, flow: tuple[int, int]):
    assert found_by_both(mooncake_conversation()[:1_200], num_blocks, flow) > 0


@pytest.mark.slow
@pytest.mark.parametrize("flow", [ONE_BY_ONE, OVERLAPPING], ids=["one by one", "overlapping"])
@pytest.mark.parametrize("num_blocks", [1_000, 5_000, 20_000, 60_000, 200_000])
def test_of_the_whole_trace_the_pool_finds_what_the_policy_says(num_blocks: int, flow: tuple[int, int]):
    assert found_by_both(mooncake_conversation(), num_blocks, flow) > 0


def test_a_pool_that_holds_everything_finds_what_has_come_before_and_nothing_else():
    assert blocks_found(named(mooncake_conversation()), NUM_DIFFERENT) == 288_500 - NUM_DIFFERENT  # 36.6 %


def test_a_prompt_that_is_found_whole_saves_all_tokens_but_the_last():
    replay = Replay(BlockPool(2))
    prompts = named([[0, 1], [0, 1]])
    assert [replay.arrive(*arrival) for arrival in enumerate(prompts)] == [0, 2 * MOONCAKE_BLOCK_TOKENS - 1]


# ---- what a look-up costs ------------------------------------------------------------------------


class CountedHash(bytes):
    """A block hash that counts how often a table is asked for it, once for each time its hash is taken."""

    num_lookups = 0

    def __hash__(self) -> int:
        CountedHash.num_lookups += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


def lookups(pool: BlockPool, hashes: list[BlockHash]) -> tuple[int, int]:
    """How many blocks a look-up finds, and how often the index was asked."""
    counted = [BlockHash(CountedHash(block_hash)) for block_hash in hashes]
    CountedHash.num_lookups = 0
    return len(pool.match(counted)), CountedHash.num_lookups


@pytest.mark.parametrize("num_others", [0, 1_000, 20_000])
def test_a_look_up_asks_once_for_each_block_and_once_for_the_first_missing_however_full_the_pool_is(num_others: int):
    pool = BlockPool(num_others + 100)
    others = [[1_000 + number] for number in range(num_others)]
    (prompt,) = named([list(range(100))])
    replay = Replay(pool)
    for arrival in enumerate([*named(others), prompt[:60]]):
        replay.arrive(*arrival)
    assert pool.num_cached == num_others + 60
    assert lookups(pool, prompt[:60]) == (60, 60)
    assert lookups(pool, prompt) == (60, 61)
    assert lookups(pool, prompt[1:]) == (59, 60)
    assert lookups(pool, prompt[60:]) == (0, 1)


# ---- the trace's file ----------------------------------------------------------------------------


def test_the_files_hold_the_traces_that_were_published():
    """Figures of the publishers' files, as they were when these were made of them."""
    prompts, lengths = mooncake_conversation(), azure_conversation()
    assert (len(prompts), sum(map(len, prompts)), len({b for p in prompts for b in p})) == (12_031, 288_500, 182_790)
    assert prompts[:2] == [list(range(14)), [0, *range(14, 28)]]
    assert (len(lengths), sum(r.num_prompt for r in lengths), sum(r.num_output for r in lengths)) == (
        19_366,
        22_361_870,
        4_088_665,
    )
    assert (lengths[0].num_prompt, lengths[0].num_output) == (374, 44)


@pytest.mark.parametrize(
    ("prompts", "pairs"),
    [
        ([[]], [(NO_BLOCK, 0)]),
        ([[0, 1], [0, 2], [0, 1]], [(NO_BLOCK, 2), (0, 1), (1, 0)]),
        ([[0], [1], [0]], [(NO_BLOCK, 1), (NO_BLOCK, 1), (0, 0)]),
    ],
)
def test_prefixes_are_packed_into_where_they_leave_the_tree_and_come_back(prompts: list, pairs: list):
    assert list(pack_prefixes(prompts)) == pairs
    assert list(unpack_prefixes(pairs)) == prompts


@pytest.mark.parametrize("prompts", [[[1]], [[0, 1], [1]], [[0], [1], [0, 1]], [[0], [1, 0]]])
def test_blocks_that_are_no_tree_in_order_of_appearance_are_refused(prompts: list):
    with pytest.raises(ValueError, match="cannot follow block"):
        list(pack_prefixes(prompts))
