"""The text model of the front door's tests, one token a byte, and plain connections to a door."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from pdserve.router.tokenizer import TextModel
from tests.checkpoints import write_tokenizer
from tests.router.door import Door

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte_model")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def text(model_dir: Path) -> TextModel:
    return TextModel.load(model_dir)


@pytest.fixture
async def raw_connection() -> AsyncIterator[Callable[[Door], Awaitable[Connection]]]:
    """Opens plain TCP connections to a door; closes what the test left open."""
    writers: list[asyncio.StreamWriter] = []

    async def connect(door: Door) -> Connection:
        reader, writer = await asyncio.open_connection(*door.address)
        writers.append(writer)
        return reader, writer

    yield connect
    for writer in writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
