import math

import numpy as np
import pytest

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.search.goodput import Ask, GoodputConfig, GoodputSearch
from pdserve.loadtest.search.runs import Run
from tests.loadtest.synthetic import SyntheticServer, run_with, search_through

ONLY_90 = GoodputConfig(start_rate_per_s=1.0, shares=(0.9,))


def rate_of(search: GoodputSearch):
    return search.result().rates[0]


@pytest.mark.parametrize("capacity", [0.05, 0.3, 0.99, 1.0, 1.01, 1.7, 11.0, 50.0])
def test_the_search_finds_a_rate_that_is_exactly_known_within_a_step(capacity):
    server = SyntheticServer(capacity)
    search = search_through(server.run, ONLY_90)
    found = rate_of(search)
    assert found.rate_per_s == pytest.approx(capacity, rel=0.05)
    assert capacity in found.interval
    assert search.result().is_finished
    # Six doublings, four bisections, two further seeds for two rates, and as much again for their bounds.
    assert len(search.runs) <= 20


@pytest.mark.parametrize("steepness", [4.0, 12.0, 40.0])
def test_the_search_finds_the_rate_in_spite_of_chance(steepness):
    found, num_runs = [], []
    for noise in range(15):
        server = SyntheticServer(1.37, steepness, noise)
        search = search_through(server.run, ONLY_90)
        found.append(rate_of(search))
        num_runs.append(len(search.runs))
    assert np.median([abs(math.log(rate.rate_per_s / 1.37)) for rate in found]) < math.log(1.05)
    # An interval of 95 % misses two of 15 with a probability of 17 %, three with 4 %.
    assert sum(1.37 not in rate.interval for rate in found) <= 2
    assert max(num_runs) <= 25


def test_the_search_asks_for_few_runs_where_all_is_clear():
    """From 1 to 2, four bisections, and both rates next to the answer are clear after one run each."""
    search = search_through(SyntheticServer(1.37, steepness=100.0).run, ONLY_90)
    assert len(search.runs) <= 7


def test_two_servers_are_sent_the_same_schedules_at_rates_that_both_visit():
    fast, slow = (search_through(SyntheticServer(capacity, noise=3).run, ONLY_90) for capacity in (1.3, 1.2))
    schedules = [{(run.rate_per_s, run.seed) for run in search.runs} for search in (fast, slow)]
    assert len(schedules[0] & schedules[1]) >= 3
    rates = {search.config.rate_at(place) for search in (fast, slow) for place in search.config.places}
    assert {run.rate_per_s for search in (fast, slow) for run in search.runs} <= rates


def test_no_two_runs_of_a_search_have_the_same_prompts():
    search = search_through(SyntheticServer(0.83, 4.0, noise=1).run, GoodputConfig(1.0))
    assert len({run.seed for run in search.runs}) == len(search.runs)


def test_a_rate_that_is_not_clear_is_asked_for_again_up_to_three_seeds():
    asked = []

    def run(ask: Ask) -> Run:
        asked.append(ask.rate_per_s)
        kept = {True: 150, False: 0}[ask.rate_per_s < 1.0] if ask.rate_per_s != 1.0 else 136
        return run_with(ask, np.arange(150) < kept)

    search_through(run, ONLY_90)
    assert asked.count(1.0) == 3


def test_further_seeds_that_turn_a_verdict_round_open_the_bracket_again():
    """The first run at each rate is lucky above the capacity of 1: the curve takes it back, and so does the answer."""

    def run(ask: Ask) -> Run:
        is_first = not any(earlier.rate_per_s == ask.rate_per_s for earlier in search.runs)
        capacity = 1.12 if is_first else 1.0
        return run_with(
            ask, np.arange(150) < (150 if ask.rate_per_s <= 0.95 else 138 if ask.rate_per_s < capacity else 90)
        )

    search = GoodputSearch(ONLY_90)
    while (ask := search.next()) is not None:
        search.add(run(ask))
    assert rate_of(search).rate_per_s <= 1.05


def test_an_answer_that_is_not_clear_gets_a_bound_nearby():
    """At 1.98 about 91 % keep, which 450 requests do not settle; the next rate tried was half of that."""
    search = search_through(SyntheticServer(2.0, 20.0, noise=2).run, ONLY_90)
    visited = sorted({run.rate_per_s for run in search.runs})
    below, above = (rate for rate in visited if rate < 2.0), (rate for rate in visited if rate > 2.0)
    assert sorted(below)[-2] > 2.0 / 1.05**6
    assert min(above) < 2.0 * 1.05**2


def test_a_server_too_slow_for_every_rate_ends_the_search_at_the_lowest():
    search = search_through(SyntheticServer(1e-6).run, ONLY_90)
    assert rate_of(search).rate_per_s is None
    assert min(run.rate_per_s for run in search.runs) == pytest.approx(1 / 64, rel=0.15)
    assert len(search.runs) == 7


def test_a_server_too_fast_for_every_rate_ends_the_search_at_the_highest():
    search = search_through(SyntheticServer(1e6).run, ONLY_90)
    assert rate_of(search).reason == "at least: no rate tried was too high"
    assert rate_of(search).rate_per_s == max(run.rate_per_s for run in search.runs)
    assert len(search.runs) == 7


def test_the_search_ends_after_its_runs_whatever_it_knows():
    """Nothing but chance: kept or not has nothing to do with the rate."""
    rng = np.random.default_rng(4)
    config = GoodputConfig(1.0, max_runs=12)
    search = search_through(lambda ask: run_with(ask, rng.random(150) < rng.choice([0.85, 0.9, 0.95])), config)
    assert len(search.runs) == 12
    assert search.result().curve
    assert not search.result().is_finished


def test_the_search_stays_at_rates_that_a_load_can_have():
    search = search_through(SyntheticServer(1e-9).run, GoodputConfig(0.002, shares=(0.9,)))
    assert min(run.rate_per_s for run in search.runs) >= 0.001
    assert len(search.runs) == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_search_among_pure_chance_comes_to_an_end_by_itself(seed):
    rng = np.random.default_rng(seed)
    config = GoodputConfig(1.0, max_runs=10_000)
    search = search_through(lambda ask: run_with(ask, rng.random(150) < rng.choice([0.5, 0.9, 1.0])), config)
    assert len(search.runs) <= 3 * 169 + 1


def test_99_percent_is_searched_for_with_600_requests():
    server = SyntheticServer(1.7, 12.0, noise=2)
    search = search_through(server.run, GoodputConfig(1.0))
    nine, ninety_nine = search.result().rates
    assert server.rate_of(0.99) in ninety_nine.interval
    assert ninety_nine.rate_per_s < nine.rate_per_s
    counts = {point.rate_per_s: point.num_requests for point in search.result().curve}
    assert max(counts.values()) >= 600


def test_runs_that_ended_early_for_90_percent_do_not_keep_99_from_its_requests():
    """The first run at 1.0 is ended after 70 requests, being clear for 90 %; three more make 520."""

    def run(ask: Ask) -> Run:
        return run_with(ask, np.full(70 if ask.share == 0.9 else 150, ask.rate_per_s <= 1.0))

    search = search_through(run, GoodputConfig(1.0))
    assert search.result().rates[1].reason is None
    assert [point.num_requests for point in search.result().curve if point.rate_per_s == 1.0] == [70 + 4 * 150]


def test_of_a_search_for_90_percent_alone_99_is_not_told():
    search = search_through(SyntheticServer(1.7, 12.0, noise=2).run, GoodputConfig(1.0), most_runs=8)
    assert search.result().rates[1].reason.startswith("not enough requests: ")
    assert not search.result().is_finished


def late(ask: Ask) -> Run:
    return Run(ask.rate_per_s, ask.seed, ((),) * ask.num_requests, is_valid=False)


def test_a_run_with_a_late_client_is_counted_and_made_again_with_another_seed():
    search = GoodputSearch(ONLY_90)
    first = search.next()
    search.add(late(first))
    again = search.next()
    assert (again.rate_per_s, search.result().num_invalid) == (first.rate_per_s, 1)
    assert again.seed != first.seed
    assert search.bracket(0.9) is None


def test_a_late_client_costs_a_rate_none_of_its_seeds():
    asked = []

    def run(ask: Ask) -> Run:
        asked.append(ask.rate_per_s)
        if len(asked) == 1:
            return late(ask)
        return run_with(ask, np.arange(150) < (136 if ask.rate_per_s == 1.0 else 150 if ask.rate_per_s < 1.0 else 0))

    search_through(run, ONLY_90)
    assert asked.count(1.0) == 3 + 1


def test_a_search_whose_client_is_always_late_gives_up_unfinished():
    search = search_through(late, GoodputConfig(1.0))
    assert {run.rate_per_s for run in search.runs} == {1.0}
    assert len({run.seed for run in search.runs}) == len(search.runs) == search.config.most_seeds
    assert not search.result().is_finished
    assert search.result().rates[0].rate_per_s is None


def test_a_run_beside_the_grid_is_refused():
    with pytest.raises(OptionError, match=r"1\.234"):
        GoodputSearch(ONLY_90).add(Run(1.234, 0, ((),)))


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"start_rate_per_s": 0.0}, "--rate"),
        ({"start_rate_per_s": math.inf}, "--rate"),
        ({"start_rate_per_s": math.nan}, "--rate"),
        ({"shares": (1.0,)}, "--shares"),
        ({"shares": (math.nan,)}, "--shares"),
        ({"step": 1.0}, "--tolerance"),
        ({"num_seeds": 0}, "--seeds"),
        ({"num_requests": 0}, "--num-requests"),
    ],
)
def test_a_search_that_cannot_be_is_refused_by_flag(options, flag):
    with pytest.raises(OptionError, match=flag):
        GoodputConfig(**{"start_rate_per_s": 1.0, **options})
