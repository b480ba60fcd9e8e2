"""Whether a request kept what was promised, and what promises are about. Pure; called by summary.py and the search."""

from collections.abc import Callable, Sequence

from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.measures.record import Record

_MEASURES: dict[Measure, Callable[[Record], float | None]] = {
    Measure.TTFT: lambda record: record.ttft_s,
    Measure.SECOND: lambda record: record.second_token_s,
    Measure.TPOT: lambda record: record.tpot_s,
    Measure.GAP: lambda record: max(record.gaps_s, default=None),
    Measure.E2E: lambda record: record.e2e_s,
}


def measure(record: Record, name: Measure) -> float | None:
    """What a promise is about, in seconds; None where the request is too short to have it."""
    return _MEASURES[name](record)


def broken_promises(record: Record, promises: Sequence[Promise]) -> tuple[str, ...]:
    """The names of the promises that a complete request broke; one too short for a measure keeps it."""
    broken = []
    for promise in promises:
        value = measure(record, promise.measure)
        if value is not None and value > promise.limit_s:
            broken.append(str(promise.measure))
    return tuple(broken)


def is_kept(record: Record, promises: Sequence[Promise]) -> bool:
    """Whether a request was answered in full and within every promise."""
    return record.is_complete and not broken_promises(record, promises)
