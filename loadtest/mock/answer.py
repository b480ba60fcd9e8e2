"""The stream that answers one request, as a script for the pacer: what is written and when. Made by server.py."""

import asyncio
import functools
import json
import random
import time
from typing import Any

from pdserve.loadtest.client.target import Api
from pdserve.loadtest.mock.behaviour import Behaviour, Fault, Received
from pdserve.loadtest.mock.pacer import Script

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
_BROKEN = {"error": {"message": "broken on purpose", "type": "server_error"}}
_DEFAULT_MAX_TOKENS = 16
# Between the two parts of an event that is split.
_SPLIT_S = 0.001


class RequestError(Exception):
    """A body that the mock cannot answer; the words go to the client."""


class Answer:
    """One request's stream. `script` writes it; the transport is the server's and may be gone before the end."""

    def __init__(
        self, transport: asyncio.WriteTransport, api: Api, behaviour: Behaviour, received: Received, num_request: int
    ):
        """num_request seeds the jitter. Raises RequestError."""
        self._transport = transport
        self._api = api
        self._behaviour = behaviour
        self._received = received
        self._jitter = random.Random(num_request)
        self._max_tokens = _read_max_tokens(received.body)
        self._prompt_tokens = _count_prompt(received.body, api)

    def script(self) -> Script:
        behaviour, fault = self._behaviour, self._behaviour.fault
        self._transport.write(HEAD)
        if self._api is Api.CHAT:
            self._write(_encode_choice(self._api, {"role": "assistant", "content": ""}))
        if fault in _BREAKING:
            yield from self._write_tokens(behaviour.fault_after)
            if fault is Fault.HANG:
                return
            if fault is Fault.DROP:
                self._transport.abort()
                return
            if fault is Fault.SHORT:
                self._finish(behaviour.fault_after, "stop")
            else:
                self._transport.write(_BREAKING[fault])
        else:
            yield from self._write_tokens(self._max_tokens)
            self._finish(self._max_tokens, "length")
        self._transport.write(LAST_CHUNK)
        self._transport.close()

    def _write_tokens(self, num_tokens: int) -> Script:
        """One event for each tokens_per_event tokens."""
        behaviour = self._behaviour
        first_at = self._received.arrived_at + behaviour.first_token_s
        num_written = 0
        while num_written < num_tokens:
            count = min(behaviour.tokens_per_event, num_tokens - num_written)
            num_written += count
            due = first_at + (num_written - 1) * behaviour.gap_s
            if behaviour.jitter_s:
                due += behaviour.jitter_s * self._jitter.random()
            yield due
            if self._transport.is_closing():
                return
            data = _token_event(self._api, count)
            if behaviour.fault is Fault.SPLIT:
                place = 1 + (7 * num_written) % (len(data) - 1)
                self._transport.write(data[:place])
                data = data[place:]
                yield time.monotonic() + _SPLIT_S
            self._received.written_at.append(time.monotonic())
            self._write(data)

    def _write(self, data: bytes) -> None:
        """Write what is framed already, or what is left of it."""
        self._transport.write(_reframe(data) if self._behaviour.fault is Fault.UNALIGNED else data)

    def _finish(self, num_tokens: int, reason: str) -> None:
        fault = self._behaviour.fault
        if fault is not Fault.NO_FINISH:
            self._write(_encode_choice(self._api, {}, reason))
        if fault is not Fault.NO_USAGE:
            self._write(_encode_event({"choices": [], "usage": self._usage(num_tokens)}))
        if fault is not Fault.NO_DONE:
            self._write(_frame(b"data: [DONE]\n\n"))

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        """With the mock's own times, from which a client on this machine computes its exact errors."""
        received = self._received
        first_s = received.written_at[0] - received.arrived_at if received.written_at else None
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self._prompt_tokens + num_tokens,
            "metrics": {"ttft_s": first_s, "arrived_at": received.arrived_at, "written_at": received.written_at},
        }


def _read_max_tokens(body: dict[str, Any]) -> int:
    value = body.get("max_tokens", body.get("max_completion_tokens", _DEFAULT_MAX_TOKENS))
    if type(value) is not int or value < 1:
        raise RequestError(f"max_tokens {value!r}: must be a whole number of at least 1")
    return value


def _count_prompt(body: dict[str, Any], api: Api) -> int:
    """Ids of a prompt of ids, words of a text or of all messages."""
    if api is Api.CHAT:
        messages = body.get("messages")
        if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
            raise RequestError("messages: must be a list of messages")
        return sum(len(str(message.get("content", "")).split()) for message in messages)
    prompt = body.get("prompt")
    if not isinstance(prompt, str | list):
        raise RequestError("prompt: must be a text or a list of token ids")
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _frame(data: bytes) -> bytes:
    """One chunk of HTTP."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _reframe(chunk: bytes) -> bytes:
    """The content of a chunk in three chunks, the middle one of a single byte."""
    data = chunk[chunk.index(b"\r\n") + 2 : -2]
    place = len(data) // 2
    return _frame(data[:place]) + _frame(data[place : place + 1]) + _frame(data[place + 1 :])


def _encode_event(payload: dict[str, Any]) -> bytes:
    return _frame(b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n")


def _encode_choice(api: Api, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    said = {"delta": delta} if api is Api.CHAT else {"text": delta.get("content", "")}
    return _encode_event({"choices": [{"index": 0, **said, "finish_reason": finish_reason}]})


@functools.cache
def _token_event(api: Api, num_tokens: int) -> bytes:
    return _encode_choice(api, {"content": " word" * num_tokens})


# What is written after fault_after tokens; DROP, HANG and SHORT write otherwise.
_BREAKING = {
    Fault.DROP: b"",
    Fault.HANG: b"",
    Fault.SHORT: b"",
    Fault.ERROR_EVENT: _encode_event(_BROKEN),
    Fault.BAD_JSON: _frame(b'data: {"choices":\n\n'),
    Fault.BAD_CHUNK: b"no length\r\n",
}
