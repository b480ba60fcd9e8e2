"""Nodes without a model for benchmarks of the router: they speak the protocol, and a token falls due by the clock.

Every node steps on a grid of its own and sends all tokens of a step in one message, as a decode node does; what it
sends is the same token again and again. Requests are told apart by the first token of their prompt. All nodes of a
process share its event loop.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.cluster.config import Network
from pdserve.cluster.events import Received
from pdserve.cluster.messages import (
    Begun,
    Cancel,
    Capacity,
    Decode,
    Facts,
    Finish,
    Gauges,
    Held,
    HeldEntry,
    Hello,
    Live,
    Role,
    Send,
    Stage,
    TokenRun,
    Tokens,
)
from pdserve.cluster.node_life import ROUTER, Ending, NodeLife
from pdserve.core.block_hash import unpack_token_ids
from pdserve.core.cache_delta import CacheDelta
from pdserve.core.ids import Epoch, NodeId, RequestId

NUM_BLOCKS = 1 << 20
# A prompt that begins with it or a later one is given one token and no other.
IDLE = 40_000


@dataclass(slots=True)
class Stream:
    """number: by which the client knows it"""

    number: int
    attempt: int
    num_tokens: int
    is_idle: bool
    num_sent: int = 0
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class StepDue:
    """Event: the grid says so; due: when it did."""

    due: float


@dataclass(slots=True)
class MockNode:
    """The machine of one node, for NodeLife.

    token   what it sends
    sent    is told (stream's number, index, time at which it was due) of each token
    """

    token: int
    sent: Callable[[int, int, float], None]
    streams: dict[RequestId, Stream] = field(default_factory=dict)
    is_drained: bool = True

    def check(self) -> None:
        """Nothing can disagree."""

    def handle(self, event: Any, now: float) -> list[Any]:
        if isinstance(event, StepDue):
            return self._step(event.due)
        if isinstance(event, Received):
            return self._receive(event.message)
        return []

    def _receive(self, message: Any) -> list[Any]:
        if isinstance(message, Decode):
            number = unpack_token_ids(message.prompt)[0]
            self.streams[message.request] = Stream(
                number, message.attempt, message.sampling.max_tokens, is_idle=number >= IDLE
            )
        elif isinstance(message, Cancel):
            self.streams.pop(message.request, None)
        elif isinstance(message, Live):
            position = message.cache
            delta = CacheDelta(position.whole, position.until, position.until, (), ())
            return [Send(ROUTER, Held(message.beat, tuple(self._held()), self._gauges(), (), False, delta))]
        return []

    def _held(self) -> list[HeldEntry]:
        return [
            HeldEntry(request, stream.attempt, Stage.DECODE, stream.num_sent)
            for request, stream in self.streams.items()
        ]

    def _gauges(self) -> Gauges:
        num_running = len(self.streams)
        return Gauges(NUM_BLOCKS, 0, 0, 0, 0, num_running, 0, 0, 0, 0, 1e-6)

    def _step(self, due: float) -> list[Any]:
        actions: list[Any] = []
        runs: list[TokenRun] = []
        for request, stream in list(self.streams.items()):
            if stream.is_idle and stream.has_begun:
                continue
            if not stream.has_begun:
                stream.has_begun = True
                actions.append(Send(ROUTER, Begun(request, stream.attempt, *[0.0] * 6)))
            is_last = stream.num_sent + 1 == stream.num_tokens
            finish = Finish.LENGTH if is_last else None
            runs.append(TokenRun(request, stream.attempt, 0, stream.num_sent, (self.token,), finish))
            self.sent(stream.number, stream.num_sent, due)
            stream.num_sent += 1
            if is_last:
                del self.streams[request]
        return [*actions, Send(ROUTER, Tokens(tuple(runs)))] if runs else actions


async def run_nodes(
    machines: Sequence[MockNode], router: str, period_s: float, max_model_len: int, stop: asyncio.Event
) -> None:
    """Serve with all of them until `stop`; their grids are spread evenly over a period."""
    async with asyncio.TaskGroup() as tasks:
        for index, machine in enumerate(machines):
            facts = Facts("", "", "", bytes(32), "", ())
            capacity = Capacity(NUM_BLOCKS, 32, max_model_len, NUM_BLOCKS, 1)
            hello = Hello(NodeId(f"D{index}"), Role.BOTH, facts, capacity)
            life = NodeLife(hello, Epoch.new(), machine, lambda action: None)
            tasks.create_task(life.run(Network(router=router), Ending(asyncio.Event(), stop)))
            tasks.create_task(_steps(life, period_s, index / len(machines), stop))


async def _steps(life: NodeLife, period_s: float, shift: float, stop: asyncio.Event) -> None:
    due = (int(time.monotonic() / period_s) + 1 + shift) * period_s
    while not stop.is_set():
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        life.feed(StepDue(due))
        due += period_s
