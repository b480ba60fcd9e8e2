"""What a client reads: the JSON bodies and server-sent events of OpenAI's completion and chat APIs.

    stream:  [role or echo of every choice]  pieces of all choices ...  [usage]  [DONE]
             each choice's last piece has its finish_reason; an error event ends a stream instead, and no [DONE]
             follows: a cut answer never looks whole

One Reply a request, made by app. Shapes only; it knows nothing of tokens. What is the same in every event is encoded
once, and log-probabilities arrive as the JSON that they are (logprobs): an event is put together from parts.
"""

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]\n\n"
NULL = b"null"


# json.dumps would make one for every value.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def encode_json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("utf-8")


def event(data: bytes) -> bytes:
    """One server-sent event; JSON has no raw line breaks, so one data line holds it."""
    return b"data: %b\n\n" % data


@dataclass(frozen=True, slots=True)
class Choice:
    """What is said of one sample, all at once or in one piece of a stream; `logprobs` is JSON."""

    sample: int
    text: str
    finish: str | None
    logprobs: bytes = NULL


class Reply:
    """The frame of every object of one answer: id, kind, model, time.

    include_usage  a stream carries `"usage": null` on its chunks and ends with a usage chunk
    """

    def __init__(self, model: str, is_chat: bool, include_usage: bool, num_prompt_tokens: int):
        self._model = model
        self._is_chat = is_chat
        self._include_usage = include_usage
        self._num_prompt_tokens = num_prompt_tokens
        self._id = ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        self._chunk_opening = self._opening("chat.completion.chunk" if is_chat else "text_completion")
        self._chunk_closing = b'],"usage":null}' if include_usage else b"]}"

    def whole(
        self, choices: Iterable[Choice], num_tokens: int, metrics: dict[str, Any], prompt_logprobs: bytes | None
    ) -> Iterator[bytes]:
        """The body of a request that is not streamed, a choice at a time.

        prompt_logprobs  JSON; like vLLM, completions have it in each choice and chat beside them
        """
        yield self._opening("chat.completion" if self._is_chat else "text_completion")
        members = b"" if prompt_logprobs is None else b',"prompt_logprobs":' + prompt_logprobs
        for index, choice in enumerate(choices):
            message = {"role": "assistant", "content": choice.text}
            content = b'"message":' + encode_json(message) if self._is_chat else b'"text":' + encode_json(choice.text)
            yield (b"," if index else b"") + _choice(choice, content, b"" if self._is_chat else members)
        usage, ledger = encode_json(self._usage(num_tokens)), encode_json(metrics)
        yield b'],"usage":%b,"metrics":%b%b}' % (usage, ledger, members if self._is_chat else b"")

    def opening(self, sample: int, echo: str | None, logprobs: bytes) -> bytes:
        """Before the first piece of a sample: chat names the role, a completion may echo the prompt."""
        choice = Choice(sample, echo or "", None, logprobs)
        if self._is_chat:
            return self._chunk(choice, {"role": "assistant", "content": ""})
        return b"" if echo is None else self._chunk(choice, {})

    def piece(self, choice: Choice) -> bytes:
        """One event for a piece, which may be empty; chat ends with one of its own for finish_reason."""
        if not self._is_chat:
            return self._chunk(choice, {})
        if choice.finish is None:
            return self._chunk(choice, {"content": choice.text})
        if not choice.text:
            return self._chunk(choice, {})
        last = Choice(choice.sample, "", choice.finish)
        text = Choice(choice.sample, choice.text, None, choice.logprobs)
        return self._chunk(text, {"content": choice.text}) + self._chunk(last, {})

    def closing(self, num_tokens: int, metrics: dict[str, Any]) -> bytes:
        """After the last piece."""
        if not self._include_usage:
            return DONE
        members = b'],"usage":%b,"metrics":%b}' % (encode_json(self._usage(num_tokens)), encode_json(metrics))
        return event(self._chunk_opening + members) + DONE

    def _chunk(self, choice: Choice, delta: dict[str, str]) -> bytes:
        content = b'"delta":' + encode_json(delta) if self._is_chat else b'"text":' + encode_json(choice.text)
        return event(self._chunk_opening + _choice(choice, content, b"") + self._chunk_closing)

    def _opening(self, kind: str) -> bytes:
        """An object up to its choices."""
        frame = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return encode_json(frame)[:-1] + b',"choices":['

    def _usage(self, num_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self._num_prompt_tokens + num_tokens,
        }


def _choice(choice: Choice, content: bytes, members: bytes) -> bytes:
    finish = NULL if choice.finish is None else encode_json(choice.finish)
    return b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}' % (
        choice.sample,
        content,
        choice.logprobs,
        finish,
        members,
    )
