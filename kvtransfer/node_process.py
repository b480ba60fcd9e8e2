"""A node as a process, whatever its role: load, serve until a signal, close in order."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from pdserve.cluster import event_loop
from pdserve.cluster.config import Compute, DecodeNumbers, Memory, NodeServing, PrefillNumbers
from pdserve.cluster.logs import start_logging
from pdserve.cluster.node_life import Ending
from pdserve.engine.engine import Engine
from pdserve.kvtransfer.node_parts import Load, NodeParts, load_node_parts

Serve = Callable[[Any, NodeParts, Ending], Awaitable[None]]


class NodeConfig(Protocol):
    """What the two node configs share."""

    @property
    def name(self) -> str: ...
    @property
    def serving(self) -> NodeServing: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def compute(self) -> Compute: ...
    @property
    def numbers(self) -> PrefillNumbers | DecodeNumbers: ...


def run_node(config: NodeConfig, max_running: int, serve: Serve, load: Load = Engine.load) -> int:
    """Load the model and run `serve` until a signal: the first one drains the node, the second ends it.

    load: makes the engine. Returns the exit code.
    """
    start_logging()
    parts = load_node_parts(
        config.name, config.serving, config.memory, config.compute, max_running, load, config.numbers
    )
    try:
        event_loop.run(_until_signal(config, parts, serve))
    finally:
        parts.close()
    return 0


async def _until_signal(config: NodeConfig, parts: NodeParts, serve: Serve) -> None:
    ending = Ending(asyncio.Event(), asyncio.Event())

    def end() -> None:
        (ending.stop if ending.leave.is_set() else ending.leave).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    await serve(config, parts, ending)
