"""The verdict in words, on servers whose capacities are known."""

from pdserve.loadtest.search.conclusion import Candidate, conclude
from pdserve.loadtest.search.diagnosis import Bound, Diagnosis
from pdserve.loadtest.search.goodput import GoodputConfig
from pdserve.loadtest.search.runs import Run
from pdserve.loadtest.search.verdict import Side
from tests.loadtest.synthetic import SyntheticServer, search_through

CONFIG = GoodputConfig(1.0, shares=(0.9,), step=1.1)
LATE = Diagnosis(Bound.PREFILL, {Bound.PREFILL: 9}, "prefill-bound: 9 of 9 broken requests waited")


def candidate(name: str, is_split: bool, capacity: float, diagnosis: Diagnosis | None = None) -> Candidate:
    return Candidate(Side(name, search_through(SyntheticServer(capacity).run, CONFIG).runs), is_split, diagnosis)


def conclude_on(*candidates: Candidate):
    return conclude(candidates, ["ttft"], 0.9)


def test_a_better_split_pays_and_its_ratio_is_named():
    found = conclude_on(candidate("2 both", False, 1.0), candidate("1P1D", True, 2.0), candidate("2P0D", True, 0.3))
    assert found.headline.startswith("Splitting pays, 1.98x (")
    assert found.headline.endswith("Use 1P1D.")
    assert found.verdict.winner == "1P1D"


def test_where_colocated_wins_the_reason_is_what_held_the_split_back():
    found = conclude_on(candidate("2 both", False, 2.0), candidate("1P1D", True, 1.0, LATE))
    assert found.headline.startswith("Colocated wins here, 1.98x (")
    assert "because the split one is prefill-bound" in found.headline
    assert found.headline.endswith("Use 2 both.")
    assert "1P1D is prefill-bound: 9 of 9 broken requests waited." in found.details


def test_equals_are_called_equal():
    found = conclude_on(candidate("2 both", False, 1.0), candidate("1P1D", True, 1.0))
    assert found.headline.startswith("No difference shown, 1.00x (")
    assert found.verdict.winner is None


def test_each_promise_is_judged_by_itself():
    found = conclude_on(candidate("2 both", False, 1.0), candidate("1P1D", True, 2.0))
    assert any(text.startswith("ttft alone: 1P1D serves more, 1.98x (") for text in found.details)


def test_without_a_split_layout_there_is_no_verdict():
    found = conclude_on(candidate("2 both", False, 1.0))
    assert found.headline.startswith("No verdict: no split layout")
    assert found.verdict is None


def test_a_promise_that_no_rate_was_too_high_for_is_not_judged():
    broken_in_ttft = Side("2 both", (Run(1.0, 0, (("ttft",),) * 60),))
    kept = Side("1P1D", (Run(1.0, 0, ((),) * 60),))
    candidates = [Candidate(broken_in_ttft, False, None), Candidate(kept, True, None)]
    found = conclude(candidates, ["ttft", "tpot"], 0.9)
    assert found.details[1] == "tpot alone: not known, no rate that was tried is clearly too high for it."
