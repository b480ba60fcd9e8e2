"""The page of a sweep, a search, a comparison or an A/B: the verdict, the curves of all servers, their runs, tables.

Called by the commands with what they have found; imports plotly.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdserve.loadtest.measures.distribution import Distribution, describe
from pdserve.loadtest.measures.latencies import values_of
from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.report.distribution_figures import draw_compared
from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.facts import describe_attainment, describe_promises
from pdserve.loadtest.report.figure import Figure
from pdserve.loadtest.report.page import Card, Page, Section
from pdserve.loadtest.report.rate_figure import Curve, draw_attainment, draw_latency, draw_rates
from pdserve.loadtest.report.rates_report import valid_runs
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.tables import MISSING
from pdserve.loadtest.report.time_figure import draw_over_time
from pdserve.loadtest.report.units import format_rate, format_rates, format_share
from pdserve.loadtest.search.answer import GoodputResult
from pdserve.loadtest.workload.window import Window

_COMPARED = (
    ("ttft", "Time to first token", Measure.TTFT),
    ("second", "Time to second token", Measure.SECOND),
    ("tpot", "Time per output token", Measure.TPOT),
    ("max_gap", "Longest gap of a request", Measure.GAP),
)


@dataclass(frozen=True, slots=True)
class Searched:
    """One server and what was found of it.

    result  None where only runs are compared
    shown   a run to look at closer, such as one at the highest rate kept
    runs    all of them, for latencies over the rate; empty leaves these out
    """

    name: str
    result: GoodputResult | None
    shown: Report | None = None
    runs: tuple[Report, ...] = ()


def make_search_page(
    document: Document,
    servers: Sequence[Searched],
    promises: tuple[Promise, ...],
    share: float = 0.9,
    verdict: str = "",
) -> Page:
    """The page.

    document  its heading, lead, facts and tables, as on a terminal
    share     of requests that must keep every promise
    verdict   what came of it, above everything else
    """
    curves = [Curve(server.name, server.result) for server in servers if server.result is not None]
    found = (draw_attainment(curves, share), draw_rates(curves, share)) if curves else ()
    figures = (*found, *_draw_latencies(servers, promises))
    sections = [
        Section("Over the rate", figures=tuple(figure for figure in figures if figure is not None)),
        _compare_runs(servers, promises),
        *(_look_closer(server, place) for place, server in enumerate(servers)),
        Section("Numbers", tables=document.tables),
    ]
    return Page(
        title=document.heading,
        subtitle=document.lead,
        warning=document.warning or "",
        verdict=verdict,
        cards=tuple(_make_card(server, share) for server in servers),
        notes=tuple(
            f"{fact.label}: {fact.text}" if fact.label else fact.text for fact in document.facts if fact.text != verdict
        ),
        sections=tuple(sections),
    )


def _make_card(server: Searched, share: float) -> Card:
    kept = f"{100 * share:g} % kept every promise"
    if server.result is None:
        summary = None if server.shown is None else server.shown.summary
        kept = MISSING if summary is None else format_share(summary.slo_attainment)
        return Card(server.name, kept, "of the requests kept every promise")
    rate = next((rate for rate in server.result.rates if math.isclose(rate.share, share)), None)
    if rate is None:
        return Card(server.name, MISSING, f"not searched for where {kept}")
    if rate.rate_per_s is None:
        return Card(server.name, MISSING, rate.reason or "")
    detail = f"{kept}; 95 % interval {format_rates(rate.interval.low, rate.interval.high)}"
    return Card(
        server.name,
        f"{format_rate(rate.rate_per_s)} /s",
        detail if rate.reason is None else f"{detail}; {rate.reason}",
    )


def _draw_latencies(servers: Sequence[Searched], promises: tuple[Promise, ...]) -> Iterator[Figure | None]:
    limits = {promise.measure: promise.limit_s for promise in promises}
    for name, title, measure in _COMPARED:
        curves = {server.name: _over_rate(server.runs, name) for server in servers}
        yield draw_latency(f"{name}-over-rate", f"{title} over rate", curves, limits.get(measure))


def _over_rate(runs: Sequence[Report], name: str) -> list[tuple[float, Distribution]]:
    """A latency of the valid runs at each rate together, ascending; rates without an answer are left out."""
    valid = valid_runs(runs)
    rates = sorted({run.config.load.rate_per_s for run in valid})
    pooled = ((rate, [run for run in valid if run.config.load.rate_per_s == rate]) for rate in rates)
    described = ((rate, describe(value for run in group for value in _values(run, name))) for rate, group in pooled)
    return [(rate, values) for rate, values in described if values is not None]


def _compare_runs(servers: Sequence[Searched], promises: tuple[Promise, ...]) -> Section:
    """The latencies of the runs that are shown, in common plots."""
    limits = {promise.measure: promise.limit_s for promise in promises}
    shown = {server.name: server.shown for server in servers if server.shown is not None}
    figures: list[Figure | None] = []
    for name, title, measure in _COMPARED:
        # Those without a run keep their place, which the looks of the others follow from.
        values = {s.name: [] if s.shown is None else list(_values(s.shown, name)) for s in servers}
        figures.append(draw_compared(f"compared-{name}", title, values, limits.get(measure)))
    rates = ", ".join(f"{name} at {format_rate(run.config.load.rate_per_s)}/s" for name, run in shown.items())
    return Section(
        "Latencies", figures=tuple(figure for figure in figures if figure is not None), text=f"One run each: {rates}."
    )


def _values(report: Report, name: str) -> Iterator[float]:
    """A latency of the requests that are judged."""
    steady = (record for record in report.records if record.is_complete and record.window is Window.STEADY)
    return values_of(name, steady)


def _look_closer(server: Searched, place: int) -> Section:
    report = server.shown
    if report is None:
        return Section("")
    figure = draw_over_time(report)
    return Section(
        f"{server.name} at {format_rate(report.config.load.rate_per_s)} requests a second",
        figures=(Figure(f"{figure.name}-{place}", figure.title, figure.caption, figure.plot, is_wide=True),),
        text=f"{describe_promises(report.config.promises)}: kept by {describe_attainment(report.summary)}.",
    )
