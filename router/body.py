"""Reading a request's body: bounded bytes, strict JSON, one object.

Called by app for every POST. Refuses, with an ApiError, whatever is not one plain UTF-8 JSON object:
wrong media type, compressed, too large, too slow, duplicate keys, NaN, lone surrogates, endless nesting.
"""

import asyncio
import json
from typing import Any, NoReturn

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from pdserve.router.api_error import ApiError, shown


async def read_object(request: web.Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The JSON object a request carries; raises ApiError 400, 408, 413 or 415."""
    _check_headers(request)
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read_bytes(request, max_bytes)
    except TimeoutError as error:
        message = f"the body was not complete after {timeout_s:g} s"
        raise ApiError(408, "request_timeout", message) from error
    except (HttpProcessingError, ClientPayloadError) as error:
        raise ApiError(400, "invalid_body", "the body does not follow its transfer encoding") from error
    return decode_object(raw)


def decode_object(raw: bytes) -> dict[str, Any]:
    """Strict JSON of one object; raises ApiError 400 naming what is wrong."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid_json(f"the body is not UTF-8 (byte {error.start})") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
        if b"\\ud" in raw.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise _invalid_json(f"the body is not valid JSON: {error.msg} at character {error.pos}") from error
    except UnicodeEncodeError as error:
        raise _invalid_json("the body holds a lone surrogate escape, which is no character") from error
    except RecursionError as error:
        raise _invalid_json("the body is nested too deeply") from error
    except ValueError as error:
        # int() refuses to convert a number of more digits than the interpreter's limit (4300).
        raise _invalid_json("the body holds a number with too many digits") from error
    if not isinstance(value, dict):
        raise _invalid_json(f"the body must be a JSON object, not {shown(value)}")
    return value


def _check_headers(request: web.Request) -> None:
    if request.content_type != "application/json":
        message = f"Content-Type must be application/json, not {shown(request.content_type)}"
        raise ApiError(415, "unsupported_media_type", message)
    try:
        charset = request.charset or "utf-8"
    except ValueError:
        charset = "unreadable"
    if charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, "unsupported_media_type", f"the charset must be utf-8, not {shown(charset)}")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        message = f"Content-Encoding must be absent, not {shown(encoding)}"
        raise ApiError(415, "unsupported_media_type", message)


async def _read_bytes(request: web.Request, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in request.content.iter_any():
        if len(data) + len(chunk) > max_bytes:
            raise _too_large(max_bytes)
        data += chunk
    return bytes(data)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _invalid_json(f"the key {shown(key)} appears twice in one object")
            seen.add(key)
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid_json(f"{name} is not a JSON number")


def _invalid_json(message: str) -> ApiError:
    return ApiError(400, "invalid_json", message)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body has more than {max_bytes} bytes, the limit (max_body_bytes)")
