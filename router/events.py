"""What the dispatcher is told, and what it asks for.

Events come from RouterService, which executes the actions; `Received`, `Tick` and `Send` are those of every machine.
"""

from dataclasses import dataclass

from pdserve.cluster.events import Received, Tick
from pdserve.cluster.messages import Capacity, Message, Role, Send
from pdserve.core.block_hash import BlockHasher
from pdserve.core.ids import Epoch, NodeId, RequestId
from pdserve.core.logprobs import NO_LOGPROBS, Logprobs
from pdserve.router.record import Record


@dataclass(frozen=True, slots=True)
class Submit:
    record: Record


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads this request any more, or its text is complete."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class SampleStopped:
    """The text of one sample is complete; the others go on."""

    request: RequestId
    sample: int


@dataclass(frozen=True, slots=True)
class NodeJoined:
    node: NodeId
    role: Role
    epoch: Epoch
    capacity: Capacity
    address: str
    hasher: BlockHasher


@dataclass(frozen=True, slots=True)
class NodeLost:
    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """Action: new tokens of a sample for the client; with `finish` they are its last.

    is_last: with them the request has ended
    """

    request: RequestId
    sample: int
    token_ids: tuple[int, ...]
    finish: str | None
    logprobs: Logprobs = NO_LOGPROBS
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Action: the request cannot be served; `reason` names the stage that failed."""

    request: RequestId
    reason: str


Event = Submit | ClientGone | SampleStopped | NodeJoined | NodeLost | Received[Message] | Tick
Action = Send | Deliver | GiveUp
