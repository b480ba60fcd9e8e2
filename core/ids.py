"""Names of things: requests, nodes, blocks, process incarnations.

Ids of requests are made by the router; what a client sends is only a label. An epoch names one
incarnation of a process, so that a restarted node is never taken for the one that died.
"""

import secrets
import time
from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", bytes)
NodeId = NewType("NodeId", str)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """One incarnation of a process: wall-clock start in ns and 64 random bits."""

    start_ns: int
    nonce: int

    @classmethod
    def new(cls) -> "Epoch":
        return cls(time.time_ns(), secrets.randbits(64))


NO_EPOCH = Epoch(0, 0)


def new_request_id() -> RequestId:
    """128 random bits, never derived from anything a client sends."""
    return RequestId(secrets.token_bytes(16))
