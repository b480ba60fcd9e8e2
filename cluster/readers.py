"""Readers: how one kind of value is read from text (a flag, a variable) or from a TOML value.

A reader raises ValueError whose message continues the sentence "SOURCE: VALUE ...", for example
"is not a whole number from 1 to 64"; settings.py puts source and value before it.
"""

import ipaddress
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

# A unix socket's path must fit sockaddr_un.sun_path, 108 bytes with its end (unix(7)).
MAX_IPC_PATH_BYTES = 107
SIZE = re.compile(r"(\d+)(?:\.(\d+))?\s*([KMGT]?)(iB|B)?", re.IGNORECASE | re.ASCII)
SHIFT = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


EVERY_INTERFACE = frozenset({"0.0.0.0", "::", "*"})


@dataclass(frozen=True, slots=True)
class Reader:
    """metavar is the value's place-holder in the help, show how the help writes a default."""

    metavar: str
    from_text: Callable[[str], object]
    from_toml: Callable[[object], object]
    show: Callable[[object], str] = str


def toml_text(value: object) -> str:
    """A value as TOML; strings as basic strings, whose escapes are JSON's (control characters included)."""
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_text(item) for item in value) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_size(text: str) -> int:
    """Bytes of "1GiB", "512MiB", "2G", "1.5g" or "4096". All units are powers of 1024.

    "GB" is refused: half of the world reads it as 10^9.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a size: write bytes, or a number with K, M, G or T, like 512MiB or 2G")
    whole, fraction, unit, suffix = match.groups()
    if unit and suffix is not None and suffix.lower() == "b":
        raise ValueError(f"is ambiguous: write {whole}{unit.upper()}iB")
    if fraction and not unit:
        raise ValueError("is not a whole number of bytes")
    scaled = int(whole + (fraction or "")) << SHIFT[unit.upper()]
    return int(scaled // 10 ** len(fraction or ""))


def size(minimum: int, maximum: int = 1 << 50) -> Reader:
    def check(value: int) -> int:
        if not minimum <= value <= maximum:
            raise ValueError(f"is out of range: from {minimum} to {maximum} bytes")
        return value

    def from_toml(value: object) -> int:
        if isinstance(value, str):
            return check(parse_size(value))
        return check(_whole(value, "a size like 4096 or '512MiB'"))

    return Reader("SIZE", lambda text: check(parse_size(text)), from_toml, show_size)


def show_size(value: object) -> str:
    """A size in the largest unit that divides it, as parse_size reads it."""
    number, unit = int(str(value)), ""
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number == 0 or number % 1024:
            break
        number, unit = number // 1024, larger
    return f"{number}{unit}"


def integer(minimum: int, maximum: int) -> Reader:
    what = f"a whole number from {minimum} to {maximum}"

    def check(value: int) -> int:
        if not minimum <= value <= maximum:
            raise ValueError(f"is not {what}")
        return value

    def from_text(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
            raise ValueError(f"is not {what}")
        return check(int(text))

    return Reader("N", from_text, lambda value: check(_whole(value, what)))


def seconds(minimum: float, maximum: float) -> Reader:
    what = f"a number of seconds from {minimum:g} to {maximum:g}"

    def check(value: float) -> float:
        if not minimum <= value <= maximum:  # false for NaN as well
            raise ValueError(f"is not {what}")
        return value

    def from_text(text: str) -> float:
        if not re.fullmatch(r"\s*[+-]?\d*\.?\d*(e[+-]?\d{1,3})?\s*", text, re.IGNORECASE | re.ASCII):
            raise ValueError(f"is not {what}")
        try:
            return check(float(text))
        except ValueError:
            raise ValueError(f"is not {what}") from None

    def from_toml(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"is not {what}")
        return check(float(value))

    return Reader("S", from_text, from_toml)


def choice(*allowed: str, metavar: str = "") -> Reader:
    def check(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"is not one of {', '.join(allowed)}")
        return text

    return Reader(metavar or "|".join(allowed), check, lambda value: check(_string(value)))


def name() -> Reader:
    def check(text: str) -> str:
        if not NAME.fullmatch(text):
            raise ValueError("is not a name: 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first")
        return text

    return Reader("NAME", check, lambda value: check(_string(value)))


def label() -> Reader:
    """A name that clients send: any printable text without spaces, "/" allowed."""

    def check(text: str) -> str:
        if not 1 <= len(text) <= 256 or not text.isprintable() or " " in text:
            raise ValueError("is not a model name: 1 to 256 printable characters, no spaces")
        return text

    return Reader("NAME", check, lambda value: check(_string(value)))


def folder() -> Reader:
    return Reader("DIR", _path, lambda value: _path(_string(value)))


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("is not a path")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("begins with the home of somebody who has none here") from None


def core_list() -> Reader:
    """Core numbers: "0,2-3" in text, the same text or a list of integers in TOML."""
    what = "is not a list of cores like 0,2-3"

    def check(cores: list[int]) -> tuple[int, ...]:
        if not cores or len(set(cores)) != len(cores) or not all(0 <= core < 4096 for core in cores):
            raise ValueError(f"{what} (each once, below 4096)")
        return tuple(sorted(cores))

    def from_text(text: str) -> tuple[int, ...]:
        cores: list[int] = []
        for item in text.split(","):
            match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", item, re.ASCII)
            if match is None:
                raise ValueError(what)
            first, last = int(match[1]), int(match[2] or match[1])
            cores += range(first, last + 1)
        return check(cores)

    def from_toml(value: object) -> tuple[int, ...]:
        if isinstance(value, list):
            return check([_whole(item, "a core number") for item in value])
        return from_text(_string(value))

    return Reader("LIST", from_text, from_toml)


def bind_host() -> Reader:
    """A host that HTTP listens on; whether strangers may come in is for the whole config to say."""

    def check(text: str) -> str:
        if not text or any(character.isspace() for character in text):
            raise ValueError("is no host: write an address of this machine, 0.0.0.0 or :: for all of them")
        return text

    return Reader("HOST", check, lambda value: check(_string(value)))


def file() -> Reader:
    """A file that exists."""

    def check(text: str) -> Path:
        path = _path(text)
        if not path.is_file():
            raise ValueError("is no file")
        return path

    return Reader("FILE", check, lambda value: check(_string(value)))


def bind_address(lowest_port: int) -> Reader:
    """A ZeroMQ address to listen on; port 0, where allowed, lets the system choose."""

    def check(text: str) -> str:
        _check_address(text, lowest_port)
        return text

    return Reader("ADDR", check, lambda value: check(_string(value)))


def dial_address() -> Reader:
    """A ZeroMQ address to connect to."""

    def check(text: str) -> str:
        if _check_address(text, 1) in EVERY_INTERFACE:
            raise ValueError("is no address that can be dialled: name one host")
        return text

    return Reader("ADDR", check, lambda value: check(_string(value)))


def host_of(address: str) -> str | None:
    """The host of a checked ZeroMQ address, None for an ipc one."""
    return _check_address(address, 0)


def is_loopback(host: str) -> bool:
    """Whether a host, as written, can only be this machine. Other names are not looked up: they can change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_address(text: str, lowest_port: int) -> str | None:
    """The host of a tcp address, None for an ipc one; ValueError when it is neither."""
    wanted = "is not an address: write tcp://HOST:PORT or ipc:///PATH"
    if text.startswith("ipc://"):
        path = text.removeprefix("ipc://")
        if not path.startswith("/") or "\0" in path:
            raise ValueError(f"{wanted} (an absolute path)")
        length = len(os.fsencode(path))
        if length > MAX_IPC_PATH_BYTES:
            raise ValueError(f"has a path of {length} bytes; a unix socket allows {MAX_IPC_PATH_BYTES}")
        return None
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(wanted) from None
    if parts.scheme != "tcp" or not host or port is None or parts.path or parts.query or parts.username is not None:
        raise ValueError(wanted)
    if port < lowest_port:
        raise ValueError(f"has port {port}: a fixed port from {lowest_port} to 65535 is needed here")
    return host


def _whole(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"is not {what}")
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("is not a string")
    return value
