"""How the mock answers a request, and what it remembers of it. Light to import: the command line needs it for help."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Fault(StrEnum):
    """What goes wrong with a request; those in a stream do so after `fault_after` tokens."""

    NONE = "none"
    STATUS = "status"  # HTTP 500 before any token
    SILENT = "silent"  # the request is taken and nothing ever answered
    DROP = "drop"  # the connection is cut
    HANG = "hang"  # no further byte until the client leaves
    SHORT = "short"  # a regular end, too early
    ERROR_EVENT = "error_event"
    BAD_JSON = "bad_json"
    BAD_CHUNK = "bad_chunk"  # framing that is no HTTP
    NO_FINISH = "no_finish"  # all tokens, no finish reason
    NO_DONE = "no_done"  # all tokens and the usage, no [DONE]
    NO_USAGE = "no_usage"  # a regular stream without the usage that was asked for
    SPLIT = "split"  # whole, but each event comes in two writes, cut at odd places
    UNALIGNED = "unaligned"  # whole, but HTTP's chunks begin and end inside of events


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one request is answered: token i is due first_token_s + i * gap_s after the request arrived.

    Both are lower bounds of what the client can measure.

    jitter_s          each token is late by a share of this, evenly drawn; order is kept
    tokens_per_event  they are sent when the last of them is due
    """

    first_token_s: float = 0.0
    gap_s: float = 0.0
    jitter_s: float = 0.0
    tokens_per_event: int = 1
    fault: Fault = Fault.NONE
    fault_after: int = 2


@dataclass(frozen=True, slots=True)
class Received:
    """One request as the mock saw it. Times are monotonic.

    arrived_at  the read that brought its last byte
    written_at  just before the write that completes it, one time for each event with tokens
    """

    arrived_at: float
    body: dict[str, Any]
    request_id: str | None
    written_at: list[float] = field(default_factory=list)
