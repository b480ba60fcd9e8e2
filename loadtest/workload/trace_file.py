"""Published traces and files of the same columns: CSV with a header or one JSON object a line, gzip or not.

    TIMESTAMP, ContextTokens, GeneratedTokens            Azure's LLM inference traces; times of day
    timestamp, input_length, output_length, hash_ids     Mooncake's; milliseconds, an id for each 512 tokens of a prompt
    num_prefill_tokens, num_decode_tokens                lengths alone; no times

A file is recognised by its columns; it may have more, and hash_ids may be missing. It is not trusted: whatever is in
it becomes a Trace or an OptionError with file, line and column.
"""

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.lengths import MAX_TOKENS
from pdserve.loadtest.workload.load import MAX_REQUESTS
from pdserve.loadtest.workload.trace import Trace, TraceRequest, find_quantum

BLOCK_TOKENS = 512
MAX_BLOCK_ID = 2**63 - 1
MAX_LINE_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_SHOWN = 60

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """What the columns of a kind of file are called. read_time gives seconds from any start."""

    input_tokens: str
    output_tokens: str
    time: str | None = None
    read_time: Callable[[Any], float] | None = None
    block_ids: str | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        return tuple(name for name in (self.time, self.input_tokens, self.output_tokens) if name is not None)


def read_trace(path: str) -> Trace:
    """Everything in a file, ordered by time where it has times. Raises OptionError."""
    columns: Columns | None = None
    requests: list[TraceRequest] = []
    for number, row in _read_rows(path):
        if columns is None:
            columns = _recognise(path, row)
        if len(requests) == MAX_REQUESTS:
            raise OptionError(f"--trace {path}: has more than {MAX_REQUESTS} requests")
        requests.append(_read_request(f"--trace {path}, line {number}", columns, row))
    if columns is None:
        raise OptionError(f"--trace {path}: has no requests")
    if columns.time is not None:
        requests.sort(key=lambda request: request.at_s)
    return Trace(
        Path(path).name,
        tuple(requests),
        has_times=columns.time is not None,
        block_tokens=BLOCK_TOKENS,
        quantum_s=find_quantum([request.at_s for request in requests]) if columns.time is not None else 0.0,
    )


def _read_rows(path: str) -> Iterator[tuple[int, Row]]:
    """Line number and columns of each row."""
    lines = _read_lines(path)
    first = next(lines, None)
    if first is None:
        return
    if first[1].startswith("{"):
        yield _read_json(path, *first)
        for number, line in lines:
            yield _read_json(path, number, line)
        return
    header = _read_csv(path, *first)
    for number, line in lines:
        fields = _read_csv(path, number, line)
        if len(fields) != len(header):
            raise OptionError(
                f"--trace {path}, line {number}: has {len(fields)} columns, but the header has {len(header)}"
            )
        yield number, dict(zip(header, fields, strict=True))


def _read_lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            file.seek(0)
            plain = gzip.GzipFile(fileobj=file) if is_gzip else file
            number = 0
            while line := plain.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise OptionError(f"--trace {path}, line {number}: is longer than {MAX_LINE_BYTES} bytes")
                text = line.decode("utf-8-sig").strip()
                if text:
                    yield number, text
    except UnicodeDecodeError:
        raise OptionError(f"--trace {path}, line {number}: is not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise OptionError(f"--trace {path}: cannot be read: {reason}") from None


def _read_json(path: str, number: int, line: str) -> tuple[int, Row]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--trace {path}, line {number}: is not JSON: {_shown(error)}") from None
    if not isinstance(row, dict):
        raise OptionError(f"--trace {path}, line {number}: is not a JSON object, as {{...}} is")
    return number, row


def _read_csv(path: str, number: int, line: str) -> list[str]:
    try:
        (fields,) = csv.reader([line], strict=True)
    except (csv.Error, ValueError) as error:
        raise OptionError(f"--trace {path}, line {number}: is not CSV: {_shown(error)}") from None
    return [field.strip() for field in fields]


def _recognise(path: str, row: Row) -> Columns:
    for columns in KNOWN_COLUMNS:
        if all(name in row for name in columns.needed):
            return columns
    known = "; ".join(", ".join(columns.needed) for columns in KNOWN_COLUMNS)
    found = ", ".join(_shown(name) for name in list(row)[:8]) or "none"
    raise OptionError(f"--trace {path}: its columns are {found}; needed are those of one line of: {known}")


def _read_request(where: str, columns: Columns, row: Row) -> TraceRequest:
    for name in columns.needed:
        if name not in row:
            raise OptionError(f"{where}: has no column {name}")
    input_tokens = _read_tokens(where, columns.input_tokens, row)
    at_s = 0.0
    if columns.time is not None and columns.read_time is not None:
        try:
            at_s = columns.read_time(row[columns.time])
        except (ValueError, TypeError, OverflowError):
            raise OptionError(f"{where}, column {columns.time}: {_shown(row[columns.time])} is no time") from None
    block_ids: tuple[int, ...] = ()
    if columns.block_ids is not None and columns.block_ids in row:
        block_ids = _read_block_ids(f"{where}, column {columns.block_ids}", row[columns.block_ids], input_tokens)
    return TraceRequest(input_tokens, _read_tokens(where, columns.output_tokens, row), at_s, block_ids)


def _read_tokens(where: str, name: str, row: Row) -> int:
    """At least one: a server that is asked for no token would be asked for nothing."""
    value = row[name]
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value, re.ASCII):
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise OptionError(f"{where}, column {name}: {_shown(value)} is no number of tokens within 0 and {MAX_TOKENS}")
    return max(1, value)


def _read_block_ids(where: str, value: Any, input_tokens: int) -> tuple[int, ...]:
    num_blocks = -(-input_tokens // BLOCK_TOKENS)
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MAX_BLOCK_ID for item in value):
        raise OptionError(f"{where}: {_shown(value)} is no list of block ids within 0 and 2^63 - 1")
    if len(value) != num_blocks:
        raise OptionError(
            f"{where}: has {len(value)} ids, but {input_tokens} tokens are {num_blocks} blocks of {BLOCK_TOKENS}"
        )
    return tuple(value)


def _time_of_day(value: Any) -> float:
    """Seconds. A fraction has up to seven digits, of which six are kept; without a time zone it is UTC."""
    moment = datetime.fromisoformat(value)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _milliseconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(value)
    return float(value) / 1000


def _shown(value: object) -> str:
    """A value of the file in an error: one line, not too long."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


KNOWN_COLUMNS = (
    Columns("ContextTokens", "GeneratedTokens", time="TIMESTAMP", read_time=_time_of_day),
    Columns("input_length", "output_length", time="timestamp", read_time=_milliseconds, block_ids="hash_ids"),
    Columns("num_prefill_tokens", "num_decode_tokens"),
)
