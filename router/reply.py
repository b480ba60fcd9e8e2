"""What a client reads: the JSON bodies and server-sent events of OpenAI's completion and chat APIs.

    stream:  [role]  text ...  last text with finish_reason  [usage]  [DONE]
             an error event ends a stream instead, and no [DONE] follows: a cut answer never looks whole

One Reply a request, made by app. Shapes only; it knows nothing of tokens or text.
"""

import json
import secrets
import time
from typing import Any

from pdserve.router.answer import Piece

DONE = b"data: [DONE]\n\n"


def encode_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def event(value: Any) -> bytes:
    """One server-sent event; JSON has no raw line breaks, so one data line holds it."""
    return b"data: " + encode_json(value) + b"\n\n"


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

    def whole(self, text: str, finish: str, num_tokens: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """The body of a request that is not streamed."""
        content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._frame(kind, [choice]) | {"usage": self._usage(num_tokens), "metrics": metrics}

    def opening(self) -> bytes:
        """Before the first piece: chat names the role."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self._is_chat else b""

    def piece(self, piece: Piece) -> bytes:
        """One event for a piece, which may be empty; chat ends with one of its own for finish_reason."""
        if not self._is_chat:
            return self._chunk({"text": piece.text}, piece.finish)
        text = self._chunk({"content": piece.text}, None) if piece.text or piece.finish is None else b""
        return text + (self._chunk({}, piece.finish) if piece.finish is not None else b"")

    def closing(self, num_tokens: int, metrics: dict[str, Any]) -> bytes:
        """After the last piece."""
        if not self._include_usage:
            return DONE
        frame = self._frame(self._chunk_kind, [])
        return event(frame | {"usage": self._usage(num_tokens), "metrics": metrics}) + DONE

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(self, content: dict[str, str], finish: str | None) -> bytes:
        body = {"delta": content} if self._is_chat else content
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": finish}
        return event(self._frame(self._chunk_kind, [choice]) | ({"usage": None} if self._include_usage else {}))

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self, num_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self._num_prompt_tokens + num_tokens,
        }
