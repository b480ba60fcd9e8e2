"""A front door on a real socket over a service that follows a script, and a client for it."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from pdserve.core.logprobs import NO_LOGPROBS, Logprobs, TokenLogprob
from pdserve.core.model_config import GenerationDefaults
from pdserve.router.api_keys import ApiKeys
from pdserve.router.app import FrontDoorLimits, create_app, make_runner
from pdserve.router.generation import GenerationError, GenerationRequest, ModelCard, Progress
from pdserve.router.tokenizer import TextModel
from tests.checkpoints import EOS_ID, VOCAB_SIZE

MODEL = "tiny"
CONTEXT = 256
METRICS = {"queue_s": 0.0, "nodes": ["P0", "D0"]}
CARD = ModelCard(MODEL, max_model_len=CONTEXT, vocab_size=VOCAB_SIZE)
DEFAULTS = GenerationDefaults(eos_ids=(EOS_ID,))


def scripted_row(token: int, num_top: int) -> list[TokenLogprob]:
    """An even token is the likeliest itself, an odd one is far from that."""
    first = token + token % 2
    top = [TokenLogprob((first + index) % VOCAB_SIZE, -0.25 * (index + 1)) for index in range(num_top)]
    return [TokenLogprob(token, -9.5 if token % 2 else -0.25), *top]


@dataclass
class Script:
    """What the model says.

    logprob    of every token of an answer; None: as in scripted_row
    others     what samples 1, 2 ... say, the last of them also those after it; without, the same as sample 0
    merge      tokens a Progress carries; samples take turns
    error      raised in place of token number error_at, over all samples
    waits_at   the token number before which the stream waits until it is cancelled
    """

    token_ids: list[int]
    merge: int = 1
    error: Exception | None = None
    error_at: int = 0
    waits_at: int | None = None
    logprob: float | None = None
    others: list[list[int]] = field(default_factory=list)

    def of_sample(self, sample: int) -> list[int]:
        return [self.token_ids, *self.others][min(sample, len(self.others))]


class ScriptedStream:
    def __init__(self, script: Script, request: GenerationRequest):
        self.cancelled = asyncio.Event()
        self.finish: str | None = None
        self.num_given = self.num_written = 0
        self.stopped: list[int] = []
        self._script = script
        self._request = request
        self._num_given = [0] * request.num_samples
        self._turns = deque(range(request.num_samples))
        self._sink: Callable[[Progress], bool] | None = None
        self.num_taken = 0

    def offer_to(self, sink: Callable[[Progress], bool]) -> None:
        self._sink = sink

    def __aiter__(self) -> "ScriptedStream":
        return self

    async def __anext__(self) -> Progress:
        progress = await self._next()
        while self._sink is not None and progress.finish is None and self._sink(progress):
            self.num_taken += 1
            progress = await self._next()
        return progress

    async def _next(self) -> Progress:
        if not self._turns:
            raise StopAsyncIteration
        sample, script, params = self._turns.popleft(), self._script, self._request.params
        said, token_ids, finish = script.of_sample(sample), [], None
        while finish is None and len(token_ids) < script.merge and self._num_given[sample] < len(said):
            if script.error is not None and self.num_given >= script.error_at:
                raise script.error
            if script.waits_at == self.num_given:
                await self.cancelled.wait()
                raise StopAsyncIteration
            token_ids.append(said[self._num_given[sample]])
            self.num_given += 1
            self._num_given[sample] += 1
            finish = params.finish_reason(self._num_given[sample], token_ids[-1])
        if not token_ids:
            raise StopAsyncIteration
        if finish is None:
            self._turns.append(sample)
        return Progress(token_ids, finish, sample, _scripted(params.logprobs, token_ids, script.logprob))

    def cancel(self, finish: str = "cancelled") -> None:
        self.finish = self.finish or finish
        self.cancelled.set()

    def stop(self, sample: int) -> None:
        self.stopped.append(sample)
        self._turns.remove(sample)

    def prompt_logprobs(self) -> Logprobs:
        return _scripted(self._request.params.prompt_logprobs, self._request.prompt_ids[1:])

    def written(self) -> None:
        self.num_written += 1

    def metrics(self) -> dict[str, Any]:
        return METRICS


def _scripted(num_top: int | None, token_ids: list[int], logprob: float | None = None) -> Logprobs:
    if num_top is None:
        return NO_LOGPROBS
    rows = [scripted_row(token, num_top) for token in token_ids]
    if logprob is not None:
        rows = [[TokenLogprob(entry.token, logprob) for entry in row] for row in rows]
    return Logprobs.pack(num_top, rows)


@dataclass
class ScriptedService:
    script: Script
    refusal: GenerationError | None = None
    ready: tuple[bool, str] = (True, "1 prefill and 1 decode node")
    requests: list[GenerationRequest] = field(default_factory=list)
    streams: list[ScriptedStream] = field(default_factory=list)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, request: GenerationRequest) -> ScriptedStream:
        if self.refusal is not None:
            raise self.refusal
        stream = ScriptedStream(self.script, request)
        self.requests.append(request)
        self.streams.append(stream)
        self.submitted.set()
        return stream

    def read_wait_s(self) -> float:
        return 0.125

    def readiness(self) -> tuple[bool, str]:
        return self.ready

    def overview(self) -> dict[str, Any]:
        return {"ready": self.ready[0], "reason": self.ready[1], "queued_requests": 3, "nodes": []}

    def metrics_text(self) -> bytes:
        return b"# TYPE pdserve_running gauge\npdserve_running 0\n"


@dataclass(frozen=True)
class Response:
    status: int
    headers: Any
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error object; the response must be exactly that."""
        body = self.json
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert self.headers["Content-Type"].startswith("application/json")
        return body["error"]

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event, "[DONE]" as it is."""
        assert self.headers["Content-Type"].startswith("text/event-stream")
        blocks = self.raw.decode("utf-8").split("\n\n")
        assert blocks.pop() == ""
        data = [block.removeprefix("data: ") for block in blocks]
        return [item if item == "[DONE]" else json.loads(item) for item in data]


@dataclass
class Door:
    """A client of a running front door."""

    session: aiohttp.ClientSession
    address: tuple[str, int]

    async def send(self, method: str, path: str, **options: Any) -> Response:
        url = "http://{}:{}".format(*self.address) + path
        async with self.session.request(method, url, **options) as response:
            return Response(response.status, response.headers, await response.read())

    async def get(self, path: str) -> Response:
        return await self.send("GET", path)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> Response:
        return await self.send("POST", "/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    async def chat(self, messages: Any = None, **fields: Any) -> Response:
        messages = [{"role": "user", "content": "hello"}] if messages is None else messages
        return await self.send("POST", "/v1/chat/completions", json={"model": MODEL, "messages": messages, **fields})


@asynccontextmanager
async def open_door(
    service: ScriptedService,
    text: TextModel,
    *,
    card: ModelCard = CARD,
    defaults: GenerationDefaults = DEFAULTS,
    limits: FrontDoorLimits | None = None,
    keys: ApiKeys | None = None,
) -> AsyncIterator[Door]:
    runner = make_runner(create_app(card, service, text, defaults, limits, keys), shutdown_timeout_s=0.05)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with aiohttp.ClientSession() as session:
            yield Door(session, runner.addresses[0][:2])
    finally:
        await runner.cleanup()


def says(text: TextModel, answer: str, **fields: Any) -> ScriptedService:
    """A service whose model says `answer`, a byte a token, and then EOS."""
    return ScriptedService(Script([*text.encode(answer), EOS_ID], **fields))


def shown_text(events: list[Any]) -> str:
    """What a client concatenates from a stream."""
    choices = [choice for item in events if item != "[DONE]" for choice in item.get("choices", ())]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def assembled(events: list[Any]) -> list[dict[str, Any]]:
    """The choices that a client puts together from a stream, as they would be in a whole answer.

    Checks on the way that nothing of a choice follows its finish_reason, and that chat names each role once, first.
    """
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for chunk in [] if event == "[DONE]" else event["choices"]:
            delta = chunk.get("delta", {})
            is_first = chunk["index"] not in choices
            choice = choices.setdefault(chunk["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert ("role" in delta) == ("delta" in chunk and is_first)
            assert choice["finish_reason"] is None
            choice["text"] += chunk.get("text", delta.get("content", ""))
            choice["finish_reason"] = chunk["finish_reason"]
            if chunk["logprobs"] is not None:
                choice["logprobs"] = _joined(choice["logprobs"], chunk["logprobs"])
    return [choices[index] for index in sorted(choices)]


def whole_choices(body: Any) -> list[dict[str, Any]]:
    """The choices of an answer that was not streamed, in the form of `assembled`."""
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return [
        {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in body["choices"]
    ]


def _joined(before: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    if before is None:
        return more
    return {key: before[key] + value if isinstance(value, list) else value for key, value in more.items()}
