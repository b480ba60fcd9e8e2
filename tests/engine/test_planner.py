"""Who gets tokens in the next step."""

from pdserve.core.ids import RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.planner import AGEING_TOKENS_PER_S, Policy, chunks, order
from pdserve.engine.sequence import Sequence


def make_sequence(num_tokens: int, num_computed: int = 0) -> Sequence:
    tokens = list(range(num_tokens))
    sequence = Sequence(num_tokens, RequestId(b"r" * 16), 1, tokens, num_tokens, SamplingParams(), [], 4)
    sequence.num_computed = num_computed
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
    assert order(sequences, Policy.FCFS) == sequences


def test_shortest_goes_by_what_is_left_not_by_length():
    long, short = make_sequence(30, num_computed=25), make_sequence(10)
    assert order([short, long], Policy.SHORTEST) == [long, short]


def test_under_shortest_a_prompt_that_waited_long_enough_overtakes():
    long, short = make_sequence(3000), make_sequence(10)
    waited = {long.key: 3000 / AGEING_TOKENS_PER_S, short.key: 0.0}
    assert order([short, long], Policy.SHORTEST, lambda s: waited[s.key]) == [long, short]
