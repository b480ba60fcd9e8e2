"""Supervisor: keeps child processes running, shows their logs as one stream, ends them together.

    child:       STARTING/RUNNING -> (exit) -> WAITING for its back-off -> RUNNING ...
    supervisor:  RUNNING -> STOPPING (first signal, or a child given up) -> KILLING (second signal, or grace over)

Each child is a process group of its own, so that Ctrl-C on the terminal reaches the supervisor alone,
and holds a lifeline to it (lifeline.py), so that none survives it. Owned by `pdserve up`.
"""

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from io import FileIO
from typing import ParamSpec

from pdserve.launch.backoff import Backoff
from pdserve.launch.lifeline import PARENT_VARIABLE
from pdserve.launch.log_stream import LogStream

P = ParamSpec("P")

EXIT_GIVEN_UP = 1
# A child that exits with this has refused its configuration or model: it would again.
EXIT_REFUSED = 2
GRACE_S = 10.0
LAST_LINES_S = 1.0
# One stop often arrives twice: sent to our process group, and passed on by `make` or a shell.
SAME_SIGNAL_S = 0.5
READY_POLL_S = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Child:
    """A process to keep: its name in the log, and its whole command line."""

    name: str
    command: tuple[str, ...]


class Supervisor:
    """Runs children until a signal, or until one of them cannot be kept.

    is_ready    asked every 100 ms until it answers True once; must not raise
    ready_line  the line shown then
    """

    def __init__(
        self,
        children: tuple[Child, ...],
        log: LogStream,
        *,
        is_ready: Callable[[], Awaitable[bool]],
        ready_line: Callable[[], str],
        grace_s: float = GRACE_S,
        new_backoff: Callable[[], Backoff] = Backoff,
    ):
        self._children = children
        self._log = log
        self._is_ready = is_ready
        self._ready_line = ready_line
        self._grace_s = grace_s
        self._new_backoff = new_backoff
        self._running: dict[str, Process] = {}
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._stopped_by, self._stopped_at = 0, 0.0
        self._exit_code = 0

    async def run(self) -> int:
        """Start all children and return the exit code when all have ended: 0 after a signal, else 1."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._keep(child)) for child in self._children]
                announcer = group.create_task(self._announce())
                await self._stopping.wait()
                announcer.cancel()
                self._signal_all(signal.SIGTERM)
                killer = group.create_task(self._kill_late())
                await asyncio.wait(keepers)
                killer.cancel()
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)
        return self._exit_code

    def _stop(self, number: int) -> None:
        now = time.monotonic()
        if self._stopping.is_set():
            if number != self._stopped_by or now - self._stopped_at >= SAME_SIGNAL_S:
                self._killing.set()
            return
        self._stopped_by, self._stopped_at = number, now
        self._say(f"{signal.Signals(number).name}: stopping (once more to kill)")
        self._stopping.set()

    async def _keep(self, child: Child) -> None:
        backoff = self._new_backoff()
        while not self._stopping.is_set():
            code = await self._run_once(child)
            if self._stopping.is_set():
                return
            delay_s = None if code == EXIT_REFUSED else backoff.delay_s(time.monotonic())
            if delay_s is None:
                self._give_up(child, code, backoff)
                return
            self._say(f"{child.name} {_ending(code)}; restart in {delay_s:g} s")
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def _give_up(self, child: Child, code: int, backoff: Backoff) -> None:
        if code == EXIT_REFUSED:
            reason = "it would refuse to start again"
        else:
            reason = f"{backoff.max_restarts} restarts within {backoff.window_s:g} s were not enough"
        self._say(f"{child.name} {_ending(code)}; giving up: {reason}, see its lines above")
        self._exit_code = EXIT_GIVEN_UP
        self._stopping.set()

    async def _run_once(self, child: Child) -> int:
        """One life of a child, its output shown; the exit code, negative for a signal."""
        environ = os.environ | {PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        # A pipe of our own: asyncio's would not tell of a child's end while a grandchild holds it open.
        read_end, write_end = os.pipe()
        output = os.fdopen(read_end, "rb", buffering=0)
        try:
            process = await asyncio.create_subprocess_exec(
                *child.command, stdin=DEVNULL, stdout=write_end, stderr=write_end, env=environ, process_group=0
            )
        except BaseException:
            output.close()
            raise
        finally:
            os.close(write_end)
        self._running[child.name] = process
        if self._stopping.is_set():
            _signal_group(process, signal.SIGTERM)
        try:
            async with asyncio.TaskGroup() as group:
                copying = group.create_task(self._copy_log(child.name, output))
                code = await process.wait()
                # What the child started and left behind goes with it, and so does its hold on the pipe.
                _signal_group(process, signal.SIGKILL)
                await asyncio.wait([copying], timeout=LAST_LINES_S)
                copying.cancel()
        finally:
            if process.returncode is None:
                _signal_group(process, signal.SIGKILL)
                await process.wait()
            self._running.pop(child.name)
        return code

    async def _copy_log(self, name: str, output: FileIO) -> None:
        """Show a child's output until the last writer closes it; closes our end."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), output
        )
        try:
            while data := await reader.read(1 << 16):
                self._show(self._log.feed, name, data)
        finally:
            transport.close()
            self._show(self._log.end, name)

    async def _announce(self) -> None:
        while not await self._is_ready():
            try:
                async with asyncio.timeout(READY_POLL_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue
        self._say(self._ready_line())

    async def _kill_late(self) -> None:
        try:
            async with asyncio.timeout(self._grace_s):
                await self._killing.wait()
        except TimeoutError:
            self._say(f"not all ended within {self._grace_s:g} s: killing {', '.join(sorted(self._running))}")
        self._exit_code = EXIT_GIVEN_UP
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._running.values():
            _signal_group(process, number)

    def _say(self, line: str) -> None:
        self._show(self._log.say, line)

    def _show(self, write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Write to the log; when nobody reads it any more, stop."""
        try:
            write(*args, **kwargs)
        except BrokenPipeError:
            self._log.abandon()
            self._exit_code = EXIT_GIVEN_UP
            self._stopping.set()


def _signal_group(process: Process, number: signal.Signals) -> None:
    """Signal a child's whole process group, if there is still anyone in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
