"""What prompts say before they have a form: symbols, numbers below an alphabet's size that become ids or words.

A prompt is a row of parts, as a chat is of messages. Prompts share exactly what the load says and else begin with
codes of their own, so that a prefix cache finds nothing by accident. Called by the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.sharing import SharedPrefix
from pdserve.loadtest.workload.trace import TraceRequest

# The steps of splitmix64 (Steele, Lea and Flood 2014, figure 17).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """symbols: int64 [num_tokens]. The role is a chat's; other forms write the symbols alone."""

    role: str
    symbols: np.ndarray


Parts = tuple[Part, ...]


def draw_prefixes(rng: np.random.Generator, shared: SharedPrefix, size: int, num_requests: int) -> list[Parts]:
    """The shared part of each request."""
    lengths = np.full(shared.num_groups, shared.num_tokens)
    check_distinct(lengths, size, f"--prefix-groups {shared.num_groups}", "--shared-prefix")
    groups = [(Part("system", row),) for row in distinct_rows(rng, lengths, size)]
    return [groups[group] for group in rng.integers(shared.num_groups, size=num_requests)]


def check_distinct(lengths: np.ndarray, size: int, what: str, flag: str) -> None:
    """Raises OptionError where the shortest row is too short for all to begin differently."""
    if _code_length(len(lengths), size) > int(lengths.min()):
        raise OptionError(
            f"{what}: cannot all differ with {flag} from {int(lengths.min())} and {size} different ids or words; "
            f"raise {flag} or widen --vocab"
        )


def distinct_rows(rng: np.random.Generator, lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Rows of symbols; the first few, as few as possible, differ between any two rows that are long enough."""
    code_length = _code_length(len(lengths), size)
    codes = rng.choice(size**code_length, size=len(lengths), replace=False)
    rows = []
    for code, length in zip(codes, lengths, strict=True):
        row = rng.integers(size, size=int(length))
        for position in range(min(code_length, len(row))):
            code, row[position] = divmod(int(code), size)
        rows.append(row)
    return rows


def trace_row(key: int, request: TraceRequest, block_tokens: float, size: int) -> np.ndarray:
    """The symbols of a traced prompt: those of its blocks, cut at its length, the last block often in its midst.

    Each symbol follows from key, block id and place in the block alone, so equal blocks are equal symbols in whatever
    prompt, scaled to whatever length.
    """
    edges = np.round(np.arange(len(request.block_ids) + 1) * block_tokens).astype(np.int64)
    places = np.arange(request.input_tokens)
    blocks = np.searchsorted(edges, places, side="right") - 1
    ids = np.array(request.block_ids, dtype=np.uint64)[blocks]
    mixed = _mix(_mix(ids ^ np.uint64(key)) + (places - edges[blocks]).astype(np.uint64))
    # Scaled from 32 bits: at most 2^31 symbols, so nothing is lost.
    return ((mixed >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)).astype(np.int64)


def join(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(rows) if len(rows) > 1 else rows[0]


def _code_length(num_rows: int, size: int) -> int:
    """The fewest symbols of which so many different codes can be made; more than any row has where none can."""
    code_length, num_codes = 1, size
    while num_codes < num_rows:
        if size == 1:
            return num_rows
        code_length, num_codes = code_length + 1, num_codes * size
    return code_length


def _mix(values: np.ndarray) -> np.ndarray:
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
