"""Errors as a client sees them: OpenAI's JSON object, with the status that fits.

Everything the front door refuses is an ApiError; the middleware in app turns it, and what the service
behind the seam raises, into `error_body`. Bodies carry what the client sent wrong and nothing of the inside.
"""

from typing import Any

from pdserve.core.errors import PdserveError
from pdserve.router.generation import GenerationError

MAX_SHOWN = 64


class ApiError(PdserveError):
    """A refusal: status, OpenAI code, and the field (`param`) it is about, where there is one."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """The usual refusal: a field of the body is wrong."""
    return ApiError(400, code, f"{param}: {message}", param)


def shown(value: object) -> str:
    """A JSON value for an error message: short, whatever its size; containers by type only."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def error_body(status: int, code: str | None, message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": _error_type(status), "param": param, "code": code}}


def generation_error_body(error: GenerationError) -> dict[str, Any]:
    return error_body(error.status, error.code, error.message)


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
