"""What an A/B says in words and numbers, for terminal, Markdown and page. Pure."""

import math

from pdserve.loadtest.measures.bootstrap import Interval
from pdserve.loadtest.report.ab_report import AbReport, Contestant
from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.facts import Fact, describe_load, describe_promises
from pdserve.loadtest.report.tables import MISSING, Table
from pdserve.loadtest.report.units import format_count, format_rate, format_share


def describe_ab(report: AbReport) -> Document:
    names = "; ".join(contestant.server.name for contestant in report.contestants)
    cores = report.contestants[0].server.cores
    num_invalid = sum(contestant.result.num_invalid for contestant in report.contestants)
    warning = f"INVALID: in {num_invalid} runs the client itself was late. Free a core for it." if num_invalid else None
    return Document(
        heading="Does splitting prefill from decode pay here?",
        lead=f"{names}. The same {cores} cores, in turn, {report.elapsed_s / 60:.0f} minutes. "
        f"{describe_load(report.config.load)}.",
        tables=(_tabulate_points(report), _tabulate_rates(report)),
        facts=_gather_facts(report),
        warning=warning,
    )


def _tabulate_rates(report: AbReport) -> Table:
    """The rate that each layout can promise, whole, per node and per core."""
    header = ("requests/s kept by 90 %", "rate", "interval", "per node", "per core", "runs", "requests", "held back")
    rows = tuple(_rate_row(contestant) for contestant in report.contestants)
    return Table("Highest rate at which 90 % keep every promise", header, rows, ends_in_words=True)


def _tabulate_points(report: AbReport) -> Table:
    """Every rate that was visited."""
    return Table(
        "Promises kept at each rate",
        ("", "requests/s", "kept", "interval", "requests", "runs"),
        tuple(
            (
                contestant.server.name,
                format_rate(point.rate_per_s),
                format_share(point.attainment),
                f"{format_share(point.interval.low)} - {format_share(point.interval.high)}",
                format_count(point.num_requests),
                format_count(point.num_runs),
            )
            for contestant in report.contestants
            for point in contestant.result.curve
        ),
    )


def _gather_facts(report: AbReport) -> tuple[Fact, ...]:
    facts = [Fact("promise", describe_promises(report.config.promises))]
    facts += [Fact("", text) for text in report.conclusion.details]
    if not report.is_finished:
        facts.append(Fact("budget", "spent before all was known: intervals are wider than they could be (--budget)"))
    return (*facts, Fact("verdict", report.conclusion.headline))


def _rate_row(contestant: Contestant) -> tuple[str, ...]:
    server, result = contestant.server, contestant.result
    found = result.rates[0]
    rate = found.rate_per_s
    per_node = rate / server.num_nodes if rate is not None and server.num_nodes else None
    return (
        server.name,
        _rate(rate),
        _interval(found.interval),
        _rate(per_node),
        _rate(None if rate is None else rate / server.cores),
        format_count(result.num_runs),
        format_count(sum(point.num_requests for point in result.curve)),
        MISSING if contestant.diagnosis is None else contestant.diagnosis.bound,
    )


def _rate(value: float | None) -> str:
    return MISSING if value is None else format_rate(value)


def _interval(interval: Interval) -> str:
    high = "?" if math.isinf(interval.high) else format_rate(interval.high)
    low = "?" if interval.low == 0 else format_rate(interval.low)
    return f"{low} - {high}"
