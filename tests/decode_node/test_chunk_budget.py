"""How large a chunk of a prompt may be beside running streams."""

import pytest

from pdserve.decode_node.chunk_budget import MIN_CHUNK, STRETCH, TPOT_SHARE, ChunkBudget
from pdserve.engine.step_cost import StepCost, StepWork

STEP_S, TOKEN_S = 0.02, 0.0012
TWO_STREAMS = StepWork(num_tokens=2, num_context=200)


def make_budget(tpot_s: float | None = None, max_step_tokens: int = 512, num_learned: int = 60) -> ChunkBudget:
    """A node whose steps take STEP_S and TOKEN_S for each token, and that has seen some of every size."""
    budget = ChunkBudget(max_step_tokens, StepCost())
    budget.tpot_s = tpot_s
    for i in range(num_learned):
        work = StepWork(1, 100) if i % 2 else StepWork().plus_chunk(0, 8 + 7 * i)
        budget.cost.learn(work, STEP_S + TOKEN_S * work.num_tokens)
    return budget


def test_a_step_may_take_a_share_of_the_promised_time_whatever_it_does():
    budget = make_budget(0.1)
    for streams in (StepWork(), TWO_STREAMS):
        assert budget.limit_s(streams) == TPOT_SHARE * 0.1 < 0.1


def test_without_a_promise_a_chunk_stretches_the_streams_step_so_many_times():
    budget = make_budget()
    assert budget.limit_s(TWO_STREAMS) == STRETCH * budget.cost.predict_s(TWO_STREAMS)


def test_a_stream_that_has_yet_to_join_counts_as_one():
    budget = make_budget()
    assert budget.limit_s(StepWork()) == STRETCH * budget.cost.predict_s(StepWork(num_tokens=1))


def test_without_a_limit_a_chunk_takes_all_that_the_streams_leave_of_the_tokens():
    budget = make_budget(max_step_tokens=100)
    assert budget.num_tokens(StepWork(), None, start=0) == 100
    assert budget.num_tokens(TWO_STREAMS, None, start=5000) == 98


@pytest.mark.parametrize("start", [0, 300])
def test_a_chunk_within_a_limit_fills_its_time_and_does_not_exceed_it(start: int):
    budget = make_budget()
    num_tokens = budget.num_tokens(TWO_STREAMS, 0.09, start)
    assert STEP_S + TOKEN_S * (2 + num_tokens) == pytest.approx(0.09, rel=0.1)


def test_more_time_than_the_tokens_need_is_no_reason_for_more_of_them():
    budget = make_budget(max_step_tokens=40)
    assert budget.num_tokens(TWO_STREAMS, 10.0, start=0) == 38


def test_a_chunk_beside_streams_that_use_all_of_their_time_is_small_but_is_one():
    assert make_budget().num_tokens(TWO_STREAMS, 0.001, start=0) == MIN_CHUNK


def test_even_the_smallest_chunk_stays_within_the_tokens_of_a_step():
    budget = make_budget(max_step_tokens=5)
    assert budget.num_tokens(TWO_STREAMS, 0.001, start=0) == 3
    assert budget.num_tokens(StepWork(5, 500), 0.001, start=0) == 0


def test_a_token_costs_its_part_of_the_step_it_comes_in():
    budget = make_budget(0.1)
    length = budget.num_tokens(TWO_STREAMS, budget.limit_s(TWO_STREAMS), start=0)
    assert budget.token_s(TWO_STREAMS) == pytest.approx(0.09 / length, rel=0.02)


def test_a_shorter_promise_and_more_streams_make_each_token_cost_more():
    long, short, shorter = (make_budget(tpot_s).token_s(TWO_STREAMS) for tpot_s in (0.2, 0.1, 0.05))
    assert long < short < shorter
    budget = make_budget(0.05)
    assert budget.token_s(StepWork()) < budget.token_s(StepWork(10, 4000))


def test_streams_that_leave_no_token_make_a_prompts_token_cost_a_step():
    budget = make_budget(0.1, max_step_tokens=2)
    assert budget.token_s(TWO_STREAMS) == pytest.approx(STEP_S + 3 * TOKEN_S, rel=0.1)


def test_a_node_that_has_measured_nothing_has_an_idea_of_its_own():
    budget = make_budget(num_learned=0)
    assert 0 < budget.token_s(StepWork()) < 1
    assert MIN_CHUNK <= budget.num_tokens(TWO_STREAMS, budget.limit_s(TWO_STREAMS), start=0) <= 60
