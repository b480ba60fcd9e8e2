"""Where a load goes: the server, its model, the API that is spoken, and how long the client waits.

Light to import: the command line needs it for help.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import check_count

MAX_CONCURRENCY = 1_000_000
MAX_PREFLIGHT = 100


class Api(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/completions" if self is Api.COMPLETIONS else "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes and how long the client waits.

    url              without the /v1 of the API
    model            None takes the first one that the server lists
    timeout_s        from the actual send of a request to the end of its stream
    max_concurrency  requests in flight at most; None is the open loop that users are
    preflight        unmeasured requests that are sent one by one before the run
    api_key          sent as `Authorization: Bearer KEY`, in no report
    """

    url: str
    model: str | None = None
    api: Api = Api.COMPLETIONS
    timeout_s: float = 300.0
    max_concurrency: int | None = None
    preflight: int = 1
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_url(self.url)
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise OptionError(f"--timeout-s {self.timeout_s}: must be a number of seconds above 0")
        if self.max_concurrency is not None:
            check_count("--max-concurrency", self.max_concurrency, 1, MAX_CONCURRENCY)
        check_count("--preflight", self.preflight, 0, MAX_PREFLIGHT)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise OptionError("--api-key-file: the key holds characters that no HTTP header can carry")

    @property
    def headers(self) -> dict[str, str]:
        """What every request to the server carries."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


def read_api_key(path: str) -> str:
    """The first key of a file like the server's: one a line, # begins a comment."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OptionError(f"--api-key-file {path}: cannot be read: {reason}") from None
    key = next((line for line in lines if line and not line.startswith("#")), None)
    if key is None or not key.isascii():
        raise OptionError(f"--api-key-file {path}: holds no key of plain ASCII")
    return key


def parse_url(text: str) -> str:
    """The server's address without a trailing slash or /v1."""
    return text.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        raise OptionError(f"--url {url}: not a URL, or its port is not within 1-65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid:
        raise OptionError(f"--url {url}: must be http://HOST:PORT or https://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        # It would end up in the report.
        raise OptionError("--url: must not carry a user name or password")
    if parts.query or parts.fragment:
        raise OptionError(f"--url {url}: must end before '?' and '#'")
