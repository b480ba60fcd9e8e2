"""Blocks on their way in: one copy a hash, and an heir when its owner ends."""

from pdserve.core.ids import BlockHash, BlockId
from pdserve.kvtransfer.filling import Fillings

HASH, BLOCK = BlockHash(b"h" * 16), BlockId(7)


def make_fillings(*joiners: int) -> Fillings:
    fillings = Fillings()
    fillings.own(HASH, BLOCK, 1)
    for key in joiners:
        assert fillings.join(HASH, key) == BLOCK
    return fillings


def test_a_verified_block_wakes_its_owner_and_everybody_who_joined():
    fillings = make_fillings(2, 3)
    assert fillings.finish(HASH) == [1, 2, 3]
    assert len(fillings) == 0


def test_the_oldest_joiner_inherits_the_copy_of_an_owner_that_ends():
    fillings = make_fillings(2, 3)
    assert fillings.leave(1) == [(HASH, BLOCK, 2)]
    assert fillings.finish(HASH) == [2, 3]


def test_a_joiner_that_ends_changes_nothing_for_the_others():
    fillings = make_fillings(2, 3)
    assert fillings.leave(2) == []
    assert fillings.finish(HASH) == [1, 3]


def test_an_entry_that_nobody_is_left_for_is_gone():
    fillings = make_fillings()
    assert fillings.leave(1) == []
    assert fillings.find(HASH) is None


def test_no_heir_may_write_while_a_copy_is_in_flight():
    fillings = make_fillings(2, 3)
    fillings.begin(HASH, BLOCK)
    assert fillings.leave(1) == []
    assert fillings.leave(2) == []
    filling = fillings.end(HASH, BLOCK)
    assert filling is not None
    assert filling.owner == 3
    assert fillings.leave(3) == []


def test_the_end_of_a_copy_into_another_block_is_not_ours():
    fillings = make_fillings()
    fillings.begin(HASH, BLOCK)
    assert fillings.end(HASH, BlockId(8)) is None
    filling = fillings.find(HASH)
    assert filling is not None
    assert filling.is_copying
