"""The front door: OpenAI's HTTP surface over a GenerationService.

    read body -> Call -> token ids (worker thread) -> service.submit -> Answer -> Reply -> client

Every error leaves as OpenAI's JSON object, every response carries X-Request-Id. A client that goes away
cancels its handler, and a handler that ends for any reason cancels its generation. The process entry
builds the application with `create_app` and runs it with `make_runner`, which sets what that rests on.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from pdserve.core.model_config import GenerationDefaults
from pdserve.router.answer import Answer, Piece
from pdserve.router.api import Call, parse_chat, parse_completion, prompt_too_long
from pdserve.router.api_error import ApiError, error_body, generation_error_body, invalid
from pdserve.router.api_keys import ApiKeys
from pdserve.router.body import read_object
from pdserve.router.generation import (
    GenerationError,
    GenerationRequest,
    GenerationService,
    GenerationStream,
    ModelCard,
    Progress,
)
from pdserve.router.messages import Conversation
from pdserve.router.reply import Reply, encode_json, event
from pdserve.router.stop import StopMatcher
from pdserve.router.tokenizer import TextModel

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
MAX_REQUEST_ID = 128
MAX_LINE_BYTES = 8190

# Parsing JSON holds the event loop: 2 ms for 1 MiB of text, 23 ms of token ids, 115 ms of empty lists at the
# worst (measured 2026-11). So a body may not be much larger than an honest one: a token is 4 to 5 characters,
# each 6 bytes when escaped.
MIN_BODY_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 32
NUM_TOKENIZER_THREADS = 2
# What load balancers and orchestrators ask, who have no key.
OPEN_PATHS = frozenset({"/health", "/ready"})
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True)
class FrontDoorLimits:
    """What one request may cost before it is understood.

    max_body_bytes  of the JSON body (413 beyond); None: what a prompt that fills the context can need
    body_timeout_s  for the whole body to arrive (408 beyond)
    """

    max_body_bytes: int | None = None
    body_timeout_s: float = 30.0

    def max_body_bytes_for(self, card: ModelCard) -> int:
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return max(MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN * card.max_model_len)


def create_app(
    card: ModelCard,
    service: GenerationService,
    text: TextModel,
    defaults: GenerationDefaults,
    limits: FrontDoorLimits | None = None,
    keys: ApiKeys | None = None,
) -> web.Application:
    """The routes of one served model; run it with `make_runner`.

    keys: without one of them only /health and /ready answer; None: everybody may use everything
    """
    door = FrontDoor(card, service, text, defaults, limits or FrontDoorLimits())
    app = web.Application(middlewares=[_errors_as_json] if keys is None else [_errors_as_json, _keeper(keys)])
    app.add_routes(
        [
            web.post("/v1/completions", door.completions),
            web.post("/v1/chat/completions", door.chat_completions),
            web.get("/v1/models", door.models),
            web.get("/health", door.health),
            web.get("/ready", door.ready),
            web.get("/metrics", door.metrics),
            web.get("/cluster", door.cluster),
        ]
    )
    app.on_response_prepare.append(_echo_request_id)
    app.cleanup_ctx.append(door.tokenizer_threads)
    return app


class ClientFaults(logging.Filter):
    """Keeps out of the log what is no HTTP, and who hung up: the log is not a stranger's to fill."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError | ConnectionError)


CLIENT_FAULTS = ClientFaults()


def make_runner(app: web.Application, shutdown_timeout_s: float = 2.0) -> web.AppRunner:
    """A runner that cancels the handler of a client that went away, and inflates no compressed body.

    On cleanup, requests in flight have shutdown_timeout_s to end (aiohttp grants it twice); then they are cancelled.
    """
    http_log = log.getChild("http")
    http_log.addFilter(CLIENT_FAULTS)
    return web.AppRunner(
        app,
        access_log=None,
        logger=http_log,
        handler_cancellation=True,
        auto_decompress=False,
        max_line_size=MAX_LINE_BYTES,
        max_field_size=MAX_LINE_BYTES,
        shutdown_timeout=shutdown_timeout_s,
    )


class FrontDoor:
    """The handlers of one served model."""

    def __init__(
        self,
        card: ModelCard,
        service: GenerationService,
        text: TextModel,
        defaults: GenerationDefaults,
        limits: FrontDoorLimits,
    ):
        self._card = card
        self._service = service
        self._text = text
        self._defaults = defaults
        self._limits = limits
        self._started_at = int(time.time())
        self._threads = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    async def tokenizer_threads(self, app: web.Application) -> AsyncIterator[None]:
        """Ends the worker threads with the application; prompts not begun by then are dropped."""
        yield
        self._threads.shutdown(cancel_futures=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read_body(request)
        return await self._generate(request, parse_completion(body, self._card, self._defaults))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read_body(request)
        return await self._generate(request, parse_chat(body, self._card, self._defaults))

    async def models(self, request: web.Request) -> web.StreamResponse:
        model = {
            "id": self._card.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "pdserve",
            "max_model_len": self._card.max_model_len,
        }
        return _json_response(200, {"object": "list", "data": [model]})

    async def health(self, request: web.Request) -> web.StreamResponse:
        return _json_response(200, {"status": "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        ready, reason = self._service.readiness()
        status = "ready" if ready else "not ready"
        return _json_response(200 if ready else 503, {"status": status, "reason": reason})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._service.metrics_text(), headers={"Content-Type": METRICS_TYPE})

    async def cluster(self, request: web.Request) -> web.StreamResponse:
        return _json_response(200, self._service.overview())

    async def _read_body(self, request: web.Request) -> dict[str, Any]:
        return await read_object(request, self._limits.max_body_bytes_for(self._card), self._limits.body_timeout_s)

    async def _generate(self, request: web.Request, call: Call) -> web.StreamResponse:
        arrived_at = time.monotonic()
        prompt_ids = await self._encode(call)
        params = call.params(len(prompt_ids), self._card.max_model_len)
        # The text of a special token never shows, so a stop string that is one would never be found in it.
        special_ids = [token_id for token_id in map(self._text.special_id, call.stop_strings) if token_id is not None]
        params = replace(params, stop_ids=tuple(dict.fromkeys((*params.stop_ids, *special_ids))))
        detokenizer = self._text.detokenizer(() if call.is_chat else prompt_ids)
        matcher = StopMatcher(call.stop_strings, call.keep_stop)
        answer = Answer(detokenizer, matcher, params.min_tokens, call.keep_stop)
        reply = Reply(self._card.name, call.is_chat, call.include_usage, len(prompt_ids))
        open_ended = call.max_tokens is None
        wanted = GenerationRequest(prompt_ids, params, request[REQUEST_ID], arrived_at, open_ended=open_ended)
        stream = self._service.submit(wanted)
        try:
            send = self._send_stream if call.stream else self._send_whole
            return await send(request, stream, answer, reply)
        finally:
            stream.cancel()

    async def _encode(self, call: Call) -> list[int]:
        """The prompt's token ids, at least one; raises ApiError."""
        prompt = call.prompt
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, Conversation):
            encode = partial(self._encode_chat, prompt)
        else:
            encode = partial(self._encode_text, prompt)
        prompt_ids = await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        if not prompt_ids:
            raise invalid(call.prompt_field, "it must not be empty; the tokenizer finds no token in it")
        return prompt_ids

    def _encode_chat(self, conversation: Conversation) -> list[int]:
        rendered = self._text.render_chat(conversation.messages)
        self._check_length(rendered, "messages")
        return self._text.encode_rendered(rendered)

    def _encode_text(self, prompt: str) -> list[int]:
        self._check_length(prompt, "prompt")
        return self._text.encode(prompt)

    def _check_length(self, text: str, field: str) -> None:
        """A text that cannot fit is not worth a tokenizer's time; raises ApiError."""
        if len(text) > self._text.max_characters(self._card.max_model_len):
            raise prompt_too_long(f"{len(text)} characters", self._card.max_model_len, field)

    async def _send_whole(
        self, request: web.Request, stream: GenerationStream, answer: Answer, reply: Reply
    ) -> web.StreamResponse:
        progress = aiter(stream)
        text = ""
        while True:
            piece = await _next_piece(progress, answer)
            text += piece.text
            if piece.finish is not None:
                stream.cancel(piece.finish)
                return _json_response(200, reply.whole(text, piece.finish, answer.num_tokens, stream.metrics()))

    async def _send_stream(
        self, request: web.Request, stream: GenerationStream, answer: Answer, reply: Reply
    ) -> web.StreamResponse:
        progress = aiter(stream)
        # A failure up to the first token still has an HTTP status of its own.
        piece = await _next_piece(progress, answer)
        response = web.StreamResponse(headers=EVENT_STREAM_HEADERS)
        await response.prepare(request)
        head = reply.opening()
        try:
            # Each write waits while the client is slower than its socket; the service merges tokens meanwhile.
            while piece.finish is None:
                await response.write(head + reply.piece(piece))
                head = b""
                piece = await _next_piece(progress, answer)
            stream.cancel(piece.finish)
            tail = reply.piece(piece) + reply.closing(answer.num_tokens, stream.metrics())
        except ConnectionError:
            raise
        except Exception as error:
            tail = event(_failure(error).body)
        await response.write(head + tail)
        await response.write_eof()
        return response


async def _next_piece(progress: AsyncIterator[Progress], answer: Answer) -> Piece:
    try:
        return answer.push(await anext(progress))
    except StopAsyncIteration as error:
        message = "the generation ended without a finish"
        raise GenerationError(500, "internal_error", message) from error


@dataclass(frozen=True, slots=True)
class _Failure:
    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def _failure(error: Exception) -> _Failure:
    """What a client is told of an exception; an unforeseen one is logged and told as nothing but itself."""
    if isinstance(error, ApiError):
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        return _Failure(error.status, error_body(error.status, error.code, error.message, error.param), headers)
    if isinstance(error, GenerationError):
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        return _Failure(error.status, generation_error_body(error), headers)
    if isinstance(error, web.HTTPNotFound):
        return _Failure(404, error_body(404, "unknown_url", "there is nothing at this path"), {})
    if isinstance(error, web.HTTPMethodNotAllowed):
        message = f"this path takes {', '.join(sorted(error.allowed_methods))}"
        return _Failure(405, error_body(405, "method_not_allowed", message), {"Allow": error.headers["Allow"]})
    if isinstance(error, web.HTTPException):
        return _Failure(error.status, error_body(error.status, None, error.reason), {})
    log.error("a request failed unexpectedly", exc_info=error)
    return _Failure(500, error_body(500, "internal_error", "internal error; the server's log has the cause"), {})


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[REQUEST_ID] = _request_id(request)
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except Exception as error:
        failure = _failure(error)
    response = _json_response(failure.status, failure.body, failure.headers)
    if failure.status in (401, 408, 413):
        # The rest of the body is not read, so the connection cannot be used again.
        response.force_close()
    return response


def _keeper(keys: ApiKeys) -> Middleware:
    """Lets nobody in without a key but those who ask whether the server lives."""

    @web.middleware
    async def keep(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and not keys.allow(request.headers.get("Authorization")):
            raise ApiError(
                401, "invalid_api_key", "no valid API key: send one of the server's as `Authorization: Bearer KEY`"
            )
        return await handler(request)

    return keep


def _request_id(request: web.Request) -> str:
    """The client's own label without what a log or a header should not hold, or a new one."""
    label = re.sub(r"[^A-Za-z0-9._:/+=@-]", "", request.headers.get("X-Request-Id", ""))
    return label[:MAX_REQUEST_ID] or secrets.token_hex(16)


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


def _json_response(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=encode_json(body), content_type="application/json", headers=headers)
