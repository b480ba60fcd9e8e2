"""What an A/B says in words and numbers, for terminal, Markdown and page. Pure."""

import math

from pdserve.loadtest.measures.bootstrap import Interval
from pdserve.loadtest.report.ab_report import AbReport, Contestant
from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.facts import Fact, describe_harness, describe_promises, describe_requests
from pdserve.loadtest.report.tables import MISSING, Table
from pdserve.loadtest.report.units import format_count, format_rate, format_share
from pdserve.loadtest.search.answer import num_needed


def describe_ab(report: AbReport) -> Document:
    servers = [contestant.server for contestant in report.contestants]
    names = "; ".join(server.name for server in servers)
    num_cores = max(len(server.cores) for server in servers)
    over = f"over the same {num_cores} cores" if num_cores else "over the same machine"
    num_invalid = sum(contestant.result.num_invalid for contestant in report.contestants)
    warning = f"{num_invalid} runs were INVALID and do not count: the client itself was late. Free a core for it."
    return Document(
        heading="Does splitting prefill from decode pay here?",
        lead=f"{names}: {over}, in turn, for {report.elapsed_s / 60:.0f} min. {describe_requests(report.config.load)}.",
        tables=(_tabulate_points(report), _tabulate_rates(report)),
        facts=_gather_facts(report),
        warning=warning if num_invalid else None,
    )


def _tabulate_rates(report: AbReport) -> Table:
    """The rate that each layout can promise, whole, per node and per core."""
    return Table(
        "Highest rate (requests/s) that keeps every promise",
        ("highest rate kept by", "90 %", "interval", "per node", "per core", "99 %", "requests", "held back"),
        tuple(_rate_row(contestant) for contestant in report.contestants),
        ends_in_words=True,
    )


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
    facts = [Fact("harness", describe_harness(report.harness))]
    facts += [Fact("failed", f"{each.server.name}: {each.failure}") for each in report.contestants if each.failure]
    strict = [each.strict for each in report.contestants if each.strict.rate_per_s is None]
    if strict:
        share = strict[0].share
        facts.append(Fact(f"{share:.0%}", f"is told from {num_needed(share)} requests at a rate up (--budget)"))
    if not report.is_finished:
        facts.append(Fact("budget", "ended before all was known: intervals are wider than they could be (--budget)"))
    facts.append(Fact("promise", describe_promises(report.config.promises)))
    facts += [Fact("", text) for text in report.conclusion.details]
    return (*facts, Fact("verdict", report.conclusion.headline))


def _rate_row(contestant: Contestant) -> tuple[str, ...]:
    server, result = contestant.server, contestant.result
    found = result.rates[0]
    return (
        server.name,
        _rate(found.rate_per_s),
        _interval(found.interval),
        _rate_per(found.rate_per_s, server.num_nodes),
        _rate_per(found.rate_per_s, len(server.cores)),
        _rate(contestant.strict.rate_per_s),
        format_count(sum(point.num_requests for point in result.curve)),
        MISSING if contestant.diagnosis is None else contestant.diagnosis.bound,
    )


def _rate_per(rate_per_s: float | None, number: int) -> str:
    return MISSING if rate_per_s is None or not number else format_rate(rate_per_s / number)


def _rate(value: float | None) -> str:
    return MISSING if value is None else format_rate(value)


def _interval(interval: Interval) -> str:
    high = "?" if math.isinf(interval.high) else format_rate(interval.high)
    low = "?" if interval.low == 0 else format_rate(interval.low)
    return f"{low} - {high}"
