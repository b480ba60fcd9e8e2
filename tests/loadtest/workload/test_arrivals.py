"""Arrival processes against their theory. Seeds are fixed; bounds are four standard errors of what is estimated."""

import math

import numpy as np
import pytest

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.arrivals import Constant, Gamma, Poisson, Replay, Step, Steps, parse_arrivals
from pdserve.loadtest.workload.times import draw_times

NUM = 20_000
STEPS = Steps((Step(0.5, 60.0), Step(2.0, 30.0)))
PROCESSES = [Poisson(), Constant(), Gamma(0.4), Gamma(2.5), STEPS]


def draw(arrivals, rate_per_s=5.0, num=NUM, seed=1):
    return draw_times(np.random.default_rng(seed), arrivals, rate_per_s, num)


@pytest.mark.parametrize("arrivals", PROCESSES, ids=str)
def test_times_begin_at_zero_and_never_decrease(arrivals):
    times = draw(arrivals)
    assert times[0] == 0
    assert np.diff(times).min() >= 0


@pytest.mark.parametrize("arrivals", PROCESSES, ids=str)
def test_the_same_seed_draws_the_same_times_and_another_rate_scales_them(arrivals):
    slow, fast = draw(arrivals, 1.0), draw(arrivals, 4.0)
    assert np.array_equal(slow, draw(arrivals, 1.0))
    assert slow / 4 == pytest.approx(fast)


@pytest.mark.parametrize("arrivals", PROCESSES, ids=str)
def test_an_infinite_rate_sends_all_at_once(arrivals):
    assert not draw(arrivals, math.inf, 20).any()


@pytest.mark.parametrize("arrivals", [Poisson(), Constant(), Gamma(0.4), Gamma(2.5)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_rate_is_exact_whatever_the_seed(arrivals, seed):
    assert draw(arrivals, 5.0, 100, seed)[-1] == pytest.approx(99 / 5.0)


@pytest.mark.parametrize(
    ("arrivals", "cv"), [(Poisson(), 1.0), (Gamma(0.4), 0.4), (Gamma(2.5), 2.5), (Gamma(1.0), 1.0)]
)
def test_gaps_have_the_mean_and_the_coefficient_of_variation_that_were_asked_for(arrivals, cv):
    gaps = np.diff(draw(arrivals))
    assert gaps.mean() == pytest.approx(0.2)
    # Of a gamma distribution the excess kurtosis is 6 cv^2, so a sample's CV varies by cv sqrt((1 + 3 cv^2) / 2 n)
    # or so; exactly scaled means leave a little less.
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=4 * cv * math.sqrt((1 + 3 * cv**2) / 2 / NUM))


def test_poisson_gaps_are_exponential():
    gaps = np.diff(draw(Poisson())) * 5.0
    for limit in (0.1, 0.5, 1.0, 2.0, 4.0):
        share = math.exp(-limit)
        assert (gaps > limit).mean() == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / NUM))


@pytest.mark.parametrize(("arrivals", "dispersion"), [(Poisson(), 1.0), (Gamma(2.0), 4.0)])
def test_counts_in_windows_scatter_as_the_process_says(arrivals, dispersion):
    """Variance over mean of counts: cv^2 for windows of many gaps (Cox 1962, section 4.5)."""
    windows_s = 40.0
    times = draw(arrivals)
    counts = np.histogram(times, bins=np.arange(0, times[-1], windows_s))[0]
    error = 4 * dispersion * math.sqrt(2 / len(counts))
    assert counts.var() / counts.mean() == pytest.approx(dispersion, abs=error)


@pytest.mark.parametrize("seed", range(50))
def test_the_burstiest_gaps_keep_the_rate(seed):
    times = draw(Gamma(20.0), 2.0, 3, seed)
    assert np.isfinite(times).all()
    assert times[-1] == pytest.approx(1.0)


def test_constant_gaps_are_equal():
    assert draw(Constant(), 4.0, 5).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_each_step_has_its_own_rate_and_the_steps_begin_again():
    assert (STEPS.own_rate_per_s, STEPS.mean_requests) == (1.0, 90.0)
    times = draw(STEPS, 1.0)
    places = times % 90.0
    num_passes = times[-1] / 90.0
    for start, end, rate in ((0, 60, 0.5), (60, 90, 2.0)):
        expected = rate * (end - start) * num_passes
        count = ((places >= start) & (places < end)).sum()
        assert count == pytest.approx(expected, abs=4 * math.sqrt(expected))


def test_gaps_within_a_step_are_exponential():
    times = draw(Steps((Step(1.0, 100.0), Step(10.0, 100.0))), 5.5)
    fast = np.diff(times[times % 200.0 >= 100.0])
    fast = fast[fast < 50.0]
    assert fast.mean() == pytest.approx(0.1, abs=4 * 0.1 / math.sqrt(len(fast)))
    assert fast.std() == pytest.approx(0.1, abs=4 * 0.1 * math.sqrt(2 / len(fast)))


def test_a_pause_sends_nothing():
    times = draw(Steps((Step(4.0, 10.0), Step(0.0, 20.0))), 4 / 3)
    assert (times % 30.0 <= 10.0 + 1e-6).all()


def test_steps_at_another_rate_are_shorter_and_steeper():
    times = draw(STEPS, 2.0)
    assert ((times % 45.0) >= 30.0).mean() == pytest.approx(2 / 3, abs=0.02)


def test_a_replay_at_its_own_rate_keeps_the_times():
    trace = Replay((0.0, 0.5, 0.75, 4.0))
    assert draw(trace, trace.own_rate_per_s, 4).tolist() == pytest.approx([0.0, 0.5, 0.75, 4.0])


def test_a_replay_of_one_moment_stays_one():
    trace = Replay((0.0,) * 5)
    assert trace.own_rate_per_s == math.inf
    assert not draw(trace, 2.0, 5).any()


def test_quantised_times_are_spread_within_their_step_in_order():
    batches = np.repeat(np.arange(200) * 3.0, 10)
    trace = Replay(tuple(batches.tolist()), quantum_s=3.0)
    rate = trace.own_rate_per_s
    times = draw(trace, rate, len(batches))
    assert np.diff(times).min() >= 0
    # From 0 to 3 s, and up to a step more or less by which the scale to the exact rate moves the ends.
    offsets = times - batches
    assert -3.0 <= offsets.min() <= offsets.max() <= 6.0
    assert offsets.std() == pytest.approx(3.0 / math.sqrt(12), rel=0.1)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=4 * math.sqrt(2 / len(gaps)))


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("poisson", Poisson()),
        ("constant", Constant()),
        ("gamma:2.5", Gamma(2.5)),
        ("steps:0.5@60,2@30", STEPS),
    ],
)
def test_arrivals_are_written_as_they_are_read(text, arrivals):
    assert parse_arrivals(text) == arrivals


@pytest.mark.parametrize(
    "text",
    [
        "",
        "random",
        "poisson:1",
        "gamma",
        "gamma:0",
        "gamma:nan",
        "gamma:1e9",
        "steps",
        "steps:",
        "steps:1",
        "steps:1@",
        "steps:1@0",
        "steps:-1@5",
        "steps:inf@5",
        "steps:1@inf",
        "steps:0@5,1@5",
        "steps:" + ",".join(["1@1"] * 1001),
    ],
)
def test_malformed_arrivals_are_refused_naming_the_flag(text):
    with pytest.raises(OptionError, match="--arrivals"):
        parse_arrivals(text)


def test_times_that_decrease_are_no_replay():
    with pytest.raises(OptionError, match="must not decrease"):
        Replay((0.0, 2.0, 1.0))
