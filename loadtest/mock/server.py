"""A server that speaks the OpenAI streaming API and generates nothing: known times, and known faults.

It checks the load test itself: what the client reports must be what this server did, and it must be the quicker of
the two. So events are made beforehand, one timer paces all streams, and writes go straight to the sockets. Used by the
tests, by `pdserve bench mock` and by the self-test.
"""

import asyncio
import json
import ssl
from collections.abc import Sequence
from typing import Self

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.mock.answer import Answer, RequestError
from pdserve.loadtest.mock.behaviour import Behaviour, Fault, Received
from pdserve.loadtest.mock.connection import Connection, Request, write_error, write_json
from pdserve.loadtest.mock.pacer import Pacer

_APIS = {api.path.encode(): api for api in Api}
# Arrivals all at once are more than the default of 100 that may wait to be accepted.
_BACKLOG = 4096


class MockServer:
    """Listens on host:port (port 0 takes a free one) while its context is open.

    The n-th generation request gets the n-th behaviour, starting over after the last. What was received is kept
    where `remembers` says so.
    """

    def __init__(
        self,
        behaviours: Sequence[Behaviour] = (Behaviour(),),
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = "mock",
        max_model_len: int = 32_768,
        tls: ssl.SSLContext | None = None,
        remembers: bool = True,
    ):
        self.received: list[Received] = []
        self._behaviours = behaviours
        self._host = host
        self._port = port
        self._card = {"id": model, "object": "model", "max_model_len": max_model_len}
        self._tls = tls
        self._remembers = remembers
        self._num_requests = 0
        self._connections: set[Connection] = set()

    async def __aenter__(self) -> Self:
        self._pacer = Pacer()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._connections, self._respond),
            self._host,
            self._port,
            backlog=_BACKLOG,
            ssl=self._tls,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        self._pacer.close()
        for connection in tuple(self._connections):
            connection.abort()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        scheme = "http" if self._tls is None else "https"
        host, port, *_ = self._server.sockets[0].getsockname()
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _respond(self, request: Request, transport: asyncio.Transport) -> None:
        if (request.method, request.path) == (b"GET", b"/v1/models"):
            write_json(transport, 200, {"object": "list", "data": [self._card]})
        elif request.method == b"POST" and request.path in _APIS:
            self._generate(request, transport)
        else:
            write_error(transport, 404, "no such path here")

    def _generate(self, request: Request, transport: asyncio.Transport) -> None:
        try:
            body = json.loads(request.body)
            if not isinstance(body, dict):
                raise RequestError("the body must be an object")
            received = Received(request.arrived_at, body, request.request_id)
            number = self._num_requests
            behaviour = self._behaviours[number % len(self._behaviours)]
            answer = Answer(transport, _APIS[request.path], behaviour, received, number)
        except (ValueError, RecursionError, RequestError) as error:
            write_error(transport, 400, str(error))
            return
        self._num_requests += 1
        if self._remembers:
            self.received.append(received)
        if behaviour.fault is Fault.STATUS:
            write_error(transport, 500, "broken on purpose")
        elif behaviour.fault is not Fault.SILENT:
            self._pacer.run(answer.script())
