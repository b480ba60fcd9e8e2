import pytest

from pdserve.loadtest.search.budget import Budget, cost_of, rank
from pdserve.loadtest.search.goodput import GoodputConfig, GoodputSearch
from tests.loadtest.synthetic import SyntheticServer, search_through

ONLY_90 = GoodputConfig(start_rate_per_s=1.0, shares=(0.9,))


def searches(**capacities: float) -> dict[str, GoodputSearch]:
    """Each after the runs that bracket its answer."""
    return {
        name: search_through(SyntheticServer(capacity, 60.0).run, ONLY_90, most_runs=3)
        for name, capacity in capacities.items()
    }


def test_a_run_costs_its_requests_and_its_ramps():
    ask = GoodputSearch(GoodputConfig(2.0)).next()
    assert cost_of(ask, Budget(ramp=0.1, overhead_s=5.0)) == pytest.approx(150 * 1.2 / 2.0 + 5.0)


def test_a_server_that_was_never_measured_comes_first():
    choices = rank({**searches(a=1.3), "b": GoodputSearch(ONLY_90)}, 1e6, Budget())
    assert [choice.name for choice in choices] == ["b", "a"]


def test_a_server_that_cannot_win_any_more_comes_last_even_if_more_is_open_about_it():
    slow = search_through(SyntheticServer(0.4, 60.0).run, ONLY_90, most_runs=1)
    fast = search_through(SyntheticServer(2.5, 60.0).run, ONLY_90, most_runs=3)
    choices = rank({"slow": slow, "fast": fast}, 1e6, Budget())
    assert [(choice.name, choice.is_behind) for choice in choices] == [("fast", False), ("slow", True)]


def test_runs_that_do_not_fit_in_the_time_left_are_left_out():
    search = searches(a=1.3)
    (choice,) = rank(search, 1e6, Budget())
    assert rank(search, choice.cost_s - 1, Budget()) == []
    assert rank(search, choice.cost_s, Budget()) == [choice]


def test_a_search_that_is_over_asks_for_nothing():
    assert rank({"a": search_through(SyntheticServer(1.3, 60.0).run, ONLY_90)}, 1e6, Budget()) == []
