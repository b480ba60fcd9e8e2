import math

import pytest

from pdserve.loadtest.client.exchange import ABANDONED
from pdserve.loadtest.measures.kept import broken_promises, is_kept, latest_end_s
from pdserve.loadtest.measures.promise import Measure, Promise, parse_promises
from pdserve.loadtest.measures.summary import summarize
from tests.loadtest.samples import make_record

TTFT_1S = Promise(Measure.TTFT, 1.0)
TPOT_100MS = Promise(Measure.TPOT, 0.1)


@pytest.mark.parametrize(
    ("measure", "value"),
    [(Measure.TTFT, 1.0), (Measure.SECOND, 1.25), (Measure.TPOT, 1.0), (Measure.GAP, 1.75), (Measure.E2E, 3.5)],
)
def test_a_promise_is_kept_at_its_limit_and_broken_above(measure, value):
    record = make_record(intended_s=1.0, token_times_s=(2.0, 2.25, 4.0), ended_s=4.5)
    assert broken_promises(record, [Promise(measure, value)]) == ()
    assert broken_promises(record, [Promise(measure, value - 0.001)]) == (measure,)


def test_a_promise_counts_from_the_intended_send_time():
    late_client = make_record(intended_s=0.0, sent_s=0.9, token_times_s=(1.1,))
    assert not is_kept(late_client, [TTFT_1S])


def test_a_request_too_short_for_a_measure_keeps_its_promise():
    assert is_kept(make_record(token_times_s=(0.5,)), [TTFT_1S, TPOT_100MS, Promise(Measure.GAP, 0.1)])


def make_abandoned(token_times_s, ended_s=5.0, planned_output_tokens=5):
    """Sent at 1, open when its run was ended."""
    return make_record(
        intended_s=1.0,
        token_times_s=token_times_s,
        ended_s=ended_s,
        planned_output_tokens=planned_output_tokens,
        error=ABANDONED,
    )


@pytest.mark.parametrize(
    ("measure", "token_times_s", "value"),
    [
        (Measure.TTFT, (), 4.0),
        (Measure.TTFT, (2.0,), 1.0),
        (Measure.SECOND, (2.0,), 4.0),
        (Measure.SECOND, (2.0, 2.5), 1.5),
        (Measure.TPOT, (2.0, 3.0), 0.75),
        (Measure.GAP, (2.0, 3.0), 2.0),
        (Measure.GAP, (2.0, 4.5), 2.5),
        (Measure.E2E, (2.0, 3.0), 4.0),
    ],
)
def test_an_abandoned_request_broke_what_no_end_of_it_could_have_kept(measure, token_times_s, value):
    record = make_abandoned(token_times_s)
    assert broken_promises(record, [Promise(measure, value)]) == ()
    assert broken_promises(record, [Promise(measure, value - 0.001)]) == (measure,)
    assert not is_kept(record, [Promise(measure, value)])


def test_an_abandoned_request_of_one_token_has_no_second():
    assert broken_promises(make_abandoned((), planned_output_tokens=1), [Promise(Measure.SECOND, 0.001)]) == ()


@pytest.mark.parametrize("measure", [Measure.TPOT, Measure.GAP])
def test_an_abandoned_request_without_a_token_says_nothing_of_its_stream(measure):
    assert broken_promises(make_abandoned(()), [Promise(measure, 0.001)]) == ()


@pytest.mark.parametrize(
    ("slo", "num_tokens", "latest_s"),
    [
        ("ttft=2,tpot=0.5", 5, 10 + 2 + 4 * 0.5),
        ("ttft=2,tpot=0.5", 1, 10 + 2),
        ("second=3,tpot=0.5", 5, 10 + 3 + 4 * 0.5),
        ("ttft=2,gap=0.25,tpot=0.5", 5, 10 + 2 + 4 * 0.25),
        ("ttft=2,tpot=0.5,e2e=3", 5, 10 + 3),
        ("ttft=2", 5, math.inf),
        ("tpot=0.5", 5, math.inf),
        ("second=2", 1, math.inf),
    ],
)
def test_a_request_that_keeps_its_promises_has_ended_by_a_time(slo, num_tokens, latest_s):
    assert latest_end_s(10.0, num_tokens, parse_promises(slo)) == latest_s


def test_attainment_counts_every_request_and_errors_miss():
    records = [
        make_record(index=0, token_times_s=(0.5, 0.55)),
        make_record(index=1, token_times_s=(1.5, 1.55)),
        make_record(index=2, token_times_s=(0.5, 0.95)),
        make_record(index=3, token_times_s=(0.5, 0.55), error="missing_done"),
        make_record(index=4, token_times_s=(), error="timeout"),
    ]
    summary = summarize(records, [TTFT_1S, TPOT_100MS], [])
    assert summary.slo_attainment == 1 / 5
    assert (summary.num_requests, summary.num_complete, summary.num_kept) == (5, 3, 1)
    assert summary.broken == {"ttft": 1, "tpot": 1}
    assert summary.errors == {"missing_done": 1, "timeout": 1}


def test_goodput_is_kept_requests_from_the_first_intended_send_to_the_last_end():
    records = [
        make_record(index=0, intended_s=0.0, sent_s=0.25, token_times_s=(0.5,)),
        make_record(index=1, intended_s=1.0, token_times_s=(1.5,)),
        make_record(index=2, intended_s=2.0, token_times_s=(), ended_s=8.0, error="timeout"),
    ]
    summary = summarize(records, [TTFT_1S], [])
    assert summary.duration_s == 8.0
    assert summary.goodput_per_s == 2 / 8
    assert summary.completed_per_s == 2 / 8


def test_without_promises_every_complete_request_is_kept():
    records = [make_record(token_times_s=(50.0,)), make_record(error="timeout", ended_s=60.0)]
    assert summarize(records, [], []).slo_attainment == 0.5


def test_latencies_are_of_complete_requests_only():
    records = [make_record(token_times_s=(0.5, 0.75)), make_record(token_times_s=(9.0, 19.0), error="connection")]
    latencies = summarize(records, [], []).latencies
    assert latencies["ttft"].max == 0.5
    assert latencies["gap"].max == 0.25
    assert latencies["client_lag"].count == 2


def test_gaps_of_all_requests_are_one_distribution():
    records = [make_record(token_times_s=(1.0, 2.0, 4.0)), make_record(token_times_s=(1.0, 4.0))]
    gaps = summarize(records, [], []).latencies["gap"]
    assert (gaps.count, gaps.p50, gaps.max) == (3, 2.0, 3.0)


def test_a_run_without_a_complete_request_has_no_latencies():
    summary = summarize([make_record(token_times_s=(), ended_s=1.0, error="http_500")], [TTFT_1S], [])
    assert summary.latencies["ttft"] is None
    assert summary.goodput_per_s == 0


@pytest.mark.parametrize(
    ("ttft_s", "lag_s", "is_valid"), [(0.05, 0.005, True), (0.05, 0.006, False), (1.0, 0.05, True), (1.0, 0.051, False)]
)
def test_a_run_is_valid_while_lag_is_below_5_ms_or_5_percent_of_the_median_ttft(ttft_s, lag_s, is_valid):
    records = [make_record(index=i, token_times_s=(ttft_s,)) for i in range(100)]
    by_loop = summarize(records, [], [[0.001] * 98 + [lag_s] * 2]).validity
    late = [make_record(index=i, sent_s=lag_s, token_times_s=(ttft_s + lag_s,)) for i in range(2)]
    by_sends = summarize([*records[:98], *late], [], [[0.001]]).validity
    assert (by_loop.is_valid, by_sends.is_valid) == (is_valid, is_valid)


def test_the_least_punctual_process_decides_however_many_are_punctual():
    """Requests take turns: of four processes the last is late with two of its 50, a hundredth of all."""
    records = [make_record(index=i, token_times_s=(0.05,)) for i in range(200)]
    late = [make_record(index=i, sent_s=0.02, token_times_s=(0.05,)) for i in (3, 7)]
    by_sends = summarize([*records[:3], late[0], *records[4:7], late[1], *records[8:]], [], [[0.001]] * 4)
    assert by_sends.validity.lag_p99_s == pytest.approx(0.02)
    by_loop = summarize(records, [], [*[[0.001] * 100] * 3, [0.001] * 98 + [0.02] * 2])
    assert by_loop.validity.lag_p99_s == pytest.approx(0.02)


def test_a_wait_for_a_place_excuses_no_lag():
    """Under --max-concurrency a request waits for 10 s, and is then answered within 20 ms."""
    records = [make_record(index=i, sent_s=10.0, woke_s=0.01, token_times_s=(10.02,)) for i in range(4)]
    assert not summarize(records, [], []).validity.is_valid
