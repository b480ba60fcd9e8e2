"""Who has the next turn: priority, policy, promises, and that nobody waits for ever."""

import itertools
import random

import pytest

from pdserve.core.turns import MAX_YIELD_S, WINDOW, Policy, Turns

TOKEN_S = 0.0015


def make_turns(*lengths: int, policy: Policy = Policy.FCFS, deadline: float | None = None) -> Turns:
    """Keys are the lengths."""
    turns = Turns(policy)
    for length in lengths:
        turns.join(length, 0, 0.0, deadline, length)
    return turns


def ordered(turns: Turns, token_s: float = TOKEN_S, now: float = 0.0, **options: int) -> list[int]:
    return list(turns.order(token_s, now, **options))


def test_first_come_first_served_is_the_order_of_keys():
    turns = Turns(Policy.FCFS)
    for key in (3, 1, 2):
        turns.join(key, 0, 0.0, None, 100 - key)
    assert ordered(turns) == [1, 2, 3]


def test_shortest_goes_by_what_is_left_and_then_by_arrival():
    turns = Turns(Policy.SHORTEST)
    for key, length in ((1, 30), (2, 10), (3, 10)):
        turns.join(key, 0, 0.0, None, length)
    assert ordered(turns) == [2, 3, 1]
    turns.advance(1, 5)
    assert ordered(turns) == [1, 2, 3]


def test_prompts_of_equal_length_are_served_in_order_of_arrival_whatever_the_policy():
    for policy in Policy:
        turns = Turns(policy)
        for key in range(5):
            turns.join(key, 0, 0.0, None, 512)
        for key in range(5):
            assert next(turns.order(TOKEN_S, 0.0)) == key
            turns.advance(key, 256)
            assert next(turns.order(TOKEN_S, 0.0)) == key
            turns.leave(key)


@pytest.mark.parametrize("policy", Policy)
def test_a_higher_priority_goes_first_whatever_its_length_and_promise(policy: Policy):
    turns = Turns(policy)
    turns.join(1, 0, 0.0, None, 10)
    turns.join(2, 0, 0.0, 1.0, 10)
    turns.join(3, 7, 0.0, None, 9000)
    turns.join(4, -1, 0.0, 1.0, 1)
    assert ordered(turns) == [3, 1, 2, 4]


def test_who_left_is_in_no_line_and_may_leave_again():
    turns = make_turns(10, 20, 30, policy=Policy.SHORTEST, deadline=9.0)
    turns.leave(20)
    turns.leave(20)
    assert ordered(turns) == [10, 30]
    assert len(turns) == 2
    assert 20 not in turns


# ---- promises --------------------------------------------------------------------------------------


def test_a_prompt_that_can_keep_its_promise_goes_before_one_that_cannot():
    assert ordered(make_turns(900, 500, deadline=1.0)) == [500, 900]
    turns = make_turns(deadline=1.0)
    for key, length in ((1, 900), (2, 500)):
        turns.join(key, 0, 0.0, 1.0, length)
    assert ordered(turns, 0.0001) == [1, 2]


def test_the_longest_gives_way_when_not_all_can_be_in_time():
    for token_s, expected in ((TOKEN_S, [2, 3, 1]), (0.0005, [1, 2, 3])):
        turns = Turns(Policy.FCFS)
        for key, length in ((1, 600), (2, 310), (3, 300)):
            turns.join(key, 0, 0.0, 1.0, length)
        assert ordered(turns, token_s) == expected


def test_what_is_computed_already_makes_a_prompt_shorter():
    turns = make_turns(500, 900, deadline=1.0)
    turns.advance(900, 200)
    assert ordered(turns) == [900, 500]


def test_promises_are_kept_in_the_order_of_their_deadlines_under_either_policy():
    for policy in Policy:
        turns = Turns(policy)
        turns.join(1, 0, 0.0, 9.0, 100)
        turns.join(2, 0, 0.0, 1.0, 500)
        assert ordered(turns) == [2, 1]


def test_a_prompt_without_a_promise_keeps_its_turn_and_takes_its_time():
    turns = Turns(Policy.FCFS)
    for key, deadline, length in ((1, None, 300), (2, 1.0, 400), (3, 1.0, 200)):
        turns.join(key, 0, 0.0, deadline, length)
    assert ordered(turns) == [1, 3, 2]


def test_what_is_to_be_computed_before_them_counts():
    turns = make_turns(310, 320, deadline=1.0)
    assert ordered(turns) == [310, 320]
    turns.join(1, 0, 0.0, 1.0, 100)
    assert ordered(turns, num_ahead=400) == [1, 310, 320]


def test_a_longer_prompt_of_a_higher_priority_gives_way_to_none_of_a_lower_one():
    turns = Turns(Policy.FCFS)
    turns.join(1, 1, 0.0, 1.0, 600)
    turns.join(2, 0, 0.0, 1.0, 300)
    assert ordered(turns) == [1, 2]


def test_who_has_lost_its_promise_goes_last_by_policy():
    turns = make_turns(900, 800, 10, policy=Policy.SHORTEST, deadline=1.0)
    assert ordered(turns) == [10, 800, 900]
    turns.join(1, 0, 0.5, 1.5, 600)
    assert ordered(turns, now=0.5) == [10, 1, 800, 900]


def test_those_that_have_lost_their_promise_hide_nobody_who_can_keep_it():
    turns = Turns(Policy.FCFS)
    for key in range(3 * WINDOW):
        turns.join(key, 0, 0.0, 1.0, 900)
    turns.join(1000, 0, 0.0, 1.0, 100)
    assert next(turns.order(TOKEN_S, 0.0)) == 1000


@pytest.mark.parametrize("seed", range(20))
def test_within_the_window_as_many_promises_are_kept_as_can_be(seed: int):
    """Against every subset, computed in the order of deadlines."""
    rng = random.Random(seed)
    jobs = [(rng.randrange(50, 500), rng.uniform(0.1, 1.5)) for _ in range(7)]
    turns = Turns(Policy.FCFS)
    for key, (length, deadline) in enumerate(jobs):
        turns.join(key, 0, 0.0, deadline, length)

    def kept(keys: list[int]) -> int:
        ends = itertools.accumulate(jobs[key][0] * 0.001 for key in keys)
        return sum(end <= jobs[key][1] for key, end in zip(keys, ends, strict=True))

    by_deadline = sorted(range(len(jobs)), key=lambda key: jobs[key][1])
    subsets = itertools.chain.from_iterable(itertools.combinations(by_deadline, n) for n in range(len(jobs) + 1))
    best = max(kept(list(subset)) for subset in subsets)
    assert kept(ordered(turns, 0.001 / 1.05)) == best


# ---- nobody waits for ever -------------------------------------------------------------------------


def test_who_has_waited_long_is_owed_every_second_turn():
    turns = make_turns(9000, policy=Policy.SHORTEST)
    served = []
    now = MAX_YIELD_S + 0.1
    for fresh in range(1, 7):
        turns.join(fresh, 0, now, None, 10)
        key = next(turns.order(TOKEN_S, now))
        turns.serve(key)
        served.append(key)
        if key != 9000:
            turns.leave(key)
    assert served == [1, 9000, 2, 9000, 3, 9000]


def test_nobody_is_owed_a_turn_before():
    turns = make_turns(9000, policy=Policy.SHORTEST)
    for fresh in range(1, 7):
        turns.join(fresh, 0, 0.0, None, 10)
        turns.serve(fresh)
        assert next(turns.order(TOKEN_S, MAX_YIELD_S)) == 1


def test_who_has_lost_its_promise_is_owed_turns_as_well():
    turns = make_turns(9000, deadline=1.0)
    now = MAX_YIELD_S + 0.1
    turns.join(9001, 0, now, now + 1.0, 10)
    firsts = []
    for _ in range(4):
        firsts.append(next(turns.order(TOKEN_S, now)))
        turns.serve(firsts[-1])
    assert firsts == [9001, 9000, 9001, 9000]


def test_who_is_owed_a_turn_waits_for_a_higher_priority():
    turns = make_turns(9000, policy=Policy.SHORTEST)
    now = MAX_YIELD_S + 0.1
    turns.join(1, 1, now, None, 10)
    for _ in range(4):
        assert next(turns.order(TOKEN_S, now)) == 1
        turns.serve(1)


# ---- what it costs ---------------------------------------------------------------------------------


class Counted(float):
    """A deadline that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.num_compared += 1
        return float(self) < float(other)

    def __gt__(self, other: float) -> bool:
        Counted.num_compared += 1
        return float(self) > float(other)


@pytest.mark.parametrize("length", [100, 10_000])
def test_the_first_in_a_long_line_takes_no_more_looks_than_in_a_short_one(length: int):
    turns = Turns(Policy.SHORTEST)
    turns.join(-1, 0, 0.0, 1e9, 5)
    for key in range(length):
        turns.join(key, 0, 0.0, 1e9 + key, 5)
    assert list(itertools.islice(turns.order(TOKEN_S, 0.0), WINDOW)) == [-1, *range(WINDOW - 1)]
    Counted.num_compared = 0
    turns.join(length, 0, 0.0, Counted(1e9 + length / 2), 5)
    turns.leave(length)
    assert 0 < Counted.num_compared <= 4 * 14 + 8
