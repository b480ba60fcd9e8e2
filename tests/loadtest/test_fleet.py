"""Client processes: who sends what, what the parent is told, and that nothing is left however a run ends.

A worker is a task of the test's own loop where its being a process changes nothing.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.loadtest.client.endpoint import Endpoint, find_endpoint
from pdserve.loadtest.client.exchange import Exchange, Failure
from pdserve.loadtest.client.fleet import drive_fleet, worker_process
from pdserve.loadtest.client.frames import Ready, Task, pack, read_messages
from pdserve.loadtest.client.request import prepare_job
from pdserve.loadtest.client.target import Target
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.errors import OptionError, WorkerError
from pdserve.loadtest.measures.promise import parse_promises
from pdserve.loadtest.measures.sse import Chunk
from pdserve.loadtest.mock.behaviour import Behaviour, Fault
from pdserve.loadtest.mock.server import MockServer
from pdserve.loadtest.runner import run
from pdserve.loadtest.workload.arrivals import Constant
from pdserve.loadtest.workload.schedule import plan_requests
from tests.loadtest.samples import make_config, make_load, worker_in_process

HANGS = Behaviour(fault=Fault.HANG)


def ignore(index: int) -> None:
    pass


async def make_job(server, load=None, **target):
    load, target = load or make_load(), Target(server.url, **target)
    return prepare_job(await find_endpoint(target), target, "mock", plan_requests(load, target.api), load.seed)


async def drive(job, num_processes=1, on_sent=ignore, launch=worker_in_process, **others):
    exchanges = []

    def keep(exchange, start):
        exchanges.append(exchange)

    await drive_fleet(job, num_processes, on_sent, keep, launch=launch, **others)
    return exchanges


def children():
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


async def test_two_processes_send_the_schedule_that_one_sends():
    sent = []
    for num_processes in (1, 2):
        async with MockServer() as server:
            load = make_load(rate_per_s=500.0, num_requests=9)
            exchanges = await drive(await make_job(server, load), num_processes)
        assert sorted(exchange.index for exchange in exchanges) == list(range(9))
        sent.append(sorted((received.request_id, received.body["prompt"]) for received in server.received))
    assert sent[0] == sent[1]


async def test_processes_share_one_start():
    load = make_load(rate_per_s=100.0, num_requests=6)
    starts = set()

    def keep(exchange, start):
        starts.add(start)

    async with MockServer() as server:
        start, _ = await drive_fleet(await make_job(server, load), 3, ignore, keep, launch=worker_in_process)
    assert starts == {start}


async def test_requests_in_flight_are_limited_over_all_processes():
    load = make_load(num_requests=8)
    async with MockServer([Behaviour(first_token_s=0.02)]) as server:
        exchanges = await drive(await make_job(server, load, max_concurrency=3), 2)
    for exchange in exchanges:
        in_flight = [other for other in exchanges if other.sent_at <= exchange.sent_at < other.ended_at]
        assert len(in_flight) <= 3


def test_more_processes_than_requests_may_be_in_flight_are_refused():
    config = make_config("http://h", max_concurrency=2)
    with pytest.raises(OptionError, match=r"--max-concurrency 2: .*--processes 3"):
        BenchConfig(config.target, config.load, num_processes=3)


async def test_a_judge_ends_the_run_and_open_requests_that_may_keep_their_promises_are_no_records():
    seen = []

    def judge(record):
        seen.append(record)
        return True

    promises = parse_promises("ttft=1000")
    async with MockServer([Behaviour(), HANGS]) as server:
        report = await run(make_config(server.url, promises=promises), judge=judge, launch=worker_in_process)
        assert len(server.received) == 4
    assert seen
    assert all(record.is_complete for record in report.records)


async def test_a_judge_is_told_of_an_open_request_that_can_keep_its_promises_no_more():
    """None is ever answered: without that the run would never end."""
    promises = parse_promises("e2e=0.05")
    async with MockServer([HANGS]) as server:
        report = await run(
            make_config(server.url, promises=promises), judge=lambda record: True, launch=worker_in_process
        )
    assert [record.index for record in report.records] == [0, 1, 2, 3]
    assert report.summary.broken == {"e2e": 4}
    assert (report.summary.num_abandoned, report.summary.errors) == (4, {})


async def test_an_abandoned_request_has_what_came_until_then():
    promises = parse_promises("ttft=1000,e2e=0.05")
    async with MockServer([Behaviour(gap_s=1000.0)]) as server:
        report = await run(
            make_config(server.url, promises=promises), judge=lambda record: True, launch=worker_in_process
        )
    assert report.summary.broken == {"ttft": 0, "e2e": 4}
    assert [record.output_tokens for record in report.records] == [1] * 4


async def test_of_a_run_that_ended_early_the_records_end_before_the_first_open_request():
    seen = []

    def judge(record):
        seen.append(record)
        return len(seen) == 5

    behaviours = [Behaviour(), HANGS, *[Behaviour()] * 4]
    async with MockServer(behaviours) as server:
        load = make_load(rate_per_s=200.0, num_requests=6, arrivals=Constant())
        report = await run(make_config(server.url, load), judge=judge, launch=worker_in_process)
        hangs = int(server.received[1].request_id.rsplit("-")[-1])
    assert [record.index for record in report.records] == list(range(hangs))
    assert report.summary.num_requests == hangs


async def test_a_judge_that_has_seen_enough_keeps_later_requests_from_being_sent():
    async with MockServer() as server:
        # The second is due in 1,000 s.
        config = make_config(server.url, make_load(rate_per_s=0.001, num_requests=2))
        report = await run(config, judge=lambda record: True, launch=worker_in_process)
        assert len(server.received) == 1
    assert [record.index for record in report.records] == [0]


async def test_a_judge_that_has_not_seen_enough_sees_every_record():
    seen = []
    async with MockServer() as server:
        report = await run(make_config(server.url), judge=seen.append, launch=worker_in_process)
    assert sorted(seen, key=lambda record: record.index) == list(report.records)


async def test_a_judge_that_fails_ends_the_run_with_its_own_error():
    def judge(record):
        raise ZeroDivisionError

    async with MockServer([Behaviour(), HANGS]) as server:
        with pytest.raises(ZeroDivisionError):
            await run(make_config(server.url), judge=judge, launch=worker_in_process)


async def test_a_client_that_is_late_itself_makes_the_run_invalid():
    def block(progress):
        # As somebody else's work on its core would; the request that was just sent is answered later.
        if not progress.ended:
            time.sleep(0.1)

    async with MockServer([Behaviour(first_token_s=0.3)]) as server:
        config = make_config(server.url, make_load(num_requests=1))
        report = await run(config, block, launch=worker_in_process)
    assert not report.summary.validity.is_valid


async def test_a_worker_that_is_killed_ends_the_run_with_its_exit_code():
    # Of other tests: servers that they share.
    others = children()

    def kill(index):
        for pid in set(children()) - set(others):
            os.kill(pid, signal.SIGKILL)

    async with MockServer([HANGS]) as server:
        with pytest.raises(WorkerError, match=r"client process [01] ended during the run: exit code -9"):
            await drive(await make_job(server), 2, kill, worker_process)


async def test_cancelling_a_run_ends_its_processes():
    sent = asyncio.Event()
    before = children()
    async with MockServer([HANGS]) as server:
        running = asyncio.create_task(drive(await make_job(server), 1, lambda index: sent.set(), worker_process))
        await sent.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert children() == before


async def test_a_worker_ends_when_its_parent_is_gone():
    ours, theirs = socket.socketpair()
    async with worker_process(theirs) as describe_end:
        ours.close()
        # Until then a worker that starts has not looked.
        while (words := describe_end()) == "exit code None":
            pass
    assert words == "exit code 0"


def worker_that(behave):
    """A launch of a worker that does something else; behave(reader, writer)."""

    @contextlib.asynccontextmanager
    async def launch(connection):
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection)
        task = asyncio.create_task(behave(reader, writer))
        try:
            yield lambda: "its own reason"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            writer.close()
            await writer.wait_closed()

    return launch


async def test_a_worker_that_ends_before_it_is_ready_is_told_with_its_reason():
    async def leave(reader, writer):
        writer.close()

    async with MockServer() as server:
        with pytest.raises(WorkerError, match="client process 0 ended during the run: its own reason"):
            await drive(await make_job(server), launch=worker_that(leave))


async def test_a_worker_that_falls_silent_ends_the_run():
    async def fall_silent(reader, writer):
        writer.write(pack(Ready()))
        await asyncio.Event().wait()

    async with MockServer() as server:
        with pytest.raises(WorkerError, match=r"client process 0 has said nothing for 0\.05 s"):
            await drive(await make_job(server), launch=worker_that(fall_silent), silence_s=0.05)


CHUNKS = st.builds(Chunk, st.floats(0, 1e9), st.binary(max_size=20))
EXCHANGES = st.builds(
    Exchange,
    index=st.integers(0, 10**6),
    woke_at=st.floats(0, 1e9),
    sent_at=st.floats(0, 1e9),
    ended_at=st.floats(0, 1e9),
    chunks=st.lists(CHUNKS, max_size=5).map(tuple),
    failure=st.none() | st.builds(Failure, st.text(max_size=5), st.text(max_size=5)),
)
TASKS = st.builds(
    Task,
    endpoint=st.sampled_from([Endpoint(2, ("127.0.0.1", 80)), Endpoint(10, ("::1", 443, 0, 0), "host")]),
    timeout_s=st.floats(0.1, 1e9),
    max_concurrency=st.none() | st.integers(1, 9),
    num_requests=st.integers(0, 9),
)


@given(st.lists(EXCHANGES | TASKS, max_size=4))
def test_messages_arrive_as_they_were_sent(messages):
    async def send_and_read():
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(map(pack, messages)))
        reader.feed_eof()
        return [message async for message in read_messages(reader)]

    assert asyncio.run(send_and_read()) == messages
