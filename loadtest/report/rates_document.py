"""What a sweep and a goodput search report: a line after each run, a document at the end. Pure."""

import math

from pdserve.loadtest.measures.bootstrap import Interval
from pdserve.loadtest.measures.summary import pool
from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.facts import Fact, describe_load, describe_promises
from pdserve.loadtest.report.rates_report import RatesReport, Units, run_of, valid_runs
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.tables import Table, median_and_p99
from pdserve.loadtest.report.units import format_count, format_rate, format_rates, format_seconds, format_share
from pdserve.loadtest.search.answer import CurvePoint, GoodputRate, GoodputResult
from pdserve.loadtest.search.goodput import GoodputSearch


def format_run(report: Report) -> str:
    """What came of one run, on a line."""
    load, read = report.config.load, run_of(report)
    num_kept = sum(read.kept())
    text = f"{load.rate_per_s:g}/s, seed {load.seed}: kept by {num_kept} of {read.num_requests}"
    if read.num_requests < load.num_requests:
        text += f", ended early of {load.num_requests}"
    ttft, tpot = report.summary.latencies["ttft"], report.summary.latencies["tpot"]
    if ttft is not None and tpot is not None:
        text += f"; p90 ttft {format_seconds(ttft.p90)}, tpot {format_seconds(tpot.p90)}"
    return text if read.is_valid else text + "; INVALID, the client was late"


def format_known(search: GoodputSearch) -> str:
    """What a search knows by now of the first share it looks for, to follow a run's line."""
    share = search.config.shares[0]
    bracket = search.bracket(share)
    if bracket is None:
        return ""
    low = f"{bracket.above:g}" if bracket.above else "below the lowest tried"
    high = f"{bracket.below:g}" if math.isfinite(bracket.below) else "above the highest tried"
    return f"  [{_percent(share)}: {low} to {high}]"


def describe_sweep(report: RatesReport) -> Document:
    return _describe(report, tabulate_sweep(report))


def describe_search(report: RatesReport) -> Document:
    return _describe(report, tabulate_curve(report.result))


def tabulate_sweep(report: RatesReport) -> Table:
    """Each rate with what its valid runs, pooled, came to."""
    rows = []
    for point in report.result.curve:
        summary = pool([run for run in valid_runs(report.runs) if run.config.load.rate_per_s == point.rate_per_s])
        ttft, tpot = summary.latencies["ttft"], summary.latencies["tpot"]
        rows.append(
            (
                f"{point.rate_per_s:g}",
                format_share(point.attainment),
                _shares(point.interval),
                *median_and_p99(ttft),
                *median_and_p99(tpot),
                format_rate(summary.goodput_per_s),
                f"{summary.output_tokens_per_s:.4g}",
            )
        )
    names = ("rate/s", "kept", "95 %", "ttft p50", "p99", "tpot p50", "p99", "kept/s", "tokens/s")
    return Table("Rates", names, tuple(rows))


def tabulate_curve(result: GoodputResult) -> Table:
    """Attainment over the rate; `curve` is the falling curve through the points, that answers are read from."""
    return Table(
        "Attainment",
        ("rate/s", "runs", "requests", "kept", "95 %", "curve"),
        tuple(_row(point) for point in result.curve),
    )


def describe_answer(rate: GoodputRate, units: Units) -> str:
    """The answer for one share, in a sentence."""
    if rate.rate_per_s is None:
        return f"{_percent(rate.share)}: {rate.reason}"
    highest = f"{format_rate(rate.rate_per_s)} requests/s (95 %: {format_rates(rate.interval.low, rate.interval.high)})"
    text = f"{_percent(rate.share)} keep every promise up to {highest}"
    for name, count in units.named():
        text += f", {format_rate(rate.rate_per_s / count)} a {name}"
    return text if rate.reason is None else f"{text}; {rate.reason}"


def _describe(report: RatesReport, table: Table) -> Document:
    target, promises, result = report.config.target, report.config.promises, report.result
    facts = [
        Fact("load", f"{describe_load(report.config.load)}; each run at its own rate, with a seed of its own"),
        Fact("promise", describe_promises(promises) if promises else "complete answers: nothing was promised (--slo)"),
    ]
    if not result.is_finished:
        facts.append(Fact("unfinished", "the search was not over: further runs would narrow this"))
    facts += [Fact("goodput", describe_answer(rate, report.units)) for rate in result.rates]
    num_rates = len({run.config.load.rate_per_s for run in report.runs})
    warning = None
    if result.num_invalid:
        warning = (
            f"INVALID: in {result.num_invalid} of {result.num_runs} runs the client was late; they are left out. Free "
            "a core for it or give it more --processes."
        )
    return Document(
        heading=f"{report.runs[0].model} at {target.url}, {target.api}",
        lead=f"rates tried: {num_rates}, in {format_count(result.num_runs)} runs",
        tables=(table,),
        facts=tuple(facts),
        warning=warning,
    )


def _row(point: CurvePoint) -> tuple[str, ...]:
    return (
        f"{point.rate_per_s:g}",
        format_count(point.num_runs),
        format_count(point.num_requests),
        format_share(point.attainment),
        _shares(point.interval),
        format_share(point.fitted),
    )


def _shares(interval: Interval) -> str:
    return f"{100 * interval.low:.1f}-{100 * interval.high:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
