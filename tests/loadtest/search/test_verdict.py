import math

import pytest

from pdserve.loadtest.search.goodput import GoodputConfig
from pdserve.loadtest.search.verdict import EVERY, Side, compare_servers
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
