"""What a client process and its parent say to each other: msgpack values one after the other on a socket.

    parent -> worker                                     worker -> parent
    Task, then a PreparedRequest for each request         Ready     all of them are here
    Start     when the run starts                         Alive     nothing else to say
    Stop      abandon what is open                        Sent      a request was begun
                                                          Exchange  a request has ended, or was abandoned
                                                          Done      nothing is open any more; the lags of the loop

Both are processes of one run on one machine and trust each other. A message is a list: the name of its type, then its
fields.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import msgpack

from pdserve.loadtest.client.driver import PreparedRequest
from pdserve.loadtest.client.endpoint import Endpoint
from pdserve.loadtest.client.exchange import Exchange, Failure
from pdserve.loadtest.measures.sse import Chunk

_READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Task:
    """A job whose requests follow one by one, so that no message holds them all."""

    endpoint: Endpoint
    timeout_s: float
    max_concurrency: int | None
    num_requests: int


@dataclass(frozen=True, slots=True)
class Start:
    """at is monotonic, a clock that all processes of a machine share."""

    at: float


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Alive:
    pass


@dataclass(frozen=True, slots=True)
class Sent:
    index: int


@dataclass(frozen=True, slots=True)
class Done:
    lags_s: tuple[float, ...]


Message = Task | PreparedRequest | Start | Stop | Ready | Alive | Sent | Exchange | Done


def pack(message: Message) -> bytes:
    kind = type(message)
    fields_of, _ = _FORMATS[kind]
    return msgpack.packb([kind.__name__, *fields_of(message)])


async def read_messages(reader: asyncio.StreamReader) -> AsyncGenerator[Message]:
    """All messages until the other side closes or is gone."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    while True:
        try:
            data = await reader.read(_READ_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        unpacker.feed(data)
        for name, *fields in unpacker:
            _, build = _FORMATS[_KINDS[name]]
            yield build(*fields)


def _task_fields(task: Task) -> list[Any]:
    endpoint = task.endpoint
    limits = (task.timeout_s, task.max_concurrency, task.num_requests)
    return [endpoint.family, endpoint.address, endpoint.tls_name, *limits]


def _build_task(
    family: int, address: list[str | int], tls_name: str | None, timeout_s: float, limit: int | None, num_requests: int
) -> Task:
    return Task(Endpoint(family, tuple(address), tls_name), timeout_s, limit, num_requests)


def _exchange_fields(exchange: Exchange) -> list[Any]:
    """The reads as one block of bytes with their times and lengths: as quick to pack as can be."""
    chunks, failure = exchange.chunks, exchange.failure
    return [
        exchange.index,
        exchange.woke_at,
        exchange.sent_at,
        exchange.ended_at,
        array("d", [chunk.arrived_at for chunk in chunks]).tobytes(),
        array("Q", [len(chunk.data) for chunk in chunks]).tobytes(),
        b"".join([chunk.data for chunk in chunks]),
        None if failure is None else (failure.kind, failure.detail),
    ]


def _build_exchange(
    index: int,
    woke_at: float,
    sent_at: float,
    ended_at: float,
    times: bytes,
    lengths: bytes,
    data: bytes,
    failure: list[str] | None,
) -> Exchange:
    ends = accumulate(_read_array("Q", lengths), initial=0)
    reads = (data[start:end] for start, end in pairwise(ends))
    chunks = tuple(map(Chunk, _read_array("d", times), reads))
    return Exchange(index, woke_at, sent_at, ended_at, chunks, None if failure is None else Failure(*failure))


def _read_array(typecode: str, data: bytes) -> array:
    values = array(typecode)
    values.frombytes(data)
    return values


_FORMATS: dict[type, tuple[Callable[[Any], list[Any]], Callable[..., Message]]] = {
    Task: (_task_fields, _build_task),
    PreparedRequest: (lambda request: [request.index, request.at_s, request.payload], PreparedRequest),
    Start: (lambda start: [start.at], Start),
    Stop: (lambda _: [], Stop),
    Ready: (lambda _: [], Ready),
    Alive: (lambda _: [], Alive),
    Sent: (lambda sent: [sent.index], Sent),
    Exchange: (_exchange_fields, _build_exchange),
    Done: (lambda done: [array("d", done.lags_s).tobytes()], lambda lags: Done(tuple(_read_array("d", lags)))),
}
_KINDS = {kind.__name__: kind for kind in _FORMATS}
