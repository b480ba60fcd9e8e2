"""The bytes of a request: made for the whole schedule before the run, so that sending is a write and nothing else."""

import json
from collections.abc import Iterable
from urllib.parse import quote, urlsplit

from pdserve.loadtest.client.driver import Job, PreparedRequest
from pdserve.loadtest.client.endpoint import Endpoint
from pdserve.loadtest.client.target import Target
from pdserve.loadtest.workload.chat import Chat
from pdserve.loadtest.workload.schedule import PlannedRequest


def prepare_job(endpoint: Endpoint, target: Target, model: str, schedule: Iterable[PlannedRequest], seed: int) -> Job:
    """All requests of the schedule that a seed made."""
    requests = (
        PreparedRequest(
            planned.index, planned.at_s, encode_request(target, model, planned, name_request(seed, planned.index))
        )
        for planned in schedule
    )
    return Job(endpoint, target.timeout_s, target.max_concurrency, tuple(requests))


def name_request(seed: int, index: int, is_preflight: bool = False) -> str:
    """The X-Request-Id, to find the request in the server's log by its last part, the index.

    In the form of a random UUID, since servers behind starlette-context (llama-cpp-python's) refuse any other.
    """
    return f"{seed & 0xFFFFFFFF:08x}-{int(is_preflight):04x}-4000-8000-{index:012d}"


def encode_request(target: Target, model: str, planned: PlannedRequest, request_id: str) -> bytes:
    """The whole HTTP request that asks for exactly the planned output, as a stream with usage.

    request_id goes out as X-Request-Id. Every request asks for a connection of its own, as separate users would: a kept
    one may be closed by the server at the moment of its reuse, which would count as the server's failure.
    """
    body = _encode_body(planned, model)
    parts = urlsplit(target.url)
    host = (parts.hostname or "").encode("idna").decode()
    host = f"[{host}]" if ":" in host else host
    path = quote(parts.path + target.api.path, safe="/%:@!$&'()*+,;=~")
    head = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}" if parts.port is None else f"Host: {host}:{parts.port}",
        "User-Agent: pdserve-bench",
        "Accept: text/event-stream",
        "Accept-Encoding: identity",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"X-Request-Id: {request_id}",
    ]
    head += [f"{name}: {value}" for name, value in target.headers.items()]
    return "\r\n".join([*head, "", ""]).encode("ascii") + body


def _encode_body(planned: PlannedRequest, model: str) -> bytes:
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
