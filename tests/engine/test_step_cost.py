"""What a step is expected to take, against a node whose steps are known."""

import random

import pytest

from pdserve.engine.step import Row
from pdserve.engine.step_cost import StepCost, StepWork


def seconds(work: StepWork, slower: float = 1.0) -> float:
    """A CPU core with a model of 135M parameters."""
    return slower * (0.020 + 0.0012 * work.num_tokens + 3e-6 * work.num_context + 8e-7 * work.num_pairs)


def streams(num_streams: int, context: int = 500) -> StepWork:
    return StepWork(num_streams, num_streams * context)


def learned(steps: list[StepWork], slower: float = 1.0, noise: float = 0.1) -> StepCost:
    draw = random.Random(1)
    cost = StepCost()
    for work in steps:
        cost.learn(work, seconds(work, slower) * draw.uniform(1 - noise, 1 + noise))
    return cost


def mixed_steps(num_steps: int) -> list[StepWork]:
    draw = random.Random(2)
    return [
        streams(draw.randrange(6), draw.randrange(100, 900)).plus_chunk(draw.randrange(500), draw.choice((2, 20, 60)))
        for _ in range(num_steps)
    ]


def test_the_work_of_a_step_tells_single_tokens_from_chunks():
    rows = (Row(1, (7,), 99, (0,)), Row(2, (7, 8, 9), 10, (1,)))
    assert StepWork.of(rows) == StepWork(num_tokens=4, num_context=100, num_pairs=11 + 12 + 13)
    assert StepWork(1, 100).plus_chunk(10, 3) == StepWork.of(rows)


@pytest.mark.parametrize("work", [streams(1), streams(4), streams(2).plus_chunk(250, 20), StepWork().plus_chunk(0, 60)])
def test_after_fifty_steps_each_kind_of_step_is_expected_to_take_what_it_takes(work: StepWork):
    cost = learned(mixed_steps(50))
    assert cost.predict_s(work) == pytest.approx(seconds(work), rel=0.12)


def test_a_node_that_becomes_slower_is_noticed():
    cost = learned(mixed_steps(50))
    for work in mixed_steps(50):
        cost.learn(work, seconds(work, slower=1.5))
    work = streams(2).plus_chunk(250, 20)
    assert cost.predict_s(work) == pytest.approx(seconds(work, slower=1.5), rel=0.1)


def test_an_hour_without_chunks_is_no_reason_to_forget_what_they_cost():
    cost = learned(mixed_steps(50))
    draw = random.Random(3)
    for _ in range(100_000):
        work = streams(draw.randrange(1, 5), draw.randrange(100, 900))
        cost.learn(work, seconds(work) * draw.uniform(0.9, 1.1))
    work = streams(2).plus_chunk(250, 20)
    assert cost.predict_s(work) == pytest.approx(seconds(work), rel=0.2)


def test_the_first_chunk_is_a_small_one():
    cost = learned([streams(1)] * 20)
    assert 10 <= cost.tokens_within(0.05, streams(1), start=0) <= 60


def test_a_chunk_of_what_fits_takes_the_time_that_there_is():
    cost = learned(mixed_steps(100), noise=0.0)
    for start in (0, 300):
        num_tokens = cost.tokens_within(0.055, streams(2), start)
        assert seconds(streams(2).plus_chunk(start, num_tokens)) == pytest.approx(0.055, rel=0.05)


def test_no_time_is_no_token():
    assert learned(mixed_steps(50)).tokens_within(0.02, streams(8), start=0) == 0


def test_a_step_that_took_no_time_says_nothing():
    cost = learned([])
    cost.learn(streams(2), 0.0)
    assert cost.predict_s(streams(2)) == StepCost().predict_s(streams(2)) > 0
