"""HTTP out of the bytes of a connection, after the run: the status, and the body with the times of its reads.

The server is not trusted: what is no HTTP, or ends too early, is a failure of the request and never an exception.
Called by record.py.
"""

from dataclasses import dataclass

import h11

from pdserve.loadtest.client.exchange import Exchange, Failure
from pdserve.loadtest.measures.sse import Chunk


@dataclass(frozen=True, slots=True)
class Response:
    """What a server answered.

    status   None where no head came
    chunks   the body without HTTP's framing, each piece with the time of the read that brought its last byte
    failure  None where the response is whole
    """

    status: int | None
    chunks: tuple[Chunk, ...]
    failure: Failure | None


def read_response(exchange: Exchange) -> Response:
    """The response of an exchange: what came of it, also where it broke off."""
    parser = h11.Connection(our_role=h11.CLIENT)
    # The parser wants to know what was asked for; any request that has a body in its answer will do.
    parser.send(h11.Request(method="POST", target="/", headers=[("Host", "server"), ("Connection", "close")]))
    parser.send(h11.EndOfMessage())
    reading = _Reading(parser)
    try:
        for chunk in exchange.chunks:
            if chunk.data and reading.read(chunk):
                return Response(reading.status, tuple(reading.body), None)
    except h11.RemoteProtocolError as error:
        return Response(reading.status, tuple(reading.body), Failure("bad_http", str(error)))
    if exchange.failure is not None:
        return Response(reading.status, tuple(reading.body), exchange.failure)
    # The server closed the connection, which is how some responses end.
    try:
        is_whole = reading.read(Chunk(exchange.ended_at, b""))
    except h11.RemoteProtocolError:
        is_whole = False
    failure = None if is_whole else Failure("connection", "closed by the server before the end of its response")
    return Response(reading.status, tuple(reading.body), failure)


class _Reading:
    """A response as far as it was read."""

    def __init__(self, parser: h11.Connection):
        self.status: int | None = None
        self.body: list[Chunk] = []
        self._parser = parser

    def read(self, chunk: Chunk) -> bool:
        """Take one read, an empty one for the connection's end; returns whether the response is whole."""
        self._parser.receive_data(chunk.data)
        while True:
            event = self._parser.next_event()
            match event:
                case h11.Response():
                    self.status = event.status_code
                case h11.Data():
                    self.body.append(Chunk(chunk.arrived_at, bytes(event.data)))
                case h11.EndOfMessage():
                    return True
                case h11.InformationalResponse():
                    pass
                case _:  # more is needed, or the connection has ended
                    return False
