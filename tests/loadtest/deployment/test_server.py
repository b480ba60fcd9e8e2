"""Child processes as servers under test: the mock, and commands that are none."""

import asyncio
import os
import select
import sys

import pytest

from pdserve.loadtest.deployment.server import Server, free_url, running
from pdserve.loadtest.errors import OptionError, TargetError

PATIENCE_S = 10.0
COMMAND = (sys.executable, "-m", "pdserve.launch.cli")


def mock_server(url: str) -> Server:
    port = url.rpartition(":")[2]
    return Server("mock", url, (*COMMAND, "bench", "mock", "--port", port, "--ttft-s", "0", "--gap-s", "0"))


async def test_a_server_is_served_inside_and_gone_outside(tmp_path):
    server = mock_server(free_url())
    host, port = server.url.removeprefix("http://").split(":")
    async with running(server, tmp_path / "log") as start_s:
        assert start_s > 0
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        await writer.wait_closed()
        with pytest.raises(OptionError, match="answers already"):
            async with running(server, tmp_path / "other"):
                pass
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


async def test_a_server_that_ends_is_an_error_with_its_last_words(tmp_path):
    script = "import sys; print('no such model'); sys.exit(3)"
    with pytest.raises(TargetError, match=r"exit code 3\n  no such model"):
        async with running(Server("s", free_url(), (sys.executable, "-c", script)), tmp_path / "log"):
            pass


async def test_a_command_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(OptionError, match="cannot start /no/such: No such file"):
        async with running(Server("s", free_url(), ("/no/such",)), tmp_path / "log"):
            pass


async def test_the_children_of_a_server_end_with_it(tmp_path):
    """A shell that starts one more process and would leave it behind."""
    server = mock_server(free_url())
    pid_file = tmp_path / "pid"
    script = f'sleep 1000 & echo $! > {pid_file}; exec "$@"'
    wrapped = Server("s", server.url, ("/bin/sh", "-c", script, "sh", *server.command))
    async with running(wrapped, tmp_path / "log"):
        handle = os.pidfd_open(int(pid_file.read_text()))
    try:
        assert select.select([handle], [], [], PATIENCE_S)[0] == [handle]
    finally:
        os.close(handle)
