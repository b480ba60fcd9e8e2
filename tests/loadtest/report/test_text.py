from dataclasses import replace

import pytest

from pdserve.loadtest.report.text import WIDTH, format_report
from pdserve.loadtest.report.units import format_bytes, format_rate, format_seconds
from tests.loadtest.report.runs import MIXED, make_harness, make_report, make_told
from tests.loadtest.samples import make_record


def test_the_table_says_what_failed_and_what_was_promised():
    table = format_report(make_report())
    assert "2 of 3; failed: 1 timeout" in table
    assert [line.split() for line in table.splitlines() if line.startswith("timeout")] == [
        ["timeout", "timeout", "1", "1", "request", "2:", "no", "end"]
    ]
    assert "ttft <= 1.00 s: kept by 33.3 % (95 % interval 6.1 % to 79.2 %) of all" in table
    assert "INVALID" not in table


def test_the_table_stays_within_its_width_whatever_the_server_is_called():
    failed = make_record(index=2, error="stream_error", detail="x" * 300)
    report = make_report((*MIXED, failed), model="/a/long/path" * 20, notes=("a rough thing " * 20,))
    assert max(map(len, format_report(report).splitlines())) <= WIDTH


def test_notes_of_what_is_rough_are_in_the_table():
    assert "note        lengths were capped" in format_report(make_report(notes=("lengths were capped",)))


def test_the_servers_stages_are_tabulated_and_what_they_leave_open_is_judged():
    text = format_report(make_report([make_told(), make_told(1, 2.0)]))
    (chunks,) = {tuple(line.split()) for line in text.splitlines() if line.startswith("chunks") and "73.2 %" in line}
    assert chunks[:4] == ("chunks", "prefill", "300", "ms")
    assert "first token: unexplained 0.00 ms at p50, 0.00 ms at p99, which adds up" in text


def test_an_account_that_leaves_much_open_does_not_add_up():
    told = make_told()
    vague = replace(told, server_metrics={"first_token": {"queue_s": 0.1}})
    assert "which is 15 times what is allowed" in " ".join(format_report(make_report([vague])).split())


def test_the_harness_quotes_its_own_error():
    exact = " ".join(format_report(make_report(harness=make_harness())).split())
    assert "own error at p99: 0.20 ms in time stamps, 0.60 ms in send times; within its limits" in exact
    inexact = " ".join(format_report(make_report(harness=make_harness(stamp_s=0.004))).split())
    assert "stamp p99 above 0.5 ms" in inexact


def test_a_run_with_a_late_client_is_marked_invalid():
    report = make_report(loop_lags_s=[[0.2] * 10])
    assert "INVALID: the client was late by 200 ms at p99" in format_report(report)


def test_the_table_of_a_run_that_failed_throughout_is_readable():
    table = format_report(make_report([make_record(token_times_s=(), ended_s=1.0, error="http_500")]))
    assert "0 of 1; failed: 1 http_500" in table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00 ms"),
        (0.0012345, "1.23 ms"),
        (0.0456, "45.6 ms"),
        (0.456, "456 ms"),
        (0.9997, "1.00 s"),
        (1.234, "1.23 s"),
        (12.34, "12.3 s"),
        (123.4, "123 s"),
        (12345.0, "12345 s"),
    ],
)
def test_seconds_are_shown_with_three_digits(value, text):
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.6, "0.6"), (12.345, "12.3"), (1250.4, "1,250"), (float("inf"), "inf"), (0.0, "0")]
)
def test_rates_are_shown_with_three_digits(value, text):
    assert format_rate(value) == text


@pytest.mark.parametrize(("value", "text"), [(512, "512 B"), (2048, "2 KiB"), (13271040, "12.7 MiB"), (2**33, "8 GiB")])
def test_sizes_have_a_unit(value, text):
    assert format_bytes(value) == text
