"""One soak: single runs first, then the load, then what is left of it.

    catalogue ─► each request alone, on a node with room ─► the same ones at once, on nodes with none ─► drained?

What is asked, in which order and which clients go away follows from the seed; when they go does not, and what is
checked does not depend on it.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.client import Client, Stream
from tests.soak.answer import Answer
from tests.soak.catalogue import Turn, catalogue, find_stop
from tests.soak.fleet import Fleet, make_model, roomy_fleet, small_fleet

NUM_CLIENTS = 24
SHARE_CANCELLED = 0.2
ANSWER_TIMEOUT_S = 120.0
DRAINED_WITHIN_S = 20.0
# Where nothing leaked, the second half of a minute added up to 3 MiB on a machine that was four times too busy, and
# 0.6 MiB to a node on a better day (November 2026): buffers of a size that nobody had needed before. In 20 minutes this
# much is one or two kB a request.
MAX_GROWTH = 8 << 20
# After so many the rest of the load would tell nothing new.
MAX_FAILURES = 20
MAX_SHOWN = 5
WAYS_TO_YIELD = ("swap", "recompute", "return")

Progress = Callable[[str, float, str], None]
"""phase, how much of it is done (0 to 1), figures"""


@dataclass(frozen=True, slots=True)
class Case:
    """A request and what it is answered when it is alone."""

    path: str
    body: dict[str, Any]
    answer: Answer


@dataclass(slots=True)
class Report:
    """What a soak did, and everything that was not as it must be."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    resident: dict[str, list[int]] = field(default_factory=dict)

    def figures(self) -> str:
        return ", ".join(f"{number} {name}" for name, number in self.counts.items())

    def growth(self) -> list[str]:
        """Processes that hold more than at half-time, when all that is kept for later has long been there."""
        found = []
        for name, series in self.resident.items():
            before, after = max(series[: (len(series) + 1) // 2]), max(series[-(len(series) // 5) :])
            self.counts[f"KiB more in {name}"] = (after - before) >> 10
            if after > before + MAX_GROWTH:
                found.append(f"{name} has grown from {before >> 10} to {after >> 10} KiB in the second half")
        return found


async def soak(seconds: float, seed: int, progress: Progress) -> Report:
    report = Report()
    try:
        with make_model() as model:
            await _soak(model, seconds, seed, progress, report)
    except (AssertionError, aiohttp.ClientError) as error:
        # A single run that failed, a process that did not start or is gone, or left something behind.
        report.failures.append(f"{type(error).__name__}: {error}")
    return report


async def _soak(model: Path, seconds: float, seed: int, progress: Progress, report: Report) -> None:
    conversations = catalogue(seed, int(min(max(seconds, 60), 400)))
    with roomy_fleet(model) as fleet:
        async with _client(fleet) as client:
            await client.until_ready()
            cases = await _alone(client, conversations, random.Random(seed), progress)
    with small_fleet(model) as fleet:
        async with _client(fleet) as client:
            await client.until_linked("D0", "P0")
            await client.until_linked("D1", "P0")
            await Load(fleet, client, cases, seed, report).run(seconds, progress)
            if report.failures:
                # What a process said of itself may be why.
                report.failures = [*fleet.troubles(), *report.failures]
            else:
                report.failures += [*fleet.troubles(), *report.growth()]
            await _check_drained(client, report)
            await _check_counters(client, report)


@asynccontextmanager
async def _client(fleet: Fleet) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(fleet.url, timeout=timeout, connector=connector) as session:
        yield Client(session)


async def _alone(
    client: Client, conversations: list[list[Turn]], source: random.Random, progress: Progress
) -> list[list[Case]]:
    """The cases of each conversation, a later turn with what was said before it."""
    found = []
    for number, turns in enumerate(conversations):
        said = ""
        cases: list[Case] = []
        for turn in turns:
            body = turn.body | _prompt(turn, said)
            answer = await _whole(client, turn.path, body)
            if turn.has_stop and (stop := find_stop(source, answer.choices[0].text)) is not None:
                plain, body = answer, body | {"stop": [stop, "\x00 never said"]}
                answer = await _whole(client, turn.path, body)
                for index, choice in answer.choices.items():
                    assert choice.text == plain.choices[index].text.split(stop)[0], f"{stop!r} does not end {body}"
            cases.append(Case(turn.path, body, answer))
            if isinstance(turn.prompt, str):
                said += turn.prompt + answer.choices[0].text
        found.append(cases)
        progress("each request alone", (number + 1) / len(conversations), f"{sum(map(len, found))} requests")
    return found


def _prompt(turn: Turn, said: str) -> dict[str, Any]:
    if turn.is_chat:
        return {"messages": [{"role": "user", "content": turn.prompt}]}
    return {"prompt": said + turn.prompt if isinstance(turn.prompt, str) else turn.prompt}


async def _whole(client: Client, path: str, body: dict[str, Any]) -> Answer:
    found = await client.post(path, **body)
    assert found.status == 200, f"{found.status} {found.body}, asked {json.dumps(body)}"
    return Answer.of(found.body)


class Load:
    """Clients who ask the cases over and over, all at once, until the time is over."""

    def __init__(self, fleet: Fleet, client: Client, cases: list[list[Case]], seed: int, report: Report):
        self._fleet = fleet
        self._client = client
        self._cases = cases
        self._seed = seed
        self._report = report
        self._ends_at = 0.0

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_at or len(self._report.failures) >= MAX_FAILURES

    async def run(self, seconds: float, progress: Progress) -> None:
        started = time.monotonic()
        self._ends_at = started + seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_CLIENTS):
                tasks.create_task(self._ask_on(random.Random(f"{self._seed} {number}")))
            while not self._is_over:
                if self._fleet.troubles():
                    self._ends_at = 0.0
                    break
                for name, num_bytes in self._fleet.resident_bytes().items():
                    self._report.resident.setdefault(name, []).append(num_bytes)
                figures = f"{self._report.counts['requests']} requests, {len(self._report.failures)} failures"
                progress("all at once", (time.monotonic() - started) / seconds, figures)
                await asyncio.sleep(1.0)

    async def _ask_on(self, source: random.Random) -> None:
        """One client: conversations in any order, the turns of each in theirs."""
        while True:
            for case in source.choice(self._cases):
                if self._is_over:
                    return
                try:
                    failure = await self._ask(case, source)
                except (AssertionError, ValueError, TimeoutError, aiohttp.ClientError) as error:
                    failure = f"{type(error).__name__}: {error}"
                self._report.counts["requests"] += 1
                if failure is not None:
                    self._report.failures.append(f"{failure}\n    asked {case.path} {json.dumps(case.body)}")

    async def _ask(self, case: Case, source: random.Random) -> str | None:
        """Ask as a stream or not, and perhaps leave early; returns what was wrong."""
        is_stream, leaves = source.random() < 0.6, source.random() < SHARE_CANCELLED
        leave_at = source.random()
        if is_stream:
            return await self._stream(case, int(leave_at * 100) if leaves else None)
        try:
            async with asyncio.timeout(leave_at if leaves else None):
                answer = await _whole(self._client, case.path, case.body)
        except TimeoutError:
            if not leaves:
                raise
            self._report.counts["cancels"] += 1
            return None
        return self._checked(answer, case)

    async def _stream(self, case: Case, num_events: int | None) -> str | None:
        body = case.body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._client.session.post(case.path, json=body) as response:
            assert response.status == 200, await response.text()
            stream = await Stream(response).read(num_events)
        answer = Answer()
        for event in stream.events:
            answer.add(event)
        if stream.is_done:
            return self._checked(answer, case)
        self._report.counts["cancels"] += 1
        return answer.departure(case.answer)

    def _checked(self, answer: Answer, case: Case) -> str | None:
        assert answer.usage is not None
        self._report.counts["tokens"] += answer.usage["completion_tokens"]
        return answer.difference(case.answer)


async def _check_drained(client: Client, report: Report) -> None:
    """Nothing may be held, leased or promised once nobody asks any more."""
    try:
        for name in ("router_queued_requests", "leases", "running", "waiting", "reserved_kv_blocks"):
            await client.until_none(f"pdserve_{name}", DRAINED_WITHIN_S)
        await client.until_blocks(lambda blocks: not any(blocks.values()), DRAINED_WITHIN_S)
    except AssertionError as error:
        report.failures.append(f"not drained: {error}")


async def _check_counters(client: Client, report: Report) -> None:
    for (mode, _, _), number in (await client.gauges("pdserve_preemptions")).items():
        report.counts[f"times {mode}"] += int(number)
    if not any(report.counts[f"times {mode}"] for mode in WAYS_TO_YIELD):
        report.failures.append("nobody had to yield: the pools were not small")
    for name in ("corrupt_blocks", "retries"):
        report.counts[name] = int(sum((await client.gauges(f"pdserve_{name}")).values()))
    if report.counts["corrupt_blocks"]:
        report.failures.append("blocks were corrupt")
