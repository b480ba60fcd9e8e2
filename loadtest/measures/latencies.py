"""The latencies that are reported, by name, as values of a request. Pure; called by summary.py and the comparison.

All but the two of `service_` count from the intended send: a late client hides nothing, and neither does a first token
that comes early: the time to the second one holds the hand-off between nodes, whenever the first was shown.
"""

from collections.abc import Callable, Iterable, Iterator

from pdserve.loadtest.measures.record import Record


def _one(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)


def _max_gap(record: Record) -> tuple[float, ...]:
    gaps = record.gaps_s
    return (max(gaps),) if gaps else ()


_VALUES: dict[str, Callable[[Record], tuple[float, ...]]] = {
    "ttft": lambda record: _one(record.ttft_s),
    "second": lambda record: _one(record.second_token_s),
    "tpot": lambda record: _one(record.tpot_s),
    "gap": lambda record: record.gaps_s,
    "max_gap": _max_gap,
    "e2e": lambda record: (record.e2e_s,),
    "queue": lambda record: _one(record.queue_s),
    "service_ttft": lambda record: _one(record.service_ttft_s),
    "service_e2e": lambda record: (record.service_e2e_s,),
}
LATENCIES = tuple(_VALUES)


def values_of(name: str, records: Iterable[Record]) -> Iterator[float]:
    """The values of a latency over records, in their order, in seconds; a gap has many a request."""
    read = _VALUES[name]
    for record in records:
        yield from read(record)
