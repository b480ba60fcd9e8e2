"""One request on the wire, recorded raw: bytes and the monotonic time at which each read returned.

Nothing is parsed here, so that the client's own work does not delay the time stamps of other streams;
the raw bytes of a run (about 0.3 KB a token) are kept until it is over. Called by the runner.
"""

import asyncio
import json
import time
from dataclasses import dataclass

import aiohttp

from pdserve.loadtest.client.target import Target
from pdserve.loadtest.measures.sse import Chunk
from pdserve.loadtest.workload.chat import Chat
from pdserve.loadtest.workload.schedule import PlannedRequest

# Far above any real answer; it only stops a server that never stops.
MAX_RESPONSE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request gave no measurement: a class that is counted, and the detail for a reader."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the socket showed of one request. All times are monotonic.

    woke_at   the client's timer for this request fired: after the intended time by the client's own lag
    sent_at   the request was handed to the socket: later than woke_at only under --max-concurrency
    ended_at  the stream ended or was given up
    status    None where no response came
    failure   None where the response was read to its end, whatever it says
    """

    woke_at: float
    sent_at: float
    ended_at: float
    status: int | None
    chunks: tuple[Chunk, ...]
    failure: Failure | None


def open_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """A session without limits or queues of its own.

    Every request opens its own connection, as separate users would: a kept one may be closed by the server
    at the moment of its reuse, which would count as the server's failure.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={
            "Accept-Encoding": "identity",
            "User-Agent": "pdserve-bench",
            **({} if api_key is None else {"Authorization": f"Bearer {api_key}"}),
        },
    )


def encode_body(planned: PlannedRequest, model: str) -> bytes:
    """The JSON body that asks for exactly the planned output, as a stream with usage."""
    body: dict[str, object] = {
        "model": model,
        "max_tokens": planned.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if isinstance(planned.prompt, Chat):
        body["messages"] = planned.prompt.to_json()
    else:
        body["prompt"] = planned.prompt
    return json.dumps(body, separators=(",", ":")).encode()


async def send(session: aiohttp.ClientSession, target: Target, body: bytes, label: str, woke_at: float) -> Exchange:
    """Send one request and read its response to the end, the timeout or the failure of the connection.

    label goes out as X-Request-Id, to find the request in the server's log.
    """
    chunks: list[Chunk] = []
    status = None
    failure = None
    sent_at = time.monotonic()
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            session.post(
                target.url + target.api.path,
                data=body,
                headers={"Content-Type": "application/json", "X-Request-Id": label},
                allow_redirects=False,
            ) as response,
        ):
            status = response.status
            num_bytes = 0
            async for data in response.content.iter_any():
                chunks.append(Chunk(time.monotonic(), data))
                num_bytes += len(data)
                if num_bytes > MAX_RESPONSE_BYTES:
                    failure = Failure("too_large", f"the response went beyond {MAX_RESPONSE_BYTES} bytes")
                    break
    except TimeoutError:
        failure = Failure("timeout", f"no end of the stream within {target.timeout_s} s (--timeout-s)")
    except (aiohttp.ClientError, OSError) as error:
        failure = Failure("connection", f"{type(error).__name__}: {error}")
    return Exchange(woke_at, sent_at, time.monotonic(), status, tuple(chunks), failure)
