"""Real servers for the tests of this folder, as few as possible: most are shared by a whole run.

    start      starts `pdserve ...` for one test       start_shared   the same, until the run ends
    start_here the same, until a file ends             network        hosts on a switch, until a file ends
    small_up   `pdserve up` on a tiny random model     real_up        on the real model in fp32, small steps
    cluster    router and nodes started one by one, on the tiny model
    client     connects to a server                    oracle         what transformers says, in fp32

The real model is the folder that PDSERVE_TEST_MODEL names (`make test` sets it); without it, its tests are skipped.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import aiohttp
import pytest

from tests.checkpoints import make_llama_checkpoint
from tests.e2e.client import PATIENCE_S, Client
from tests.e2e.cluster import Cluster
from tests.e2e.namespaces import Namespace, Network, NoNamespacesError
from tests.e2e.oracle import Oracle
from tests.e2e.servers import Server

Start = Callable[..., Server]
Connect = Callable[..., Client]

SMALL_CONTEXT = 4096
# Fewer tokens than the context has.
SMALL_KV_MEMORY = "1MiB"
SMALL_KV_BLOCKS = 63
STEP_TOKENS = 64


def _starting() -> Iterator[Start]:
    with ExitStack() as stack:

        def start(*words: object, through: tuple[str, ...] = (), **environ: str) -> Server:
            server = Server(*words, through=through, **environ)
            stack.callback(server.end)
            return server

        yield start


@pytest.fixture
def start() -> Iterator[Start]:
    yield from _starting()


@pytest.fixture(scope="session")
def start_shared() -> Iterator[Start]:
    yield from _starting()


@pytest.fixture(scope="module")
def start_here() -> Iterator[Start]:
    yield from _starting()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        network = Network()
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield network
    network.close()


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Makes a client of a server, on a host of a network if one is given; closed after the test."""
    async with AsyncExitStack() as stack:

        def connect(server: Server, host: Namespace | None = None, api_key: str | None = None) -> Client:
            assert server.url is not None
            timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
            connector = aiohttp.TCPConnector(limit=0, socket_factory=None if host is None else host.make_socket)
            headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
            session = aiohttp.ClientSession(server.url, timeout=timeout, connector=connector, headers=headers)
            stack.push_async_callback(session.close)
            return Client(session)

        yield connect


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_checkpoint(
        tmp_path_factory.mktemp("e2e") / "small", max_position_embeddings=SMALL_CONTEXT, num_hidden_layers=2
    )


@pytest.fixture
def cluster(start: Start, small_model: Path) -> Cluster:
    return Cluster(start, small_model)


@pytest.fixture(scope="session")
def small_up(start_shared: Start, small_model: Path) -> Server:
    return start_shared("up", "--model", small_model, "--port", 0, "--kv-memory", SMALL_KV_MEMORY).wait_ready()


@pytest.fixture(scope="session")
def real_model() -> Path:
    folder = os.environ.get("PDSERVE_TEST_MODEL")
    if not folder:
        pytest.skip("PDSERVE_TEST_MODEL names no model folder (make test sets it)")
    return Path(folder)


@pytest.fixture(scope="session")
def real_up(start_shared: Start, real_model: Path) -> Server:
    """Small steps, so that a prompt of some hundred tokens takes many and a step never takes long."""
    flags = ("--dtype", "float32", "--kv-memory", "128MiB", "--max-step-tokens", STEP_TOKENS)
    return start_shared("up", "--model", real_model, "--port", 0, *flags).wait_ready()


@pytest.fixture(scope="session")
def oracle(real_model: Path) -> Oracle:
    return Oracle(real_model)
