"""Server-sent events out of raw chunks, after the fact.

An event carries the time of the chunk that completed it; events that came in one chunk share its time,
because the client cannot have seen them apart. Called by record.py once a run is over.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes as one read of the response gave them. arrived_at is monotonic."""

    arrived_at: float
    data: bytes


@dataclass(frozen=True, slots=True)
class Event:
    arrived_at: float
    data: str


def split_events(chunks: Iterable[Chunk]) -> list[Event]:
    """The events with data, in order. Comments and other fields are skipped, an unfinished event is dropped."""
    events: list[Event] = []
    data_lines: list[bytes] = []
    unfinished: list[bytes] = []
    for chunk in chunks:
        unfinished.append(chunk.data)
        if b"\n" not in chunk.data:
            continue
        *lines, rest = b"".join(unfinished).split(b"\n")
        unfinished = [rest]
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data_lines.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data_lines:
                events.append(Event(chunk.arrived_at, b"\n".join(data_lines).decode(errors="replace")))
                data_lines = []
    return events
