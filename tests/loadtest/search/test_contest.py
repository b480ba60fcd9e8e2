import math

from pdserve.loadtest.search.budget import Budget
from pdserve.loadtest.search.contest import Contest
from pdserve.loadtest.search.goodput import GoodputConfig
from tests.loadtest.synthetic import SyntheticServer

CONFIG = GoodputConfig(1.0, shares=(0.9,), step=1.1, num_requests=100)


def play(capacities: dict[str, float], left_s: float = math.inf, most: int = 1000) -> tuple[Contest, list[str]]:
    contest = Contest(list(capacities), CONFIG)
    servers = {name: SyntheticServer(capacity) for name, capacity in capacities.items()}
    order: list[str] = []
    while len(order) < most and (choice := contest.next(left_s, Budget())) is not None:
        contest.add(choice, servers[choice.name].run(choice.ask))
        order.append(choice.name)
    return contest, order


def test_servers_take_turns_while_both_can_win():
    _, order = play({"a": 1.5, "b": 1.4}, most=6)
    assert order == ["a", "b", "a", "b", "a", "b"]


def test_one_that_cannot_win_any_more_waits_until_the_others_are_known():
    contest, order = play({"good": 1.6, "bad": 0.4, "fair": 1.5})
    others_done = max(place for place, name in enumerate(order) if name != "bad")
    assert order[:others_done].count("bad") <= 2
    results = contest.results()
    assert results["good"].rates[0].rate_per_s > 3 * results["bad"].rates[0].rate_per_s


def test_every_search_finds_its_rate_within_a_step():
    contest, _ = play({"a": 1.5, "b": 0.9})
    for name, capacity in (("a", 1.5), ("b", 0.9)):
        rate = contest.results()[name].rates[0].rate_per_s
        assert capacity / 1.1 <= rate <= capacity * 1.1


def test_nothing_is_begun_of_which_less_than_a_third_fits():
    contest, budget = Contest(["a"], CONFIG), Budget(ramp=0.0, overhead_s=0.0)
    assert contest.next(34.0, budget) is not None
    assert contest.next(33.0, budget) is None
    assert contest.next(34.0, Budget(ramp=0.0, overhead_s=0.0, switch_s=10.0)) is None


def test_one_that_cannot_be_run_is_asked_no_more_and_keeps_what_was_found():
    contest, _ = play({"a": 1.5, "b": 1.4}, most=2)
    contest.drop("a")
    assert contest.next(math.inf, Budget()).name == "b"
    assert contest.results()["a"].num_runs == 1
