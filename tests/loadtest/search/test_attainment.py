import math

import numpy as np
import pytest

from pdserve.loadtest.search.answer import describe_curve, find_rate
from pdserve.loadtest.search.attainment import (
    Crossing,
    cross,
    crossing_interval,
    fit_curve,
    points_of,
    resample_shares,
)
from pdserve.loadtest.search.runs import Run
from tests.loadtest.synthetic import run_at


def pool_adjacent_violators(shares, weights):
    """The classic algorithm, block by block."""
    blocks = []
    for share, weight in zip(shares, weights, strict=True):
        blocks.append([share * weight, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] <= blocks[-1][0] / blocks[-1][1]:
            kept, total, size = blocks.pop()
            blocks[-1] = [blocks[-1][0] + kept, blocks[-1][1] + total, blocks[-1][2] + size]
    return [kept / total for kept, total, size in blocks for _ in range(size)]


def test_the_curve_is_that_of_pooling_adjacent_violators():
    rng = np.random.default_rng(2)
    for num_points in (1, 2, 3, 8, 15):
        weights = rng.integers(1, 500, size=num_points).astype(float)
        shares = rng.random((20, num_points))
        for row, curve in zip(shares, fit_curve(shares, weights), strict=True):
            assert list(curve) == pytest.approx(pool_adjacent_violators(row, weights))


def test_points_that_already_fall_are_the_curve():
    shares = np.array([[1.0, 0.9, 0.9, 0.2]])
    assert np.allclose(fit_curve(shares, np.ones(4)), shares)


def test_the_crossing_is_on_the_line_between_the_rates_on_both_sides():
    points = points_of([run_at(1.0, 100, 0), run_at(4.0, 80, 20)])
    assert cross(points, 0.9) == Crossing(pytest.approx(2.0), 1.0, 4.0)


def test_a_point_that_is_better_than_those_below_by_chance_is_pooled_with_them():
    points = points_of([run_at(1.0, 100, 0), run_at(2.0, 88, 12), run_at(3.0, 92, 8), run_at(4.0, 50, 50)])
    assert [round(point.fitted, 3) for point in describe_curve(points)] == [1.0, 0.9, 0.9, 0.5]
    assert cross(points, 0.9).above == 3.0


def test_a_curve_that_never_falls_below_has_no_rate_above_it():
    assert cross(points_of([run_at(1.0, 95, 5), run_at(2.0, 95, 5)]), 0.9) == Crossing(2.0, 2.0, math.inf)


def test_a_curve_that_is_always_below_has_no_rate_under_it():
    assert cross(points_of([run_at(1.0, 80, 20)]), 0.9) == Crossing(0.0, 0.0, 1.0)


def test_a_run_whose_client_was_late_moves_no_curve():
    late = Run(2.0, 1, (("ttft",),) * 100, is_valid=False)
    assert points_of([run_at(1.0, 100, 0), late]) == points_of([run_at(1.0, 100, 0)])


def test_each_promise_has_a_curve_of_its_own():
    runs = [run_at(1.0, 100, 0), run_at(2.0, 60, 40, name="tpot"), run_at(4.0, 0, 100)]
    assert cross(points_of(runs), 0.9).below == 2.0
    assert cross(points_of(runs), 0.9, "ttft").below == 4.0
    assert math.isinf(cross(points_of(runs[:2]), 0.9, "ttft").below)


def test_resampled_shares_scatter_as_the_binomial_does():
    shares = resample_shares(points_of([run_at(1.0, 360, 40)]), None)
    assert shares.mean() == pytest.approx(0.9, abs=0.002)
    assert shares.std() == pytest.approx(math.sqrt(0.9 * 0.1 / 400), rel=0.1)


def test_runs_at_a_rate_are_resampled_each_by_itself():
    """All of one kept, none of the other: how many of each there are is no chance."""
    shares = resample_shares(points_of([run_at(1.0, 50, 0, seed=1), run_at(1.0, 0, 50, seed=2)]), None)
    assert np.allclose(shares, 0.5)


def test_a_schedules_first_requests_are_weighted_alike_however_many_follow():
    whole, part = (
        resample_shares(points_of([Run(1.0, 0, (("ttft",),) * 60 + ((),) * kept)]), None)[:, 0] for kept in (1500, 1440)
    )
    assert np.corrcoef(whole, part)[0, 1] > 0.95


def test_another_seed_weights_otherwise():
    first, other = (resample_shares(points_of([run_at(1.0, 100, 10, seed)]), None)[:, 0] for seed in (0, 1))
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.15


def test_the_interval_holds_at_least_the_two_rates_on_both_sides():
    points = points_of([run_at(1.0, 150, 0), run_at(1.05, 0, 150)])
    assert crossing_interval(points, 0.9).low == 1.0
    assert crossing_interval(points, 0.9).high == 1.05


def test_the_interval_has_no_end_where_no_rate_gives_one():
    interval = crossing_interval(points_of([run_at(1.0, 136, 14)]), 0.9)
    assert (interval.low, interval.high) == (0.0, math.inf)


@pytest.mark.parametrize(("requests", "reported"), [(599, False), (600, True)])
def test_99_percent_is_reported_from_600_requests_up(requests, reported):
    points = points_of([run_at(1.0, requests - 1, 1), run_at(1.05, 500, 100)])
    rate = find_rate(points, 0.99)
    assert (rate.rate_per_s is not None) is reported
    if not reported:
        assert rate.reason == "not enough requests: 599 of 600 at 1 requests/s"


def test_a_server_too_slow_at_every_rate_has_no_goodput():
    rate = find_rate(points_of([run_at(0.5, 10, 90)]), 0.9)
    assert rate.rate_per_s is None
    assert "at 0.5 requests/s, the lowest rate tried" in rate.reason


def test_a_server_that_no_rate_was_too_high_for_has_a_lower_bound():
    rate = find_rate(points_of([run_at(8.0, 150, 0)]), 0.9)
    assert (rate.rate_per_s, rate.interval.high) == (8.0, math.inf)
    assert rate.reason.startswith("at least")


def test_nothing_measured_has_no_rate():
    assert find_rate((), 0.9).reason == "nothing was measured that may be believed"
