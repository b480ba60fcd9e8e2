"""Sampling against small servers: one that answers like ours, others that are broken in some way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from pdserve.loadtest.client.gauges import GaugeSample, GaugeSampler, NodeSample
from pdserve.loadtest.client.target import Target

GOOD = """\
# HELP pdserve_kv_blocks KV blocks by state
# TYPE pdserve_kv_blocks gauge
pdserve_kv_blocks{node="P0",role="prefill",state="free"} 50.0
pdserve_kv_blocks{node="P0",role="prefill",state="cached"} 20.0
pdserve_kv_blocks{node="P0",role="prefill",state="held"} 25.0
pdserve_kv_blocks{node="P0",role="prefill",state="leased"} 5.0
pdserve_running{node="P0",role="prefill"} 1.0
pdserve_waiting{node="P0",role="prefill"} 2.0
pdserve_queued_tokens{node="P0",role="prefill"} 700.0
pdserve_running{node="D0",role="decode"} 4.0
pdserve_router_queued_requests 3.0
pdserve_ttft_seconds_sum 12.5
"""


@contextlib.asynccontextmanager
async def serving(*answers: web.Response | Exception) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server that gives its answers in turn, and an event that is set when it is asked beyond the last."""
    waiting = list(answers)
    is_done = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if not waiting:
            is_done.set()
            return web.Response(status=500)
        given = waiting.pop(0)
        if isinstance(given, Exception):
            request.transport.close()
            raise asyncio.CancelledError
        return given

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with serving_app(app) as url:
        yield url, is_done


@contextlib.asynccontextmanager
async def serving_app(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def sample(*answers: web.Response | Exception) -> tuple[GaugeSample, ...]:
    async with serving(*answers) as (url, is_done):
        sampler = GaugeSampler(Target(url), period_s=0.001)
        watching = asyncio.create_task(sampler.watch())
        await is_done.wait()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return sampler.read(start=0.0)


async def test_each_answer_becomes_a_sample_of_every_node():
    first, second = await sample(web.Response(text=GOOD), web.Response(text=GOOD))
    assert first.num_queued == 3
    assert first.nodes == (
        NodeSample("P0", "prefill", 1, 2, 700, 50, 20, 25, 5),
        NodeSample("D0", "decode", 4, 0, 0, 0, 0, 0, 0),
    )
    assert 0 < first.at_s < second.at_s


async def test_a_server_with_keys_is_asked_with_the_key():
    keys = []

    async def answer(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.Response(status=401)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with serving_app(app) as url:
        await GaugeSampler(Target(url, api_key="secret")).watch()
    assert keys == ["Bearer secret"]


def test_cached_blocks_are_not_in_use():
    assert NodeSample("P0", "prefill", 1, 2, 700, 50, 20, 25, 5).kv_use == 0.3
    assert NodeSample("P0", "prefill", 0, 0, 0, 0, 0, 0, 0).kv_use == 0


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=404),
        web.Response(text="vllm_running 3\n"),
        web.Response(body=b"\xff\xfe\x00"),
        web.Response(status=302, headers={"Location": "/metrics"}),
    ],
    ids=["not found", "another server's", "no text", "moved"],
)
async def test_a_server_that_is_not_ours_is_asked_once_and_gives_nothing(answer):
    async with serving(answer) as (url, is_done):
        sampler = GaugeSampler(Target(url), period_s=0.001)
        await sampler.watch()
        assert sampler.read(start=0.0) == ()
        assert not is_done.is_set()


async def test_nobody_at_the_address_gives_nothing():
    async with serving() as (url, _):
        pass
    sampler = GaugeSampler(Target(url))
    await sampler.watch()
    assert sampler.read(start=0.0) == ()


@pytest.mark.parametrize(
    "broken",
    [
        web.Response(status=503),
        ConnectionResetError(),
        web.Response(text="pdserve_running{node= 1\n"),
        web.Response(text='pdserve_running{node="P0"} 1\n'),
        web.Response(text='pdserve_running{node="P0",role="prefill"} NaN\n'),
        web.Response(text='pdserve_running{node="P0",role="prefill"} -1\n'),
        web.Response(text='pdserve_kv_blocks{node="P0",role="prefill",state="odd"} 1\n'),
    ],
    ids=["unavailable", "cut off", "no format", "no role", "no number", "negative", "odd state"],
)
async def test_an_answer_that_cannot_be_read_is_left_out(broken):
    samples = await sample(web.Response(text=GOOD), broken, web.Response(text=GOOD))
    assert [len(taken.nodes) for taken in samples] == [2, 2]


async def test_an_endless_answer_is_given_up():
    samples = await sample(web.Response(text=GOOD), web.Response(text=GOOD + "#" * (5 * 1024 * 1024)))
    assert len(samples) == 1
