"""A server under test as a child process: started, waited for, and ended with everything it has started.

Any command line can be one. `running` owns the process for as long as it is looked at; what it prints goes to a file.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from pdserve.loadtest.errors import OptionError, TargetError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 60.0
POLL_S = 0.1
LOG_LINES = 8
# A `pdserve` command that finds its parent's process id here ends with that process, however it dies.
LIFELINE = "PDSERVE_PARENT_PID"


@dataclass(frozen=True, slots=True)
class Server:
    """A command line that serves at a URL, which is without /v1.

    cores, num_nodes  what it is given, for figures per core and per node; 0 nodes: unknown
    is_split          prefill and decode run on nodes of their own
    """

    name: str
    url: str
    command: tuple[str, ...]
    cores: int
    num_nodes: int = 0
    is_split: bool = False
    environ: dict[str, str] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def running(server: Server, log: Path) -> AsyncIterator[float]:
    """Start the server and wait until it has answered one completion; yields the seconds that took.

    log: its output, overwritten. Raises OptionError for a command that cannot be started or a port in use,
    TargetError for a server that ends or does not answer within START_TIMEOUT_S.
    """
    if await _is_listening(server.url):
        raise OptionError(f"{server.name}: {server.url} answers already; stop that server or choose another port")
    started = time.monotonic()
    with log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *server.command,
                stdin=DEVNULL,
                stdout=output,
                stderr=STDOUT,
                env=os.environ | {LIFELINE: str(os.getpid())} | server.environ,
                start_new_session=True,
            )
        except OSError as error:
            raise OptionError(f"{server.name}: cannot start {server.command[0]}: {error.strerror}") from None
    try:
        await _wait_until_served(server, process, log)
        yield time.monotonic() - started
    finally:
        await _end(process)


def free_url() -> str:
    """A loopback URL whose port is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


async def _is_listening(url: str) -> bool:
    async with aiohttp.ClientSession() as session:
        try:
            async with asyncio.timeout(1.0), session.get(url + "/v1/models"):
                return True
        except (aiohttp.ClientConnectorError, TimeoutError):
            return False
        except (aiohttp.ClientError, OSError):
            return True


async def _wait_until_served(server: Server, process: Process, log: Path) -> None:
    ended = asyncio.ensure_future(process.wait())
    served = asyncio.ensure_future(_first_answer(server.url))
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.wait((ended, served), return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        raise TargetError(f"{server.name}: not served within {START_TIMEOUT_S:g} s{_last_lines(log)}") from None
    finally:
        for task in (ended, served):
            task.cancel()
        await asyncio.gather(ended, served, return_exceptions=True)
    if process.returncode is not None:
        raise TargetError(f"{server.name}: ended with exit code {process.returncode}{_last_lines(log)}")


async def _first_answer(url: str) -> None:
    """Returns when one short completion has been answered."""
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    async with session.get(url + "/v1/models") as response:
                        model = (await response.json())["data"][0]["id"]
                    body = {"model": model, "prompt": "Hello", "max_tokens": 2}
                    async with session.post(url + "/v1/completions", json=body) as response:
                        if response.status == 200:
                            await response.read()
                            return
            await asyncio.sleep(POLL_S)


async def _end(process: Process) -> None:
    """Ask the process group to stop, then make it; nothing of it is left."""
    for number, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await process.wait()
                break
    # Its leader has gone; whoever of the group has not goes now.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    return "".join(f"\n  {line}" for line in lines)
