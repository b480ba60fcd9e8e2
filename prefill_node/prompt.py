"""One request on a prefill node, and the table of all of them.

A prompt that was cancelled leaves the table of requests at once, and by_key when no step names its blocks any more.
Mutable, owned by PrefillScheduler; Reservations changes what concerns blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from pdserve.cluster.messages import FirstToken
from pdserve.core.ids import BlockId, RequestId
from pdserve.engine.sequence import Sequence


class Phase(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    PARKED = "parked"


@dataclass(slots=True)
class Prompt:
    """One accepted request. `leased` are the blocks its lease pins once it is PARKED.

    was_parked: it goes on from an earlier attempt that was computed here, whose blocks it finds again
    """

    sequence: Sequence
    phase: Phase
    cancelled: bool = False
    was_parked: bool = False
    first_token: FirstToken | None = None
    leased: list[BlockId] = field(default_factory=list)


class Prompts:
    def __init__(self) -> None:
        self.by_key: dict[int, Prompt] = {}
        self._by_request: dict[RequestId, Prompt] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._by_request.values())

    def __getitem__(self, request: RequestId) -> Prompt:
        return self._by_request[request]

    def find(self, request: RequestId) -> Prompt | None:
        return self._by_request.get(request)

    def add(self, prompt: Prompt) -> None:
        self._by_request[prompt.sequence.request] = prompt
        self.by_key[prompt.sequence.key] = prompt

    def remove(self, prompt: Prompt) -> None:
        """It has ended; a step may still name it."""
        del self._by_request[prompt.sequence.request]
        prompt.cancelled = True
