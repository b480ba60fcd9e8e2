"""Who gets tokens in the next step."""

import pytest

from pdserve.core.ids import RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.core.turns import Policy
from pdserve.engine.planner import Planner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step_cost import StepCost, StepWork

BUDGET = 16


def make_sequence(key: int, num_tokens: int, priority: int = 0) -> Sequence:
    tokens = list(range(num_tokens))
    sequence = Sequence(key, RequestId(b"r" * 16), 1, tokens, num_tokens, SamplingParams(), [], 4)
    sequence.priority = priority
    return sequence


def make_planner(*lengths: int, policy: Policy = Policy.FCFS, fixed_s: float = 0.0, token_s: float = 0.0) -> Planner:
    """Keys count from 0. A node has learned that a step takes fixed_s and token_s for each token."""
    cost = StepCost()
    for num_tokens in (1, 50, 200) * 30:
        cost.learn(StepWork(num_tokens), fixed_s + token_s * num_tokens)
    planner = Planner(policy, BUDGET, cost)
    for key, length in enumerate(lengths):
        planner.add(make_sequence(key, length))
    return planner


def planned(planner: Planner, budget: int = BUDGET) -> list[tuple[int, int]]:
    return [(sequence.key, n) for sequence, n in planner.chunks(lambda _: budget, 0.001, 0.0)]


def test_the_budget_goes_to_the_first_and_what_it_leaves_to_those_that_it_ends():
    assert planned(make_planner(4, 6, 6, 6)) == [(0, 4), (1, 6), (2, 6)]


def test_a_prompt_longer_than_a_step_gets_all_of_it():
    assert planned(make_planner(20, 4)) == [(0, 16)]


def test_a_sequence_that_has_progressed_gets_only_the_rest():
    planner, sequence = make_planner(), make_sequence(0, 10)
    planner.add(sequence)
    sequence.num_computed = 7
    planner.progressed(sequence)
    assert planned(planner) == [(0, 3)]


def test_nothing_is_planned_without_sequences_or_without_budget():
    assert planned(make_planner()) == []
    assert planned(make_planner(10), 0) == []
    assert planned(make_planner(10), -3) == []


def test_the_budget_depends_on_who_is_first():
    planner = make_planner(30, 12, policy=Policy.SHORTEST)
    assert [n for _, n in planner.chunks(lambda first: first.num_tokens // 2, 0.001, 0.0)] == [6]


def test_what_a_cut_leaves_goes_to_the_next():
    plan = make_planner(10, 12).chunks(lambda _: BUDGET, 0.001, 0.0, cut=lambda sequence, n: n - 4)
    assert [(sequence.key, n) for sequence, n in plan] == [(0, 6), (1, 6)]


@pytest.mark.parametrize(("num_others", "fills"), [(1, False), (30, True)])
def test_a_step_that_ends_a_prompt_is_filled_when_many_others_gain_by_it(num_others: int, fills: bool):
    """Ten tokens cost the first 10 ms; a step less saves each of the others 1 ms."""
    planner = make_planner(6, *[400] * num_others, fixed_s=0.001, token_s=0.001)
    assert planned(planner) == ([(0, 6), (1, 10)] if fills else [(0, 6)])


def test_beside_streams_a_step_less_saves_what_they_take():
    planner = make_planner(6, 400, fixed_s=0.001, token_s=0.001)
    plan = planner.chunks(lambda _: BUDGET, 0.001, 0.0, beside=StepWork(num_tokens=30))
    assert [(sequence.key, n) for sequence, n in plan] == [(0, 6), (1, 10)]


def test_keep_adds_whom_it_names_and_removes_the_others():
    planner = make_planner(4)
    kept, new = make_sequence(1, 5), make_sequence(2, 2)
    planner.keep([kept])
    kept.num_computed = 2
    planner.keep([kept, new])
    assert planned(planner) == [(1, 3), (2, 2)]
    planner.keep([])
    assert len(planner) == 0
