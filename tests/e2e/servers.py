"""Commands of pdserve as real processes: started, listened to, killed, and ended with all they started.

Waits are for a line of the log or for the end of a process. Whatever happens to the tests, nothing is
left: the process holds a lifeline to this one, and its children hold theirs to it.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pdserve.launch.lifeline import PARENT_VARIABLE

PATIENCE_S = 60.0
COMMAND = (sys.executable, "-m", "pdserve.launch.cli")


class Server:
    """A running `pdserve ...`. `url` is where its HTTP answers, None for a node.

    through: words before the command that start it elsewhere, in a process that keeps its id
    """

    def __init__(self, *words: object, through: tuple[str, ...] = (), **environ: str):
        self.words = tuple(map(str, words))
        self.url: str | None = None
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._has_read_all = False
        own = {PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*through, *COMMAND, *self.words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | own | environ,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name=f"log of pdserve {self.words[0]}")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._has_read_all = True
            self._changed.notify_all()

    def wait_for(self, pattern: str, since: int = 0) -> re.Match[str]:
        """The first line from number `since` on that holds the pattern; fails with the log when none comes."""
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                for line in self.lines[since:]:
                    if found := re.search(pattern, line):
                        return found
                assert not self._has_read_all, self._report(f"ended before a line like {pattern!r}")
                assert self._changed.wait(deadline - time.monotonic()), self._report(f"no line like {pattern!r}")

    def wait_ready(self) -> "Server":
        """Wait for `up` to say that it serves, and where."""
        self.url = self.wait_for(r"ready in .*: (http://\S+)/v1").group(1)
        return self

    def wait_listening(self) -> "Server":
        """Wait for a router to say where it answers."""
        self.url = self.wait_for(r"HTTP on (http://\S+)").group(1)
        return self

    def tree(self) -> dict[int, str]:
        """Command line by process id of this process and all that descend from it and live."""
        found, new = {}, [self.pid]
        while new:
            pid = new.pop()
            found[pid] = command_line(pid)
            new += children(pid)
        return {pid: line for pid, line in found.items() if line}

    def pid_of(self, name: str) -> int:
        """The process of a child of `up`: router, P0, D0, ..."""
        wanted = " router " if name == "router" else f" --name {name} "
        found = [pid for pid, line in self.tree().items() if wanted in line]
        assert len(found) == 1, self._report(f"{len(found)} processes are {name}")
        return found[0]

    def kill(self, name: str) -> None:
        """kill -9 a child of `up`."""
        os.kill(self.pid_of(name), signal.SIGKILL)

    def wait(self) -> int:
        """The exit code, once the process and everybody who holds its output have ended."""
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._report("did not end")) from None
        self._reader.join(PATIENCE_S)
        assert not self._reader.is_alive(), self._report("ended, but something it started still runs")
        return code

    def stop(self) -> int:
        """SIGTERM, and wait for the end."""
        self._process.terminate()
        return self.wait()

    def end(self) -> None:
        """However the tests went: end it, leave nothing, and fail when it left something or had a bug."""
        tree = self.tree() if self._process.poll() is None else {}
        try:
            if self._process.poll() is None:
                # A frozen process would not end.
                self._process.send_signal(signal.SIGCONT)
                self.stop()
        finally:
            self._process.kill()
            self._process.wait()
            for pid in tree:
                if command_line(pid) == tree[pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._reader.join(PATIENCE_S)
            assert self._process.stdout is not None
            self._process.stdout.close()
        left = [line for pid, line in tree.items() if command_line(pid) == line]
        assert not left, self._report(f"left behind: {left}")
        assert not self.bugs, self._report("wrote a traceback")

    @property
    def bugs(self) -> list[str]:
        return [line for line in self.lines if "Traceback" in line]

    def _report(self, what: str) -> str:
        return "\n".join([f"pdserve {' '.join(self.words)}: {what}; its log:", *self.lines[-60:]])


@dataclass(frozen=True)
class Memfd:
    """A pool's memory, wherever it is open or mapped."""

    device: int
    inode: int


def children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:  # the thread has just ended
            continue
    return found


def command_line(pid: int) -> str:
    """The words of a process, "" when it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def pools(pids: list[int]) -> set[Memfd]:
    """The KV pools that these processes have open."""
    found = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                if os.readlink(path).startswith("/memfd:pdserve-"):
                    about = path.stat()
                    found.add(Memfd(about.st_dev, about.st_ino))
            except OSError:  # closed meanwhile
                continue
    return found


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "tcp://{}:{}".format(*probe.getsockname())
