"""What a comparison of two files reports: ratios at each rate both ran at, and who serves more. Pure."""

import json
from dataclasses import dataclass
from pathlib import Path

from pdserve.loadtest.measures.bootstrap import Interval
from pdserve.loadtest.measures.comparison import (
    AttainmentDifference,
    PercentileRatio,
    compare_attainment,
    compare_latencies,
)
from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.facts import Fact, describe_promises
from pdserve.loadtest.report.json_file import write_whole
from pdserve.loadtest.report.pairing import Source, pair_runs, records_of
from pdserve.loadtest.report.rates_report import run_of
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.schema import encode
from pdserve.loadtest.report.tables import LATENCY_TITLES, MISSING, Table
from pdserve.loadtest.report.units import format_count, format_rate, format_seconds, format_share
from pdserve.loadtest.search.attainment import points_of
from pdserve.loadtest.search.verdict import PromiseVerdict, Side, compare_servers

SCHEMA = "pdserve.loadtest.comparison/1"

_READING = (
    "b/a below 1: b is faster; * where 1 is outside of the 95 % interval, which one row in 20 is by chance. How the "
    "machine differs from run to run no interval knows: repeat with other seeds."
)


@dataclass(frozen=True, slots=True)
class RateComparison:
    """Both servers at one rate, over all seeds that both ran."""

    rate_per_s: float
    num_requests: int
    attainment: AttainmentDifference
    latencies: tuple[PercentileRatio, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """goodput: by promise, every promise first, its winner "a" or "b"; empty where a file has one rate only."""

    name_a: str
    name_b: str
    rates: tuple[RateComparison, ...]
    goodput: tuple[PromiseVerdict, ...]


def compare(a: Source, b: Source) -> Comparison:
    """Raises ReportError where nothing of the two can be compared."""
    pairs = pair_runs(a, b)
    rates = sorted({of_a.config.load.rate_per_s for of_a, _ in pairs})
    compared = []
    for rate in rates:
        at_rate = [pair for pair in pairs if pair[0].config.load.rate_per_s == rate]
        records = records_of(at_rate)
        num_requests = sum(len(of_a) for of_a, _ in records)
        if num_requests:
            promises = at_rate[0][0].config.promises
            compared.append(
                RateComparison(rate, num_requests, compare_attainment(records, promises), compare_latencies(records))
            )
    return Comparison(a.name, b.name, tuple(compared), _compare_goodput(a, b))


def describe_comparison(comparison: Comparison, a: Source, b: Source) -> Document:
    of_a, of_b = a.runs[0], b.runs[0]
    facts = [Fact("a, b", f"{_server(of_a)}; {_server(of_b)}")]
    if of_a.config.promises:
        facts.append(Fact("promise", describe_promises(of_a.config.promises)))
    facts.append(Fact("reading", _READING))
    facts += [Fact("kept", _describe_kept(at)) for at in comparison.rates]
    facts += [Fact("goodput", _describe_verdict(verdict)) for verdict in comparison.goodput]
    late = [run for run in (*a.runs, *b.runs) if not run.summary.validity.is_valid]
    return Document(
        heading=f"a: {a.name}, b: {b.name}",
        lead=f"compared at {len(comparison.rates)} rates, request by request",
        tables=tuple(_tabulate(at) for at in comparison.rates),
        facts=tuple(facts),
        warning=f"INVALID: in {len(late)} of the runs the client was late" if late else None,
    )


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write it as JSON, all of it or nothing. Raises OSError."""
    content = {"schema": SCHEMA, **encode(comparison)}
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _compare_goodput(a: Source, b: Source) -> tuple[PromiseVerdict, ...]:
    sides = [Side(name, tuple(run_of(report) for report in source.runs)) for name, source in (("a", a), ("b", b))]
    if any(len(points_of(side.runs)) < 2 for side in sides):
        return ()
    names = [str(promise.measure) for promise in a.runs[0].config.promises]
    return compare_servers(sides[0], sides[1], names if len(names) > 1 else []).promises


def _tabulate(at: RateComparison) -> Table:
    title = f"{format_rate(at.rate_per_s)}/s, {format_count(at.num_requests)} requests"
    return Table(title, (title, "", "a", "b", "b/a", "95 %", ""), tuple(_row(ratio) for ratio in at.latencies))


def _row(ratio: PercentileRatio) -> tuple[str, ...]:
    return (
        LATENCY_TITLES[ratio.latency],
        f"p{ratio.percent:g}",
        format_seconds(ratio.a),
        format_seconds(ratio.b),
        MISSING if ratio.ratio is None else f"{ratio.ratio:.3f}",
        MISSING if ratio.interval is None else _interval(ratio.interval),
        "*" if ratio.is_shown else "",
    )


def _describe_kept(at: RateComparison) -> str:
    kept = at.attainment
    text = f"at {format_rate(at.rate_per_s)}/s by {format_share(kept.a)} (a) and {format_share(kept.b)} (b): "
    points = f"{100 * kept.difference:+.1f} points ({100 * kept.interval.low:+.1f} to {100 * kept.interval.high:+.1f})"
    return text + (points if kept.is_shown else f"no difference shown, {points}")


def _describe_verdict(verdict: PromiseVerdict) -> str:
    text = f"{verdict.promise}: a {_highest(verdict.rate_a)}, b {_highest(verdict.rate_b)}"
    if verdict.ratio is not None:
        text += f", a/b {verdict.ratio:.3f} ({_interval(verdict.interval)})"
    winner = "no difference shown" if verdict.winner is None else f"{verdict.winner} serves more"
    return f"{text}: {winner}"


def _highest(rate_per_s: float) -> str:
    return f"{format_rate(rate_per_s)} requests/s" if rate_per_s else "none of the rates tried"


def _interval(interval: Interval) -> str:
    return f"{interval.low:.3f}-{interval.high:.3f}"


def _server(report: Report) -> str:
    return f"{report.model} at {report.config.target.url}"
