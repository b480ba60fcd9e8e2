"""The steady window apart from the warm-up and the cool-down, and several runs pooled."""

from types import SimpleNamespace

import pytest

from pdserve.loadtest.measures.failures import FailureClass, classify
from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.measures.rates import Rates, measure_rates, steady_span
from pdserve.loadtest.measures.summary import pool, summarize
from pdserve.loadtest.workload.window import Window
from tests.loadtest.samples import make_record

TTFT_1S = Promise(Measure.TTFT, 1.0)


def make_run(ttfts_s=(0.5, 0.5, 0.5, 0.5), spacing_s=1.0, first_window=Window.WARM_UP, last_window=Window.COOL_DOWN):
    """Requests one after the other, 0.25 s apart their two tokens; the first and the last are not steady."""
    records = []
    for i, ttft_s in enumerate(ttfts_s):
        at = i * spacing_s
        window = first_window if i == 0 else last_window if i == len(ttfts_s) - 1 else Window.STEADY
        records.append(make_record(i, at, (at + ttft_s, at + ttft_s + 0.25), window=window, prompt_tokens=8))
    return records


def test_only_the_steady_windows_requests_make_the_headline():
    summary = summarize(make_run((9.0, 0.5, 0.6, 7.0)), [TTFT_1S], [])
    assert (summary.num_requests, summary.num_complete, summary.num_kept) == (2, 2, 2)
    assert summary.slo_attainment == 1.0
    assert summary.latencies["ttft"].max == pytest.approx(0.6)
    assert summary.broken == {"ttft": 0}


def test_the_other_windows_stand_beside_it():
    windows = summarize(make_run((9.0, 0.5, 0.6, 7.0)), [TTFT_1S], []).windows
    assert list(windows) == ["warm-up", "cool-down"]
    assert windows["warm-up"].latencies["ttft"].max == 9.0
    assert (windows["cool-down"].num_requests, windows["cool-down"].num_kept) == (1, 0)


def test_a_run_without_ramps_has_no_other_windows():
    assert summarize([make_record()], [], []).windows == {}


def test_a_run_that_ended_before_its_steady_window_has_no_headline():
    summary = summarize(make_run()[:1], [TTFT_1S], [])
    assert (summary.num_requests, summary.slo_attainment, summary.attainment_interval) == (0, 0.0, None)
    assert (summary.duration_s, summary.goodput_per_s) == (0.0, 0.0)
    assert summary.intervals["ttft"] is None


def test_the_steady_span_ends_where_the_cool_down_begins():
    assert steady_span(make_run()) == (1.0, 3.0)


def test_without_a_cool_down_the_steady_span_ends_with_its_last_request():
    assert steady_span(make_run(last_window=Window.STEADY)) == (1.0, 3.75)


def test_requests_sent_all_at_once_have_a_span_until_the_last_end():
    assert steady_span(make_run(spacing_s=0.0)) == (0.0, 0.75)


def test_rates_count_what_happened_in_the_span_whoever_was_asked():
    """At 1.0 the steady window opens; the warm-up's request has its second token after that, and ends then."""
    rates = measure_rates(make_run((0.9, 0.5, 0.5, 0.5)), [TTFT_1S])
    assert rates == Rates(span_s=2.0, num_complete=3, num_kept=3, input_tokens=2 * 8, output_tokens=5)


def test_an_overloaded_servers_rate_is_what_it_served_not_what_it_was_sent():
    """Sent at 10/s, served at 2/s: of 200 requests in 20 s it ends 40."""
    records = [
        make_record(i, i / 10, (i / 2 + 0.5,), window=Window.STEADY if i < 200 else Window.COOL_DOWN)
        for i in range(201)
    ]
    summary = summarize(records, [], [])
    assert summary.completed_per_s == pytest.approx(2.0)
    assert summary.output_tokens_per_s == pytest.approx(2.0)


def test_tokens_that_shared_an_event_count_with_it():
    record = make_record(token_times_s=(1.0, 3.0), output_tokens=6, ended_s=3.0)
    after = make_record(1, 2.0, (9.0,), window=Window.COOL_DOWN)
    assert measure_rates([record, after], []).output_tokens == 3.0


def test_input_tokens_are_the_servers_count_where_it_gave_one():
    records = [make_record(0, prompt_tokens=11), make_record(1)]
    assert measure_rates(records, []).input_tokens == 11 + 8


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("http_503", FailureClass.HTTP),
        ("timeout", FailureClass.TIMEOUT),
        ("connection", FailureClass.CONNECTION),
        ("bad_event", FailureClass.STREAM),
        ("missing_done", FailureClass.MISSING_END),
        ("missing_finish", FailureClass.MISSING_END),
        ("short_output", FailureClass.SHORT_OUTPUT),
        ("long_output", FailureClass.LONG_OUTPUT),
        ("unheard_of", FailureClass.OTHER),
    ],
)
def test_each_error_has_a_class(error, expected):
    assert classify(error) is expected


def test_errors_are_counted_by_kind_and_by_class():
    errors = ["http_500", "http_503", "http_503", "missing_done", "missing_finish"]
    summary = summarize([make_record(i, error=error) for i, error in enumerate(errors)], [], [])
    assert summary.errors == {"http_503": 2, "http_500": 1, "missing_done": 1, "missing_finish": 1}
    assert summary.error_classes == {"HTTP status": 3, "missing end": 2}


def test_prompts_that_the_server_counts_otherwise_are_counted():
    records = [make_record(0, prompt_tokens=8), make_record(1, prompt_tokens=9), make_record(2, prompt_tokens=None)]
    assert summarize(records, [], []).num_prompt_mismatches == 1


def test_the_largest_gap_of_each_request_is_a_distribution_of_its_own():
    records = [make_record(0, token_times_s=(1.0, 2.0, 4.0)), make_record(1, token_times_s=(1.0, 4.0, 4.5))]
    latencies = summarize(records, [], []).latencies
    assert (latencies["gap"].count, latencies["gap"].p50) == (4, 1.0)
    assert (latencies["max_gap"].count, latencies["max_gap"].p50, latencies["max_gap"].max) == (2, 2.0, 3.0)


def test_an_early_first_token_does_not_hide_a_late_second_one():
    early_first = make_record(intended_s=1.0, token_times_s=(1.1, 3.0, 3.1))
    assert summarize([early_first], [], []).latencies["second"].p50 == 2.0
    promise = Promise(Measure.SECOND, 1.95)
    assert summarize([early_first], [promise], []).broken == {"second": 1}


@pytest.mark.parametrize(
    ("ledger", "queue_s"),
    [
        ({"queue_s": 0.25, "prefill_queue_s": 0.5}, 0.75),
        ({"queue_s": 0.25, "prefill_queue_s": None}, 0.25),
        ({}, None),
        (None, None),
        ({"queue_s": "long", "prefill_queue_s": -1}, None),
        ({"queue_s": 10**400, "prefill_queue_s": True}, None),
    ],
)
def test_the_queue_is_what_the_servers_ledger_says(ledger, queue_s):
    assert make_record(server_metrics=ledger).queue_s == queue_s


def make_report(records, loop_lags_s=((0.001,),)):
    promises = (TTFT_1S,)
    return SimpleNamespace(
        records=tuple(records),
        config=SimpleNamespace(promises=promises),
        summary=summarize(records, promises, loop_lags_s),
    )


def test_runs_of_several_seeds_are_pooled_as_one():
    first, second = make_run((9.0, 0.5, 0.5, 0.5)), make_run((0.5, 0.5, 2.0, 0.25, 0.5), spacing_s=2.0)
    pooled = pool([make_report(first), make_report(second)])
    assert (pooled.num_requests, pooled.num_kept, pooled.broken) == (5, 4, {"ttft": 1})
    assert pooled.duration_s == 2.0 + 6.0
    rates = measure_rates(first, [TTFT_1S]), measure_rates(second, [TTFT_1S])
    assert pooled.goodput_per_s == (rates[0].num_kept + rates[1].num_kept) / 8.0
    assert pooled.latencies["ttft"].count == 5


def test_pooling_one_run_changes_nothing():
    report = make_report(make_run())
    assert pool([report]) == report.summary


def test_pooled_runs_are_as_punctual_as_the_worst():
    pooled = pool([make_report(make_run()), make_report(make_run(), loop_lags_s=[[0.2]])])
    assert not pooled.validity.is_valid
