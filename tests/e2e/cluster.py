"""A cluster whose processes are started one by one, each by its own command."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.e2e.servers import Server, free_address

NODE = ("--kv-memory", "1MiB", "--num-threads", 1)


class Cluster:
    """A router, and nodes that are told where it is. start: starts a process, as the fixture does."""

    def __init__(self, start: Callable[..., Server], model: Path, control: str | None = None):
        self._start = start
        self._model = model
        self.control = control or free_address()

    def router(self, *flags: object) -> Server:
        words = ("router", "--model", self._model, "--port", 0, "--control", self.control)
        return self._start(*words, *flags).wait_listening()

    def node(self, role: str, *flags: object, name: str | None = None, model: Path | None = None) -> Server:
        name = name or role[0].upper() + "0"
        words = ("--name", name, "--model", model or self._model, "--router", self.control)
        return self._start(role, *words, *NODE, *flags)


async def until_ended_by(number: int, server: Server) -> None:
    assert await asyncio.to_thread(server.wait) == -number


async def until_stopped(server: Server) -> None:
    """Until a node that is to freeze, and is a child of this process, has."""
    await asyncio.to_thread(server.wait_for, "fault: freeze")
    await asyncio.to_thread(os.waitid, os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)


def go_on(server: Server) -> None:
    os.kill(server.pid, signal.SIGCONT)
