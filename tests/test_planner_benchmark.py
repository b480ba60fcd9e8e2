"""The planner's benchmark runs: one event of each kind, with few waiting."""

import pytest

from benchmarks.planner import CASES


@pytest.mark.parametrize("case", CASES)
def test_the_machines_plan_while_others_wait(case: str):
    steps = CASES[case](20)
    assert all(next(steps) > 0 for _ in range(5))
