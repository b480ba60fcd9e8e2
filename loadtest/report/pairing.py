"""Which runs of two files can be compared: those that sent the same requests at the same times. Pure.

Called by the command `compare`, which refuses the rest in the words of the flags.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.loadtest.errors import ReportError
from pdserve.loadtest.measures.comparison import Pair
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.search.runs import settled

# What makes a schedule, by flag, what is most often the reason first.
_FIELDS: tuple[tuple[str, Callable[[Report], object]], ...] = (
    ("--api", lambda report: report.config.target.api),
    ("--input-tokens", lambda report: report.config.load.input_tokens),
    ("--output-tokens", lambda report: report.config.load.output_tokens),
    ("--num-requests", lambda report: report.config.load.num_requests),
    ("--ramp", lambda report: report.config.load.ramp),
    ("--arrivals", lambda report: report.config.load.arrivals),
    ("--shared-prefix", lambda report: report.config.load.shared_prefix),
    ("--turns", lambda report: report.config.load.conversations),
    ("--vocab", lambda report: report.config.load.vocabulary),
    ("--prompt-format", lambda report: report.config.load.prompt_format),
    ("--rate", lambda report: report.config.load.rate_per_s),
    ("--seed", lambda report: report.config.load.seed),
)


@dataclass(frozen=True, slots=True)
class Source:
    """The runs of one file, and what to call it."""

    name: str
    runs: tuple[Report, ...]


def pair_runs(a: Source, b: Source) -> tuple[tuple[Report, Report], ...]:
    """Runs of the same schedule, in a's order. Raises ReportError naming what differs where there are none."""
    of_a, of_b = a.runs[0], b.runs[0]
    if set(of_a.config.promises) != set(of_b.config.promises):
        raise ReportError(
            f"{b.name}: --slo: is {_promises(of_b)}, but {a.name} has {_promises(of_a)}; only runs that promised the "
            "same can be compared"
        )
    left: dict[str, list[Report]] = {}
    for report in b.runs:
        left.setdefault(report.schedule_digest, []).append(report)
    pairs = tuple(
        (report, left[report.schedule_digest].pop(0)) for report in a.runs if left.get(report.schedule_digest)
    )
    if not pairs:
        raise ReportError(f"{b.name}: {_difference(a, b)}; only runs of the same schedule can be compared")
    return pairs


def records_of(pairs: Sequence[tuple[Report, Report]]) -> tuple[Pair, ...]:
    """The requests that both runs of each pair know the outcome of, for the statistics."""
    found = []
    for a, b in pairs:
        of_a, of_b = (settled(report.records, report.config.load.num_warm_up) for report in (a, b))
        num_both = min(len(of_a), len(of_b))
        found.append((of_a[:num_both], of_b[:num_both]))
    return tuple(found)


def _difference(a: Source, b: Source) -> str:
    """The first flag that no two runs have in common, else whatever tells the schedules apart."""
    for flag, read in _FIELDS:
        of_a, of_b = [read(report) for report in a.runs], [read(report) for report in b.runs]
        if not any(value in of_a for value in of_b):
            return f"{flag}: is {_join(of_b)}, but {a.name} has {_join(of_a)}"
    return (
        f"schedule_digest: is {b.runs[0].schedule_digest}, but {a.name} has {a.runs[0].schedule_digest}, so the "
        "prompts or their lengths differ"
    )


def _join(values: Sequence[object]) -> str:
    return ", ".join(dict.fromkeys("none" if value is None else str(value) for value in values))


def _promises(report: Report) -> str:
    return ",".join(f"{each.measure}={each.limit_s:g}" for each in report.config.promises) or "not given"
