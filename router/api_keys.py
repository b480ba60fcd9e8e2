"""Who may use the front door: API keys from a file, compared in constant time. Owned by the app."""

import hashlib
import hmac
from pathlib import Path

from pdserve.cluster.private_file import read_lines
from pdserve.core.errors import ConfigError

SCHEME = "bearer"
MIN_KEY_CHARS = 16


class ApiKeys:
    """keys: texts that clients send as `Authorization: Bearer KEY`; only their digests are kept."""

    def __init__(self, keys: list[str]):
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: Path) -> "ApiKeys":
        """One key a line; empty lines and lines that begin with # do not count.

        Raises ConfigError when the file cannot be read, when others than its owner can, or when a key is too short.
        """
        lines = read_lines(path, "--api-key-file")
        for number, key in lines:
            if len(key) < MIN_KEY_CHARS or not key.isascii() or " " in key:
                # The key itself must not come into a log.
                raise ConfigError(
                    f"--api-key-file {path}: the key in line {number} is shorter than {MIN_KEY_CHARS} "
                    "characters, or not plain ASCII without spaces"
                )
        return cls([key for _, key in lines])

    def allow(self, authorization: str | None) -> bool:
        """Whether this Authorization header holds one of the keys."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME:
            return False
        digest = _digest(key.strip())
        # Every key is compared, whichever fits: the time says nothing.
        return any([hmac.compare_digest(digest, known) for known in self._digests])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
