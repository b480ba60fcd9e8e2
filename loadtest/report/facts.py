"""What a run says in sentences: what was sent, what came of it, and what of it is rough. Pure.

Text, Markdown and the page only set these; each number stands in `units.py`'s form.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.loadtest.measures.harness import HarnessError
from pdserve.loadtest.measures.ledger import Reconciliation
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.summary import Summary
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.tables import reconcile_steady
from pdserve.loadtest.report.units import format_bytes, format_count, format_rate, format_seconds, format_share
from pdserve.loadtest.workload.load import Load
from pdserve.loadtest.workload.trace import Trace

# Of fewer requests the p99 is the slowest one, which says little of the next run.
_ENOUGH_FOR_P99 = 100


@dataclass(frozen=True, slots=True)
class Fact:
    label: str
    text: str


def describe_rate(load: Load) -> str:
    return "all at once" if math.isinf(load.rate_per_s) else f"at {load.rate_per_s:.4g}/s ({load.arrivals})"


def describe_load(load: Load) -> str:
    """What was sent, in a sentence without its end."""
    parts = [f"{format_count(load.num_requests)} requests {describe_rate(load)}"]
    return ", ".join([*parts, *_describe_shape(load), f"seed {load.seed}"])


def describe_requests(load: Load) -> str:
    """The same of a load that is sent at several rates."""
    return ", ".join([f"{format_count(load.num_requests)} requests a run ({load.arrivals})", *_describe_shape(load)])


def _describe_shape(load: Load) -> list[str]:
    parts = []
    others = load.num_total - load.num_requests
    if others:
        parts.append(
            f"{format_count(load.num_warm_up)} more before and {format_count(others - load.num_warm_up)} after"
        )
    if isinstance(load.lengths, Trace):
        parts.append(f"of {load.lengths.name}")
    return [*parts, f"{load.input_tokens} tokens in, {load.output_tokens} out"]


def describe_promises(promises: tuple[Promise, ...]) -> str:
    return ", ".join(f"{promise.measure} <= {format_seconds(promise.limit_s)}" for promise in promises)


def describe_attainment(summary: Summary) -> str:
    """The share of requests that kept what was promised, with its interval."""
    text = format_share(summary.slo_attainment)
    interval = summary.attainment_interval
    if interval is None:
        return text
    return f"{text} (95 % interval {format_share(interval.low)} to {format_share(interval.high)})"


def describe_machine(report: Report) -> str:
    machine = report.environment
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"{machine.cpu_model}, {machine.num_cpus} cores, {format_bytes(machine.memory_bytes)}, load "
        f"average {machine.load_average:.2f}, {machine.kernel}, Python {machine.python}, {packages}"
    )


def describe_harness(harness: HarnessError | None) -> str:
    """What the load test itself got wrong just before the run, and whether that is too much."""
    if harness is None:
        return "its own error was not measured before this run"
    return (
        f"its own error at p99: {format_seconds(harness.stamps.p99)} in time stamps, "
        f"{format_seconds(harness.sends.p99)} in send times; {'; '.join(harness.faults) or 'within its limits'}"
    )


def describe_account(title: str, account: Reconciliation) -> str:
    """How much of the time to a token the server's stages leave open, and whether that is within what is allowed."""
    verdict = "which adds up" if account.adds_up else f"which is {account.used_p99:.2g} times what is allowed"
    return (
        f"{title}: unexplained {format_seconds(account.unexplained.p50)} at p50, "
        f"{format_seconds(account.unexplained.p99)} at p99, {verdict}; {format_share(account.share_explained)} of "
        f"{format_count(account.num_requests)} requests are explained"
    )


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
    return (
        Fact("schedule", f"digest {report.schedule_digest}: the same digest is the same load at the same times"),
        Fact("machine", describe_machine(report)),
        Fact(
            "harness",
            describe_harness(report.harness),
        ),
        *(Fact("note", note) for note in gather_notes(report)),
        Fact("complete", _describe_complete(summary)),
        Fact(
            "throughput",
            f"{format_rate(summary.completed_per_s)} requests/s, {format_rate(summary.input_tokens_per_s)} input and "
            f"{format_rate(summary.output_tokens_per_s)} output tokens/s, over {summary.duration_s:.1f} s",
        ),
        *(Fact("ledger", describe_account(*account)) for account in reconcile_steady(report.records).items()),
        Fact("promise", _describe_kept(report.config.promises, summary)),
        Fact("goodput", f"{format_rate(summary.goodput_per_s)} requests/s kept every promise"),
    )


def gather_notes(report: Report) -> tuple[str, ...]:
    """What is rough, capped, left out or otherwise not what it seems, a sentence each."""
    return (*report.notes, *_notes_of_load(report), *_notes_of_answers(report.summary))


def _notes_of_load(report: Report) -> Iterator[str]:
    if report.config.target.max_concurrency is not None:
        yield (
            f"at most {format_count(report.config.target.max_concurrency)} requests were in flight "
            "(--max-concurrency): latencies count the wait for a place"
        )
    planned = report.config.load.num_total
    if len(report.records) < planned:
        yield f"the run was ended early: {len(report.records)} of {planned} requests are in the numbers"
    if report.summary.num_requests < _ENOUGH_FOR_P99:
        yield f"of {report.summary.num_requests} requests the p99 is the slowest one"


def _notes_of_answers(summary: Summary) -> Iterator[str]:
    if summary.num_prompt_mismatches:
        yield (
            f"the server counted another number of prompt tokens than planned in "
            f"{format_count(summary.num_prompt_mismatches)} of {format_count(summary.num_requests)} requests"
        )
    if summary.merged_tokens:
        yield (
            f"{format_count(summary.merged_tokens)} of {format_count(summary.output_tokens)} tokens came in another's "
            "event: their gaps count as 0"
        )
    if summary.num_without_usage:
        yield (
            f"{format_count(summary.num_without_usage)} answers came without usage: their tokens are counted by events"
        )


def _describe_complete(summary: Summary) -> str:
    text = f"{format_count(summary.num_complete)} of {format_count(summary.num_requests)}"
    if summary.num_abandoned:
        text += f"; {format_count(summary.num_abandoned)} had broken a promise and were open when the run was ended"
    errors = ", ".join(f"{format_count(count)} {name}" for name, count in summary.errors.items())
    return f"{text}; failed: {errors}" if errors else text


def _describe_kept(promises: tuple[Promise, ...], summary: Summary) -> str:
    attainment = describe_attainment(summary)
    if not promises:
        return f"none given (--slo); complete were {attainment}"
    text = f"{describe_promises(promises)}: kept by {attainment} of all requests"
    broken = ", ".join(f"{name} {format_count(count)}" for name, count in summary.broken.items() if count)
    return f"{text}; broken: {broken}" if broken else text
