"""Small loads, records and streams for the tests, with defaults for all that a test does not care about."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable

from pdserve.loadtest.client.exchange import Exchange
from pdserve.loadtest.client.target import Api, Target
from pdserve.loadtest.client.worker import serve
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.measures.sse import Chunk
from pdserve.loadtest.workload.lengths import DrawnLengths, Span
from pdserve.loadtest.workload.load import Load
from pdserve.loadtest.workload.schedule import PlannedRequest

DONE = b"data: [DONE]\n\n"
PROMPT_LENGTHS = Span(8, 12)
OUTPUT_LENGTHS = Span(4, 4)
BOTH_APIS = tuple(Api)


def make_load(
    rate_per_s: float = float("inf"),
    num_requests: int = 4,
    input_tokens: Span = PROMPT_LENGTHS,
    output_tokens: Span = OUTPUT_LENGTHS,
    **others,
) -> Load:
    return Load(rate_per_s, num_requests, DrawnLengths(input_tokens, output_tokens), **{"ramp": 0.0, **others})


def make_config(url: str, load: Load | None = None, promises: tuple[Promise, ...] = (), **target) -> BenchConfig:
    return BenchConfig(Target(url=url, **{"preflight": 0, **target}), load or make_load(), promises)


def make_record(
    index: int = 0,
    intended_s: float = 0.0,
    token_times_s: tuple[float, ...] = (1.0, 1.5, 2.0),
    sent_s: float | None = None,
    **others,
) -> Record:
    """A complete record whose tokens came at the given times of the run, unless others say otherwise."""
    sent_s = intended_s if sent_s is None else sent_s
    fields = {
        "woke_s": sent_s,
        "ended_s": max(token_times_s, default=intended_s),
        "planned_input_tokens": 8,
        "planned_output_tokens": len(token_times_s),
        "output_tokens": len(token_times_s),
        "usage_is_given": True,
        "finish_reason": "length",
        "status": 200,
    }
    return Record(
        index=index, intended_s=intended_s, sent_s=sent_s, token_times_s=token_times_s, **{**fields, **others}
    )


def make_planned(output_tokens: int = 3, at_s: float = 0.0) -> PlannedRequest:
    return PlannedRequest(index=0, at_s=at_s, input_tokens=2, output_tokens=output_tokens, prompt=(7, 8))


def make_exchange(chunks: list[Chunk], status: int | None = 200, failure=None, ended_at: float = 109.0) -> Exchange:
    """An exchange of a run that started at 100: its timer fired at 100.25, its send was at 100.5.

    chunks are the body's; a status of None is a server that said nothing.
    """
    if status is not None:
        head = f"HTTP/1.1 {status} Status\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        last = [] if failure is not None else [Chunk(ended_at, b"0\r\n\r\n")]
        framed = [Chunk(chunk.arrived_at, b"%x\r\n%b\r\n" % (len(chunk.data), chunk.data)) for chunk in chunks]
        chunks = [Chunk(100.6, head), *framed, *last]
    return Exchange(index=0, woke_at=100.25, sent_at=100.5, ended_at=ended_at, chunks=tuple(chunks), failure=failure)


@contextlib.asynccontextmanager
async def worker_in_process(connection: socket.socket) -> AsyncIterator[Callable[[], str]]:
    """A worker as a task of this loop: most tests need no process of its own."""
    task = asyncio.create_task(serve(connection))
    try:
        yield lambda: "a task"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text_event(text: str = " word", finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def delta_event(delta: dict, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def usage_event(completion_tokens: object, **others) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": completion_tokens, **others}})


def planned_ids(schedule: tuple[PlannedRequest, ...]) -> list[tuple[int, ...]]:
    return [planned.prompt for planned in schedule if not isinstance(planned.prompt, str)]
