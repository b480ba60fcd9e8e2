import math

import pytest

from pdserve.loadtest.search.budget import Budget, cost_of, rank
from pdserve.loadtest.search.goodput import GoodputConfig, GoodputSearch
from pdserve.loadtest.search.verdict import EVERY, Side, compare_servers, rank_servers
from tests.loadtest.synthetic import SyntheticServer, run_at, search_through

ONLY_90 = GoodputConfig(start_rate_per_s=1.0, shares=(0.9,))


def measured(name: str, capacity: float, noise: int, steepness: float = 20.0) -> Side:
    return Side(name, search_through(SyntheticServer(capacity, steepness, noise).run, ONLY_90).runs)


def test_of_two_equal_servers_no_difference_is_shown():
    verdicts = [
        compare_servers(measured("a", 1.13, 100 + trial), measured("b", 1.13, 200 + trial), []) for trial in range(20)
    ]
    assert sum(verdict.winner is None for verdict in verdicts) >= 18


def test_a_difference_of_20_percent_is_found_with_its_size():
    verdicts = [
        compare_servers(measured("a", 1.2 * 1.13, 100 + trial), measured("b", 1.13, 200 + trial), [])
        for trial in range(20)
    ]
    assert sum(verdict.winner == "a" for verdict in verdicts) >= 18
    assert not any(verdict.winner == "b" for verdict in verdicts)
    ratios = [verdict.promises[0] for verdict in verdicts]
    assert all(0.93 < ratio.ratio / 1.2 < 1.07 for ratio in ratios)
    assert sum(1.2 in ratio.interval for ratio in ratios) >= 18


def test_nothing_finer_than_the_grid_is_claimed():
    """Without any chance, and a step apart: one keeps what the other does not, but they may be next to each other."""
    a = Side("a", (run_at(1.0, 150, 0), run_at(1.05, 150, 0), run_at(1.1, 0, 150)))
    b = Side("b", (run_at(1.0, 150, 0), run_at(1.05, 0, 150)))
    verdict = compare_servers(a, b, [])
    assert verdict.winner == "a"
    assert verdict.promises[0].interval.low == 1.0


def test_who_wins_is_told_for_each_promise():
    a = Side("a", (run_at(1.0, 150, 0), run_at(2.0, 0, 150, name="ttft"), run_at(4.0, 0, 150, name="ttft")))
    b = Side("b", (run_at(1.0, 150, 0), run_at(2.0, 150, 0), run_at(4.0, 0, 150, name="tpot")))
    every, ttft, tpot = compare_servers(a, b, ["ttft", "tpot"]).promises
    assert (every.promise, every.winner, every.ratio) == (EVERY, "b", pytest.approx(0.5, rel=0.1))
    assert (ttft.rate_a, ttft.rate_b, ttft.ratio) == (pytest.approx(1.07, rel=0.01), 4.0, None)
    assert math.isinf(tpot.interval.high)


def test_a_server_too_slow_for_every_rate_loses_without_a_ratio():
    a = Side("a", (run_at(1.0, 0, 150),))
    b = Side("b", (run_at(1.0, 150, 0), run_at(2.0, 150, 0), run_at(2.1, 0, 150)))
    verdict = compare_servers(a, b, [])
    assert (verdict.winner, verdict.promises[0].ratio, verdict.promises[0].interval.low) == ("b", None, 0.0)


def test_attainment_at_shared_rates_is_compared_request_by_request():
    """The same four are broken in both, and ten more in b: what is hard for both says nothing."""
    a = Side("a", (run_at(1.0, 146, 4),))
    b = Side("b", (run_at(1.0, 136, 14), run_at(2.0, 0, 150)))
    (shared,) = compare_servers(a, b, []).shared
    assert (shared.rate_per_s, shared.winner) == (1.0, "a")
    assert shared.difference.low > 0
    assert shared.difference.high - shared.difference.low < 0.09


def test_a_shared_rate_at_which_both_do_the_same_shows_no_difference():
    (shared,) = compare_servers(Side("a", (run_at(1.0, 140, 10),)), Side("b", (run_at(1.0, 140, 10),)), []).shared
    assert shared.winner is None


def test_the_best_of_several_is_compared_with_each_other():
    ranking = rank_servers([measured("1:1", 1.0, 1), measured("1:2", 2.0, 2), measured("both", 1.1, 3)], [])
    assert ranking.best == "1:2"
    assert [(verdict.name_a, verdict.name_b) for verdict in ranking.verdicts] == [("1:2", "1:1"), ("1:2", "both")]
    assert ranking.is_shown


def test_the_best_of_equals_is_not_shown_to_be_better():
    assert not rank_servers([measured("a", 1.0, 1), measured("b", 1.0, 2)], []).is_shown


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


def test_a_server_that_is_up_comes_before_its_equal():
    budget = Budget(switch_s=60.0)
    for running in ("a", "b"):
        assert rank(searches(a=1.3, b=1.3), 1e6, budget, running)[0].name == running


def test_runs_that_do_not_fit_in_the_time_left_are_left_out():
    search = searches(a=1.3)
    (choice,) = rank(search, 1e6, Budget())
    assert rank(search, choice.cost_s - 1, Budget()) == []
    assert rank(search, choice.cost_s, Budget()) == [choice]


def test_a_search_that_is_over_asks_for_nothing():
    assert rank({"a": search_through(SyntheticServer(1.3, 60.0).run, ONLY_90)}, 1e6, Budget()) == []
