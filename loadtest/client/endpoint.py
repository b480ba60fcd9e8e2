"""The server's address as the wire needs it: resolved once, before anything is measured.

A name may have several addresses (localhost has two) of which a server listens on one: the first that accepts is taken.
"""

import asyncio
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pdserve.loadtest.client.target import Target
from pdserve.loadtest.errors import TargetError

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to connect.

    family, address  of the socket, as getaddrinfo gives them
    tls_name         the host that the certificate must name; None speaks plain HTTP
    """

    family: int
    address: tuple[Any, ...]
    tls_name: str | None = None


async def find_endpoint(target: Target) -> Endpoint:
    """The target's address that accepts connections. Raises TargetError where none does."""
    parts = urlsplit(target.url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    reason = "no address"
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TargetError(f"--url {target.url}: cannot be reached: {error}") from None
    for family, _, _, _, address in infos:
        endpoint = Endpoint(family, address, host if parts.scheme == "https" else None)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                connection = await connect(endpoint)
        except TimeoutError:
            reason = f"no connection within {_CONNECT_TIMEOUT_S:g} s"
        except OSError as error:
            reason = str(error)
        else:
            connection.close()
            return endpoint
    raise TargetError(f"--url {target.url}: cannot be reached: {reason}")


async def connect(endpoint: Endpoint) -> socket.socket:
    """A connected socket that does not block; the caller closes it. Raises OSError."""
    connection = socket.socket(endpoint.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, endpoint.address)
    except BaseException:
        connection.close()
        raise
    return connection


def open_tls(endpoint: Endpoint) -> ssl.SSLContext | None:
    """Certificates are checked against those that the system trusts (SSL_CERT_FILE names others)."""
    return None if endpoint.tls_name is None else ssl.create_default_context()
