"""What the socket showed of one request: raw bytes and the time at which each read returned them.

Made by wire.py in the process that measures, sent to the parent, read by measures/ once there is time for it.
"""

from dataclasses import dataclass

from pdserve.loadtest.measures.sse import Chunk

# The kind of a Failure: the request was open when its run was ended, and nothing was wrong with it.
ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request gave no measurement: a class that is counted, and the detail for a reader."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and all that came back. All times are monotonic.

    index     of the request in its schedule
    woke_at   the client's timer for this request fired: after the intended time by the client's own lag
    sent_at   its connection was begun: later than woke_at only under --max-concurrency
    ended_at  the response was over, as far as the wire can tell, or was given up
    chunks    the bytes of the connection, HTTP head and framing included
    failure   None where the connection was read to the response's end, whatever it says
    """

    index: int
    woke_at: float
    sent_at: float
    ended_at: float
    chunks: tuple[Chunk, ...]
    failure: Failure | None

    @property
    def is_abandoned(self) -> bool:
        return self.failure is not None and self.failure.kind == ABANDONED

    @property
    def looks_failed(self) -> bool:
        """A first guess, for a progress line."""
        return self.failure is not None or not self.chunks or self.chunks[0].data[8:13] != b" 200 "


def sender_of(index: int, num_processes: int) -> int:
    """Which client process sends a request: they take turns."""
    return index % num_processes
