"""What goes on between processes: block names, addresses that come back, strangers and insiders that say nonsense.

One cluster serves all tests here, each process started with an address of its own, a key and another seed of
Python's hash().
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pdserve.cluster.codec import decode, encode
from pdserve.cluster.keys import ClusterKeys
from pdserve.cluster.messages import Cancel, WrongEpoch
from pdserve.core.ids import NO_EPOCH, RequestId
from pdserve.launch.cli import main
from tests.e2e.client import ASK_AGAIN_S, PATIENCE_S, Answer, Client
from tests.e2e.conftest import Connect, Start
from tests.e2e.servers import Server, free_address
from tests.e2e.sockets import Listener, listeners

BLOCK_SIZE = 32
LONG_PROMPT = [3 + i % 200 for i in range(1000)]
NUM_BLOCKS = -(-len(LONG_PROMPT) // BLOCK_SIZE)
BACK_WITHIN_S = 3.0
NODE = ("--kv-memory", "2MiB", "--num-threads", 1)


class Cluster:
    """Processes by name; one that was killed is started again as it was."""

    def __init__(self, start: Start, model: Path, folder: Path):
        self._start = start
        self._model = model
        self.key_file = folder / "cluster.key"
        assert main(["keygen", str(self.key_file)]) == 0
        self.addresses = {name: free_address() for name in ("router", "P0", "D0")}
        self.servers: dict[str, Server] = {}
        self.start("router")
        self.start("P0")
        self.start("D0")
        self.router.wait_for(r"\bserving$")

    def start(self, name: str) -> Server:
        words = ("--model", self._model, "--key-file", self.key_file)
        control = self.addresses["router"]
        if name == "router":
            server = self._start("router", *words, "--port", 0, "--control", control, "--cooperative-prefill", "off")
            server.wait_listening()
        else:
            role, seed = {"P0": ("prefill", "0"), "D0": ("decode", "1")}[name]
            places = ("--name", name, "--router", control, "--listen", self.addresses[name])
            server = self._start(role, *words, *places, *NODE, PYTHONHASHSEED=seed)
        self.servers[name] = server
        return server

    @property
    def router(self) -> Server:
        return self.servers["router"]

    @property
    def pids(self) -> list[int]:
        return [server.pid for server in self.servers.values()]


@pytest.fixture(scope="module")
def cluster(start_shared: Start, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(start_shared, small_model, tmp_path_factory.mktemp("inter-node"))


@pytest.fixture
async def client(cluster: Cluster, connect: Connect) -> Client:
    client = connect(cluster.router)
    await client.until_ready()
    return client


async def test_processes_with_different_hash_seeds_name_blocks_alike(client: Client):
    """A decode node that found nothing of what was sent would compute it again, and its pool would fill."""
    answers = [await client.complete(LONG_PROMPT, 4, ignore_eos=True) for _ in range(30)]
    metrics = [answer.body["metrics"] for answer in answers]
    assert len({answer.text for answer in answers}) == 1
    assert {(found["plan"], found["attempts"]) for found in metrics} == {("split", 1)}
    first, *others = [found["bytes_moved"] for found in metrics]
    # Afterwards only the partial block at the end, which has no name, is asked for.
    assert {moved * NUM_BLOCKS for moved in others} == {first}
    assert {found["cached_tokens"] for found in metrics[1:]} == {(NUM_BLOCKS - 1) * BLOCK_SIZE}
    everywhere = {"P0": NUM_BLOCKS - 1, "D0": NUM_BLOCKS - 1}
    await client.until_blocks(lambda cached: cached == everywhere, PATIENCE_S, "cached")
    await client.until_blocks(lambda used: not any(used.values()), PATIENCE_S)


def check_schema(answer: Answer) -> bool:
    """Whether it is an answer; everything else must be an error of OpenAI's shape."""
    if answer.status == 200:
        (choice,) = answer.body["choices"]
        assert choice["finish_reason"] == "length"
        assert isinstance(choice["text"], str)
        assert answer.body["usage"]["completion_tokens"] == 4
        return True
    assert answer.status >= 500
    assert answer.error.keys() >= {"message", "type", "param", "code"}
    return False


class Load:
    """Requests one after the other, from three clients, until told to end. served, failed: when each was sent."""

    def __init__(self, client: Client):
        self.served: list[float] = []
        self.failed: list[float] = []
        self.is_over = asyncio.Event()
        self._client = client
        self._answered = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(self._ask(number))

    async def _ask(self, number: int) -> None:
        now = asyncio.get_running_loop().time
        for turn in itertools.count():
            if self.is_over.is_set():
                return
            asked_at = now()
            is_answer = check_schema(await self._client.complete(f"{number} {turn} " * 20, 4, ignore_eos=True))
            (self.served if is_answer else self.failed).append(asked_at)
            self._answered.set()
            if not is_answer:
                await asyncio.sleep(ASK_AGAIN_S)

    async def until_served(self, since: float, count: int = 1) -> None:
        """Until so many that were sent after `since` have their answers."""
        async with asyncio.timeout(PATIENCE_S):
            while sum(asked_at > since for asked_at in self.served) < count:
                self._answered.clear()
                await self._answered.wait()


async def test_nodes_that_are_killed_and_come_back_at_their_addresses_serve_again_within_three_seconds(
    start: Start, connect: Connect, small_model: Path, tmp_path: Path
):
    """Whoever kept something of the incarnation before would go on failing while every process looks well."""
    cluster = Cluster(start, small_model, tmp_path)
    load = Load(connect(cluster.router))
    now = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        for name in ("D0", "P0"):
            await load.until_served(now(), 5)
            before = len(cluster.router.lines)
            os.kill(cluster.servers[name].pid, signal.SIGKILL)
            cluster.start(name)
            await asyncio.to_thread(cluster.router.wait_for, f"{name} joined as", since=before)
            back_at = now()
            await load.until_served(back_at)
            assert now() - back_at < BACK_WITHIN_S
            failed_by = back_at + BACK_WITHIN_S
            await load.until_served(failed_by, 5)
            assert [at - back_at for at in load.failed if at > failed_by] == []
        load.is_over.set()


class Exploit:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._folder),)


async def test_a_pickle_at_any_port_is_refused_and_nothing_of_it_runs(cluster: Cluster, client: Client, tmp_path: Path):
    canary = tmp_path / "canary"
    exploit = pickle.dumps(Exploit(canary))
    found = [listener for pid in cluster.pids for listener in listeners(pid)]
    # HTTP, three addresses for frames, and the socket that hands over the pool.
    assert len(found) >= 5
    for listener in found:
        await asyncio.to_thread(say, listener, exploit)
    with insider(ClusterKeys.read(cluster.key_file)) as dial:
        for address in cluster.addresses.values():
            await asyncio.to_thread(say_as_insider, dial(address), exploit)
    assert not canary.exists()
    assert check_schema(await client.complete("hello", 4, ignore_eos=True))
    pickle.loads(exploit)
    assert canary.exists(), "it would have harmed nobody"


def say(listener: Listener, data: bytes) -> None:
    """Send bytes to whatever listens there, and wait until it has closed the connection."""
    with socket.socket(listener.family, listener.kind) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(listener.address)
        # It may have closed before everything was said.
        with contextlib.suppress(ConnectionError):
            stranger.sendall(data)
            while stranger.recv(65536):
                pass


@contextlib.contextmanager
def insider(keys: ClusterKeys) -> Iterator[Any]:
    """Dials with the cluster's keys; its frames are read."""
    context = zmq.Context()
    dealers = []

    def dial(address: str) -> zmq.Socket:
        dealer = context.socket(zmq.DEALER)
        dealers.append(dealer)
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = keys.server, keys.public, keys.secret
        dealer.rcvtimeo = dealer.sndtimeo = int(1e3 * PATIENCE_S)
        dealer.connect(address)
        return dealer

    try:
        yield dial
    finally:
        for dealer in dealers:
            dealer.close(linger=0)
        context.term()


def say_as_insider(dealer: zmq.Socket, data: bytes) -> None:
    """Frames are read in order: the answer to a good one says that the others before it were looked at."""
    good = encode(Cancel(RequestId(bytes(16)), 1), NO_EPOCH, NO_EPOCH)
    for frames in ([data], [b"", data], [good, data], [data, data, data]):
        dealer.send_multipart(frames)
    dealer.send(good)
    assert isinstance(decode(dealer.recv(), ()).message, WrongEpoch)


def test_nothing_listens_beyond_this_machine_unless_told_to(cluster: Cluster, small_up: Server):
    found = [listener for pid in [*cluster.pids, *small_up.tree()] for listener in listeners(pid)]
    hosts = {listener.address[0] for listener in found if listener.family != socket.AF_UNIX}
    assert hosts == {"127.0.0.1"}


def test_the_secret_is_in_no_environment_command_line_or_log(cluster: Cluster):
    secret = ClusterKeys.read(cluster.key_file).secret
    for server in cluster.servers.values():
        for name in ("environ", "cmdline"):
            assert secret not in Path(f"/proc/{server.pid}/{name}").read_bytes()
        assert secret.decode() not in "\n".join(server.lines)
        assert server.lines


@pytest.mark.parametrize("text", ["", 'public = ""\nsecret = ""\n'], ids=["empty file", "empty keys"])
def test_beyond_this_machine_nothing_starts_with_empty_keys(start: Start, small_model: Path, tmp_path: Path, text: str):
    key_file = tmp_path / "cluster.key"
    key_file.write_text(text)
    key_file.chmod(0o600)
    address = free_address().replace("127.0.0.1", "0.0.0.0")
    router = start("router", "--model", small_model, "--port", 0, "--control", address, "--key-file", key_file)
    assert router.wait() == 2
    router.wait_for(r"^pdserve router: --key-file .*: public is no key")
