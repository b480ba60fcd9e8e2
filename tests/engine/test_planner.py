"""Who gets tokens in the next step."""

from pdserve.core.ids import RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.planner import AGEING_TOKENS_PER_S, MAX_YIELD_S, Policy, chunks, order
from pdserve.engine.sequence import Sequence


def make_sequence(num_tokens: int, num_computed: int = 0, accepted_at: float = 0.0, deadline: float | None = None):
    tokens = list(range(num_tokens))
    sequence = Sequence(num_tokens, RequestId(b"r" * 16), 1, tokens, num_tokens, SamplingParams(), [], 4)
    sequence.num_computed = num_computed
    sequence.accepted_at, sequence.deadline = accepted_at, deadline
    return sequence


def planned(sequences: list[Sequence], budget: int) -> list[tuple[int, int]]:
    return [(sequence.key, num_tokens) for sequence, num_tokens in chunks(sequences, budget)]


def test_the_budget_goes_to_the_first_and_what_it_leaves_to_the_next():
    assert planned([make_sequence(10), make_sequence(20)], 16) == [(10, 10), (20, 6)]


def test_a_sequence_that_is_half_done_gets_only_the_rest():
    assert planned([make_sequence(10, num_computed=7)], 16) == [(10, 3)]


def test_nothing_is_planned_without_tokens_to_catch_up_on_or_without_budget():
    assert planned([make_sequence(10, num_computed=10)], 16) == []
    assert planned([make_sequence(10)], 0) == []
    assert planned([make_sequence(10)], -3) == []


def test_first_come_first_served_keeps_the_given_order():
    sequences = [make_sequence(30), make_sequence(10), make_sequence(20)]
    assert order(sequences, Policy.FCFS, 0.0, 0.0) == sequences


def test_shortest_goes_by_what_is_left_not_by_length():
    long, short = make_sequence(30, num_computed=25), make_sequence(10)
    assert order([short, long], Policy.SHORTEST, 0.0, 0.0) == [long, short]


def test_under_shortest_a_prompt_that_waited_long_enough_overtakes():
    now = 3000 / AGEING_TOKENS_PER_S
    long, short = make_sequence(3000), make_sequence(10, accepted_at=now)
    assert order([short, long], Policy.SHORTEST, 0.0, now) == [long, short]


def test_a_prompt_that_can_keep_its_deadline_goes_before_one_that_cannot():
    late, in_time = make_sequence(900, deadline=1.0), make_sequence(500, deadline=1.0)
    assert order([late, in_time], Policy.FCFS, 0.0015, 0.0) == [in_time, late]
    assert order([late, in_time], Policy.FCFS, 0.0001, 0.0) == [late, in_time]


def test_the_longest_gives_way_when_not_all_can_be_in_time():
    long, short, shorter = (make_sequence(n, deadline=1.0) for n in (600, 310, 300))
    assert order([long, short, shorter], Policy.FCFS, 0.0015, 0.0) == [short, shorter, long]
    assert order([long, short, shorter], Policy.FCFS, 0.0005, 0.0) == [long, short, shorter]


def test_what_is_computed_already_makes_a_prompt_shorter():
    started, fresh = make_sequence(900, num_computed=700, deadline=1.0), make_sequence(500, deadline=1.0)
    assert order([fresh, started], Policy.FCFS, 0.0015, 0.0) == [started, fresh]


def test_a_prompt_without_a_deadline_keeps_its_turn_and_takes_its_time():
    resumed, long, short = make_sequence(300), make_sequence(400, deadline=1.0), make_sequence(200, deadline=1.0)
    assert order([resumed, long, short], Policy.FCFS, 0.0015, 0.0) == [resumed, short, long]


def test_a_late_prompt_yields_only_so_long():
    late = make_sequence(900, deadline=1.0)
    now = MAX_YIELD_S + 0.1
    fresh = make_sequence(10, accepted_at=now, deadline=now + 1.0)
    assert order([fresh, late], Policy.FCFS, 0.0015, now) == [late, fresh]
