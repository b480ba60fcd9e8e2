"""The tokenizer of the server itself, asked over HTTP before the run.

    vLLM, SGLang, pdserve   POST /tokenize {"prompt"} or {"messages"} -> {"count"}
    llama.cpp               POST /tokenize {"content"} -> {"tokens"}; a chat goes through /apply-template first
    llama-cpp-python        POST /extras/tokenize/count {"input"} -> {"count"}; no chats

The server is not trusted: an answer that gives no count is a server without a tokenizer while it is looked for, and a
TargetError afterwards.
"""

import http.client
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pdserve.loadtest.client.target import Api, Target
from pdserve.loadtest.errors import TargetError
from pdserve.loadtest.measures.record import parse_json
from pdserve.loadtest.workload.chat import Chat, Message
from pdserve.loadtest.workload.lengths import MAX_TOKENS

_TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_PROBE = "time year"
# What `ask` of a dialect gets: a path and a body, whose JSON answer it returns, None where there was none.
Post = Callable[[str, dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a kind of server is asked. Both return the number of tokens, None where the answer says none."""

    name: str
    count_text: Callable[[Post, str, str], int | None]
    count_chat: Callable[[Post, str, Chat], int | None]


class ServerTokenizer:
    """Counts by asking a server that is known to answer in this dialect."""

    def __init__(self, target: Target, model: str, dialect: Dialect):
        self.name = f"the server's own {dialect.name}"
        self._target = target
        self._model = model
        self._dialect = dialect

    def count(self, prompt: str | Chat) -> int:
        num_tokens = self.try_count(prompt)
        if num_tokens is None:
            raise TargetError(
                f"--url {self._target.url}: {self._dialect.name} gave no count for a prompt, though it did before; "
                "--tokenizer DIR counts without the server"
            )
        return num_tokens

    def try_count(self, prompt: str | Chat) -> int | None:
        """None where the server gives no count."""
        if isinstance(prompt, str):
            return self._dialect.count_text(self._post, self._model, prompt)
        return self._dialect.count_chat(self._post, self._model, prompt)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        parts = urlsplit(self._target.url)
        headers = {"Content-Type": "application/json"}
        if self._target.api_key is not None:
            headers["Authorization"] = f"Bearer {self._target.api_key}"
        connection = (
            http.client.HTTPSConnection(parts.netloc, timeout=_TIMEOUT_S, context=ssl.create_default_context())
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)
        )
        try:
            connection.request("POST", parts.path + path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            content = response.read(_MAX_ANSWER_BYTES)
            return parse_json(content) if response.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()


def find_server_tokenizer(target: Target, model: str) -> ServerTokenizer | None:
    """The server's tokenizer, in the first dialect in which it counts what the target's API needs; None without one."""
    probes: list[str | Chat] = [_PROBE]
    if target.api is Api.CHAT:
        probes.append(Chat((Message("user", _PROBE),)))
    for dialect in DIALECTS:
        tokenizer = ServerTokenizer(target, model, dialect)
        if all(tokenizer.try_count(probe) is not None for probe in probes):
            return tokenizer
    return None


def _vllm_text(post: Post, model: str, text: str) -> int | None:
    return _count(post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": True}))


def _vllm_chat(post: Post, model: str, chat: Chat) -> int | None:
    return _count(post("/tokenize", {"model": model, "messages": chat.to_json(), "add_generation_prompt": True}))


def _llama_text(post: Post, model: str, text: str) -> int | None:
    answer = post("/tokenize", {"content": text, "add_special": True})
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return len(tokens) or None if isinstance(tokens, list) else None


def _llama_chat(post: Post, model: str, chat: Chat) -> int | None:
    answer = post("/apply-template", {"messages": chat.to_json()})
    text = answer.get("prompt") if isinstance(answer, dict) else None
    return _llama_text(post, model, text) if isinstance(text, str) else None


def _llama_python_text(post: Post, model: str, text: str) -> int | None:
    return _count(post("/extras/tokenize/count", {"model": model, "input": text}))


def _no_chat(post: Post, model: str, chat: Chat) -> int | None:
    return None


def _count(answer: Any) -> int | None:
    value = answer.get("count") if isinstance(answer, dict) else None
    return value if type(value) is int and 1 <= value <= MAX_TOKENS else None


DIALECTS = (
    Dialect("/tokenize", _vllm_text, _vllm_chat),
    Dialect("/tokenize (llama.cpp)", _llama_text, _llama_chat),
    Dialect("/extras/tokenize", _llama_python_text, _no_chat),
)
