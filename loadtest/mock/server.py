"""A server that speaks the OpenAI streaming API and generates nothing: known times, and known faults.

It checks the load test itself: what the client reports must be what this server did. Used by the tests
and by `pdserve bench mock`.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from aiohttp import web

from pdserve.loadtest.client.target import Api


class Fault(StrEnum):
    """What goes wrong with a request; those in a stream do so after `fault_after` tokens."""

    NONE = "none"
    STATUS = "status"  # HTTP 500 before any token
    DROP = "drop"  # the connection is cut
    HANG = "hang"  # no further byte until the client leaves
    SHORT = "short"  # a regular end, too early
    ERROR_EVENT = "error_event"
    BAD_JSON = "bad_json"
    NO_FINISH = "no_finish"  # all tokens, no finish reason
    NO_DONE = "no_done"  # all tokens and the usage, no [DONE]
    NO_USAGE = "no_usage"  # a regular stream without the usage that was asked for


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one request is answered. Both waits are lower bounds of what the client can measure."""

    first_token_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_event: int = 1
    fault: Fault = Fault.NONE
    fault_after: int = 2


@dataclass(frozen=True, slots=True)
class Received:
    """One request as the mock saw it. written_at is monotonic, one time for each event with tokens."""

    arrived_at: float
    body: dict[str, Any]
    request_id: str | None
    written_at: list[float] = field(default_factory=list)


class MockServer:
    """Listens on host:port (port 0 takes a free one) while its context is open.

    The n-th generation request gets the n-th behaviour, starting over after the last.
    """

    def __init__(
        self,
        behaviours: Sequence[Behaviour] = (Behaviour(),),
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = "mock",
        max_model_len: int = 32_768,
    ):
        self.received: list[Received] = []
        self._behaviours = behaviours
        self._host = host
        self._port = port
        self._model = model
        self._max_model_len = max_model_len
        app = web.Application()
        app.router.add_get("/v1/models", self._list_models)
        for api in Api:
            app.router.add_post(api.path, self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        host, port, *_ = self._runner.addresses[0]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _list_models(self, request: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "max_model_len": self._max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        received = Received(time.monotonic(), await request.json(), request.headers.get("X-Request-Id"))
        behaviour = self._behaviours[len(self.received) % len(self._behaviours)]
        self.received.append(received)
        if behaviour.fault is Fault.STATUS:
            return web.json_response({"error": {"message": "broken on purpose", "type": "server_error"}}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await _Answer(request, response, behaviour, received).stream()
        return response


class _Answer:
    """The stream of one request."""

    def __init__(self, request: web.Request, response: web.StreamResponse, behaviour: Behaviour, received: Received):
        self._request = request
        self._response = response
        self._behaviour = behaviour
        self._received = received
        self._is_chat = request.path == Api.CHAT.path

    async def stream(self) -> None:
        fault, max_tokens = self._behaviour.fault, self._received.body["max_tokens"]
        if self._is_chat:
            await self._write_choice({"role": "assistant", "content": ""}, None)
        match fault:
            case Fault.DROP:
                await self._write_tokens(self._behaviour.fault_after)
                assert self._request.transport is not None
                self._request.transport.abort()
            case Fault.HANG:
                await self._write_tokens(self._behaviour.fault_after)
                await asyncio.Event().wait()
            case Fault.ERROR_EVENT:
                await self._write_tokens(self._behaviour.fault_after)
                await self._write_event({"error": {"message": "broken on purpose", "type": "server_error"}})
            case Fault.BAD_JSON:
                await self._write_tokens(self._behaviour.fault_after)
                await self._response.write(b'data: {"choices":\n\n')
            case Fault.SHORT:
                await self._write_tokens(self._behaviour.fault_after)
                await self._finish(self._behaviour.fault_after, "stop")
            case _:
                await self._write_tokens(max_tokens)
                await self._finish(max_tokens, "length")

    async def _write_tokens(self, num_tokens: int) -> None:
        """One event for each tokens_per_event tokens, the gap of each token waited for."""
        await asyncio.sleep(self._behaviour.first_token_s)
        num_written = 0
        while num_written < num_tokens:
            count = min(self._behaviour.tokens_per_event, num_tokens - num_written)
            num_gaps = count if num_written else count - 1
            await asyncio.sleep(self._behaviour.gap_s * num_gaps)
            self._received.written_at.append(time.monotonic())
            await self._write_choice({"content": " word" * count}, None)
            num_written += count

    async def _finish(self, num_tokens: int, reason: str) -> None:
        if self._behaviour.fault is not Fault.NO_FINISH:
            await self._write_choice({}, reason)
        if self._behaviour.fault is not Fault.NO_USAGE:
            await self._write_event({"choices": [], "usage": self._usage(num_tokens)})
        if self._behaviour.fault is not Fault.NO_DONE:
            await self._response.write(b"data: [DONE]\n\n")

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        body, received = self._received.body, self._received
        prompt_tokens = len(body["messages"][0]["content"].split()) if self._is_chat else len(body["prompt"])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": prompt_tokens + num_tokens,
            "metrics": {"ttft_s": received.written_at[0] - received.arrived_at},
        }

    async def _write_choice(self, delta: dict[str, str], finish_reason: str | None) -> None:
        said = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        await self._write_event({"choices": [{"index": 0, **said, "finish_reason": finish_reason}]})

    async def _write_event(self, payload: dict[str, Any]) -> None:
        await self._response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")
