"""BlockPool against a naive model, and each promise by itself."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pdserve.core.errors import OutOfBlocksError
from pdserve.core.ids import BlockHash
from pdserve.engine.block_pool import BlockPool
from pdserve.router.prefix_index import PrefixIndex


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


NAMES = 8
PROMPTS = st.lists(st.integers(0, NAMES - 1), unique=True, min_size=1, max_size=4)


class PoolAgainstModel(RuleBasedStateMachine):
    """Every public operation at random. The model counts everything anew from tables, leases and three small dicts.

    A table is what a sequence holds; a lease names blocks, each once. Whatever raises must have changed nothing.
    """

    num_operations = 0

    @initialize(num_blocks=st.integers(4, 7))
    def start(self, num_blocks: int) -> None:
        self.generations = [2**64 - 2] * num_blocks
        self.pool = BlockPool(num_blocks, self.generations)
        self.num_blocks = num_blocks
        self.tables: list[list[int]] = []
        self.leases: list[list[int]] = []
        self.named: dict[int, int] = {}
        self.checksums: dict[int, int | None] = dict.fromkeys(range(num_blocks))
        self.num_taken = [0] * num_blocks
        # When a block was last put down: (operation, place among those put down together).
        self.put_down: dict[int, tuple[int, int]] = {}
        self.num_put_down = 0
        self.reserved = 0
        self.reader = PrefixIndex()

    # ---- what the model says ---------------------------------------------------------------------

    @property
    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @property
    def leased(self) -> set[int]:
        return {block for lease in self.leases for block in lease}

    @property
    def idle(self) -> set[int]:
        return set(range(self.num_blocks)) - self.held - self.leased

    @property
    def room(self) -> int:
        return len(self.idle) - self.reserved

    def block_of(self, number: int) -> int | None:
        return next((block for block, named in self.named.items() if named == number), None)

    def found(self, numbers: list[int]) -> list[int]:
        """Blocks of the longest prefix that is named."""
        blocks = [self.block_of(number) for number in numbers]
        return blocks[: blocks.index(None)] if None in blocks else blocks

    # ---- operations and what they mean for the model ---------------------------------------------

    def reserved_more(self, n: int) -> None:
        self.pool.reserve(n)
        self.reserved += n

    def taken(self) -> int:
        """A free block where there is one, else the one put down first, the end of a prefix before its head."""
        idle = self.idle
        block = self.pool.take()
        if free := idle - set(self.named):
            assert block in free
        else:
            assert block == min(idle, key=lambda b: self.put_down[b])
        self.reserved -= 1
        self.named.pop(block, None)
        self.checksums[block] = None
        self.num_taken[block] += 1
        return block

    def committed(self, block: int, number: int, checksum: int | None) -> None:
        is_first = self.block_of(number) in (None, block)
        assert self.pool.commit(block, name(number), checksum) == is_first
        self.checksums[block] = checksum
        if is_first:
            self.named[block] = number

    def dropped(self, blocks: list[int]) -> None:
        """Called when no table names them any more."""
        self.pool.drop(blocks)
        self.noted_put_down(blocks)

    def unpinned(self, lease: list[int]) -> None:
        self.pool.unpin(lease)
        self.noted_put_down(lease)

    def noted_put_down(self, blocks: list[int]) -> None:
        """The end of a prefix is put down before its beginning."""
        self.num_put_down += 1
        for place, block in enumerate(reversed(blocks)):
            if block in self.idle:
                self.put_down[block] = (self.num_put_down, place)

    # ---- prompts ---------------------------------------------------------------------------------

    @rule(numbers=PROMPTS)
    def claim(self, numbers: list[int]) -> None:
        """What is found of a prompt is held, the rest taken and not computed yet, if there is room."""
        if self.fits(numbers):
            self.claimed(numbers)

    @rule(numbers=PROMPTS)
    def compute(self, numbers: list[int]) -> None:
        """What is found of a prompt is held, the rest computed; others end first where they must."""
        while not self.fits(numbers):
            if self.tables:
                self.dropped(self.tables.pop(0))
            elif self.leases:
                self.unpinned(self.leases.pop(0))
            else:
                self.pool.unreserve(self.reserved)
                self.reserved = 0
        for block, number in zip(self.claimed(numbers), numbers, strict=True):
            if block not in self.named:
                self.committed(block, number, number)

    def fits(self, numbers: list[int]) -> bool:
        hits = self.found(numbers)
        return self.pool.can_reserve(len(numbers) - len(hits), hits)

    def claimed(self, numbers: list[int]) -> list[int]:
        hits = self.pool.match([name(number) for number in numbers])
        assert hits == self.found(numbers)
        for block in hits:
            self.pool.hold(block)
        table = list(hits)
        self.tables.append(table)
        self.reserved_more(len(numbers) - len(hits))
        for _ in numbers[len(hits) :]:
            table.append(self.taken())
        return table

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A second sample of a prompt holds the same blocks."""
        table = data.draw(st.sampled_from(self.tables))
        for block in table:
            self.pool.hold(block)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), lease=st.booleans())
    def drop(self, data: st.DataObject, lease: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        if lease:
            self.pool.pin(table)
            self.leases.append(table)
        self.dropped(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), n=st.integers(1, 4))
    def drop_the_end(self, data: st.DataObject, n: int) -> None:
        """As when a shared last block is exchanged for a copy."""
        index = data.draw(st.integers(0, len(self.tables) - 1))
        kept, end = self.tables[index][:-n], self.tables[index][-n:]
        self.tables[index : index + 1] = [kept] if kept else []
        self.dropped(end)

    # ---- one operation each ----------------------------------------------------------------------

    @rule(n=st.integers(0, 7), numbers=PROMPTS, keep=st.integers(0, 3))
    def can_reserve(self, n: int, numbers: list[int], keep: int) -> None:
        hits = [block for number in numbers if (block := self.block_of(number)) is not None]
        fits = n + keep + len(self.idle & set(hits)) <= self.room
        assert self.pool.can_reserve(n, hits, keep) == fits

    @rule(n=st.integers(0, 2))
    def reserve(self, n: int) -> None:
        if n <= self.room:
            self.reserved_more(n)

    @rule(n=st.integers(0, 2))
    def unreserve(self, n: int) -> None:
        if n <= self.reserved:
            self.pool.unreserve(n)
            self.reserved -= n

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        if self.reserved == 0 and self.room:
            self.reserved_more(1)
        if self.reserved and self.tables:
            data.draw(st.sampled_from(self.tables)).append(self.taken())
        elif self.reserved:
            self.tables.append([self.taken()])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def hold_leased(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        for block in lease:
            self.pool.hold(block)
        self.tables.append(list(lease))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        lease = list(data.draw(st.sampled_from(self.tables)))
        self.pool.pin(lease)
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.unpinned(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), number=st.integers(0, NAMES - 1), checksum=st.none() | st.integers(0, 2**64 - 1))
    def commit(self, data: st.DataObject, number: int, checksum: int | None) -> None:
        """Also what has that name already; a block has one content, so never under a second one."""
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.committed(block, self.named.get(block, number), checksum)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), checksum=st.integers(0, 2**64 - 1))
    def note_checksum(self, data: st.DataObject, checksum: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.note_checksum(block, checksum)
        self.checksums[block] = checksum

    @rule(number=st.integers(0, 4 * NAMES))
    def forget(self, number: int) -> None:
        self.pool.forget(name(number))
        block = self.block_of(number)
        if block is not None:
            del self.named[block]

    @rule(n=st.integers(1, 9))
    def follow(self, n: int) -> None:
        """A reader of the log takes in n changes; one that has taken in all knows what is findable."""
        self.reader.apply(self.pool.log.delta(self.reader.position, n))
        if self.reader.position.until == self.pool.log.number:
            assert {n for n in range(NAMES) if name(n) in self.reader} == set(self.named.values())

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """What a caller must not do."""
        pool, block = self.pool, data.draw(st.integers(0, self.num_blocks - 1))
        wrong: list[Callable[[], object]] = [
            lambda: pool.reserve(self.room + 1),
            lambda: pool.unreserve(self.reserved + 1),
        ]
        if self.reserved == 0:
            wrong.append(pool.take)
        if block not in self.held:
            wrong += [lambda: pool.drop([block]), lambda: pool.pin([block])]
        if block not in self.leased:
            wrong.append(lambda: pool.unpin([block]))
        for operation in wrong:
            with pytest.raises(OutOfBlocksError):
                operation()

    # ---- after each of them ----------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        PoolAgainstModel.num_operations += 1
        pool = self.pool
        pool.check(self.tables)
        idle, leased = self.idle, self.leased - self.held
        cached = {block for block in idle if block in self.named}
        expected = (len(idle) - len(cached), len(cached), len(self.held), len(leased), self.reserved, self.room)
        counts = (pool.num_free, pool.num_cached, pool.num_held, pool.num_leased, pool.num_reserved, pool.room)
        assert counts == expected
        refs = Counter(block for table in self.tables for block in table)
        assert [pool.num_refs(block) for block in range(self.num_blocks)] == [refs[b] for b in range(self.num_blocks)]
        assert [pool.find(name(number)) for number in range(NAMES)] == [self.block_of(n) for n in range(NAMES)]
        assert {block: pool.checksum(block) for block in range(self.num_blocks)} == self.checksums
        # A generation is what peers see: one more for each time the block is taken, around 2**64.
        assert self.generations == [(2**64 - 2 + taken) % 2**64 for taken in self.num_taken]


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


@pytest.mark.slow
def test_a_hundred_thousand_operations_agree_with_the_model():
    before = PoolAgainstModel.num_operations
    more = settings(max_examples=1_400, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(PoolAgainstModel, settings=more)
    assert PoolAgainstModel.num_operations - before >= 100_000
