"""What a node says of its prefix index, from every position that a reader may be at."""

from pdserve.core.cache_delta import BEGINNING, CacheDelta, CachePosition
from pdserve.core.ids import BlockHash
from pdserve.engine.cache_log import MAX_DELTA_HASHES, CacheLog


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def names(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(name(number) for number in numbers)


def make_log(*present: int, removed: tuple[int, ...] = (), max_removed: int = 8) -> CacheLog:
    log = CacheLog(max_removed)
    for number in (*present, *removed):
        log.add(name(number))
    for number in removed:
        log.remove(name(number))
    return log


def test_an_empty_log_has_nothing_to_say():
    assert make_log().delta(BEGINNING) == CacheDelta(0, 0, 0, (), ())


def test_a_reader_at_the_beginning_is_told_all_in_the_order_of_the_changes():
    assert make_log(3, 1, 2).delta(BEGINNING) == CacheDelta(0, 0, 3, names(3, 1, 2), ())


def test_a_reader_is_told_only_what_has_changed_since_its_position():
    log = make_log(1, 2)
    position = CachePosition(0, log.number)
    log.add(name(3))
    log.remove(name(1))
    assert log.delta(position) == CacheDelta(0, 2, 4, names(3), names(1))


def test_a_reader_that_is_told_everything_is_told_nothing_more():
    log = make_log(1, 2)
    assert log.delta(CachePosition(0, 2)) == CacheDelta(0, 2, 2, (), ())


def test_of_a_hash_that_changed_often_only_the_latest_change_is_told():
    log = make_log(1, 2)
    log.remove(name(1))
    log.add(name(1))
    log.remove(name(2))
    assert log.delta(BEGINNING) == CacheDelta(0, 0, 5, names(1), names(2))


def test_a_delta_is_bounded_and_the_next_one_goes_on_where_it_ended():
    log = make_log(*range(MAX_DELTA_HASHES + 3))
    first = log.delta(BEGINNING)
    second = log.delta(CachePosition(0, first.until))
    assert (len(first.added), first.until) == (MAX_DELTA_HASHES, MAX_DELTA_HASHES)
    assert second.added == names(*range(MAX_DELTA_HASHES, MAX_DELTA_HASHES + 3))


def test_removed_hashes_count_against_the_bound_as_well():
    half = MAX_DELTA_HASHES // 2
    gone = tuple(range(10_000, 10_000 + half + 5))
    log = make_log(*range(half), removed=gone, max_removed=len(gone))
    delta = log.delta(BEGINNING)
    assert len(delta.added) + len(delta.removed) == MAX_DELTA_HASHES


def test_who_is_behind_forgotten_removals_begins_anew_and_hears_of_no_older_ones():
    log = make_log(1, 2, 3, removed=(4, 5), max_removed=1)
    assert log.delta(CachePosition(0, 5)) == CacheDelta(7, 0, 7, names(1, 2, 3), ())


def test_who_has_heard_of_the_forgotten_removals_goes_on():
    log = make_log(1, removed=(4, 5), max_removed=1)
    assert log.delta(CachePosition(0, 4)) == CacheDelta(0, 4, 5, (), names(5))


def test_who_began_anew_after_the_forgotten_removals_goes_on_however_far_back_it_is():
    log = make_log(*range(MAX_DELTA_HASHES), 6000, removed=(7000, 7001), max_removed=1)
    first = log.delta(BEGINNING)
    log.remove(name(0))
    second = log.delta(CachePosition(first.whole, first.until))
    assert first.whole == MAX_DELTA_HASHES + 5
    assert second == CacheDelta(first.whole, first.until, log.number, names(6000), names(0))


def test_who_began_anew_and_missed_forgotten_removals_since_begins_anew_again():
    log = make_log(*range(MAX_DELTA_HASHES), 6000, removed=(7000, 7001), max_removed=1)
    first = log.delta(BEGINNING)
    log.remove(name(0))
    log.remove(name(1))
    assert log.delta(CachePosition(first.whole, first.until)).whole == log.number > first.whole


def test_a_log_stays_bounded_by_what_is_present_and_remembered():
    log = CacheLog(max_removed=4)
    for number in range(10_000):
        log.add(name(number))
        if number >= 16:
            log.remove(name(number - 16))
    assert log.num_present == 16
    assert len(log) == 16 + 4
    assert set(log.delta(BEGINNING).added) == set(names(*range(9_984, 10_000)))
