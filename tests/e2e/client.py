"""A client of a real server: completions, streams, and what /metrics says."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

T = TypeVar("T")

PATIENCE_S = 60.0
# /metrics has no event to wait for; so often it is asked again.
ASK_AGAIN_S = 0.02


@dataclass
class Stream:
    """The server-sent events of one answer, read as far as the test wants."""

    response: aiohttp.ClientResponse
    events: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False

    async def read(self, num_events: int | None = None) -> "Stream":
        """Read until so many events are here; without a number, to the end."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.is_done and (num_events is None or len(self.events) < num_events):
                line = await self.response.content.readline()
                assert line, f"cut after {len(self.events)} events"
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    self.is_done = True
                elif data:
                    event = json.loads(data)
                    assert "error" not in event, event
                    self.events.append(event)
        return self

    @property
    def text(self) -> str:
        choices = [choice for event in self.events for choice in event["choices"]]
        return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)

    @property
    def finish(self) -> str | None:
        reasons = [choice["finish_reason"] for event in self.events for choice in event["choices"]]
        return reasons[-1] if reasons else None

    @property
    def closing(self) -> dict[str, Any]:
        """The last event: usage and metrics."""
        return self.events[-1]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Any
    body: Any

    @property
    def text(self) -> str:
        assert self.status == 200, self.body
        return self.body["choices"][0]["text"]

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.body) == {"error"}, self.body
        return self.body["error"]


class Client:
    def __init__(self, session: aiohttp.ClientSession):
        self.session = session

    async def get(self, path: str) -> Answer:
        async with self.session.get(path) as response:
            raw = await response.text()
            is_json = response.content_type == "application/json"
            return Answer(response.status, response.headers, json.loads(raw) if is_json else raw)

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        async with self.session.post(path, json=body, headers=headers) as response:
            return Answer(response.status, response.headers, await response.json())

    async def complete(self, prompt: Any, max_tokens: int = 16, **body: Any) -> Answer:
        """A greedy completion."""
        body = {"temperature": 0, "prompt": prompt, "max_tokens": max_tokens} | body
        return await self.post("/v1/completions", **body)

    @asynccontextmanager
    async def stream(self, prompt: Any, max_tokens: int = 16, **body: Any) -> AsyncIterator[Stream]:
        """A greedy completion as a stream with usage; leaving early hangs up."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"temperature": 0, "prompt": prompt, "max_tokens": max_tokens} | options | body
        async with self.session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            yield Stream(response)

    async def read_stream(self, prompt: Any, max_tokens: int = 16, **body: Any) -> Stream:
        async with self.stream(prompt, max_tokens, **body) as stream:
            return await stream.read()

    async def gauges(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of a gauge or counter by the values of its labels, in the order of their names."""
        text = (await self.get("/metrics")).body
        for family in text_string_to_metric_families(text):
            if family.name == name:
                return {
                    tuple(value for _, value in sorted(sample.labels.items())): sample.value
                    for sample in family.samples
                    if sample.name in (name, f"{name}_total")
                }
        raise AssertionError(f"no {name} in /metrics:\n{text}")

    async def blocks(self, *states: str) -> dict[str, int]:
        """KV blocks in one of these states, by node."""
        found: dict[str, int] = {}
        for (node, _, state), value in (await self.gauges("pdserve_kv_blocks")).items():
            found[node] = found.get(node, 0) + (int(value) if state in states else 0)
        return found

    async def until_blocks(
        self, is_as_wanted: Callable[[dict[str, int]], bool], within_s: float, *states: str
    ) -> dict[str, int]:
        """Blocks in one of these states (held or leased, unless told) by node, as soon as they are as wanted.

        Nodes tell the router at each beat: what is read here may be older than the answer before it, so tests wait
        for a state and never read it once. Fails when they are not so in time.
        """
        async for blocks in self._again_and_again(lambda: self.blocks(*states or ("held", "leased")), within_s):
            if is_as_wanted(blocks):
                break
        return blocks

    async def until_none(self, name: str, within_s: float) -> None:
        """Until a gauge is 0 for all its labels; fails when it is not in time."""
        async for values in self._again_and_again(lambda: self.gauges(name), within_s):
            if not any(values.values()):
                break

    async def until_ready(self) -> None:
        """Until a prefill node and a decode node are linked; fails when they are not in time."""
        async for ready in self._again_and_again(lambda: self.get("/ready"), PATIENCE_S):
            if ready.status == 200:
                break

    async def until_linked(self, decode: str, prefill: str) -> None:
        """Until the router gives requests to this pair; fails when it does not in time."""
        async for cluster in self._again_and_again(lambda: self.get("/cluster"), PATIENCE_S):
            links = {node["node"]: [link["node"] for link in node["links"]] for node in cluster.body["nodes"]}
            if prefill in links.get(decode, ()):
                break

    async def _again_and_again(self, ask: Callable[[], Awaitable[T]], within_s: float) -> AsyncIterator[T]:
        now = asyncio.get_running_loop().time
        deadline = now() + within_s
        while True:
            answer = await ask()
            yield answer
            assert now() < deadline, f"after {within_s} s it is still {answer}"
            await asyncio.sleep(ASK_AGAIN_S)
