import math

import numpy as np
import pytest

from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.search.judge import Judge
from pdserve.loadtest.search.runs import Run, read_run
from pdserve.loadtest.search.sequential import MAX_ERROR, Decision, decide, log_evidence
from pdserve.loadtest.workload.window import Window
from tests.loadtest.samples import make_record

PROMISES = (Promise(Measure.TTFT, 1.0),)


def chances_of_deciding(share: float, threshold: float, num_requests: int) -> tuple[float, float]:
    """The exact probabilities to have passed and to have failed by num_requests, looking after every one."""
    undecided = np.zeros(num_requests + 2)
    undecided[0] = 1.0
    passed = failed = 0.0
    for n in range(1, num_requests + 1):
        moved = np.concatenate([[0.0], undecided[:-1]])
        undecided = undecided * (1 - share) + moved * share
        for kept in np.flatnonzero(undecided > 1e-12):
            decision = decide(int(kept), n, threshold)
            if decision is Decision.OPEN:
                continue
            passed += undecided[kept] * (decision is Decision.PASSES)
            failed += undecided[kept] * (decision is Decision.FAILS)
            undecided[kept] = 0.0
    return passed, failed


@pytest.mark.parametrize("threshold", [0.9, 0.99])
def test_looking_after_every_request_is_wrong_no_more_often_than_stated(threshold):
    passed, failed = chances_of_deciding(threshold, threshold, 600)
    assert 0 < passed + failed <= MAX_ERROR


def test_a_share_below_the_threshold_passes_less_often_than_one_at_it_and_a_clear_one_hardly_ever():
    at, below, clearly_below = (chances_of_deciding(share, 0.9, 450)[0] for share in (0.9, 0.88, 0.8))
    assert at > below > clearly_below
    assert clearly_below < 1e-3


def test_150_requests_settle_what_is_clear():
    assert chances_of_deciding(0.99, 0.9, 150)[0] > 0.9
    assert chances_of_deciding(0.7, 0.9, 150)[1] > 0.99


@pytest.mark.parametrize("threshold", [0.9, 0.99])
def test_the_evidence_has_a_mean_of_1_at_the_threshold_after_any_number_of_requests(threshold):
    """That is what its guarantee rests on."""
    for total in (1, 7, 150):
        mean = sum(
            math.comb(total, kept)
            * threshold**kept
            * (1 - threshold) ** (total - kept)
            * math.exp(log_evidence(kept, total, threshold))
            for kept in range(total + 1)
        )
        assert mean == pytest.approx(1.0)


def test_nothing_is_decided_before_the_first_request():
    assert decide(0, 0, 0.9) is Decision.OPEN


def test_a_share_at_the_threshold_stays_open_however_many_requests_show_it():
    assert decide(900_000, 1_000_000, 0.9) is Decision.OPEN


def make_judge(num_kept=0, num_requests=0, first_index=0, share=0.9):
    """A step of a tenth: a promise of 1 s takes 10 s to break."""
    return Judge(share, num_kept, num_requests, first_index, PROMISES, step=1.1)


def slow(index, every_s=0.0, **others):
    return make_record(index, index * every_s, token_times_s=(index * every_s + 9.0,), **others)


def fast(index, every_s=0.0, **others):
    return make_record(index, index * every_s, token_times_s=(index * every_s + 0.5,), **others)


def test_a_run_that_clearly_fails_is_ended():
    judge = make_judge()
    answers = [judge(slow(i)) for i in range(40)]
    assert answers.index(True) == 29


def test_a_run_is_not_ended_for_a_burst_at_its_beginning():
    judge = make_judge()
    assert not any(judge(slow(i)) for i in range(29))


def test_a_run_that_clearly_passes_is_ended_once_a_queue_would_have_shown():
    answers = [judge(fast(i, every_s=0.125)) for judge in [make_judge()] for i in range(200)]
    assert answers.index(True) == 80


def test_a_run_is_not_ended_for_passing_before_there_are_enough_requests_to_say_so():
    answers = [judge(fast(i, every_s=1.0)) for judge in [make_judge()] for i in range(200)]
    assert answers.index(True) == 59


def test_a_run_that_passes_is_not_ended_while_a_queue_may_still_grow():
    judge = make_judge()
    assert not any(judge(fast(i, every_s=0.01)) for i in range(500))


def test_a_run_whose_later_requests_break_their_promises_is_not_ended_for_passing():
    judge = make_judge(num_kept=1000, num_requests=1000)
    assert not any(judge(slow(i, 1.0) if i % 5 == 0 else fast(i, 1.0)) for i in range(100))


def test_earlier_runs_at_the_rate_count():
    assert not any(map(make_judge(), [slow(i) if i % 6 == 0 else fast(i) for i in range(60)]))
    assert any(map(make_judge(num_kept=90, num_requests=120), [slow(i) if i % 6 == 0 else fast(i) for i in range(60)]))


def test_requests_that_end_out_of_order_count_once_all_before_them_have_ended():
    """The first is still open: those that broke since may be the exception."""
    judge = make_judge()
    assert not any(judge(slow(i)) for i in range(1, 60))
    assert judge(slow(0))


def test_only_the_steady_window_is_judged():
    judge = make_judge(first_index=40)
    assert not any(judge(slow(i, window=Window.WARM_UP)) for i in range(40))
    assert any(judge(slow(i)) for i in range(40, 80))


def test_a_failed_request_broke_its_promises():
    judge = make_judge()
    assert any(judge(fast(i, error="timeout")) for i in range(40))


def test_a_run_is_read_in_the_order_of_the_schedule_up_to_the_first_that_is_missing():
    """Request 4 was abandoned: that 5 has ended says that it was faster, not that it is like the others."""
    records = [fast(5), slow(3), fast(2), fast(0, window=Window.WARM_UP), fast(1, window=Window.WARM_UP)]
    run = read_run(2.0, 7, 2, records, PROMISES)
    assert run == Run(2.0, 7, ((), ("ttft",)))


def test_a_failed_request_keeps_no_single_promise():
    run = read_run(2.0, 7, 0, [fast(0, error="timeout"), slow(1), fast(2)], PROMISES)
    assert run.kept() == [False, False, True]
    assert run.kept("ttft") == [False, False, True]
    assert run.kept("tpot") == [False, True, True]
