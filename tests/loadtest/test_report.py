import json
import math
from datetime import UTC, datetime

import pytest

from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.measures.summary import summarize
from pdserve.loadtest.report.progress import Progress, ProgressLine, format_progress
from pdserve.loadtest.report.report import (
    Report,
    describe_environment,
    format_report,
    format_seconds,
    to_json,
    write_json,
)
from tests.loadtest.samples import make_config, make_load, make_record

PROMISES = (Promise(Measure.TTFT, 1.0),)


def make_report(records, loop_lags_s=(0.001,), rate_per_s=2.0):
    return Report(
        config=make_config("http://h:1", make_load(rate_per_s, len(records)), PROMISES),
        model="m",
        started_at=datetime(2026, 1, 2, tzinfo=UTC),
        environment=describe_environment(),
        schedule_digest="ab",
        summary=summarize(records, PROMISES, loop_lags_s),
        records=tuple(records),
    )


MIXED = (
    make_record(index=0, token_times_s=(0.5, 0.75)),
    make_record(index=1, token_times_s=(1.5, 1.75)),
    make_record(index=2, token_times_s=(0.5,), error="timeout", detail="no end", ended_s=4.0),
)


def test_json_has_its_schema_and_the_verdict_at_the_top():
    content = to_json(make_report(MIXED))
    assert content["schema"] == "pdserve.loadtest.run/1"
    assert content["slo_attainment"] == 1 / 3
    assert content["goodput_per_s"] == 1 / 4
    assert content["valid"] is True


def test_json_has_every_request_with_its_measures_and_verdict():
    requests = to_json(make_report(MIXED))["requests"]
    assert [(request["index"], request["kept"], list(request["broken"])) for request in requests] == [
        (0, True, []),
        (1, False, ["ttft"]),
        (2, False, []),
    ]
    assert list(requests[0]["gaps_s"]) == [0.25]
    assert requests[2]["error"] == "timeout"


def test_the_file_is_standard_json_even_for_an_infinite_rate(tmp_path):
    path = tmp_path / "run.json"
    write_json(make_report(MIXED, rate_per_s=math.inf), path)
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert content["config"]["load"]["rate_per_s"] == "inf"
    assert len(content["requests"]) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "run.json"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(OSError, match="directory"):
        write_json(make_report(MIXED), path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_the_table_says_what_failed_and_what_was_promised():
    table = format_report(make_report(MIXED))
    assert "2 of 3; failed: 1 timeout" in table
    assert "ttft <= 1.00 s: kept by 33.3 % of all requests (broken: ttft 1)" in table
    assert "INVALID" not in table
    assert max(map(len, table.splitlines())) <= 100


def test_a_run_with_a_late_client_is_marked_invalid():
    report = make_report(MIXED, loop_lags_s=[0.2] * 10)
    assert "INVALID: the client was late by 200 ms at p99" in format_report(report)
    assert to_json(report)["valid"] is False


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


def test_progress_is_a_bar_with_counts():
    line = format_progress(Progress(total=8, sent=6, ended=4, failed=1))
    assert line == "[############............] 4 of 8 requests, 2 running, 1 failed"


class Terminal:
    def __init__(self):
        self.written = ""

    def write(self, text):
        self.written += text

    def flush(self):
        pass


def test_the_progress_line_is_redrawn_at_most_ten_times_a_second_and_wiped_at_the_end():
    terminal = Terminal()
    line = ProgressLine(terminal)
    for now in (5.0, 5.01, 5.09, 5.2):
        line.draw(Progress(total=8), now)
    line.close()
    assert terminal.written.count("of 8") == 2
    assert terminal.written.rsplit("\r", 2)[1].strip() == ""
