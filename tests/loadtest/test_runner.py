"""Whole runs against the mock server. Bounds on times are those that hold on any machine, however loaded."""

import asyncio
import contextlib
import gc
from itertools import pairwise

import pytest

from pdserve.loadtest.client.models import find_model
from pdserve.loadtest.client.request import name_request
from pdserve.loadtest.client.target import Target
from pdserve.loadtest.errors import OptionError, TargetError
from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.mock.behaviour import Behaviour, Fault
from pdserve.loadtest.mock.server import MockServer
from pdserve.loadtest.report.progress import Progress
from pdserve.loadtest.runner import run
from pdserve.loadtest.workload.lengths import Span
from tests.loadtest.samples import BOTH_APIS, make_config, make_load, worker_in_process

FIRST_S = 0.03
GAP_S = 0.01


async def run_here(config, *callbacks):
    return await run(config, *callbacks, launch=worker_in_process)


async def run_against(*behaviours, load=None, promises=(), **target):
    async with MockServer(behaviours or (Behaviour(),)) as server:
        report = await run_here(make_config(server.url, load, promises, **target))
    return report, server


@pytest.mark.parametrize("api", BOTH_APIS)
async def test_times_are_never_earlier_than_the_server_made_them(api):
    report, server = await run_against(Behaviour(FIRST_S, GAP_S), api=api)
    assert {record.error for record in report.records} == {None}
    by_label = {received.request_id: received for received in server.received}
    for record in report.records:
        received = by_label[name_request(0, record.index)]
        assert record.output_tokens == len(record.token_times_s) == record.planned_output_tokens == 4
        assert record.ttft_s >= FIRST_S
        assert record.e2e_s >= record.token_times_s[-1] - record.intended_s >= FIRST_S + 3 * GAP_S
        assert list(record.token_times_s) == sorted(record.token_times_s)
        # Both sides share a clock: the server saw a request after its send and wrote a token before its read.
        for read_s, written_at in zip(record.token_times_s, received.written_at, strict=True):
            assert read_s - record.sent_s >= written_at - received.arrived_at


async def test_requests_ask_for_exact_lengths_and_never_stop_early():
    report, server = await run_against(load=make_load(output_tokens=Span(2, 6)))
    assert len(server.received) == 4
    for received in server.received:
        record = report.records[int(received.request_id.rsplit("-")[-1])]
        assert len(received.body["prompt"]) == record.planned_input_tokens == record.prompt_tokens
        assert received.body["max_tokens"] == record.planned_output_tokens
        assert received.body["ignore_eos"] is True
        assert received.body["temperature"] == 0
        assert received.body["stream_options"] == {"include_usage": True}
        assert received.body["model"] == "mock"


async def test_the_loop_is_open_and_sends_before_earlier_requests_end():
    """None ends before it is given up, and by then the last is long sent."""

    class AllSentNoneEndedError(Exception):
        pass

    def note(progress: Progress) -> None:
        if progress.sent == progress.total and not progress.ended:
            raise AllSentNoneEndedError

    async with MockServer([Behaviour(fault=Fault.HANG)]) as server:
        config = make_config(server.url, make_load(rate_per_s=1000.0), timeout_s=5.0)
        with pytest.raises(AllSentNoneEndedError):
            await run_here(config, note)


async def test_max_concurrency_holds_requests_back_and_their_latency_counts_the_wait():
    report, _ = await run_against(Behaviour(first_token_s=FIRST_S), max_concurrency=1)
    records = sorted(report.records, key=lambda record: record.sent_s)
    for earlier, later in pairwise(records):
        assert later.sent_s >= earlier.ended_s
    assert records[-1].ttft_s >= 4 * FIRST_S
    assert records[-1].service_ttft_s < records[-1].ttft_s


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.STATUS, "http_500"),
        (Fault.DROP, "connection"),
        (Fault.SHORT, "short_output"),
        (Fault.ERROR_EVENT, "stream_error"),
        (Fault.BAD_JSON, "bad_event"),
        (Fault.BAD_CHUNK, "bad_http"),
        (Fault.NO_FINISH, "missing_finish"),
        (Fault.NO_DONE, "missing_done"),
    ],
)
@pytest.mark.parametrize("api", BOTH_APIS)
async def test_each_way_to_fail_is_told_apart(fault, error, api):
    report, _ = await run_against(Behaviour(), Behaviour(fault=fault), api=api)
    assert report.summary.errors == {error: 2}
    assert report.summary.num_complete == 2


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.SILENT])
async def test_a_server_that_stalls_is_given_up_after_the_timeout(fault):
    report, _ = await run_against(Behaviour(fault=fault), load=make_load(num_requests=1), timeout_s=0.2)
    (record,) = report.records
    assert record.error == "timeout"
    assert "--timeout-s" in record.detail
    assert record.service_e2e_s >= 0.2
    assert report.summary.duration_s >= 0.2


@pytest.mark.parametrize("fault", [Fault.SPLIT, Fault.UNALIGNED])
@pytest.mark.parametrize("api", BOTH_APIS)
async def test_where_the_server_cuts_its_writes_changes_nothing(fault, api):
    report, server = await run_against(Behaviour(gap_s=0.002, fault=fault), api=api)
    by_label = {received.request_id: received for received in server.received}
    for record in report.records:
        received = by_label[name_request(0, record.index)]
        assert record.is_complete
        assert record.output_tokens == len(record.token_times_s) == 4
        for read_s, written_at in zip(record.token_times_s, received.written_at, strict=True):
            assert read_s - record.sent_s >= written_at - received.arrived_at


async def test_tokens_merged_into_one_event_are_counted_and_kept_apart_from_gaps():
    report, _ = await run_against(
        Behaviour(FIRST_S, GAP_S, tokens_per_event=3), load=make_load(output_tokens=Span(7, 7))
    )
    for record in report.records:
        assert record.is_complete
        assert record.output_tokens == 7
        assert len(record.token_times_s) == 3
        assert record.merged_tokens == 4
        assert len(record.gaps_s) == 6
        assert record.gaps_s.count(0.0) >= 4
    assert report.summary.merged_tokens == 16


async def test_a_server_without_usage_is_measured_by_its_events():
    report, _ = await run_against(Behaviour(fault=Fault.NO_USAGE))
    assert report.summary.num_complete == 4
    assert report.summary.num_without_usage == 4


async def test_the_servers_own_ledger_is_kept_with_each_request():
    report, _ = await run_against(Behaviour(first_token_s=FIRST_S))
    for record in report.records:
        assert FIRST_S <= record.server_metrics["ttft_s"] <= record.service_ttft_s


async def test_promises_are_judged_over_all_requests():
    promises = (Promise(Measure.TTFT, 3600.0), Promise(Measure.GAP, 3600.0))
    report, _ = await run_against(Behaviour(), Behaviour(fault=Fault.DROP), promises=promises)
    assert report.summary.slo_attainment == 0.5
    report, _ = await run_against(Behaviour(first_token_s=FIRST_S), promises=(Promise(Measure.TTFT, FIRST_S / 2),))
    assert report.summary.slo_attainment == 0
    assert report.summary.broken == {"ttft": 4}


async def test_progress_is_told_of_every_send_and_end():
    seen = []

    def note(progress: Progress) -> None:
        seen.append((progress.sent, progress.ended, progress.failed))

    async with MockServer([Behaviour(), Behaviour(fault=Fault.STATUS)]) as server:
        await run_here(make_config(server.url), note)
    assert len(seen) == 8
    assert seen[-1] == (4, 4, 2)


async def test_preflight_requests_are_sent_and_not_measured():
    report, server = await run_against(preflight=3)
    assert len(server.received) == 7
    assert len(report.records) == 4
    prompts = {tuple(received.body["prompt"]) for received in server.received}
    assert len(prompts) == 7


async def test_a_failing_preflight_ends_the_run_with_its_reason():
    with pytest.raises(TargetError, match=r"preflight .*http_500: broken on purpose"):
        await run_against(Behaviour(fault=Fault.STATUS), preflight=1)


async def test_the_client_watches_its_own_lag():
    report, _ = await run_against(Behaviour(first_token_s=0.1))
    assert report.summary.latencies["loop_lag"].count >= 1
    assert report.summary.validity.lag_p99_s >= 0


async def test_an_unknown_model_is_refused_naming_those_served():
    with pytest.raises(TargetError, match=r"--model other: .*'mock'"):
        await run_against(model="other")


async def test_half_a_character_in_a_models_name_is_no_part_of_it():
    body = b'{"data":[{"id":"model-\\ud800"}]}'

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        assert (await find_model(Target(f"http://{host}:{port}"))).name == "model-"


async def test_a_load_beyond_the_models_context_is_refused_with_both_numbers():
    async with MockServer(max_model_len=15) as server:
        with pytest.raises(OptionError, match=r"up to 16 tokens .*mock takes 15"):
            await run_here(make_config(server.url))


async def test_a_server_that_is_not_there_is_named():
    async with MockServer() as server:
        url = server.url
    with pytest.raises(TargetError, match=f"--url {url}: cannot be reached"):
        await run_here(make_config(url))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered HTTP 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "did not answer with a list of models"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"data":[]}', "whose models are: none"),
        (b"SSH-2.0-x\r\n\r\n", "cannot be reached"),
        (b"", "cannot be reached"),
    ],
)
async def test_a_server_that_speaks_something_else_is_refused(answer, message):
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(TargetError, match=message):
            await run_here(make_config(f"http://{host}:{port}"))


async def test_a_run_leaves_the_garbage_collector_as_it_was():
    frozen = gc.get_freeze_count()
    await run_against()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


async def test_a_cancelled_run_leaves_nothing_behind():
    async with MockServer([Behaviour(fault=Fault.HANG)]) as server:
        all_sent = asyncio.Event()

        def note(progress: Progress) -> None:
            if progress.sent == progress.total:
                all_sent.set()

        running = asyncio.create_task(run_here(make_config(server.url), note))
        await all_sent.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
