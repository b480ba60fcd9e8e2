"""What the router believes a node's cache holds, over a network that loses, repeats and delays beats."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.core.cache_delta import BEGINNING, CacheDelta, CachePosition
from pdserve.core.ids import BlockHash
from pdserve.engine.block_pool import BlockPool
from pdserve.router.prefix_index import PrefixIndex


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def names(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(name(number) for number in numbers)


def make_index(*numbers: int) -> PrefixIndex:
    index = PrefixIndex()
    index.apply(CacheDelta(0, 0, len(numbers), names(*numbers), ()))
    return index


def test_a_new_index_knows_nothing():
    index = PrefixIndex()
    assert (len(index), index.num_leading(names(1)), index.num_found(names(1))) == (0, 0, 0)
    assert index.position == BEGINNING


def test_a_prefix_ends_at_the_first_block_that_is_not_there():
    index = make_index(1, 2, 4)
    assert index.num_leading(names(1, 2, 3, 4)) == 2
    assert index.num_leading(names(1, 2)) == 2
    assert index.num_leading(names(3, 1)) == 0
    assert index.num_leading(()) == 0


def test_blocks_are_found_wherever_they_stand_in_a_request():
    assert make_index(1, 2, 4).num_found(names(1, 3, 4, 5)) == 2


def test_what_is_removed_is_found_no_longer():
    index = make_index(1, 2)
    index.apply(CacheDelta(0, 2, 4, names(3), names(1)))
    assert [h in index for h in names(1, 2, 3)] == [False, True, True]
    assert index.position == CachePosition(0, 4)


def test_a_delta_that_comes_twice_or_late_or_after_one_that_was_lost_changes_nothing():
    for delta in (
        CacheDelta(0, 0, 2, names(9), ()),
        CacheDelta(0, 1, 3, names(9), ()),
        CacheDelta(0, 4, 5, names(9), ()),
    ):
        index = make_index(1, 2)
        index.apply(delta)
        assert (name(9) in index, index.position) == (False, CachePosition(0, 2))


def test_a_whole_that_is_new_replaces_what_was_known():
    index = make_index(1, 2)
    index.apply(CacheDelta(7, 0, 5, names(3), ()))
    assert [h in index for h in names(1, 2, 3)] == [False, False, True]
    assert index.position == CachePosition(7, 5)


def test_a_whole_that_is_older_than_the_present_one_and_the_later_piece_of_one_unknown_change_nothing():
    index = PrefixIndex()
    index.apply(CacheDelta(7, 0, 5, names(3), ()))
    index.apply(CacheDelta(6, 0, 5, names(4), ()))
    index.apply(CacheDelta(9, 5, 6, names(5), ()))
    assert [h in index for h in names(3, 4, 5)] == [True, False, False]
    assert index.position == CachePosition(7, 5)


class RouterFollowsPool(RuleBasedStateMachine):
    """A tiny pool whose blocks are named and evicted, and beats that are lost, repeated, late and out of order."""

    @initialize(num_blocks=st.integers(1, 6), most=st.integers(1, 4))
    def start(self, num_blocks: int, most: int) -> None:
        self.most = most
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        self.ever: set[BlockHash] = set()
        self.lives: list[CachePosition] = []
        self.helds: list[CacheDelta] = []

    @rule(numbers=st.lists(st.integers(0, 9), min_size=1, max_size=12))
    def blocks_are_computed(self, numbers: list[int]) -> None:
        for number in numbers:
            self.pool.reserve(1)
            block_id = self.pool.take()
            self.pool.commit(block_id, name(number), None)
            self.ever.add(name(number))
            self.pool.drop([block_id])

    @rule(number=st.integers(0, 9))
    def a_block_turns_out_bad(self, number: int) -> None:
        self.pool.forget(name(number))

    @rule()
    def the_router_beats(self) -> None:
        self.lives.append(self.index.position)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), is_kept=st.booleans())
    def the_node_answers(self, data: st.DataObject, is_kept: bool) -> None:
        at = data.draw(st.integers(0, len(self.lives) - 1))
        live = self.lives[at] if is_kept else self.lives.pop(at)
        self.helds.append(self.pool.log.delta(live, self.most))

    @precondition(lambda self: self.helds)
    @rule(data=st.data(), is_kept=st.booleans())
    def an_answer_arrives(self, data: st.DataObject, is_kept: bool) -> None:
        at = data.draw(st.integers(0, len(self.helds) - 1))
        self.index.apply(self.helds[at] if is_kept else self.helds.pop(at))

    @rule()
    def messages_are_lost(self) -> None:
        self.lives.clear()
        self.helds.clear()

    @rule()
    def undisturbed_beats_bring_the_router_up_to_date(self) -> None:
        """As many as the log has changes: a delta brings at least one."""
        for _ in range(len(self.pool.log) + 1):
            self.index.apply(self.pool.log.delta(self.index.position, self.most))
        assert {name(n) for n in range(10) if name(n) in self.index} == {
            name(n) for n in range(10) if self.pool.find(name(n)) is not None
        }
        assert len(self.index) == self.pool.log.num_present
        assert self.pool.log.delta(self.index.position).added == ()

    @invariant()
    def it_believes_only_what_was_once_true(self) -> None:
        assert all(name(n) not in self.index or name(n) in self.ever for n in range(10))
        assert len(self.index) <= len(self.ever)


TestRouterFollowsPool = RouterFollowsPool.TestCase
TestRouterFollowsPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
