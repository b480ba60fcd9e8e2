import math

import numpy as np
import pytest

from pdserve.loadtest.measures.bootstrap import (
    Interval,
    draw_counts,
    interval_of,
    percentile_intervals,
    resampled_percentiles,
    wilson,
)
from pdserve.loadtest.measures.distribution import percentile


def test_wilsons_interval_is_the_published_one():
    # Newcombe 1998 (Statistics in Medicine 17), table I, method 3.
    for kept, total, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        interval = wilson(kept, total)
        assert interval.low == pytest.approx(low, abs=5e-5)
        assert interval.high == pytest.approx(high, abs=5e-5)


def test_wilsons_interval_stays_within_0_and_1_where_all_or_none_keep():
    for total in (1, 2, 150, 450):
        none, every = wilson(0, total), wilson(total, total)
        assert 0 == none.low < none.high < 1
        assert 0 < every.low < every.high <= 1


@pytest.mark.parametrize("share", [0.5, 0.9, 0.97])
def test_wilsons_interval_covers_the_true_share_about_as_often_as_it_says(share):
    """Its coverage is the sum of the binomial's probabilities where it covers: exact, no simulation."""
    for total in (150, 450):
        covered = sum(
            math.comb(total, kept) * share**kept * (1 - share) ** (total - kept)
            for kept in range(total + 1)
            if share in wilson(kept, total)
        )
        # Within the oscillation that Brown, Cai and DasGupta 2001 (figure 5) show for it.
        assert 0.93 <= covered <= 0.98


def test_every_resample_has_as_many_requests_of_each_run_as_the_run():
    counts = np.concatenate(list(draw_counts([3, 0, 5], num_resamples=50, seed=1)))
    assert counts.shape == (50, 8)
    assert (counts[:, :3].sum(axis=1) == 3).all()
    assert (counts[:, 3:].sum(axis=1) == 5).all()


def test_the_same_seed_draws_the_same_resamples_and_another_seed_others():
    first, again, other = (np.concatenate(list(draw_counts([40], 20, seed))) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_a_request_is_drawn_as_often_as_chance_has_it():
    counts = np.concatenate(list(draw_counts([30], num_resamples=4000)))
    # Binomial(30, 1/30): mean 1, variance 29/30; four standard errors of 120,000 draws.
    assert counts.mean() == 1.0
    assert counts.var() == pytest.approx(29 / 30, abs=4 * math.sqrt(2.9 / 120_000))


def test_resampled_percentiles_are_those_of_the_drawn_values():
    rng = np.random.default_rng(5)
    owners = np.repeat(np.arange(12), rng.integers(0, 6, size=12))
    values = rng.exponential(size=len(owners))
    counts = np.concatenate(list(draw_counts([12], num_resamples=30)))
    found = resampled_percentiles(values, owners, counts, (50, 90, 99))
    for row, count in zip(found, counts, strict=True):
        drawn = np.repeat(values, count[owners])
        assert list(row) == [percentile(drawn, percent) for percent in (50, 90, 99)]


def test_a_resample_without_any_value_has_no_percentile():
    found = resampled_percentiles(np.array([2.0]), np.array([1]), np.array([[2, 0], [0, 2]]), (50,))
    assert math.isnan(found[0, 0])
    assert found[1, 0] == 2.0
    assert interval_of(found[:, 0]) == Interval(2.0, 2.0)


def test_nothing_known_makes_an_interval_without_ends():
    assert interval_of(np.full(5, np.nan)) == Interval(-math.inf, math.inf)


@pytest.mark.parametrize(("percent", "least"), [(50, 0.90), (90, 0.88)])
def test_a_percentiles_interval_covers_the_true_one_about_as_often_as_it_says(percent, least):
    """400 trials of 150 exponential values: a coverage of 95 % is at least 0.92 with four standard errors' room,
    less what the percentile bootstrap of a quantile is known to lack at this size."""
    rng = np.random.default_rng(7)
    true = -math.log(1 - percent / 100)
    covered = [
        true in percentile_intervals([rng.exponential(size=150)], (percent,), num_resamples=300, seed=trial)[0]
        for trial in range(400)
    ]
    assert least <= np.mean(covered) <= 0.985


def test_an_interval_narrows_with_the_root_of_the_number_of_requests():
    rng = np.random.default_rng(11)
    widths = []
    for size in (100, 1600):
        intervals = [percentile_intervals([rng.exponential(size=size)], (50,), 300, trial)[0] for trial in range(40)]
        widths.append(np.mean([interval.high - interval.low for interval in intervals]))
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.2)


def test_pooled_runs_that_differ_are_resampled_each_by_itself():
    """Half of the values are 1 and half are 2: drawn from one pot, the median would be either."""
    apart = percentile_intervals([np.full(51, 1.0), np.full(50, 2.0)], (50,))
    together = percentile_intervals([np.repeat([1.0, 2.0], (51, 50))], (50,))
    assert apart == [Interval(1.0, 1.0)]
    assert together == [Interval(1.0, 2.0)]
