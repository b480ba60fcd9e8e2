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
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from pdserve.loadtest.deployment.cores import confined
from pdserve.loadtest.errors import OptionError, TargetError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 60.0
POLL_S = 0.1
LOG_LINES = 8
# A `pdserve` command that finds its parent's process id here ends with that process, however it dies.
LIFELINE = "PDSERVE_PARENT_PID"
PORT = "{port}"
LOOPBACK_URL = f"http://127.0.0.1:{PORT}"


@dataclass(frozen=True, slots=True)
class Server:
    """A command line that serves at a URL, which is without /v1; {port} in either stands for a port that is free.

    cores      those it is started on; none: all, and how many it uses is unknown
    num_nodes  0: unknown
    is_split   prefill and decode run on nodes of their own
    """

    name: str
    url: str
    command: tuple[str, ...]
    cores: tuple[int, ...] = ()
    num_nodes: int = 0
    is_split: bool = False
    environ: dict[str, str] = field(default_factory=dict)

    def placed(self) -> "Server":
        """The same with a port that is free now."""
        if PORT not in self.url:
            return self
        port = str(free_port())
        command = tuple(word.replace(PORT, port) for word in self.command)
        return replace(self, url=self.url.replace(PORT, port), command=command)


@contextlib.asynccontextmanager
async def running(server: Server, log: Path) -> AsyncIterator[float]:
    """Start the server and wait until it has answered one completion; yields the seconds that took.

    log: its output, overwritten. Raises OptionError for a command that cannot be started or a port in use,
    TargetError for a server that ends or does not answer within START_TIMEOUT_S.
    """
    if await _is_listening(server.url):
        raise OptionError(f"{server.name}: {server.url} answers already; stop that server or choose another port")
    began = time.monotonic()
    async with started(server, log) as process:
        await _wait_until_served(server, process, log)
        yield time.monotonic() - began


@contextlib.asynccontextmanager
async def started(server: Server, log: Path) -> AsyncIterator[Process]:
    """Its process, which need not serve yet, or ever; ended with all of its group."""
    with log.open("wb") as output:
        try:
            with confined(server.cores):
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
        yield process
    finally:
        await _end(process)


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_url() -> str:
    """A loopback URL whose port is free now."""
    return f"http://127.0.0.1:{free_port()}"


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
