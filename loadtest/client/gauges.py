"""What a pdserve server says of its own nodes during a run: GET /metrics each half second.

Owned by the parent process, never by the ones that measure. Only the lines that matter are kept while the run
lasts; they are parsed after it. A server that is not ours, or that stops answering, simply gives nothing: gauges
explain a run, they never decide it.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from pdserve.loadtest.client.target import Target

PERIOD_S = 0.5
# Far above what a scrape takes; only a server that hangs meets it.
_TIMEOUT_S = 5.0
# A cluster of 64 nodes answers with about 100 KB.
_MAX_BYTES = 4 * 1024 * 1024
_COUNTS = {
    "pdserve_running": "num_running",
    "pdserve_waiting": "num_waiting",
    "pdserve_queued_tokens": "num_queued_tokens",
}
_BLOCKS = "pdserve_kv_blocks"
_STATES = {state: f"num_{state}_blocks" for state in ("free", "cached", "held", "leased")}
_ROUTER_QUEUE = "pdserve_router_queued_requests"
_KEPT_LINES = tuple(name.encode() + end for name in (*_COUNTS, _BLOCKS, _ROUTER_QUEUE) for end in (b"{", b" "))


@dataclass(frozen=True, slots=True)
class NodeSample:
    """One node at one time: requests, tokens still to compute, and KV blocks by state."""

    node: str
    role: str
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_leased_blocks: int

    @property
    def num_blocks(self) -> int:
        return self.num_free_blocks + self.num_cached_blocks + self.num_held_blocks + self.num_leased_blocks

    @property
    def kv_use(self) -> float:
        """Share of the pool that requests hold or that is leased to a peer; what is only cached counts as free."""
        return (self.num_held_blocks + self.num_leased_blocks) / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class GaugeSample:
    """The server at one time, at_s seconds after the start of the run."""

    at_s: float
    num_queued: int
    nodes: tuple[NodeSample, ...]


class GaugeSampler:
    """Collects answers while `watch` runs; `read` turns them into samples afterwards."""

    def __init__(self, target: Target, period_s: float = PERIOD_S):
        self._url = target.url + "/metrics"
        self._headers = target.headers
        self._period_s = period_s
        self._answers: list[tuple[float, bytes]] = []

    async def watch(self) -> None:
        """Runs until cancelled, or returns at once where the first answer is none of a pdserve server."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(
            timeout=timeout, headers=self._headers, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            due = time.monotonic()
            while True:
                lines = await self._ask(session)
                if lines:
                    self._answers.append((time.monotonic(), lines))
                elif not self._answers:
                    return
                due = max(due + self._period_s, time.monotonic())
                await asyncio.sleep(due - time.monotonic())

    def read(self, start: float) -> tuple[GaugeSample, ...]:
        """The samples of a run that started at this monotonic time; what cannot be read is left out."""
        samples = (_read_sample(at - start, lines) for at, lines in self._answers)
        return tuple(sample for sample in samples if sample is not None)

    async def _ask(self, session: aiohttp.ClientSession) -> bytes:
        """The lines that matter, empty where there was no answer."""
        try:
            async with session.get(self._url, allow_redirects=False) as response:
                if response.status != 200:
                    return b""
                body = bytearray()
                async for data in response.content.iter_any():
                    body += data
                    if len(body) > _MAX_BYTES:
                        return b""
        except (TimeoutError, aiohttp.ClientError, OSError):
            return b""
        return b"".join(line for line in body.splitlines(keepends=True) if line.startswith(_KEPT_LINES))


def _read_sample(at_s: float, lines: bytes) -> GaugeSample | None:
    try:
        families = text_string_to_metric_families(lines.decode(errors="replace"))
        return _make_sample(at_s, [sample for family in families for sample in family.samples])
    except (ValueError, KeyError):
        return None


def _make_sample(at_s: float, values: Iterable[Sample]) -> GaugeSample:
    """Raises KeyError for a missing label or a strange state, ValueError for a number that is no count."""
    num_queued = 0
    nodes: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, labels, value, *_ in values:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}")
        if name == _ROUTER_QUEUE:
            num_queued = int(value)
        else:
            field = _STATES[labels["state"]] if name == _BLOCKS else _COUNTS[name]
            nodes[labels["node"], labels["role"]][field] = int(value)
    fields = (*_COUNTS.values(), *_STATES.values())
    return GaugeSample(
        at_s,
        num_queued,
        tuple(
            NodeSample(node, role, **{field: counts.get(field, 0) for field in fields})
            for (node, role), counts in nodes.items()
        ),
    )
