"""Addresses of links: tcp://host:port and ipc:///path, checked before ZeroMQ sees them."""

import os
import re
import socket
import stat
from pathlib import Path

from pdserve.core.errors import ConfigError

# sun_path holds 108 bytes, the last is zero.
MAX_IPC_PATH_BYTES = 107
TCP_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._*-]+):(\d{1,5})")


def check_address(address: str) -> Path | None:
    """The path of an ipc address, None for tcp. Raises ConfigError for anything else."""
    match = TCP_ADDRESS.fullmatch(address)
    if match is not None and int(match[2]) <= 65535:
        return None
    if address.startswith("ipc:///") and "\0" not in address:
        path = address.removeprefix("ipc://")
        length = len(path.encode())
        if length > MAX_IPC_PATH_BYTES:
            raise ConfigError(f"ipc path {path!r} has {length} bytes, a unix socket's holds {MAX_IPC_PATH_BYTES}")
        return Path(path)
    raise ConfigError(f"address {address!r} is neither tcp://host:port (port up to 65535) nor ipc:///path")


def claim_path(path: Path) -> None:
    """Make sure that the directory is private and that nobody listens there.

    libzmq would silently take the path over from a living process (ipc binds never fail for being in use).
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.parent.stat()
    except OSError as error:
        raise ConfigError(f"cannot use directory {path.parent} for ipc: {error.strerror}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"directory {path.parent} must be ours with mode 0700 to listen on {path}, "
            f"it belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ConfigError(f"cannot listen on ipc://{path}: another process does")
