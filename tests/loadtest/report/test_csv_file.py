import csv
import io

from pdserve.loadtest.report.csv_file import format_csv
from tests.loadtest.report.runs import MIXED, make_report
from tests.loadtest.samples import make_record


def read(report):
    return list(csv.DictReader(io.StringIO(format_csv(report))))


def test_csv_has_one_line_a_request_with_its_measures():
    rows = read(make_report())
    assert [row["index"] for row in rows] == ["0", "1", "2"]
    assert rows[0]["ttft_s"] == "0.500000"
    assert rows[0]["max_gap_s"] == "0.250000"
    assert [row["kept"] for row in rows] == ["1", "0", "0"]
    assert rows[1]["broken"] == "ttft"
    assert rows[2]["error"] == "timeout"


def test_what_a_request_does_not_have_is_empty():
    (row,) = read(make_report([make_record(token_times_s=(), ended_s=1.0, error="http_500")]))
    assert row["ttft_s"] == row["tpot_s"] == row["max_gap_s"] == row["detail"] == ""


def test_words_of_a_server_stay_one_cell_and_are_no_formula():
    detail = '=HYPERLINK("x"),\n"y"'
    rows = read(make_report((*MIXED, make_record(index=3, error="stream_error", detail=detail))))
    assert rows[3]["detail"] == "'" + detail
    assert len(rows) == 4
