"""What a run says in words and numbers, in one form for all writers: facts (a label and a sentence) and tables.

Every cell is text that a person can read; text, Markdown and the page only set it. Pure.
"""

import math
from dataclasses import dataclass

from pdserve.loadtest.measures.distribution import Distribution
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.summary import Summary
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.units import format_count, format_rate, format_seconds, format_share
from pdserve.loadtest.workload.load import Load

_LATENCIES = (
    ("ttft", "time to first token"),
    ("second", "time to second token"),
    ("tpot", "time per output token"),
    ("gap", "gap between tokens"),
    ("e2e", "end to end"),
    ("service_ttft", "first token, from actual send"),
    ("service_e2e", "end to end, from actual send"),
    ("client_lag", "client lag"),
    ("loop_lag", "client loop lag"),
)
MISSING = "-"


@dataclass(frozen=True, slots=True)
class Fact:
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """header and rows have the same number of cells. The first column names the row, the others hold numbers.

    ends_in_words  the last column is a sentence
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    ends_in_words: bool = False


def describe_load(report: Report) -> str:
    """What was sent, in a sentence."""
    load = report.config.load
    return (
        f"{load.num_requests} requests {describe_rate(load)}, seed {load.seed}, "
        f"{load.input_tokens} tokens in, {load.output_tokens} out"
    )


def describe_rate(load: Load) -> str:
    return "all at once" if math.isinf(load.rate_per_s) else f"at {load.rate_per_s:g}/s ({load.arrivals})"


def describe_promises(promises: tuple[Promise, ...]) -> str:
    return ", ".join(f"{promise.measure} <= {format_seconds(promise.limit_s)}" for promise in promises)


def explain_invalid(summary: Summary) -> str | None:
    """Why the run must not be believed; None where it may."""
    validity = summary.validity
    if validity.is_valid:
        return None
    return (
        f"INVALID: the client was late by {format_seconds(validity.lag_p99_s)} at p99, above "
        f"{format_seconds(validity.max_lag_s)}. Free a core for it or lower --rate."
    )


def gather_facts(report: Report) -> tuple[Fact, ...]:
    """The run in sentences, the most important last, where a terminal ends."""
    summary = report.summary
    facts = [
        Fact("schedule", f"digest {report.schedule_digest}: the same digest is the same load at the same times"),
        Fact("complete", _describe_complete(summary)),
        Fact(
            "throughput",
            f"{format_rate(summary.completed_per_s)} requests/s, {summary.output_tokens_per_s:.4g} output tokens/s "
            f"over {summary.duration_s:.1f} s",
        ),
    ]
    if summary.merged_tokens:
        text = f"{summary.merged_tokens} of {summary.output_tokens} tokens came in another's event"
        facts.append(Fact("merged", text))
    if summary.num_without_usage:
        text = f"from {summary.num_without_usage} requests; their tokens are counted by events"
        facts.append(Fact("no usage", text))
    facts += [Fact("note", note) for note in report.notes]
    facts.append(Fact("promise", _describe_kept(report.config.promises, summary)))
    facts.append(Fact("goodput", f"{format_rate(summary.goodput_per_s)} requests/s kept every promise"))
    return tuple(facts)


def tabulate_latencies(summary: Summary) -> Table:
    return Table(
        "Latencies",
        ("", "p50", "p90", "p99", "max", "mean"),
        tuple((title, *_cells(summary.latencies[name])) for name, title in _LATENCIES),
    )


def tabulate_errors(report: Report) -> Table:
    """Failed requests by class, with the words of the first of each."""
    first = {record.error: record for record in reversed(report.records) if record.error is not None}
    return Table(
        "Errors",
        ("class", "requests", "the first of them"),
        tuple(
            (name, format_count(count), f"request {first[name].index}: {first[name].detail or MISSING}")
            for name, count in report.summary.errors.items()
        ),
        ends_in_words=True,
    )


def gather_tables(report: Report) -> tuple[Table, ...]:
    tables = (tabulate_latencies(report.summary), tabulate_errors(report))
    return tuple(table for table in tables if table.rows)


def _cells(values: Distribution | None) -> tuple[str, ...]:
    if values is None:
        return (MISSING,) * 5
    return tuple(format_seconds(cell) for cell in (values.p50, values.p90, values.p99, values.max, values.mean))


def _describe_complete(summary: Summary) -> str:
    text = f"{summary.num_complete} of {summary.num_requests}"
    errors = ", ".join(f"{count} {name}" for name, count in summary.errors.items())
    return f"{text}; failed: {errors}" if errors else text


def _describe_kept(promises: tuple[Promise, ...], summary: Summary) -> str:
    if not promises:
        return f"none given (--slo); {format_share(summary.slo_attainment)} were complete"
    text = f"{describe_promises(promises)}: kept by {format_share(summary.slo_attainment)} of all requests"
    broken = ", ".join(f"{name} {count}" for name, count in summary.broken.items() if count)
    return f"{text} (broken: {broken})" if broken else text
