"""The page of a search or an A/B: the verdict, a curve and an answer a server, and their runs side by side."""

import math
from dataclasses import replace

import pytest

from pdserve.loadtest.measures.bootstrap import Interval
from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.facts import Fact
from pdserve.loadtest.report.page import render
from pdserve.loadtest.report.search_page import Searched, make_search_page
from pdserve.loadtest.report.tables import Table
from pdserve.loadtest.search.answer import CurvePoint, GoodputRate, GoodputResult
from tests.loadtest.report.pages import HOSTILE, Elements, figures_of, trace_names
from tests.loadtest.report.runs import PROMISES, make_report

FOUND = GoodputRate(0.9, 1.2, Interval(1.0, 1.4))


def make_result(rate: GoodputRate = FOUND) -> GoodputResult:
    points = ((0.5, 0.99), (1.0, 0.93), (2.0, 0.4))
    curve = tuple(
        CurvePoint(at, 1, 100, round(100 * share), share, Interval(share - 0.05, min(1.0, share + 0.05)), share)
        for at, share in points
    )
    return GoodputResult((rate,), curve, num_runs=3, num_invalid=0, is_finished=True)


def make_page(*servers: Searched, verdict: str = ""):
    table = Table("Highest rates", ("", "requests/s"), (("both", "1.2"),))
    document = Document("A/B of m", "ten requests", (table,), (Fact("budget", "spent"),))
    return render(make_search_page(document, servers, PROMISES, 0.9, verdict))


def words_of(text: str) -> str:
    return Elements(text).words.replace("\N{NO-BREAK SPACE}", " ")


BOTH = Searched("both", make_result(), make_report())
SPLIT = Searched("1P:1D", make_result(GoodputRate(0.9, 1.5, Interval(1.3, math.inf))), make_report())


def test_the_verdict_stands_above_the_answers():
    words = words_of(make_page(BOTH, SPLIT, verdict="Splitting pays, 1.25x."))
    assert words.index("Splitting pays, 1.25x.") < words.index("1.2 /s") < words.index("Promises kept over rate")


def test_each_server_has_its_answer_with_what_bounds_it():
    words = words_of(make_page(BOTH, SPLIT))
    assert "95 % interval 1 to 1.4" in words
    assert "95 % interval 1.3 and more" in words


def test_each_server_has_a_curve_of_its_own_look():
    (traces,) = (figure["data"] for name, figure in figures_of(make_page(BOTH, SPLIT)).items() if name == "attainment")
    curves = [trace for trace in traces if trace.get("name")]
    assert [trace["name"] for trace in curves] == ["both", "1P:1D"]
    for look in ("color", "dash"):
        assert len({trace["line"][look] for trace in curves}) == 2
    assert len({trace["marker"]["symbol"] for trace in curves}) == 2


def test_runs_are_compared_in_common_figures_and_shown_one_by_one():
    figures = figures_of(make_page(BOTH, SPLIT))
    assert trace_names(figures["compared-ttft"]) == {"both", "1P:1D"}
    assert {"over-time-0", "over-time-1"} <= figures.keys()


def test_a_server_looks_the_same_in_every_figure_also_where_others_have_no_run():
    figures = figures_of(make_page(Searched("a", make_result()), BOTH, SPLIT))
    looks = {
        (trace["name"], trace["line"]["color"], trace["line"]["dash"])
        for name in ("attainment", "compared-ttft")
        for trace in figures[name]["data"]
        if trace.get("name")
    }
    assert len(looks) == 3


def test_the_interval_of_a_single_rate_is_drawn_as_a_bar():
    alone = replace(make_result(), curve=make_result().curve[:1])
    figure = figures_of(make_page(Searched("a", alone)))["attainment"]
    (curve,) = [trace for trace in figure["data"] if trace.get("name") == "a"]
    assert curve["error_y"]["arrayminus"] == [pytest.approx(5.0)]


def test_one_server_alone_is_compared_with_none():
    assert "rates" not in figures_of(make_page(BOTH))


def test_servers_without_runs_to_show_have_their_curves_alone():
    figures = figures_of(make_page(Searched("a", make_result()), Searched("b", make_result())))
    assert list(figures) == ["attainment", "rates"]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (GoodputRate(0.9, None, Interval(0.0, math.inf), "nothing was measured"), "nothing was measured"),
        (GoodputRate(0.9, 2.0, Interval(0.0, 2.5), "at least: no rate tried was too high"), "interval up to 2.5; at"),
        (GoodputRate(0.99, 2.0, Interval(1.0, 2.5)), "not searched for where 90 % kept every promise"),
    ],
)
def test_an_answer_that_is_none_or_only_a_bound_says_so(rate, expected):
    assert expected in words_of(make_page(Searched("a", make_result(rate))))


def test_a_search_without_a_single_point_has_a_page():
    nothing = GoodputResult((), (), num_runs=0, num_invalid=0, is_finished=False)
    assert list(figures_of(make_page(Searched("a", nothing)))) == ["attainment"]


def test_no_name_of_a_server_becomes_markup_or_script():
    text = make_page(Searched(HOSTILE, make_result(), make_report()), SPLIT, verdict=HOSTILE)
    assert Elements(text).of("img") == []
    assert len(Elements(text).of("script")) == 2
    assert "<img" not in str(figures_of(text))


def test_latencies_over_the_rate_pool_the_runs_at_a_rate():
    runs = tuple(make_report(rate_per_s=rate) for rate in (1.0, 1.0, 2.0))
    figures = figures_of(make_page(Searched("a", make_result(), runs=runs)))
    medians = next(trace for trace in figures["ttft-over-rate"]["data"] if trace["name"] == "median")
    assert medians["x"] == [1.0, 2.0]
    assert medians["y"] == [0.5, 0.5]


def test_runs_are_compared_without_any_search():
    figures = figures_of(make_page(Searched("a", None, make_report()), Searched("b", None, make_report())))
    assert trace_names(figures["compared-tpot"]) == {"a", "b"}
    assert "attainment" not in figures
