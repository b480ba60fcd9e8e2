import numpy as np
import pytest

from pdserve.loadtest.measures.distribution import describe, percentile


def test_a_percentile_is_the_smallest_observed_value_that_the_share_does_not_exceed():
    hundred = list(range(1, 101))
    assert [percentile(hundred, percent) for percent in (0, 50, 90, 99, 99.1, 100)] == [1, 50, 90, 99, 100, 100]
    assert percentile([3.0, 1.0], 50) == 1.0
    assert percentile([3.0, 1.0], 51) == 3.0
    assert percentile([5.0], 99) == 5.0


@pytest.mark.parametrize("count", [1, 2, 7, 150, 1000, 1001, 12_345])
def test_percentiles_are_those_of_their_definition_for_any_count(count):
    values = np.random.default_rng(count).lognormal(size=count)
    described = describe(values)
    ordered = sorted(values)
    for share, found in ((500, described.p50), (900, described.p90), (990, described.p99), (999, described.p99_9)):
        # In whole thousandths, so that no rounding decides.
        smallest = next(value for i, value in enumerate(ordered, start=1) if 1000 * i >= share * count)
        assert found == smallest
    assert described.max == ordered[-1]
    assert described.count == count


def test_a_percentile_is_numpys_of_observed_values():
    values = np.random.default_rng(3).exponential(size=777)
    described = describe(values)
    expected = np.percentile(values, (50, 90, 99, 99.9), method="inverted_cdf")
    assert [described.p50, described.p90, described.p99, described.p99_9] == list(expected)


def test_a_distribution_of_nothing_is_none():
    assert describe([]) is None


def test_a_distribution_names_its_count_mean_percentiles_and_maximum():
    values = describe(float(value) for value in range(1, 2001))
    assert (values.count, values.mean, values.max) == (2000, 1000.5, 2000)
    assert (values.p50, values.p90, values.p99, values.p99_9) == (1000, 1800, 1980, 1998)
