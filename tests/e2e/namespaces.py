"""Network namespaces stand for hosts: each with one link to a switch, all gone with the descriptors that hold them.

    client ─ switch (a bridge) ─┬─ host ─ eth0, 10.77.0.2
                                └─ host ─ eth0, 10.77.0.3

Nothing has a name that could collide with another run's or outlive this process: a namespace lives while this
process has it open or a process is in it, and its links live as long as it does.
"""

import ctypes
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

CLONE_NEWNET = 0x40000000
OWN = "/proc/thread-self/ns/net"
SUBNET = "10.77.0"
SWITCH_ADDRESS = f"{SUBNET}.1"
LIBC = ctypes.CDLL(None, use_errno=True)


class NoNamespacesError(Exception):
    """They may not be made here, or there is nothing to make them with."""


class Namespace:
    """A network of its own. `through` before a command runs it there, in a process with the same id."""

    def __init__(self) -> None:
        with _back_again():
            _check(LIBC.unshare(CLONE_NEWNET), "unshare")
            self.fd = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def through(self) -> tuple[str, ...]:
        return ("nsenter", f"--net={self.path}", "--")

    def run(self, *words: object) -> str:
        """The output of a command. Raises NoNamespacesError when it fails."""
        done = subprocess.run([*self.through, *map(str, words)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoNamespacesError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout

    def make_socket(self, about: tuple) -> socket.socket:  # type: ignore[type-arg]
        """A socket of this process that lives there; `about` is what getaddrinfo says of where it will connect."""
        with _back_again():
            _check(LIBC.setns(self.fd, CLONE_NEWNET), "setns")
            return socket.socket(*about[:3])

    def close(self) -> None:
        os.close(self.fd)


class Host(Namespace):
    """A host for a switch, on which the port that it is plugged into has its name."""

    def __init__(self, switch: Namespace, name: str, address: str) -> None:
        super().__init__()
        self.address = address
        self._name = name
        self._switch = switch

    def set_up(self) -> None:
        name, address, switch = self._name, self.address, self._switch
        link = ("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", self.path)
        for words in (link, ("link", "set", name, "master", "switch", "up")):
            switch.run("ip", *words)
        for words in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            self.run("ip", *words)
        self.run("ip", "link", "set", "lo", "up")

    def unplug(self) -> None:
        self._switch.run("ip", "link", "set", self._name, "down")

    def plug(self) -> None:
        self._switch.run("ip", "link", "set", self._name, "up")

    def slowed_down(self, megabits: int) -> AbstractContextManager[None]:
        """Limit what it sends until the end, with a queue that holds everything: the link delays and never drops."""
        limits = ("rate", f"{megabits}mbit", "burst", "32kb", "limit", "64mb")
        self.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limits)
        stack = ExitStack()
        stack.callback(self.run, "tc", "qdisc", "del", "dev", "eth0", "root")
        return stack

    @property
    def num_bytes_sent(self) -> int:
        (about,) = json.loads(self.run("ip", "-json", "-stats", "link", "show", "eth0"))
        return int(about["stats64"]["tx"]["bytes"])


class Network:
    """A switch and its hosts. Raises NoNamespacesError where they may not be made."""

    def __init__(self) -> None:
        missing = [tool for tool in ("ip", "nsenter", "tc") if shutil.which(tool) is None]
        if missing:
            raise NoNamespacesError(f"{missing[0]} is not installed")
        self.switch = Namespace()
        self._hosts: list[Host] = []
        try:
            for words in (("add", "switch", "type", "bridge"), ("set", "switch", "up")):
                self.switch.run("ip", "link", *words)
            self.switch.run("ip", "addr", "add", f"{SWITCH_ADDRESS}/24", "dev", "switch")
        except NoNamespacesError:
            self.close()
            raise

    def add_host(self, name: str) -> Host:
        host = Host(self.switch, name, f"{SUBNET}.{len(self._hosts) + 2}")
        self._hosts.append(host)
        host.set_up()
        return host

    def close(self) -> None:
        for namespace in (*self._hosts, self.switch):
            namespace.close()


@contextmanager
def _back_again() -> Iterator[None]:
    """This thread is in its own namespace again afterwards."""
    own = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            _check(LIBC.setns(own, CLONE_NEWNET), "setns")
        finally:
            os.close(own)


def _check(result: int, call: str) -> None:
    if result:
        raise NoNamespacesError(f"{call}: {os.strerror(ctypes.get_errno())}")
