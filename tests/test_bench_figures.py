"""What the benchmarks of growth and of the router say about their measurements."""

import pytest

from benchmarks.growth import line
from benchmarks.router import describe


def test_growth_names_the_largest_factor_of_a_doubling():
    assert line("rows", (1, 2, 4), [0.010, 0.015, 0.030]) == "| rows | 1 to 4 | 10.0 ms, 15.0 ms, 30.0 ms | 2.00 |"


def test_tokens_are_late_by_what_they_come_after_the_quickest_of_their_stream():
    on_time = [0.02 * index for index in range(1001)]
    late = [time + (0.004 if index % 2 else 0.0) for index, time in enumerate(on_time)]
    told = describe([on_time, late], 0.02, router_s=0.02)
    assert "2 streams, 100 tokens/s" in told
    assert "10.0 us" in told
    assert "0.00 ms (p50) and 4.00 ms (p99)" in told


def test_a_step_that_a_stream_missed_is_no_delay():
    times = [0.02 * index for index in range(10)] + [0.02 * index for index in range(11, 20)]
    assert "0.00 ms (p99)" in describe([times], 0.02, router_s=0.0)


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_the_shortest_streams_are_described(num_tokens: int):
    assert "1 streams" in describe([[0.02 * index for index in range(num_tokens)]], 0.02, router_s=0.0)
