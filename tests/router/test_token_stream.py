"""What arrives of a request waits for its reader, or goes to a sink while the reader waits."""

import asyncio

import pytest

from pdserve.core.ids import new_request_id
from pdserve.core.sampling import SamplingParams
from pdserve.router.events import Deliver
from pdserve.router.generation import GenerationError, Progress
from pdserve.router.ledger import Times
from pdserve.router.record import Record
from pdserve.router.service import TokenStream


@pytest.fixture
def stream() -> TokenStream:
    record = Record(new_request_id(), "", [1, 2], SamplingParams(max_tokens=9), Times(0.0))
    return TokenStream(record, None)


def push(stream: TokenStream, *token_ids: int, finish: str | None = None) -> None:
    stream.push(Deliver(stream.record.request, 0, token_ids, finish))


async def waiting(stream: TokenStream) -> "asyncio.Task[Progress]":
    """A reader that has found nothing yet."""
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    return reader


async def test_what_comes_while_nobody_reads_is_merged(stream):
    taken: list[Progress] = []
    stream.offer_to(lambda progress: taken.append(progress) or True)
    push(stream, 5)
    push(stream, 6, 7)
    assert (await anext(stream)).token_ids == [5, 6, 7]
    assert taken == []


async def test_a_sink_takes_what_comes_while_the_reader_waits_up_to_the_last(stream):
    taken: list[int] = []
    stream.offer_to(lambda progress: taken.extend(progress.token_ids) or True)
    reader = await waiting(stream)
    push(stream, 5)
    push(stream, 6)
    assert not reader.done()
    push(stream, 7, finish="length")
    assert await reader == Progress([7], "length")
    assert taken == [5, 6]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_what_the_sink_leaves_wakes_the_reader_and_all_after_it_waits(stream):
    offered: list[int] = []
    stream.offer_to(lambda progress: offered.extend(progress.token_ids) or progress.token_ids != [6])
    reader = await waiting(stream)
    for token in (5, 6, 7):
        push(stream, token)
    assert (await reader).token_ids == [6, 7]
    assert offered == [5, 6]


async def test_what_a_sink_raises_is_its_readers(stream):
    def broken(progress: Progress) -> bool:
        raise KeyError("token")

    stream.offer_to(broken)
    reader = await waiting(stream)
    push(stream, 5)
    with pytest.raises(KeyError):
        await reader


async def test_a_failure_reaches_a_reader_that_waits_and_one_that_comes_later(stream):
    reader = await waiting(stream)
    stream.fail(GenerationError(503, "node_failure", "gone"))
    for late in (reader, await waiting(stream)):
        with pytest.raises(GenerationError):
            await late


async def test_tokens_that_come_after_a_reader_was_cancelled_are_kept(stream):
    reader = await waiting(stream)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    push(stream, 5)
    assert (await anext(stream)).token_ids == [5]
