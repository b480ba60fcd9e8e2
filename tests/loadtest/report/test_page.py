"""The page of a run: what stands on it, that it needs nothing from outside, and that no words of a server run on it."""

import pytest

from pdserve.loadtest.client.gauges import GaugeSample, NodeSample
from pdserve.loadtest.report.page import render
from pdserve.loadtest.report.run_page import make_page
from tests.loadtest.report.pages import HOSTILE, Elements, figures_of, trace_names
from tests.loadtest.report.runs import MIXED, make_gauges, make_report, make_told
from tests.loadtest.samples import make_record


@pytest.fixture(scope="module")
def page() -> str:
    return render(make_page(make_report(gauges=make_gauges(), notes=("lengths were capped at 2,048",))))


def test_the_page_loads_nothing_from_anywhere(page):
    elements = Elements(page)
    assert [
        attributes for _, attributes in elements.elements if {"src", "href", "action", "data"} & attributes.keys()
    ] == []
    assert len(elements.of("script")) == 2
    assert "@import" not in page[: page.index("<script")]
    (policy,) = [meta["content"] for meta in elements.of("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_the_page_is_small_enough_to_send(page):
    assert len(page.encode()) < 8 * 1024 * 1024


def test_every_figure_has_its_place_and_every_place_its_figure(page):
    places = [attributes["data-figure"] for attributes in Elements(page).of("div") if "data-figure" in attributes]
    assert places == list(figures_of(page)) == ["ttft", "second", "tpot", "gap", "max_gap", "e2e", "over-time"]


def test_the_page_says_what_was_measured_and_what_came_of_it(page):
    words = Elements(page).words.replace("\N{NO-BREAK SPACE}", " ")
    for expected in ("Load test of m at 2/s (Poisson)", "33.3 %", "ttft <= 1.00 s", "1 of 3", "lengths were capped"):
        assert expected in words


def test_the_promise_is_marked_in_the_figure_it_limits_alone(page):
    marked = {
        name for name, figure in figures_of(page).items() if "promise" in str(figure["layout"].get("annotations"))
    }
    assert marked == {"ttft"}


def test_the_time_line_shows_stages_flaws_queues_and_memory(page):
    names = trace_names(figures_of(page)["over-time"])
    assert {"decode", "failed", "broke a promise", "router, queued", "prefill, waiting", "P0, prefill"} <= names


def test_with_a_ledger_requests_are_drawn_by_the_servers_stages():
    figures = figures_of(render(make_page(make_report([make_told(), make_told(1, 2.0)]))))
    kinds = {"queue", "prefill", "transfer", "decode"}
    assert kinds <= trace_names(figures["over-time"])
    assert kinds <= trace_names(figures["stages"])
    bars = {trace["hovertemplate"].partition(":")[0]: trace["x"] for trace in figures["stages"]["data"]}
    assert bars["chunks"] == [pytest.approx(0.3)]


def test_without_gauges_the_time_line_has_the_clients_view_alone():
    names = trace_names(figures_of(render(make_page(make_report())))["over-time"])
    assert "in flight, by the client" in names
    assert not names & {"router, queued", "P0, prefill"}


def test_a_run_that_failed_throughout_has_a_page_without_latencies():
    records = [make_record(index=i, token_times_s=(), ended_s=1.0, error="http_500", detail="no") for i in range(3)]
    assert list(figures_of(render(make_page(make_report(records))))) == ["over-time"]


def test_a_late_client_is_marked_above_everything():
    words = Elements(render(make_page(make_report(loop_lags_s=[[0.2] * 10])))).words
    assert words.index("INVALID") < words.index("Promises kept")


def test_no_words_of_a_server_become_markup_or_script():
    record = make_record(index=3, token_times_s=(), ended_s=2.0, error="stream_error", detail=HOSTILE)
    gauges = (GaugeSample(0.0, 0, (NodeSample(HOSTILE, HOSTILE, *[1] * 7),)),)
    report = make_report((*MIXED, record), model=HOSTILE, notes=(HOSTILE,), gauges=gauges)
    text = render(make_page(report))
    elements = Elements(text)
    assert elements.of("img") == []
    assert len(elements.of("script")) == 2
    assert elements.words.count(HOSTILE) >= 3
    # What plots take for markup is escaped once more for them.
    assert "<img" not in str(figures_of(text))


def test_many_requests_are_thinned_out_evenly_and_the_page_says_so():
    records = [make_record(index=i, intended_s=float(i), token_times_s=(i + 0.5, i + 1.0)) for i in range(1000)]
    text = render(make_page(make_report(records)))
    (decode,) = [trace for trace in figures_of(text)["over-time"]["data"] if trace.get("name") == "decode"]
    assert len(decode["customdata"]) == 334
    assert "334 of 1,000 requests" in text


def test_long_runs_keep_the_peaks_of_their_queues():
    quiet, full = (NodeSample("P0", "prefill", running, 0, 0, 1, 1, 1, 1) for running in (1, 900))
    gauges = tuple(GaugeSample(0.5 * i, 0, (full if i == 1777 else quiet,)) for i in range(5000))
    (line,) = [
        trace
        for trace in figures_of(render(make_page(make_report(gauges=gauges))))["over-time"]["data"]
        if trace.get("name") == "prefill, running"
    ]
    assert len(line["x"]) == len(line["y"]) == 1000
    assert max(line["y"]) == 900
