"""BlockPool against a naive model, and each promise by itself."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.core.errors import OutOfBlocksError
from pdserve.core.ids import BlockHash
from pdserve.engine.block_pool import BlockPool


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def fill(pool: BlockPool, *numbers: int) -> list[int]:
    """Take, commit and hold one block per number."""
    pool.reserve(len(numbers))
    blocks = [pool.take() for _ in numbers]
    for block_id, number in zip(blocks, numbers, strict=True):
        pool.commit(block_id, name(number), number)
    return blocks


def test_a_dropped_committed_block_is_found_again_and_a_partial_one_is_free():
    pool = BlockPool(4)
    (full,) = fill(pool, 1)
    pool.reserve(1)
    partial = pool.take()
    pool.drop([full, partial])
    assert pool.match([name(1)]) == [full]
    assert (pool.num_free, pool.num_cached) == (3, 1)


def test_the_tail_of_a_prefix_is_evicted_first():
    pool = BlockPool(3)
    blocks = fill(pool, 1, 2, 3)
    pool.drop(blocks)
    pool.reserve(1)
    assert pool.take() == blocks[2]
    assert pool.match([name(1), name(2), name(3)]) == blocks[:2]


def test_the_least_recently_used_prefix_is_evicted_first():
    pool = BlockPool(2)
    (old,) = fill(pool, 1)
    (new,) = fill(pool, 2)
    pool.drop([old])
    pool.drop([new])
    pool.hold(old)
    pool.drop([old])
    pool.reserve(1)
    assert pool.take() == new


def test_free_blocks_are_taken_before_anything_is_evicted():
    pool = BlockPool(2)
    (cached,) = fill(pool, 1)
    pool.drop([cached])
    pool.reserve(1)
    assert pool.take() != cached


def test_a_reservation_is_a_promise_that_others_cannot_take():
    pool = BlockPool(3)
    pool.reserve(2)
    assert pool.room == 1
    assert not pool.can_reserve(2)
    with pytest.raises(OutOfBlocksError, match="2 blocks reserved with room for 1"):
        pool.reserve(2)


def test_holding_a_cached_hit_counts_against_the_room():
    pool = BlockPool(2)
    (hit,) = fill(pool, 1)
    pool.drop([hit])
    assert pool.can_reserve(1, [hit])
    assert not pool.can_reserve(2, [hit])
    assert not pool.can_reserve(1, [hit], keep=1)


def test_a_leased_block_is_neither_room_nor_evictable_and_then_cached():
    pool = BlockPool(1)
    blocks = fill(pool, 1)
    pool.pin(blocks)
    pool.drop(blocks)
    assert (pool.num_leased, pool.room) == (1, 0)
    assert pool.match([name(1)]) == blocks
    pool.unpin(blocks)
    assert (pool.num_leased, pool.num_cached) == (0, 1)


def test_a_reassigned_block_has_a_new_generation_and_no_name():
    pool = BlockPool(1)
    (block,) = fill(pool, 1)
    before = pool.generation(block)
    pool.drop([block])
    pool.reserve(1)
    assert pool.take() == block
    assert pool.generation(block) == before + 1
    assert pool.match([name(1)]) == []
    assert pool.checksum(block) is None


def test_committing_a_hash_twice_keeps_the_first_block():
    pool = BlockPool(2)
    first, second = fill(pool, 1, 1)
    assert pool.match([name(1)]) == [first]
    pool.drop([second])
    assert pool.num_free == 1


def test_a_forgotten_hash_is_not_found_and_its_block_is_free():
    pool = BlockPool(1)
    blocks = fill(pool, 1)
    pool.drop(blocks)
    pool.forget(name(1))
    assert pool.match([name(1)]) == []
    assert pool.num_free == 1


def test_dropping_or_unpinning_once_too_often_is_an_error():
    pool = BlockPool(1)
    blocks = fill(pool, 1)
    pool.drop(blocks)
    with pytest.raises(OutOfBlocksError, match="dropped once too often"):
        pool.drop(blocks)
    with pytest.raises(OutOfBlocksError, match="unpinned once too often"):
        pool.unpin(blocks)
    with pytest.raises(OutOfBlocksError, match="nobody holds it"):
        pool.pin(blocks)


class PoolAgainstModel(RuleBasedStateMachine):
    """Random operations; the model keeps only sets, and every count is derived from them anew."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.tables: list[list[int]] = []
        self.leases: list[list[int]] = []
        self.named: dict[int, BlockHash] = {}
        self.reserved = 0

    def used(self) -> set[int]:
        return {b for table in self.tables + self.leases for b in table}

    @rule(n=st.integers(0, 9))
    def reserve(self, n: int) -> None:
        expected = n <= self.num_blocks - len(self.used()) - self.reserved
        assert self.pool.can_reserve(n) == expected
        if expected:
            self.pool.reserve(n)
            self.reserved += n

    @precondition(lambda self: self.reserved)
    @rule(number=st.integers(0, 5), commit=st.booleans())
    def take(self, number: int, commit: bool) -> None:
        block_id = self.pool.take()
        assert block_id not in self.used()
        self.reserved -= 1
        self.named.pop(block_id, None)
        self.tables.append([block_id])
        if commit and name(number) not in self.named.values():
            assert self.pool.commit(block_id, name(number), number)
            self.named[block_id] = name(number)

    @precondition(lambda self: self.reserved)
    @rule()
    def unreserve(self) -> None:
        self.pool.unreserve(1)
        self.reserved -= 1

    @rule(number=st.integers(0, 5))
    def hold(self, number: int) -> None:
        hits = self.pool.match([name(number)])
        assert hits == [b for b, n in self.named.items() if n == name(number)]
        if hits and self.pool.can_reserve(0, hits):
            self.pool.hold(hits[0])
            self.tables.append(hits)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), lease=st.booleans())
    def drop(self, data: st.DataObject, lease: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        if lease:
            self.pool.pin(table)
            self.leases.append(table)
        self.pool.drop(table)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.pool.unpin(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.tables)
        held = {b for table in self.tables for b in table}
        leased = {b for table in self.leases for b in table} - held
        idle = set(range(self.num_blocks)) - held - leased
        named = {b for b in idle if b in self.named}
        expected = (len(idle) - len(named), len(named), len(held), len(leased), self.reserved)
        pool = self.pool
        assert (pool.num_free, pool.num_cached, pool.num_held, pool.num_leased, pool.num_reserved) == expected


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
