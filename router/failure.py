"""What a client is told of an exception: a status and OpenAI's error object, or in a stream the object alone.

Used by app for what happens before a response has begun, and by exchange for what happens after.
"""

import logging
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pdserve.router.api_error import ApiError, error_body, generation_error_body
from pdserve.router.generation import GenerationError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def failure(error: Exception) -> Failure:
    """What a client is told of an exception; an unforeseen one is logged and told as nothing but itself."""
    if isinstance(error, ApiError):
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        return Failure(error.status, error_body(error.status, error.code, error.message, error.param), headers)
    if isinstance(error, GenerationError):
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        return Failure(error.status, generation_error_body(error), headers)
    if isinstance(error, web.HTTPNotFound):
        return Failure(404, error_body(404, "unknown_url", "there is nothing at this path"), {})
    if isinstance(error, web.HTTPMethodNotAllowed):
        message = f"this path takes {', '.join(sorted(error.allowed_methods))}"
        return Failure(405, error_body(405, "method_not_allowed", message), {"Allow": error.headers["Allow"]})
    if isinstance(error, web.HTTPException):
        return Failure(error.status, error_body(error.status, None, error.reason), {})
    log.error("a request failed unexpectedly", exc_info=error)
    return Failure(500, error_body(500, "internal_error", "internal error; the server's log has the cause"), {})
