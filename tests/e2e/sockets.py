"""Where a process listens, read from /proc."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

TCP_LISTEN = "0A"
# __SO_ACCEPTCON in the flags of /proc/net/unix.
UNIX_LISTEN = 0x10000


@dataclass(frozen=True)
class Listener:
    """address: what connect() takes."""

    family: socket.AddressFamily
    kind: socket.SocketKind
    address: tuple[str, int] | str | bytes


def listeners(pid: int) -> list[Listener]:
    own = _inodes(pid)
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for words in _rows(pid, name):
            if words[3] == TCP_LISTEN and words[9] in own:
                host, port = words[1].split(":")
                found.append(Listener(family, socket.SOCK_STREAM, (_host(family, host), int(port, 16))))
    for words in _rows(pid, "unix"):
        if int(words[3], 16) & UNIX_LISTEN and words[6] in own and len(words) > 7:
            path, kind = words[7], socket.SocketKind(int(words[4], 16))
            address = b"\0" + path[1:].encode() if path.startswith("@") else path
            found.append(Listener(socket.AF_UNIX, kind, address))
    return found


def _inodes(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = os.readlink(path)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _rows(pid: int, name: str) -> list[list[str]]:
    try:
        lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return []
    return [line.split() for line in lines[1:]]


def _host(family: socket.AddressFamily, text: str) -> str:
    """The kernel writes addresses as words in the machine's own order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))
