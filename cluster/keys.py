"""The keys of a cluster: the CURVE pair that all of its processes hold, and who else is let in.

Whoever holds the pair is a part of the cluster. Where processes have pairs of their own, or while a pair is
replaced, `allow` names the further public keys that are let in and `server` the key that whom this process
dials is expected to have. Read once at start, handed to the endpoint.
"""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.cluster.private_file import read_private
from pdserve.core.errors import ConfigError

FLAG = "--key-file"
# 32 bytes in Z85 (ZeroMQ RFC 32), whose alphabet has no quote and no backslash.
Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """Keys in Z85.

    server   public key that a process which is dialled must have
    allowed  public keys that are let in, the pair's own among them
    """

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes
    allowed: frozenset[bytes]

    @classmethod
    def read(cls, path: Path) -> "ClusterKeys":
        """Read what `keygen` has written. Raises ConfigError; no message shows a key."""
        try:
            entries = tomllib.loads(read_private(path, FLAG))
        except tomllib.TOMLDecodeError:
            # Its own message may quote the line.
            raise ConfigError(f"{FLAG} {path}: is not what `pdserve keygen` writes") from None
        unknown = sorted(entries.keys() - {"public", "secret", "server", "allow"})
        if unknown:
            raise ConfigError(f"{FLAG} {path}: unknown entry {unknown[0]!r}")
        public, secret = (_key(entries.get(name), f"{FLAG} {path}: {name}") for name in ("public", "secret"))
        server = _key(entries.get("server", entries["public"]), f"{FLAG} {path}: server")
        allow = entries.get("allow", [])
        if not isinstance(allow, list):
            raise ConfigError(f"{FLAG} {path}: allow is no list")
        further = [_key(key, f"{FLAG} {path}: entry {number} of allow") for number, key in enumerate(allow, 1)]
        return cls(public, secret, server, frozenset([public, *further]))


def read_keys(path: Path | None) -> ClusterKeys | None:
    """The keys of a file, none without one."""
    return None if path is None else ClusterKeys.read(path)


def key_file_text(public: bytes, secret: bytes) -> str:
    """What a key file holds."""
    return (
        "# The keys of one pdserve cluster: every process of it needs this file, nobody else may have it.\n"
        f'public = "{public.decode()}"\n'
        f'secret = "{secret.decode()}"\n'
        "# Further public keys that are let in.\n"
        "allow = []\n"
    )


def _key(value: object, where: str) -> bytes:
    if not isinstance(value, str) or Z85_KEY.fullmatch(value) is None:
        raise ConfigError(f"{where} is no key: 40 characters of Z85 are expected")
    return value.encode()
