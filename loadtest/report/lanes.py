"""The requests of a run as lanes of a time line: what each was doing from when to when, and how it ended. Pure.

Without a server's ledger a lane has what the client saw: the wait for the first token, then the stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.loadtest.measures.kept import broken_promises
from pdserve.loadtest.measures.ledger import Kind, Span, time_line
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.record import Record


@dataclass(frozen=True, slots=True)
class Lane:
    """One request. flaw: why it does not count as kept, None where it does."""

    index: int
    spans: tuple[Span, ...]
    ended_s: float
    flaw: str | None
    has_failed: bool


def gather_lanes(records: Sequence[Record], promises: Sequence[Promise], max_lanes: int) -> tuple[Lane, ...]:
    """Lanes in the order of the schedule; of more than max_lanes requests, every second, third and so on."""
    step = -(-len(records) // max_lanes)
    return tuple(_make_lane(record, promises) for record in records[::step])


def _make_lane(record: Record, promises: Sequence[Promise]) -> Lane:
    flaw = record.error
    if broken := broken_promises(record, promises):
        flaw = "broke " + ", ".join(broken)
    spans = time_line(record) if record.is_complete else None
    return Lane(record.index, spans or _clients_view(record), record.ended_s, flaw, record.has_failed)


def _clients_view(record: Record) -> tuple[Span, ...]:
    times = record.token_times_s
    if not times:
        return (Span("no token", Kind.OTHER, record.intended_s, record.ended_s),)
    return (
        Span("wait for the first token", Kind.OTHER, record.intended_s, times[0]),
        Span("stream", Kind.DECODE, times[0], times[-1]),
    )
