"""One run from the plan to the report: find the model, try it, send everything on time, then read it.

The loop is open: a request is sent at its intended time whatever became of those before it. Called by the
command, and by programs through `run`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp

from pdserve.loadtest.client.gauges import GaugeSampler
from pdserve.loadtest.client.lag import LagCanary
from pdserve.loadtest.client.target import Api, Target
from pdserve.loadtest.client.wire import Exchange, encode_body, open_session, send
from pdserve.loadtest.config import BenchConfig
from pdserve.loadtest.errors import OptionError, TargetError
from pdserve.loadtest.measures.record import parse_json, read_exchange
from pdserve.loadtest.measures.summary import summarize
from pdserve.loadtest.report.environment import describe_environment
from pdserve.loadtest.report.progress import Progress
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.workload.load import Load
from pdserve.loadtest.workload.schedule import PlannedRequest, digest_schedule, plan_preflight, plan_requests

# From the end of preparations to the first send, so that the first request is not late.
_START_DELAY_S = 0.05
_MODELS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    max_model_len: int | None


def ignore_progress(progress: Progress) -> None:
    pass


async def run(config: BenchConfig, on_progress: Callable[[Progress], None] = ignore_progress) -> Report:
    """Run one load test.

    on_progress is called on the event loop whenever a request is sent or ends; it must be quick.
    Raises OptionError for a load that cannot be made or does not fit the model, TargetError for a server
    that cannot be reached, does not serve the model or refuses the preflight.
    """
    load, target = config.load, config.target
    schedule = plan_requests(load, target.api)
    started_at = datetime.now(UTC)
    async with open_session(target.api_key) as session:
        model = await find_model(session, target)
        _check_fits(load, target, model)
        await _preflight(session, load, target, model.name)
        bodies = [encode_body(planned, model.name) for planned in schedule]
        canary, gauges = LagCanary(), GaugeSampler(target.url)
        start, exchanges = await _drive(session, config, schedule, bodies, canary, gauges, on_progress)
    records = tuple(
        read_exchange(planned, exchange, start) for planned, exchange in zip(schedule, exchanges, strict=True)
    )
    return Report(
        config=config,
        model=model.name,
        started_at=started_at,
        environment=describe_environment(),
        schedule_digest=digest_schedule(schedule),
        summary=summarize(records, config.promises, canary.lags_s),
        records=records,
        gauges=gauges.read(start),
    )


async def find_model(session: aiohttp.ClientSession, target: Target) -> ServedModel:
    """The model to ask for: the target's, or the first that the server lists."""
    url = target.url + "/v1/models"
    try:
        async with asyncio.timeout(_MODELS_TIMEOUT_S), session.get(url, allow_redirects=False) as response:
            status, body = response.status, await response.read()
    except TimeoutError:
        raise TargetError(f"--url {target.url}: no answer from {url} within {_MODELS_TIMEOUT_S} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise TargetError(f"--url {target.url}: cannot be reached: {error or type(error).__name__}") from None
    if status != 200:
        raise TargetError(f"--url {target.url}: {url} answered HTTP {status}, not 200; is it an OpenAI-style server?")
    models = _read_models(url, body)
    for model in models:
        if target.model in (None, model.name):
            return model
    names = ", ".join(repr(model.name) for model in models) or "none"
    raise TargetError(f"--model {target.model}: not served at {target.url}, whose models are: {names}")


def _read_models(url: str, body: bytes) -> list[ServedModel]:
    try:
        payload = parse_json(body)
        cards = [(card["id"], card.get("max_model_len")) for card in payload["data"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise TargetError(f"{url} did not answer with a list of models; is it an OpenAI-style server?") from None
    return [
        ServedModel(name, max_len if type(max_len) is int else None) for name, max_len in cards if isinstance(name, str)
    ]


def _check_fits(load: Load, target: Target, model: ServedModel) -> None:
    longest = load.input_tokens.high + load.output_tokens.high
    # A chat prompt is words, whose tokens only the server can count.
    if target.api is Api.COMPLETIONS and model.max_model_len is not None and longest > model.max_model_len:
        raise OptionError(
            f"--input-tokens {load.input_tokens} --output-tokens {load.output_tokens}: up to {longest} tokens "
            f"a request, but {model.name} takes {model.max_model_len} (max_model_len)"
        )


async def _preflight(session: aiohttp.ClientSession, load: Load, target: Target, model: str) -> None:
    """Send the preflight requests one after the other, unmeasured; the first that fails ends the run."""
    for planned in plan_preflight(load, target.api, target.preflight):
        body = encode_body(planned, model)
        start = time.monotonic()
        exchange = await send(session, target, body, f"bench-preflight-{planned.index}", start)
        record = read_exchange(planned, exchange, start)
        if record.error is not None:
            raise TargetError(
                f"the preflight request failed: {record.error}: {record.detail} (--preflight 0 measures regardless)"
            )


async def _drive(
    session: aiohttp.ClientSession,
    config: BenchConfig,
    schedule: Sequence[PlannedRequest],
    bodies: Sequence[bytes],
    canary: LagCanary,
    gauges: GaugeSampler,
    on_progress: Callable[[Progress], None],
) -> tuple[float, list[Exchange]]:
    """Send the schedule. Returns the monotonic start of the run and the exchanges in the schedule's order."""
    target = config.target
    progress = Progress(total=len(schedule))
    slots = contextlib.nullcontext() if target.max_concurrency is None else asyncio.Semaphore(target.max_concurrency)
    start = time.monotonic() + _START_DELAY_S

    async def exchange(planned: PlannedRequest, body: bytes) -> Exchange:
        woke_at = time.monotonic()
        async with slots:
            progress.sent += 1
            on_progress(progress)
            result = await send(session, target, body, f"bench-{config.load.seed}-{planned.index}", woke_at)
        progress.ended += 1
        progress.failed += result.failure is not None or result.status != 200
        on_progress(progress)
        return result

    async with asyncio.TaskGroup() as background:
        watching = [background.create_task(watch()) for watch in (canary.watch, gauges.watch)]
        async with asyncio.TaskGroup() as requests:
            tasks = []
            for planned, body in zip(schedule, bodies, strict=True):
                delay_s = start + planned.at_s - time.monotonic()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                tasks.append(requests.create_task(exchange(planned, body)))
        for task in watching:
            task.cancel()
    return start, [task.result() for task in tasks]
