from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.facts import Fact
from pdserve.loadtest.report.markdown import format_document, format_markdown
from tests.loadtest.report.runs import MIXED, make_report
from tests.loadtest.samples import make_record


def test_markdown_has_the_latencies_as_a_table_of_as_many_cells_each():
    rows = [line for line in format_markdown(make_report()).splitlines() if line.startswith("|")]
    assert "| time to first token | 500 ms | 1.50 s | 1.50 s | 1.50 s | 1.50 s | 1.00 s |" in rows
    latencies = rows[: rows.index("|  | p50 | p90 | p99 |")]
    assert {row.count("|") for row in latencies} == {8}


def test_markdown_says_what_was_promised_and_kept():
    assert "**promise**: ttft \\<= 1.00 s: kept by 33.3 % (95" in format_markdown(make_report())


def test_a_late_client_is_marked_above_everything():
    lines = format_markdown(make_report(loop_lags_s=[[0.2] * 10])).splitlines()
    assert lines[2].startswith("**INVALID: ")


def test_words_of_a_server_cannot_break_the_table_or_the_page():
    record = make_record(index=3, error="stream_error", detail="a | b\n<script>`x`")
    text = format_markdown(make_report((*MIXED, record), model="m|<b>"))
    assert "a \\| b \\<script\\>\\`x\\`" in text
    assert "<script>" not in text
    assert "### m\\|\\<b\\> at" in text


def test_facts_without_a_label_belong_to_the_one_before():
    facts = (Fact("promise", "kept"), Fact("", "by many"), Fact("", "nearly"), Fact("verdict", "yes"))
    lines = format_document(Document(heading="h", lead="l", tables=(), facts=facts)).splitlines()
    assert lines[-4:] == ["- **verdict**: yes", "- **promise**: kept", "  - by many", "  - nearly"]
