"""Which model the server serves, asked once before a run. Called by the runner."""

import asyncio
import ssl
from dataclasses import dataclass

import aiohttp

from pdserve.loadtest.client.target import Target
from pdserve.loadtest.errors import TargetError
from pdserve.loadtest.measures.record import parse_json, printable

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    max_model_len: int | None


async def find_model(target: Target) -> ServedModel:
    """The model to ask for: the target's, or the first that the server lists. Raises TargetError."""
    url = target.url + "/v1/models"
    try:
        async with (
            asyncio.timeout(_TIMEOUT_S),
            aiohttp.ClientSession(headers=target.headers) as session,
            session.get(url, allow_redirects=False, ssl=ssl.create_default_context()) as response,
        ):
            status, body = response.status, await response.read()
    except TimeoutError:
        raise TargetError(f"--url {target.url}: no answer from {url} within {_TIMEOUT_S} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise TargetError(f"--url {target.url}: cannot be reached: {error or type(error).__name__}") from None
    if status != 200:
        raise TargetError(f"--url {target.url}: {url} answered HTTP {status}, not 200; is it an OpenAI-style server?")
    models = _read_models(url, body)
    for model in models:
        if target.model in (None, model.name):
            return model
    names = ", ".join(repr(model.name) for model in models) or "none"
    raise TargetError(f"--model {target.model}: not served at {target.url}, whose models are: {names}")


def _read_models(url: str, body: bytes) -> list[ServedModel]:
    try:
        payload = parse_json(body)
        cards = [(card["id"], card.get("max_model_len")) for card in payload["data"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise TargetError(f"{url} did not answer with a list of models; is it an OpenAI-style server?") from None
    return [
        ServedModel(printable(name), max_len if type(max_len) is int else None)
        for name, max_len in cards
        if isinstance(name, str)
    ]
