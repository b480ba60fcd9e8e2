"""The page of one run: the verdict and its numbers, the latencies, the run over time, tables. Imports plotly."""

from pathlib import Path

from pdserve.loadtest.measures.distribution import Distribution
from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.measures.latencies import values_of
from pdserve.loadtest.measures.promise import Measure
from pdserve.loadtest.report.distribution_figures import draw_distribution
from pdserve.loadtest.report.facts import describe_load, describe_promises, describe_rate, explain_invalid, gather_notes
from pdserve.loadtest.report.figure import Figure
from pdserve.loadtest.report.page import Card, Page, Section, write_html
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.stage_figure import draw_stages
from pdserve.loadtest.report.tables import MISSING, gather_tables, reconcile_steady
from pdserve.loadtest.report.time_figure import draw_over_time
from pdserve.loadtest.report.units import format_count, format_rate, format_seconds, format_share
from pdserve.loadtest.workload.window import Window

# What is drawn, under which title, and which promise limits it.
_DISTRIBUTIONS = (
    ("ttft", "Time to first token", Measure.TTFT, "requests"),
    ("second", "Time to second token", Measure.SECOND, "requests"),
    ("tpot", "Time per output token", Measure.TPOT, "requests"),
    ("gap", "Gap between two tokens", None, "gaps"),
    ("max_gap", "Longest gap of a request", Measure.GAP, "requests"),
    ("e2e", "End to end", Measure.E2E, "requests"),
)


def write_page(report: Report, path: Path) -> None:
    """Raises OSError; the file is there in full or as it was before."""
    write_html(make_page(report), path)


def make_page(report: Report) -> Page:
    target, sent = report.config.target, describe_load(report.config.load)
    stages = draw_stages(reconcile_steady(report.records))
    return Page(
        title=f"Load test of {report.model} {describe_rate(report.config.load)}",
        subtitle=f"{sent}. {target.url}, {target.api}, {report.started_at:%Y-%m-%d %H:%M} UTC.",
        warning=explain_invalid(report.summary) or "",
        cards=_make_cards(report),
        notes=gather_notes(report),
        sections=(
            Section("Latencies", figures=_draw_latencies(report)),
            Section("Where the time goes", figures=() if stages is None else (stages,)),
            Section("Over time", figures=(draw_over_time(report),)),
            Section("Numbers", tables=gather_tables(report)),
        ),
    )


def _make_cards(report: Report) -> tuple[Card, ...]:
    summary = report.summary
    promises = report.config.promises
    promised = describe_promises(promises) if promises else "complete answers; no promise was given (--slo)"
    interval = summary.attainment_interval
    kept = promised
    if interval is not None:
        kept += f"; 95 % interval {format_share(interval.low)} to {format_share(interval.high)}"
    failed = sum(summary.errors.values())
    errors = ", ".join(f"{format_count(count)} {name}" for name, count in summary.errors.items())
    return (
        Card("Promises kept" if promises else "Complete", format_share(summary.slo_attainment), kept),
        Card("Goodput", f"{format_rate(summary.goodput_per_s)} /s", "requests a second that kept every promise"),
        _latency_card("Time to first token", summary.latencies["ttft"]),
        _latency_card("Time per output token", summary.latencies["tpot"]),
        Card(
            "Throughput",
            f"{format_rate(summary.output_tokens_per_s)} tokens/s",
            f"{format_rate(summary.completed_per_s)} requests/s",
        ),
        Card("Failed", f"{format_count(failed)} of {format_count(summary.num_requests)}", errors, is_bad=failed > 0),
        Card(
            "Client lag",
            format_seconds(summary.validity.lag_p99_s),
            f"at p99; up to {format_seconds(summary.validity.max_lag_s)} the run is valid",
            is_bad=not summary.validity.is_valid,
        ),
        _harness_card(report.harness),
    )


def _harness_card(harness: HarnessError | None) -> Card:
    if harness is None:
        return Card("Harness error", MISSING, "not measured before this run")
    detail = f"in time stamps, {format_seconds(harness.sends.p99)} in send times, at p99, by a self-test"
    faults = "; ".join(harness.faults)
    return Card(
        "Harness error", format_seconds(harness.stamps.p99), f"{detail}. {faults}" if faults else detail, bool(faults)
    )


def _latency_card(label: str, values: Distribution | None) -> Card:
    if values is None:
        return Card(label, MISSING, "no request has it")
    return Card(label, format_seconds(values.p50), f"median; p99 {format_seconds(values.p99)}")


def _draw_latencies(report: Report) -> tuple[Figure, ...]:
    limits = {promise.measure: promise.limit_s for promise in report.config.promises}
    steady = [record for record in report.records if record.window is Window.STEADY and record.is_complete]
    figures = (
        draw_distribution(name, title, list(values_of(name, steady)), limits.get(measure) if measure else None, counted)
        for name, title, measure, counted in _DISTRIBUTIONS
    )
    return tuple(figure for figure in figures if figure is not None)
