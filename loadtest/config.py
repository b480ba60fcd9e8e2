"""What one load test is asked to do: the load, the target and the promises, checked and immutable.

The command builds it from flags; other programs build it directly and meet the same checks, which
name the flag because that is the word users know. Light to import: the command line needs it for help.
"""

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from pdserve.loadtest.errors import OptionError

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1_000_000
MAX_WARMUP = 100
MIN_RATE_PER_S = 0.001
MAX_RATE_PER_S = 100_000.0
MAX_TOKEN_ID = 2**31


class Api(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/completions" if self is Api.COMPLETIONS else "/v1/chat/completions"


class Measure(StrEnum):
    """What can be promised for a request, in seconds counted from its intended send time."""

    TTFT = "ttft"
    SECOND = "second"
    TPOT = "tpot"
    GAP = "gap"
    E2E = "e2e"


@dataclass(frozen=True, slots=True)
class Promise:
    measure: Measure
    limit_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from low to high, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that prompts are drawn from: low, low + 1, ... end - 1."""

    low: int = 100
    end: int = 30_000

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.end <= MAX_TOKEN_ID:
            raise OptionError(f"--vocab {self.low}-{self.end}: needs 0 <= LOW < END <= {MAX_TOKEN_ID}")

    @property
    def size(self) -> int:
        return self.end - self.low


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. The same load gives the same arrival times, lengths and prompts.

    rate_per_s may be infinite: all requests at once.
    """

    rate_per_s: float
    num_requests: int
    input_tokens: Span
    output_tokens: Span
    seed: int = 0
    vocabulary: Vocabulary = Vocabulary()

    def __post_init__(self) -> None:
        if not (MIN_RATE_PER_S <= self.rate_per_s <= MAX_RATE_PER_S or self.rate_per_s == math.inf):
            raise OptionError(
                f"--rate {self.rate_per_s}: must be within {MIN_RATE_PER_S} and {MAX_RATE_PER_S:.0f} "
                "requests a second, or inf for all at once"
            )
        _check_count("--num-requests", self.num_requests, 1, MAX_REQUESTS)
        _check_count("--seed", self.seed, 0, 2**63 - 1)
        _check_span("--input-tokens", self.input_tokens)
        _check_span("--output-tokens", self.output_tokens)


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes and how long the client waits.

    url              without the /v1 of the API
    model            None takes the first one that the server lists
    timeout_s        from the actual send of a request to the end of its stream
    max_concurrency  requests in flight at most; None is the open loop that users are
    api_key          sent as `Authorization: Bearer KEY`, in no report
    """

    url: str
    model: str | None = None
    api: Api = Api.COMPLETIONS
    timeout_s: float = 300.0
    max_concurrency: int | None = None
    warmup: int = 1
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_url(self.url)
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise OptionError(f"--timeout-s {self.timeout_s}: must be a number of seconds above 0")
        if self.max_concurrency is not None:
            _check_count("--max-concurrency", self.max_concurrency, 1, MAX_REQUESTS)
        _check_count("--warmup", self.warmup, 0, MAX_WARMUP)


@dataclass(frozen=True, slots=True)
class BenchConfig:
    target: Target
    load: Load
    promises: tuple[Promise, ...] = ()


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


def parse_span(flag: str, text: str) -> Span:
    """Read "256-768", or "512" for exactly 512."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text.strip(), re.ASCII)
    if match is None:
        raise OptionError(f"{flag} {text}: must be LOW-HIGH, for example 256-768, or one number")
    low = int(match[1])
    return Span(low, low if match[2] is None else int(match[2]))


def parse_vocabulary(text: str) -> Vocabulary:
    """Read "100-30000": ids from 100 to 29999."""
    match = re.fullmatch(r"([0-9]{1,12})-([0-9]{1,12})", text.strip(), re.ASCII)
    if match is None:
        raise OptionError(f"--vocab {text}: must be LOW-END, for example 100-30000")
    return Vocabulary(int(match[1]), int(match[2]))


def parse_promises(text: str) -> tuple[Promise, ...]:
    """Read "ttft=2.0,tpot=0.06", limits in seconds."""
    promises: dict[Measure, Promise] = {}
    for part in text.split(","):
        name, _, limit = (piece.strip() for piece in part.partition("="))
        if name not in list(Measure):
            raise OptionError(f"--slo {part.strip()}: must be NAME=SECONDS with a name out of {', '.join(Measure)}")
        limit_s = parse_number("--slo", f"{name}=", limit)
        if not (limit_s > 0 and math.isfinite(limit_s)):
            raise OptionError(f"--slo {name}={limit}: must be a number of seconds above 0")
        if Measure(name) in promises:
            raise OptionError(f"--slo {text}: {name} is given twice")
        promises[Measure(name)] = Promise(Measure(name), limit_s)
    return tuple(promises.values())


def parse_number(flag: str, prefix: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{flag} {prefix}{text}: must be a number") from None


def parse_count(flag: str, text: str) -> int:
    if re.fullmatch(r"-?[0-9]{1,19}", text.strip(), re.ASCII) is None:
        raise OptionError(f"{flag} {text}: must be a whole number of at most 19 digits")
    return int(text)


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


def _check_count(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise OptionError(f"{flag} {value}: must be within {low} and {high}")


def _check_span(flag: str, span: Span) -> None:
    if not 1 <= span.low <= span.high <= MAX_TOKENS:
        raise OptionError(f"{flag} {span}: needs 1 <= LOW <= HIGH <= {MAX_TOKENS}")
