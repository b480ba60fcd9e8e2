"""The stages of a request's first and second token, from what nodes and clocks say."""

import re
import time
from pathlib import Path

import pytest

from pdserve.cluster.messages import Begun, Drawn, FirstToken
from pdserve.core.chunk import Chunk
from pdserve.core.ids import RequestId, new_request_id
from pdserve.core.sampling import SamplingParams
from pdserve.router.events import Deliver
from pdserve.router.ledger import Times
from pdserve.router.record import Record
from pdserve.router.service import TokenStream

REQUEST = RequestId(bytes(16))


def make_times(arrived: float = 10.0, read_s: float = 0.25, queued: float = 10.5, dispatched: float = 11.0) -> Times:
    times = Times(arrived, read_s, queued=queued)
    times.dispatch(dispatched)
    return times


def computed(queue_s: float = 0.5, chunks: tuple[Chunk, ...] = (Chunk(8, 0.5, 1.0), Chunk(8, 2.0, 1.0)), **others):
    return FirstToken(REQUEST, 1, (Drawn(0, 0, 7),), 0, queue_s, prefill_s=2.5, chunks=chunks, **others)


def begun(**others: float) -> Begun:
    fields = {"wait_for_blocks_s": 0.125, "fetch_s": 0.25, "copy_s": 0.5, "verify_s": 0.25}
    return Begun(REQUEST, 1, **{**fields, "queue_s": 1.0, "step_s": 2.0, **others})


def test_the_first_token_has_the_stages_of_router_and_node_and_the_rest_is_the_links():
    times = make_times()
    times.compute(computed(step_end_s=0.125, told_s=0.0625), 0.0)
    times.take(0, 1, 15.0)
    assert times.first_stages == {
        "read_s": 0.25,
        "route_s": 0.25,
        "queue_s": 0.5,
        "earlier_attempts_s": 0.0,
        "prefill_queue_s": 0.5,
        "chunks_s": 1.875,
        "chunk_wait_s": 0.5,
        "step_end_s": 0.1875,
        "cpu_wait_s": 0.0,
        "link_s": 0.9375,
        "excess_s": 0.0,
    }


@pytest.mark.parametrize(("waited_s", "cpu_wait_s"), [(0.25, 0.5), (5.0, 0.9375)])
def test_a_wait_for_a_core_is_no_more_than_what_is_left(waited_s: float, cpu_wait_s: float):
    times = make_times()
    times.compute(computed(step_end_s=0.125, told_s=0.0625, waited_s=0.25), waited_s)
    times.take(0, 1, 15.0)
    assert times.first_stages["cpu_wait_s"] == cpu_wait_s
    assert sum(times.first_stages.values()) == 5.0


def test_the_second_token_has_the_stages_of_the_decode_node():
    times = make_times()
    times.compute(computed(), 0.0)
    times.take(0, 1, 15.0)
    times.begin(begun(told_s=0.25), 0.125)
    times.take(1, 2, 20.0)
    assert times.second_stages == {
        "wait_for_blocks_s": 0.125,
        "fetch_s": 0.25,
        "copy_s": 0.5,
        "verify_s": 0.25,
        "decode_queue_s": 1.0,
        "first_step_s": 2.0,
        "step_end_s": 0.25,
        "cpu_wait_s": 0.125,
        "link_s": 0.5,
        "excess_s": 0.0,
    }


def test_what_a_decode_node_did_before_the_router_had_the_first_token_counts_for_nothing():
    times = make_times()
    times.compute(computed(), 0.0)
    times.take(0, 1, 15.0)
    times.begin(begun(), 0.125)
    times.take(1, 2, 18.875)
    stages = times.second_stages
    assert (stages["wait_for_blocks_s"], stages["fetch_s"], stages["copy_s"]) == (0.0, 0.125, 0.5)
    assert (stages["cpu_wait_s"], stages["link_s"]) == (0.0, 0.0)
    assert stages.pop("excess_s") == 0.25
    assert sum(stages.values()) == 3.875


def test_the_routers_own_stages_are_cut_by_nothing():
    times = make_times()
    times.compute(computed(queue_s=50.0), 0.0)
    times.take(0, 1, 15.0)
    stages = times.first_stages
    assert (stages["read_s"], stages["route_s"], stages["queue_s"]) == (0.25, 0.25, 0.5)
    assert (stages["prefill_queue_s"], stages["link_s"], stages["excess_s"]) == (1.5, 0.0, 48.5)


def test_a_word_of_the_prefill_that_comes_after_the_tokens_counts_all_the_same():
    times = make_times()
    times.take(0, 1, 15.0)
    times.compute(computed(), 0.0)
    assert times.first_stages["prefill_queue_s"] == 0.5
    assert times.first_stages["link_s"] == 1.0


def test_a_first_token_that_the_decode_node_repeats_has_its_stages_there_and_the_second_that_comes_along_has_none():
    times = make_times()
    times.begin(begun(), 0.25)
    times.take(0, 2, 18.5)
    times.compute(computed(), 0.25)
    first, second = times.first_stages, times.second_stages
    assert (first["chunks_s"], first["copy_s"], first["first_step_s"], first["cpu_wait_s"]) == (2.0, 0.5, 2.0, 0.375)
    assert (sum(first.values()), set(second.values())) == (8.5, {0.0})


def test_a_token_that_a_later_attempts_prefill_brings_has_no_stages_of_the_decoding_that_follows():
    times = make_times()
    times.compute(computed(), 0.0)
    times.take(0, 1, 15.0)
    times.dispatch(16.0)
    times.compute(computed(), 0.0)
    times.take(1, 2, 20.0)
    times.begin(begun(), 0.0)
    assert "first_step_s" not in times.second_stages
    assert times.second_stages["link_s"] == 1.0


def test_a_later_attempt_has_its_prefill_in_the_second_token():
    times = make_times()
    times.compute(computed(), 0.0)
    times.take(0, 1, 15.0)
    times.dispatch(16.0)
    times.compute(computed(queue_s=0.25), 0.0)
    times.begin(begun(), 0.0)
    times.take(1, 2, 25.0)
    stages = times.second_stages
    assert (stages["earlier_attempts_s"], stages["prefill_queue_s"], stages["decode_queue_s"]) == (1.0, 0.25, 1.0)
    assert sum(stages.values()) == 10.0
    assert times.dispatched == 11.0


def test_tokens_that_come_without_a_word_of_their_stages_are_the_links():
    times = make_times()
    times.take(0, 2, 15.0)
    assert (times.first_token, times.second_token) == (15.0, 15.0)
    assert times.first_stages["link_s"] == 4.0
    assert times.second_stages["link_s"] == 0.0


def test_each_token_comes_once_and_is_written_once():
    times = make_times()
    times.compute(computed(), 0.0)
    times.compute(computed(queue_s=2.0), 0.0)
    times.take(0, 1, 15.0)
    times.written(has_second=False, now=15.5)
    times.take(1, 2, 16.0)
    times.written(has_second=True, now=16.25)
    times.take(2, 3, 17.0)
    times.written(has_second=True, now=17.25)
    assert times.first_stages["prefill_queue_s"] == 0.5
    assert (times.first_token, times.second_token, times.last_token) == (15.0, 16.0, 17.0)
    assert (times.first_written, times.second_written) == (15.5, 16.25)


def test_a_promise_counts_from_when_all_of_the_request_was_here():
    assert Times(10.0, 0.25).promised_from == 10.25


# ---- what is told of it --------------------------------------------------------------------------


def make_record(times: Times) -> Record:
    return Record(new_request_id(), "r", [1, 2, 3], SamplingParams(max_tokens=8), times)


def rows_of(page: str, first_column: str) -> set[str]:
    """Names in the first column of the table with this heading."""
    rows = page.split(f"| {first_column} |")[1].split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}


def test_the_documentation_names_every_member_and_every_stage():
    times = make_times()
    times.compute(computed(), 0.0)
    times.take(0, 1, 15.0)
    times.begin(begun(), 0.0)
    times.take(1, 2, 20.0)
    ledger = make_record(times).ledger()
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text().split("## The ledger")[1]
    assert rows_of(page, "member of `metrics`") == set(ledger)
    assert rows_of(page, "stage") == set(ledger["first_token"]) | set(ledger["second_token"])


def test_a_token_that_never_came_has_no_stages():
    ledger = make_record(Times(1.0)).ledger()
    assert (ledger["first_token"], ledger["second_token"], ledger["chunks"]) == (None, None, [])


async def test_what_a_reader_was_given_is_delivered_when_it_is_written():
    times = make_times(arrived=time.monotonic() - 10.0)
    stream = TokenStream(make_record(times), service=None)
    for num_before, is_yielded in ((0, True), (1, False)):
        times.take(num_before, num_before + 1, time.monotonic())
        stream.push(Deliver(stream.record.request, 0, (7,), None))
        if is_yielded:
            await anext(stream)
    stream.written()
    # The second token came while the first was being written.
    assert times.first_written >= times.first_token
    assert times.second_written is None
    await anext(stream)
    stream.written()
    assert times.second_written >= times.second_token
