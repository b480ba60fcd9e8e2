"""The front door: OpenAI's HTTP surface over a GenerationService.

    read body -> Call -> token ids (worker thread) -> service.submit -> Exchange -> client

Every error leaves as OpenAI's JSON object, every response carries X-Request-Id. A client that goes away
cancels its handler, and a handler that ends for any reason cancels its generation. The process entry
builds the application with `create_app` and runs it with `make_runner`, which sets what that rests on.
"""

import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from pdserve.core.model_config import GenerationDefaults
from pdserve.router.answer import Answer
from pdserve.router.api import Call, parse_chat, parse_completion
from pdserve.router.api_error import ApiError
from pdserve.router.api_keys import ApiKeys
from pdserve.router.body import read_object
from pdserve.router.exchange import Exchange, Listings
from pdserve.router.failure import failure
from pdserve.router.generation import GenerationRequest, GenerationService, ModelCard
from pdserve.router.logprobs import ChatListing, CompletionListing, PromptListing, TokenNames
from pdserve.router.prompt import EncodedPrompt, PromptEncoder
from pdserve.router.reply import Reply, encode_json
from pdserve.router.stop import StopMatcher
from pdserve.router.tokenize import parse_tokenize
from pdserve.router.tokenizer import TextModel

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED_AT = web.RequestKey("arrived_at", float)
READ_S = web.RequestKey("read_s", float)
WAITED_S = web.RequestKey("waited_s", float)
MAX_REQUEST_ID = 128
MAX_LINE_BYTES = 8190

# Parsing JSON holds the event loop: 2 ms for 1 MiB of text, 23 ms of token ids, 115 ms of empty lists at the
# worst (measured 2026-11). So a body may not be much larger than an honest one: a token is 4 to 5 characters,
# each 6 bytes when escaped.
MIN_BODY_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 32
# What load balancers and orchestrators ask, who have no key.
OPEN_PATHS = frozenset({"/health", "/ready"})
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
            web.post("/tokenize", door.tokenize),
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
        self._encoder = PromptEncoder(text, card.max_model_len)
        names = TokenNames(text.vocabulary)
        self._completion_listings = Listings(CompletionListing(names), PromptListing(names))
        self._chat_listings = Listings(ChatListing(text.vocabulary), PromptListing(names))

    async def tokenizer_threads(self, app: web.Application) -> AsyncIterator[None]:
        """Ends the worker threads with the application; prompts not begun by then are dropped."""
        yield
        self._encoder.close()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read_body(request)
        return await self._generate(request, parse_completion(body, self._card, self._defaults))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read_body(request)
        return await self._generate(request, parse_chat(body, self._card, self._defaults))

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        token_ids = await self._encoder.tokenize(parse_tokenize(await self._read_body(request), self._card))
        content = {"count": len(token_ids), "max_model_len": self._card.max_model_len, "tokens": token_ids}
        return _json_response(200, {**content, "token_strs": None})

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
        request[WAITED_S] = self._service.read_wait_s()
        limits = self._limits
        body = await read_object(request, limits.max_body_bytes_for(self._card), limits.body_timeout_s)
        request[READ_S] = time.monotonic() - request[ARRIVED_AT]
        return body

    async def _generate(self, request: web.Request, call: Call) -> web.StreamResponse:
        prompt = await self._encoder.encode(call)
        params = call.params(len(prompt.token_ids), self._card.max_model_len)
        # The text of a special token never shows, so a stop string that is one would never be found in it.
        special_ids = [token_id for token_id in map(self._text.special_id, call.stop_strings) if token_id is not None]
        params = replace(params, stop_ids=tuple(dict.fromkeys((*params.stop_ids, *special_ids))))
        wanted = GenerationRequest(
            prompt.token_ids,
            params,
            request[REQUEST_ID],
            request[ARRIVED_AT],
            call.priority,
            open_ended=call.max_tokens is None,
            num_samples=call.num_samples,
            read_s=request[READ_S],
            waited_s=request[WAITED_S],
        )
        answers = [self._answer(call, prompt) for _ in range(call.num_samples)]
        reply = Reply(self._card.name, call.is_chat, call.include_usage, len(prompt.token_ids))
        listings = self._chat_listings if call.is_chat else self._completion_listings
        stream = self._service.submit(wanted)
        try:
            exchange = Exchange(call, prompt, answers, stream, reply, listings, self._encoder)
            return await (exchange.send_stream(request) if call.stream else exchange.send_whole(request))
        finally:
            stream.cancel()

    def _answer(self, call: Call, prompt: EncodedPrompt) -> Answer:
        detokenizer = self._text.detokenizer(() if call.is_chat else prompt.token_ids)
        matcher = StopMatcher(call.stop_strings, call.keep_stop)
        offset = None if call.logprobs is None else len(prompt.text)
        return Answer(detokenizer, matcher, call.sampling.min_tokens, call.keep_stop, offset)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[ARRIVED_AT] = time.monotonic()
    request[REQUEST_ID] = _request_id(request)
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except Exception as error:
        told = failure(error)
    response = _json_response(told.status, told.body, told.headers)
    if told.status in (401, 408, 413):
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
