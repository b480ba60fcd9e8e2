"""What happens to a machine: the inputs that every `handle(event, now)` shares.

The asyncio edge (node.py, service.py) turns sockets and clocks into these; tests write them down.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.cluster.messages import Link, Message
from pdserve.core.ids import NodeId

M = TypeVar("M", bound=Message, covariant=True)


@dataclass(frozen=True, slots=True)
class Received(Generic[M]):
    """A message from an admitted peer, its envelope checked. waited_s: for a core before it was read, at most."""

    sender: NodeId
    message: M
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Joined:
    """The router let this node in; leases live for lease_s without its beat, tpot_s is what clients are promised."""

    lease_s: float
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """This node is to end: it takes no new work and finishes what it has."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Both sides of the handshake with this peer are done, and its blocks can be had."""

    link: Link


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The peer's connection broke, it went silent, or another incarnation took its place."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; `late` when the loop was held up, so that nothing expires unheard."""

    late: bool = False
